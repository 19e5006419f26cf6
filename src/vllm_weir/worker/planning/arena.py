"""Where rows lie: in the host's arena, and the values of a row of the ring."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import RowShape, Shard, ring_rows, row_width
from vllm_weir.schema.taps import STAGES, shard_column, tap_of


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


@dataclass(frozen=True)
class RowLayout:
    """The rows of the taps where they are not simply [d_model]."""

    # tap -> values of the whole model's row; only of taps whose row is not [d_model]
    widths: Mapping[int, int] = field(default_factory=dict)
    # tap -> the part of its row that this worker's tensor holds; only of taps whose row is not [d_model]
    shards: Mapping[int, Shard] = field(default_factory=dict)
    # taps whose rows tensor-parallel workers hold together. Each worker sends its own part.
    spread: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()  # those of `spread` whose part another worker holds too, which sends it
    # column -> rows of the ring that one of its rows takes; left out where that is 1
    ring_rows: Mapping[int, int] = field(default_factory=dict)
    # column -> what it is called in messages, where that differs
    reader_columns: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        shapes: Mapping[Site, RowShape],
        shards: Mapping[Site, Shard],
        d_model: int,
        num_layers: int,
        rank: int,
        ranks: int,
    ) -> RowLayout:
        """Work out the layout.

        Args:
            shapes: site -> shape of a row of the whole model, where that is not (d_model,).
            shards: site -> the part that this worker holds, where it does not hold all of it.
            d_model: width of a row of the ring.
            num_layers: of the model.
            rank: of this worker among those that share the model's heads and neurons.
            ranks: how many these are.
        """
        widths: dict[int, int] = {}
        by_tap: dict[int, Shard] = {}
        rows: dict[int, int] = {}
        names: dict[int, int] = {}
        silent: set[int] = set()
        for site, shape in shapes.items():
            tap, width = tap_of(site), row_width(shape)
            widths[tap] = width
            shard = by_tap[tap] = shards.get(site, Shard(0, width))
            held = shard.stop - shard.start
            if site in shards and rank % max(ranks * held // width, 1):
                silent.add(tap)
            for column in _columns_of(tap):
                if (count := ring_rows(held, d_model)) > 1:
                    rows[column] = count
                if shard.start:
                    names[column] = shard_column(column, shard.start // held, num_layers)
        return cls(widths, by_tap, frozenset(map(tap_of, shards)), frozenset(silent), rows, names)


def _columns_of(tap: int) -> Iterable[int]:
    return range(tap * STAGES, (tap + 1) * STAGES)
