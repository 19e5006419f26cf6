"""How time and memory grow with what a client sends."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

FOLD, MOST = 16, 24
"""What is sent grows so many times, and what it costs so many times at most: 256 would be quadratic."""
LEAST_SECONDS, LEAST_BYTES = 2e-3, 1 << 17
"""Less is what the clock, the allocator and the routes themselves make of it."""


def seconds(call: Callable[[], Any]) -> float:
    gc.collect()
    gc.disable()  # its runs are not the call's
    try:
        began = time.process_time()
        call()
        return time.process_time() - began
    finally:
        gc.enable()


def peak(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def grows(small: Callable[[], Any], large: Callable[[], Any]) -> str:
    """Return how the larger of two costs too much; "" if it does not. What is only disturbed is measured again."""
    gc.freeze()  # what thousands of tests have left in the process is not gone through each time
    try:
        return _grows(small, large)
    finally:
        gc.unfreeze()


def _grows(small: Callable[[], Any], large: Callable[[], Any]) -> str:
    held = peak(large)
    if held > MOST * LEAST_BYTES and held > MOST * (before := peak(small)):
        return f"{held / before:.0f} times the memory"
    least, most = LEAST_SECONDS, float("inf")
    for _ in range(5):
        most = min(most, seconds(large))
        if most <= MOST * least:
            return ""
        least = max(least, min(seconds(small) for _ in range(3)))
        if most <= MOST * least:
            return ""
    return f"{most / least:.0f} times the time"


Path = tuple[Any, ...]
LISTS = "its lists"
"""Instead of a field: all lists of an object, which grow together."""


def places(value: Any, at: Path = ()) -> Iterator[Path]:
    """Where a body has lists, texts and objects, itself included, and several lists in one object."""
    if isinstance(value, (list, str, dict)):
        yield at
    if isinstance(value, dict):
        if sum(isinstance(inner, list) for inner in value.values()) > 1:
            yield (*at, LISTS)
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for k, inner in enumerate(value):
            yield from places(inner, (*at, k))


def grown(body: Any, at: Path, n: int) -> Any:
    """The body with what is there repeated to `n` elements, letters or fields; fields are numbered."""
    if at == (LISTS,):
        return {key: grown(inner, (), n) if isinstance(inner, list) else inner for key, inner in body.items()}
    if at:
        inner = grown(body[at[0]], at[1:], n)
        if isinstance(body, dict):
            return {**body, at[0]: inner}
        return [inner if k == at[0] else one for k, one in enumerate(body)]
    if isinstance(body, dict):
        key, value = next(iter(body.items()), ("a", 1))
        return {**body, **{str(k) if key.isdigit() else f"{key}{k:x}": value for k in range(n)}}
    return (body * (n // max(1, len(body)) + 1))[:n] if body else body
