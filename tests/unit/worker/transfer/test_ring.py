"""The ring: pieces are contiguous, and one that comes round again waits for exactly the copies that still need it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_weir.worker.transfer.ring import Ring


class Copy:
    """A device event: `done` once the copy has happened; waiting for it makes it (and all before it) happen."""

    def __init__(self, earlier):
        self.done, self.earlier = False, list(earlier)

    def query(self):
        return self.done

    def wait(self):
        for one in [*self.earlier, self]:
            one.done = True


@given(capacity=st.integers(1, 40), data=st.data())
def test_no_row_is_overwritten_before_it_has_left(capacity, data):
    ring = Ring(capacity, 3, torch.float32, torch.device("cpu"))
    copies: list[Copy] = []
    holds: list[Copy | None] = [None] * capacity
    for _ in range(30):
        rows = data.draw(st.integers(1, capacity))
        start = ring.take(rows)
        assert start >= 0 and start + rows <= capacity
        pending = [c for c in copies if not c.done]
        ring.claim(start, rows)
        for at in range(start, start + rows):
            assert holds[at] is None or holds[at].done
        newest = max((copies.index(h) for h in holds[start : start + rows] if h in pending), default=-1)
        assert all(not c.done for c in pending if copies.index(c) > newest), "it waited for more than it needs"
        copy = Copy(copies)
        copies.append(copy)
        holds[start : start + rows] = [copy] * rows
        ring.release_after(start, rows, copy)
        if data.draw(st.booleans()):  # the device goes on by itself
            for one in copies[: data.draw(st.integers(0, len(copies)))]:
                one.done = True


def test_finished_copies_are_forgotten():
    ring = Ring(1000, 1, torch.float32, torch.device("cpu"))
    for _ in range(200):
        copy = Copy([])
        copy.done = True
        ring.release_after(ring.take(1), 1, copy)
    assert len(ring._leaving) <= 1


def test_a_piece_larger_than_the_ring_is_an_error():
    ring = Ring(10, 1, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="11 rows do not fit a ring of 10"):
        ring.take(11)
    assert ring.take(10) == 0


@pytest.mark.parametrize(("dtype", "starts"), [(torch.bfloat16, [0, 4, 6]), (torch.float32, [0, 3, 5])])
def test_pieces_begin_where_float32_may_lie(dtype, starts):
    """Reductions keep float32 in the ring's rows, whose width may be odd."""
    ring = Ring(16, 1, dtype, torch.device("cpu"))
    assert [ring.take(rows) for rows in (3, 2, 1)] == starts
