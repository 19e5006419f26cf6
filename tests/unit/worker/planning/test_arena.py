"""The arena: pieces never overlap, come back once both holders have let go, and leave no gaps behind."""

from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from vllm_weir.worker.planning.arena import Arena


@given(capacity=st.integers(1, 40), data=st.data())
def test_pieces(capacity, data):
    arena, held = Arena(capacity), {}
    for _ in range(40):
        if held and data.draw(st.booleans()):
            start = data.draw(st.sampled_from(sorted(held)))
            arena.release(start)
            held[start][1] -= 1
            if not held[start][1]:
                del held[start]
        else:
            rows = data.draw(st.integers(1, capacity))
            taken = {i for s, (n, _) in held.items() for i in range(s, s + n)}
            gaps = [s for s in range(capacity - rows + 1) if not taken & set(range(s, s + rows))]
            start = arena.allocate(rows)
            assert start == (min(gaps) if gaps else None), "the lowest gap that fits"
            if start is not None:
                held[start] = [rows, 2]
        assert arena.used == sum(n for n, _ in held.values()) and arena.pressure == arena.used / capacity
    for start, (_, holders) in held.items():
        for _ in range(holders):
            arena.release(start)
    assert arena.used == 0 and arena.allocate(capacity) == 0


def test_patience():
    arena = Arena(10)
    first = arena.allocate(8)
    started = time.monotonic()
    assert arena.allocate(5, patience=0.05) is None and time.monotonic() - started >= 0.05
    assert arena.allocate(11, patience=60) is None, "what can never fit is not waited for"
    threading.Timer(0.05, lambda: [arena.release(first), arena.release(first)]).start()
    assert arena.allocate(5, patience=10) == 0
