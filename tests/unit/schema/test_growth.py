"""What a client sends costs in proportion to its length, and not to a power of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import vllm_weir as weir
from tests.support.growth import FOLD, grows
from vllm_weir.schema import keys
from vllm_weir.schema.fields import loads
from vllm_weir.schema.vectors import Vector


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
    "one key twice": (1000, key_twice, lambda text: loads(text, "x")),
    "unknown keys": (2000, unknown, lambda body: (keys.meant.cache_clear(), keys.asks({}, body), keys.slip({}, body))),
    "a long text among short ones": (1000, lambda n: ["x" * n, *[""] * n], lambda v: Vector.parse(v, "x")),
    "a text among numbers": (1000, lambda n: [*[0.5] * n, "x" * n], lambda v: Vector.parse(v, "x")),
    "numbers": (1000, lambda n: [0.5] * n, lambda v: Vector.parse(v, "x")),
    "rows": (100, lambda n: [[0.5] * 32] * n, lambda v: Vector.parse(v, "x")),
    "empty rows": (1000, lambda n: [[]] * n, lambda v: Vector.parse(v, "x")),
    "ragged rows": (100, lambda n: [*[[0.5] * 8] * n, [0.5]], lambda v: Vector.parse(v, "x")),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_costs_grow_no_faster_than_what_is_sent(door):
    size, made, read = DOORS[door]
    small, large = (functools.partial(refused, functools.partial(read, made(n))) for n in (size, FOLD * size))
    small()  # what is cached once
    assert grows(small, large) == ""


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
