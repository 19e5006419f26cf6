"""The ring: a bounded buffer on the device that the taps write, and its way out to host memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class Lease:
    """A contiguous piece of the ring between its reservation and the moment its rows have left the process."""

    start: int
    rows: int
    read: Callable[[], memoryview] | None = None
    done: bool = False


class Ring:
    """Rows [capacity, d_model], handed out as contiguous leases in FIFO order.

    On CUDA a lease's rows go to the pinned mirror on a side stream; the main stream never waits for that copy, only
    `reserve` does when the ring is full.
    """

    def __init__(self, capacity: int, d_model: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.zeros(capacity, d_model, dtype=dtype, device=device)
        self.capacity = capacity
        self._leases: deque[Lease] = deque()
        self._changed = threading.Condition()
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._mirror = torch.zeros(capacity, d_model, dtype=dtype, pin_memory=True)
            self._stream = torch.cuda.Stream(device)

    @property
    def in_flight(self) -> int:
        """Rows reserved and not yet released."""
        with self._changed:
            return sum(lease.rows for lease in self._leases)

    def reserve(self, rows: int) -> Lease:
        """A lease of `rows` contiguous rows; blocks until earlier ones have left if there is no room."""
        if rows > self.capacity:
            raise ValueError(f"{rows} rows do not fit a ring of {self.capacity}")
        with self._changed:
            while (start := self._place(rows)) is None:
                self._changed.wait()
            lease = Lease(start, rows)
            self._leases.append(lease)
            return lease

    def ship(self, lease: Lease) -> None:
        """Start moving the lease's rows, which the step just issued writes, to host memory; sets ``lease.read``."""
        rows = self.buffer[lease.start : lease.start + lease.rows]
        if not self._cuda:
            lease.read = lambda: _bytes(rows)
            return
        target = self._mirror[lease.start : lease.start + lease.rows]
        written = torch.cuda.Event()
        written.record()
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(written)
            target.copy_(rows, non_blocking=True)
            copied.record()

        def read() -> memoryview:
            copied.synchronize()
            return _bytes(target)

        lease.read = read

    def release(self, lease: Lease) -> None:
        """The lease's rows have left; its room can be used again."""
        with self._changed:
            lease.done = True
            while self._leases and self._leases[0].done:
                self._leases.popleft()
            self._changed.notify_all()

    def _place(self, rows: int) -> int | None:
        if not self._leases:
            return 0
        tail, last = self._leases[0].start, self._leases[-1]
        head = last.start + last.rows
        if last.start < tail:  # wrapped round: the room is between head and tail
            return head if head + rows <= tail else None
        if head + rows <= self.capacity:
            return head
        return 0 if rows <= tail else None


def _bytes(rows: torch.Tensor) -> memoryview:
    """The memory of contiguous rows on the host, without a copy."""
    return rows.view(torch.uint8).numpy().data.cast("B")
