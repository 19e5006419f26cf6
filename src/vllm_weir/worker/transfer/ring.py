"""The bounded device buffer that the taps write rows to."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch


class GpuEvent(Protocol):
    """The part of ``torch.cuda.Event`` that the ring uses."""

    def query(self) -> bool:
        """Return whether the event has happened."""

    def wait(self) -> None:
        """Make the current stream wait for the event."""


class Ring:
    """Rows [capacity, d_model] on the device, handed out piece by piece, round and round.

    The host never waits for room: before a piece is written again, the device's main stream waits
    for the copy that takes its rows out.
    """

    def __init__(self, capacity: int, d_model: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.zeros(capacity, d_model, dtype=dtype, device=device)
        self.capacity = capacity
        self._cursor = self._base = 0
        # Align pieces for float32, which reductions are kept in.
        self._alignment = max(1, 4 // self.buffer.element_size())
        self._leaving: deque[tuple[int, int, GpuEvent]] = deque()
        """(first row, end, event) of pieces that are being copied out, in the order of their
        copies."""

    def take(self, rows: int) -> int:
        """Return the first row of the next piece of `rows` contiguous rows; raise ValueError if they do not fit."""
        if rows > self.capacity - self._base:
            raise ValueError(f"{rows} rows do not fit a ring of {self.capacity - self._base}")
        start = -(-self._cursor // self._alignment) * self._alignment
        if start + rows > self.capacity:
            start = self._base
        self._cursor = start + rows
        return start

    def rewind(self, start: int = 0) -> None:
        """Use only the ring's rows from `start` on: take the next piece there, and wrap to there.

        Pieces of one size then overlap only once the rest of the ring has been handed out.
        """
        self._cursor = self._base = start

    def claim(self, start: int, rows: int) -> None:
        """Make the current stream wait until the rows in a piece have been copied out."""
        last = max((k for k, (a, b, _) in enumerate(self._leaving) if a < start + rows and start < b), default=-1)
        if last >= 0:
            # Copies finish in queue order: waiting for the last one covers all before it.
            self._leaving[last][2].wait()
            for _ in range(last + 1):
                self._leaving.popleft()

    def release_after(self, start: int, rows: int, copied: GpuEvent) -> None:
        """Note that a piece's rows will have been copied out once `copied` has happened."""
        while self._leaving and self._leaving[0][2].query():
            self._leaving.popleft()
        self._leaving.append((start, start + rows, copied))
