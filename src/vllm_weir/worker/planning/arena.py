"""The arena: which parts of the host buffer are in use, and by whom. Pure bookkeeping, in rows."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort


class Arena:
    """Hands out contiguous pieces of `capacity` rows.

    A piece has two holders, the writer (the worker that fills it) and the reader (the process that asked for the
    rows); it is free again once both have let go.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: list[tuple[int, int]] = [(0, capacity)]
        """(start, end), ascending, never touching each other."""
        self._held: dict[int, list[int]] = {}
        """start -> [size, holders]."""
        self._used = 0
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Rows that somebody holds."""
        return self._used

    @property
    def pressure(self) -> float:
        """Share of the arena that somebody holds."""
        return self._used / self.capacity

    def allocate(self, rows: int, patience: float = 0.0) -> int | None:
        """Start of a piece of `rows` rows, the lowest that fits; None if none has become free within `patience` s."""
        deadline = time.monotonic() + patience
        with self._changed:
            while (start := self._find(rows)) is None:
                left = deadline - time.monotonic()
                if left <= 0 or rows > self.capacity:
                    return None
                self._changed.wait(left)
            self._held[start] = [rows, 2]
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

    def let_go(self, start: int) -> None:
        """One holder less of the piece at `start`."""
        with self._changed:
            piece = self._held[start]
            piece[1] -= 1
            if piece[1]:
                return
            del self._held[start]
            self._used -= piece[0]
            self._give_back(start, start + piece[0])
            self._changed.notify_all()

    def _give_back(self, start: int, end: int) -> None:
        at = bisect_left(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
        insort(self._free, (start, end))
