"""The ring: the bounded buffer on the device that the taps write."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch


class GpuEvent(Protocol):
    """What is needed of ``torch.cuda.Event``."""

    def query(self) -> bool: ...
    def wait(self) -> None: ...


class Ring:
    """Rows [capacity, d_model], taken piece by piece, round and round.

    Nobody on the host ever waits for room: when a piece comes round again before its rows have left, the device's main
    stream waits for the copy that takes them out.
    """

    def __init__(self, capacity: int, d_model: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.zeros(capacity, d_model, dtype=dtype, device=device)
        self.capacity = capacity
        self._cursor = self._base = 0
        self._grain = max(1, 4 // self.buffer.element_size())
        self._leaving: deque[tuple[int, int, GpuEvent]] = deque()

    def take(self, rows: int) -> int:
        """Start of the next piece of `rows` contiguous rows."""
        if rows > self.capacity - self._base:
            raise ValueError(f"{rows} rows do not fit a ring of {self.capacity - self._base}")
        start = -(-self._cursor // self._grain) * self._grain  # float32 values are left in it, too
        if start + rows > self.capacity:
            start = self._base
        self._cursor = start + rows
        return start

    def rewind(self, start: int = 0) -> None:
        """The next piece begins at row `start`, and so do all that would go beyond the ring: of pieces of one size from
        here on, as many as fit do not overlap."""
        self._cursor = self._base = start

    def claim(self, start: int, rows: int) -> None:
        """Let the current stream wait until nothing in the piece is still to be copied out."""
        last = max((k for k, (a, b, _) in enumerate(self._leaving) if a < start + rows and start < b), default=-1)
        if last >= 0:
            # Copies leave in order, so the latest one's end is the end of all before it.
            self._leaving[last][2].wait()
            for _ in range(last + 1):
                self._leaving.popleft()

    def leaves(self, start: int, rows: int, copied: GpuEvent) -> None:
        """The piece's rows will have left once `copied` has happened."""
        while self._leaving and self._leaving[0][2].query():
            self._leaving.popleft()
        self._leaving.append((start, start + rows, copied))
