"""Row sequences: where the rows of a request go in host memory. Pure numpy.

A row sequence holds one request's rows that share a site set. A `rank` numbers its token positions,
each of which has one row per column. It lies in extents ``[capacity, columns, d_model]`` of the
arena, so that the copy engine copies what a step adds in one piece, and each site of an extent is a
tensor without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.worker.planning.arena import Arena

FIRST_GENERATED = 256
"""Generated tokens that the first extent has room for, if that many can come; later ones double."""
FEWEST = 16
"""Ranks of an extent in a crowded arena, unless more are needed at once."""
CROWDED = 0.4
"""Once this share of the arena is in use, extents are made no larger than necessary."""
EXTENT_SHARE = 8
"""An extent for generated tokens, which may never come, takes at most 1/8 of the arena."""
PROMPT_SHARE = 2
"""An extent for a prompt, whose rows are sure to come, takes at most 1/2: what lies in one extent
is handed out without a copy."""

_ARRAYS = (
    "number", "next_rank", "end_rank", "origin", "rank_size", "ring_rows", "units_per_row", "codec", "last_position",
)  # fmt: skip


@dataclass
class RowSequence:
    """One row sequence; its counters are in the arrays of `RowSequences` at `index`.

    Attributes:
        number: the name under which its reader knows it.
        columns: what is captured, ascending.
        prompt_rows: ranks that are sure to come.
        most_rows: ranks that can come at most.
        rank_size, ring_rows, codec: as in the arrays of `RowSequences`.
        extents: (start in the arena, first rank, capacity in ranks); the last one is being filled.
    """

    number: int
    index: int
    request_id: str
    endpoint: str
    columns: tuple[int, ...]
    prompt_rows: int
    most_rows: int
    rank_size: int
    ring_rows: int
    codec: int
    extents: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class ResultCell:
    """What a row sequence holds instead of rows: one cell for each token, or for all of them.

    A cell is float32 [columns, values], unless `kind` says otherwise.
    """

    # ``"fold"`` for a reduction, or a codec's records: ``"scores"``, or ``"packed"``, ``"read_outs"`` and
    # ``"rows_read"``, [columns, values] bytes
    kind: str
    values: int  # per column
    size: int  # arena rows of the cell; bytes for records
    codec: int = -1  # number of the codec, -1 for none
    units_per_row: int = 1  # bytes of an arena row for records, which follow each other without gaps; 1 for a reduction


class RowSequences:
    """The live row sequences of one worker.

    Args:
        arena: where extents are allocated.
        patience: seconds to wait for room before failing; None to drop rows instead.
        rewind: how many positions may be computed again because drafts were rejected. Their rows
            get new ranks; the rows of rejected drafts are never announced.
        allow_reader: called with the endpoint, start and rows of every new piece of the arena.
        reader_columns: column -> what it is called in messages, where that differs.

    Attributes:
        layout_updates: endpoint -> what its reader must be told with the next step's rows.
        epoch: grows whenever a method changes the arrays; see `defer_advance`.
    """

    def __init__(
        self,
        arena: Arena,
        patience: float | None = 0.0,
        rewind: int = 0,
        allow_reader: Callable[[str, int, int], None] = lambda endpoint, start, rows: None,
        reader_columns: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.arena, self.patience, self.rewind = arena, patience, rewind
        self._allow_reader, self._reader_columns = allow_reader, reader_columns
        self.live: dict[int, RowSequence] = {}
        self.layout_updates: dict[str, messages.LayoutUpdate] = {}
        self.epoch = 0
        self._deferred: tuple[np.ndarray, int] | None = None
        self._numbers = itertools.count()
        self._free: list[int] = []
        self._grow_arrays(64)

    def _grow_arrays(self, size: int) -> None:
        used = len(self.next_rank) if self.live else 0
        for name in _ARRAYS:
            array = np.zeros(size, np.int64)
            if used:
                array[:used] = getattr(self, name)
            setattr(self, name, array)
        self._free.extend(range(size - 1, used - 1, -1))

    number: np.ndarray
    next_rank: np.ndarray
    """Rank of the next row."""
    end_rank: np.ndarray
    """First rank that the last extent has no room for."""
    origin: np.ndarray
    """Place in the arena where rank 0 would be, going by the last extent: a row, or a byte for
    records."""
    rank_size: np.ndarray
    """Arena rows of a rank: the number of columns, or the size of a cell; bytes for records."""
    ring_rows: np.ndarray
    """Ring rows of a token."""
    units_per_row: np.ndarray
    """Units of `rank_size` in an arena row: 1, or the bytes of a row for records."""
    codec: np.ndarray
    """Number of the codec for records, else -1."""
    last_position: np.ndarray
    """Position of the latest row, -1 if there is none."""

    def open(
        self,
        request_id: str,
        endpoint: str,
        columns: tuple[int, ...],
        prompt_rows: int,
        most_rows: int,
        cell: ResultCell | None = None,
    ) -> RowSequence:
        """Open a row sequence, without an extent yet; given a `cell`, it holds cells, not rows."""
        self.catch_up()
        if not self._free:
            self._grow_arrays(2 * len(self.next_rank))
        index = self._free.pop()
        rank_size, codec, units_per_row = len(columns), -1, 1
        if cell is not None:
            rank_size, codec, units_per_row = cell.size, cell.codec, cell.units_per_row
        row_seq = RowSequence(
            next(self._numbers), index, request_id, endpoint, columns, prompt_rows, most_rows,
            rank_size, len(columns), codec,
        )  # fmt: skip
        self.live[index] = row_seq
        self.number[index] = row_seq.number
        self.next_rank[index] = self.end_rank[index] = self.origin[index] = 0
        self.rank_size[index], self.ring_rows[index], self.codec[index] = rank_size, len(columns), codec
        self.units_per_row[index] = units_per_row
        self.last_position[index] = -1
        names = self._reader_columns
        named = [names.get(column, column) for column in columns] if names else columns
        opened = messages.SequenceOpened(row_seq.number, request_id, list(named))
        if cell is not None:
            opened.kind, opened.values, opened.width = cell.kind, cell.values, cell.size
        self.layout_update_for(endpoint).opened.append(opened)
        return row_seq

    def close(self, row_seq: RowSequence) -> None:
        """End a row sequence: no more rows will come."""
        self.catch_up()
        self._retire(row_seq)
        self.layout_update_for(row_seq.endpoint).closed.append(row_seq.number)
        del self.live[row_seq.index]
        self._free.append(row_seq.index)

    def place(self, row_seq: RowSequence, ranks: int) -> list[tuple[int, int, int]]:
        """Return places for the next `ranks` ranks: (first rank, place, count) per extent.

        Return fewer if there is no room for the rest and rows may be dropped. Raises WeirError if there is no room and
        rows may not be dropped.
        """
        self.catch_up()
        places = []
        index = row_seq.index
        while ranks:
            if self.next_rank[index] == self.end_rank[index] and not self._extend(row_seq, ranks):
                if self.patience is None:
                    break
                raise WeirError(
                    "the host buffer is full, and none of it became free in time; drop results that are no longer "
                    "needed, or raise the setting host_bytes",
                    "capture",
                )
            rank = int(self.next_rank[index])
            count = int(min(ranks, self.end_rank[index] - rank))
            places.append((rank, int(self.origin[index]) + rank * row_seq.rank_size, count))
            self.next_rank[index] += count
            ranks -= count
        return places

    def retire_all(self) -> None:
        """Close every extent, so that readers can take rows out; sequences go on in new ones."""
        self.catch_up()
        for row_seq in self.live.values():
            self._retire(row_seq)

    def defer_advance(self, indices: np.ndarray, steps: int) -> None:
        """Count `steps` more rows for the row sequences at `indices` when `catch_up` is called.

        So a step that repeats the last one touches no array; whoever reads `next_rank` or
        `last_position` must catch up first.
        """
        self._deferred = (indices, steps)

    def catch_up(self) -> None:
        """Bring `next_rank` and `last_position` up to date."""
        self.epoch += 1
        if self._deferred is not None:
            indices, steps = self._deferred
            self._deferred = None
            self.next_rank[indices] += steps
            self.last_position[indices] += steps

    def take_layout_updates(self) -> dict[str, messages.LayoutUpdate]:
        """Return what readers must be told, by endpoint, and forget it."""
        layout_updates, self.layout_updates = self.layout_updates, {}
        return layout_updates

    def layout_update_for(self, endpoint: str) -> messages.LayoutUpdate:
        """Return what this reader will be told, to be added to."""
        layout_update = self.layout_updates.get(endpoint)
        if layout_update is None:
            layout_update = self.layout_updates[endpoint] = messages.LayoutUpdate()
        return layout_update

    def _extend(self, row_seq: RowSequence, ranks: int) -> bool:
        """Give a row sequence, whose extent is full, another, of up to `ranks` ranks; return whether there was room."""
        index = row_seq.index
        rank, units_per_row = int(self.next_rank[index]), int(self.units_per_row[index])
        wanted = self._wanted_capacity(row_seq, rank, ranks, units_per_row)
        allocated = self._allocate(wanted, min(wanted, ranks, FEWEST), row_seq.rank_size, units_per_row)
        if allocated is None:
            return False
        start, arena_rows, capacity = allocated
        try:
            self._allow_reader(row_seq.endpoint, start, arena_rows)
        except WeirError:
            for _ in ("worker", "reader"):
                self.arena.release(start)
            raise
        self._retire(row_seq)
        row_seq.extents.append((start, rank, capacity))
        self.end_rank[index] = rank + capacity
        self.origin[index] = start * units_per_row - rank * row_seq.rank_size
        placed = messages.ExtentPlaced(row_seq.number, rank, capacity, start)
        self.layout_update_for(row_seq.endpoint).placed.append(placed)
        return True

    def _wanted_capacity(self, row_seq: RowSequence, rank: int, ranks: int, units_per_row: int) -> int:
        """Return the best capacity of an extent from `rank` on; `ranks` are needed at once."""
        if rank < row_seq.prompt_rows:
            generated = min(FIRST_GENERATED, row_seq.most_rows - row_seq.prompt_rows)
            expected, share = row_seq.prompt_rows - rank + generated, PROMPT_SHARE
        else:
            expected, share = min(max(FIRST_GENERATED, rank), row_seq.most_rows - rank), EXTENT_SHARE
        if self.arena.pressure > CROWDED:
            expected = FEWEST
        largest = self.arena.capacity * units_per_row // (share * row_seq.rank_size)
        return min(max(1, largest), max(ranks, expected))

    def _allocate(self, wanted: int, least: int, rank_size: int, units_per_row: int) -> tuple[int, int, int] | None:
        """Return start and rows of a piece for `wanted` ranks or fewer, and for how many; None without room.

        Wait only for `least` ranks.
        """

        def arena_rows(capacity: int) -> int:
            return -(-capacity * rank_size // units_per_row)

        capacity = wanted
        while (start := self.arena.allocate(arena_rows(capacity))) is None and capacity > least:
            capacity = max(least, capacity // 2)
        if start is None and self.patience:
            start = self.arena.allocate(arena_rows(capacity), self.patience)
        return None if start is None else (start, arena_rows(capacity), capacity)

    def _retire(self, row_seq: RowSequence) -> None:
        """Close a row sequence's extents."""
        if row_seq.extents:
            next_rank = int(self.next_rank[row_seq.index])
            retired = self.layout_update_for(row_seq.endpoint).retired
            for start, first_rank, _ in row_seq.extents:
                retired.append(messages.ExtentRetired(row_seq.number, first_rank, next_rank - first_rank, start))
            row_seq.extents.clear()
            self.end_rank[row_seq.index] = next_rank
