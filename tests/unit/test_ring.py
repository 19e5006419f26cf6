"""Leases of the ring: contiguous, never overlapping, first in first out, waiting when there is no room."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_weir.worker.ring import Ring


def make(capacity, d_model=3, dtype=torch.float32):
    return Ring(capacity, d_model, dtype, torch.device("cpu"))


@settings(max_examples=500, deadline=None)
@given(capacity=st.integers(1, 40), data=st.data())
def test_leases_never_overlap(capacity, data):
    ring, live = make(capacity), deque()
    for _ in range(60):
        rows = data.draw(st.integers(1, capacity))
        while ring._place(rows) is None:
            assert live, "an empty ring has no room"
            ring.release(live.popleft())
        lease = ring.reserve(rows)
        assert lease.rows == rows and lease.start >= 0 and lease.start + rows <= capacity
        taken = [i for other in live for i in range(other.start, other.start + other.rows)]
        assert not set(taken) & set(range(lease.start, lease.start + rows))
        live.append(lease)
        assert ring.in_flight == sum(one.rows for one in live)
    while live:
        ring.release(live.popleft())
    assert ring.in_flight == 0 and ring._place(capacity) == 0


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_releases_out_of_order_free_in_order(data):
    ring = make(32)
    leases = [ring.reserve(data.draw(st.integers(1, 6))) for _ in range(5)]
    order = data.draw(st.permutations(range(5)))
    done = set()
    for i in order:
        ring.release(leases[i])
        done.add(i)
        oldest = next((k for k in range(5) if k not in done), 5)
        assert ring.in_flight == sum(one.rows for one in leases[oldest:])


def test_a_reservation_waits_for_room():
    ring = make(10)
    first, second = ring.reserve(6), ring.reserve(4)
    got = []
    thread = threading.Thread(target=lambda: got.append(ring.reserve(5)), daemon=True)
    thread.start()
    thread.join(0.1)
    assert not got
    ring.release(second)
    thread.join(0.1)
    assert not got, "an older lease is still out"
    ring.release(first)
    thread.join(5)
    assert got[0].start == 0


def test_too_large_is_an_error_not_a_deadlock():
    with pytest.raises(ValueError, match="11 rows"):
        make(10).reserve(11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_the_rows(dtype):
    ring = make(8, 5, dtype)
    ring.release(ring.reserve(3))
    ring.reserve(3)
    lease = ring.reserve(4)
    ring.buffer.copy_(torch.randn(8, 5))
    ring.ship(lease)
    read = torch.frombuffer(bytearray(lease.read()), dtype=dtype).view(4, 5)
    assert read.equal(ring.buffer[lease.start : lease.start + 4])
