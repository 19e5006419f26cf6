"""Rows of the device's tables: which are in use, and their copy on the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np


class Move(NamedTuple):
    """`rows` consecutive rows of a table that stood at `source` and stand at `target` from now on."""

    source: int
    target: int
    rows: int


class Slots:
    """Reference-counted table rows by key: one, or several that follow each other.

    The rows of an idle key keep their content until they are needed for another.

    Args:
        on_move: called when keys have been moved together to make room for several rows side by
            side; has to move their content, one after the other. Needed only if a key has several
            rows.

    Attributes:
        slot_of: key -> its row, the first one if it has several.
    """

    def __init__(self, capacity: int, on_move: Callable[[Sequence[Move]], None] | None = None) -> None:
        self.slot_of: dict[Hashable, int] = {}
        self._capacity, self._on_move = capacity, on_move
        self._rows: dict[Hashable, int] = {}
        """Keys that have several rows -> how many."""
        self._users: dict[Hashable, int] = {}
        self._idle: dict[Hashable, None] = {}
        """Keys without users, the one that has been idle for longest first."""
        self._free = list(range(capacity - 1, -1, -1))

    def hold(self, key: Hashable, rows: int = 1) -> tuple[int, bool]:
        """Return the key's slot for one user more, and whether its content must be written; a new key gets `rows`.

        Raises IndexError if too many slots are in use.
        """
        if key in self.slot_of:
            self._idle.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1
            return self.slot_of[key], False
        while len(self._free) < rows:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                raise IndexError("all slots are in use")
            self.forget(oldest)
        slot = self._free.pop() if rows == 1 else self._take_several(rows)
        self.slot_of[key], self._users[key] = slot, 1
        if rows > 1:
            self._rows[key] = rows
        return slot, True

    def release(self, key: Hashable) -> bool:
        """Drop one user; return whether it was the last."""
        self._users[key] -= 1
        if self._users[key]:
            return False
        del self._users[key]
        self._idle[key] = None
        return True

    def forget(self, key: Hashable) -> None:
        """Free an idle key's slots."""
        del self._idle[key]
        slot = self.slot_of.pop(key)
        if key in self._rows:
            self._free.extend(range(slot + self._rows.pop(key) - 1, slot, -1))
        self._free.append(slot)

    @property
    def in_use(self) -> int:
        """Rows of keys that have users."""
        return len(self._users) + sum(rows - 1 for key, rows in self._rows.items() if key in self._users)

    def _take_several(self, rows: int) -> int:
        """Return the first of `rows` free slots that follow each other; as many are free."""
        run = self._last_run(rows)
        if run is None:
            self._move_together()
            run = self._last_run(rows)
            assert run is not None, "all free slots follow each other"
        self._free = [slot for slot in self._free if not run <= slot < run + rows]
        return run

    def _last_run(self, rows: int) -> int | None:
        """Return the last run of free slots, far from where single ones are taken, or None."""
        free = np.sort(self._free)
        starts = np.flatnonzero(free[rows - 1 :] - free[: len(free) - rows + 1] == rows - 1)
        return int(free[starts[-1]]) if len(starts) else None

    def _move_together(self) -> None:
        """Move all keys to the table's beginning, in their order."""
        assert self._on_move is not None, "the content can be moved"
        end, moves = 0, []
        for key in sorted(self.slot_of, key=self.slot_of.__getitem__):
            rows = self._rows.get(key, 1)
            moves.append(Move(self.slot_of[key], end, rows))
            self.slot_of[key] = end
            end += rows
        self._free = list(range(self._capacity - 1, end - 1, -1))
        self._on_move([move for move in moves if move.source != move.target])


class HostTables:
    """Arrays of which single rows are written.

    Args:
        names: of the attributes that are such arrays.

    Attributes:
        changed: table name -> rows that were written since the last `take_changes`.
    """

    def __init__(self, *names: str) -> None:
        self.changed: dict[str, set[int]] = {name: set() for name in names}

    def take_changes(self) -> dict[str, np.ndarray]:
        """Return the rows written since the last call, int64 and ascending, by table name."""
        changes = {name: np.fromiter(sorted(rows), np.int64) for name, rows in self.changed.items() if rows}
        for rows in self.changed.values():
            rows.clear()
        return changes
