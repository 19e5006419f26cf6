"""What a client sends costs in proportion to its length, and not to a power of it."""

from __future__ import annotations

import functools
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

import vllm_weir as weir
from vllm_weir.schema import keys
from vllm_weir.schema.json_text import loads
from vllm_weir.schema.vectors import Vector

FOLD = 16
MOST_BYTES, MOST_TIME = 24, 64
"""How much more 16 times as much may take: 256 is quadratic. Caches hold the small one alone."""


def refused(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except weir.WeirError as error:
        return error


def unknown(n: int) -> dict[str, Any]:
    return {f"steering_vektor{i:06x}"[:28]: 1 for i in range(n)}


def key_twice(n: int) -> str:
    return "{" + ",".join(f'"{i}":0' for i in [*range(n), n - 1]) + "}"


DOORS: dict[str, tuple[int, Callable[[int], Any], Callable[[Any], Any]]] = {
    "one key twice": (8000, key_twice, lambda text: loads(text, "x")),
    "unknown keys": (4000, unknown, lambda body: (keys.asks({}, body), keys.slip({}, body))),
    "a long text among short ones": (4000, lambda n: ["x" * n, *[""] * n], lambda v: Vector.parse(v, "x")),
    "a text among numbers": (4000, lambda n: [*[0.5] * n, "x" * n], lambda v: Vector.parse(v, "x")),
    "numbers": (4000, lambda n: [0.5] * n, lambda v: Vector.parse(v, "x")),
    "rows": (100, lambda n: [[0.5] * 32] * n, lambda v: Vector.parse(v, "x")),
    "empty rows": (4000, lambda n: [[]] * n, lambda v: Vector.parse(v, "x")),
    "ragged rows": (200, lambda n: [*[[0.5] * 8] * n, [0.5]], lambda v: Vector.parse(v, "x")),
}  # fmt: skip


def seconds(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def peak(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    call()
    bytes_at_most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return bytes_at_most


@pytest.mark.parametrize("door", DOORS)
def test_costs_grow_no_faster_than_what_is_sent(door):
    size, made, read = DOORS[door]
    small, large = (functools.partial(refused, functools.partial(read, made(n))) for n in (size, FOLD * size))
    # A call of microseconds, and one of a few kilobytes, are what the clock and the allocator make of them.
    assert peak(large) <= MOST_BYTES * max(peak(small), 1 << 14)
    least = max(min(seconds(small) for _ in range(5)), 2e-4)
    assert min(seconds(large) for _ in range(5)) <= MOST_TIME * least


def test_lists_hold_numbers_at_a_depth_that_arrays_have():
    deep: Any = 0.5
    for _ in range(1000):
        deep = [deep]
    for value, said in (
        (["a"], "got str"),
        ([None], "got NoneType"),
        ([{}], "got dict"),
        (deep, "deep"),
        ([[True], [b""]], "bytes"),
    ):
        with pytest.raises(weir.WeirError, match=said) as raised:
            Vector.parse(value, "here")
        assert raised.value.field == "here"
    with pytest.raises(weir.WeirError, match="1 to 8"):
        Vector.parse({"b64": "", "dtype": "float32", "shape": [1] * 65}, "here")
