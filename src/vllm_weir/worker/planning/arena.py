"""The arena: which parts of the host buffer are in use. Pure bookkeeping, in rows."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from dataclasses import dataclass


@dataclass
class _Piece:
    rows: int
    holders: int


class Arena:
    """An allocator of contiguous pieces of `capacity` rows.

    A piece has two holders, the writer (the worker that fills it) and the reader (the process that
    asked for the rows); it is free again once both have released it. Safe to use from several
    threads.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: list[tuple[int, int]] = [(0, capacity)]
        """(start, end), ascending, never touching each other."""
        self._held: dict[int, _Piece] = {}
        """Start -> piece."""
        self._used = 0
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Rows in pieces that somebody holds."""
        return self._used

    @property
    def pressure(self) -> float:
        """Share of the arena in pieces that somebody holds."""
        return self._used / self.capacity

    def allocate(self, rows: int, patience: float = 0.0) -> int | None:
        """Allocate the lowest free piece of `rows` rows and return its start.

        Wait up to `patience` seconds for room; return None if there is none by then.
        """
        deadline = time.monotonic() + patience
        with self._changed:
            while (start := self._find(rows)) is None:
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0 or rows > self.capacity:
                    return None
                self._changed.wait(seconds_left)
            self._held[start] = _Piece(rows, holders=2)
            self._used += rows
            return start

    def _find(self, rows: int) -> int | None:
        for k, (start, end) in enumerate(self._free):
            if end - start == rows:
                del self._free[k]
                return start
            if end - start > rows:
                self._free[k] = (start + rows, end)
                return start
        return None

    def release(self, start: int) -> None:
        """Drop one holder of the piece at `start`; the second call frees it."""
        with self._changed:
            piece = self._held[start]
            piece.holders -= 1
            if piece.holders:
                return
            del self._held[start]
            self._used -= piece.rows
            self._add_free(start, start + piece.rows)
            self._changed.notify_all()

    def _add_free(self, start: int, end: int) -> None:
        """Add to the free pieces, joined with free neighbours."""
        k = bisect_left(self._free, (start, end))
        if k < len(self._free) and self._free[k][0] == end:
            end = self._free.pop(k)[1]
        if k and self._free[k - 1][1] == start:
            start = self._free.pop(k - 1)[0]
        insort(self._free, (start, end))
