"""Row sequences: where the rows of a request go in host memory. Pure numpy.

A row sequence is the run of one request's rows that share a set of columns; its row number `rank` is a token position,
times one row for each column. It lives in extents of the arena, ``[capacity, columns, d_model]`` each: what a step adds
is one piece for the device's copy engine, and any site of it a tensor that needs no copying.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.worker.planning.arena import Arena

FIRST_GENERATED = 256
"""Generated tokens that a row sequence's first extent has room for, if so many can come; later ones double."""
CROWDED = 0.4
"""Share of the arena in use from which extents are made no larger than need be."""
EXTENT_SHARE = 8
"""No extent is larger than this part of the arena, for rows that may never come."""
PROMPT_SHARE = 2
"""The same for rows of a prompt, which are sure to come: what lies in one extent is handed out without a copy."""


@dataclass
class RowSequence:
    """One row sequence; its counters stand in the arrays of `RowSequences` at `index`."""

    number: int
    index: int
    request_id: str
    reply: str
    columns: tuple[int, ...]
    prompt_rows: int
    most_rows: int
    shape: tuple[int, int, int, int]
    """Its `width`, `lead`, `directions` and `taken`, as in the arrays."""
    extents: list[tuple[int, int, int]] = field(default_factory=list)
    """(start in the arena, first rank, capacity); the last one is being filled."""


@dataclass(frozen=True)
class ResultCell:
    """What a row sequence holds of a token (or of all of them) instead of rows: [columns, values] float32.

    Attributes:
        kind: ``"fold"``, or a codec's records: ``"scores"`` or ``"packed"``; the last holds [columns, values] bytes.
        values: per column.
        rows: arena rows that it takes; bytes if it holds records.
        directions: ``-2 - number`` of the codec, -1 for none.
        grain: bytes of an arena row if it holds records: then places are counted in bytes, and cells follow without
            gaps.
    """

    kind: str
    values: int
    rows: int
    directions: int = -1
    grain: int = 1


class RowSequences:
    """The live row sequences of one worker.

    Attributes:
        news: reply address -> what its reader must be told with the next step's rows.
        patience: seconds to wait for room; None: rows that find none are dropped.
        grant: called with the reply address, start and rows of every new piece of the arena.
        epoch: grows whenever a method changes the arrays; see `lag_by`.
    """

    def __init__(self, arena: Arena, patience: float | None = 0.0) -> None:
        self.arena = arena
        self.patience = patience
        self.live: dict[int, RowSequence] = {}
        self.layout_updates: dict[str, messages.LayoutUpdate] = {}
        self.grant: Callable[[str, int, int], None] = lambda reply, start, rows: None
        self.epoch = 0
        self._lag: tuple[np.ndarray, int] | None = None
        self._numbers = itertools.count()
        self._free: list[int] = []
        self._grow_arrays(64)

    def _grow_arrays(self, size: int) -> None:
        old = len(self.rank) if self.live else 0
        for name in ("number", "rank", "limit", "origin", "width", "lead", "taken", "grain", "directions", "last"):
            array = np.zeros(size, np.int64)
            if old:
                array[:old] = getattr(self, name)
            setattr(self, name, array)
        self._free.extend(range(size - 1, old - 1, -1))

    number: np.ndarray
    rank: np.ndarray
    """Rank of the next row."""
    limit: np.ndarray
    """First rank that the last extent has no room for."""
    origin: np.ndarray
    """Row of the arena where rank 0 would be, going by the last extent; of a packed row sequence the byte."""
    width: np.ndarray
    """Arena rows of a rank: the number of columns, or the size of a cell; of a packed row sequence bytes."""
    lead: np.ndarray
    """Ring rows of a token that stand before those that are sent: what a cell is made from."""
    taken: np.ndarray
    """Ring rows of a token."""
    grain: np.ndarray
    """Units of `width` in an arena row: 1, or the bytes of a row for a packed row sequence."""
    directions: np.ndarray
    """Of a cell, see there; -1 for rows."""
    last: np.ndarray
    """Position of the latest row."""

    def open(
        self,
        request_id: str,
        reply: str,
        columns: tuple[int, ...],
        prompt_rows: int,
        most_rows: int,
        cell: ResultCell | None = None,
    ) -> RowSequence:
        """A new row sequence, still without room; with a `cell` it holds that instead of rows."""
        self.catch_up()
        if not self._free:
            self._grow_arrays(2 * len(self.rank))
        index = self._free.pop()
        if cell is None:
            shape = (len(columns), 0, -1, len(columns))
        else:
            shape = (cell.rows, len(columns), cell.directions, len(columns))
        row_seq = RowSequence(next(self._numbers), index, request_id, reply, columns, prompt_rows, most_rows, shape)
        self.live[index] = row_seq
        self.number[index] = row_seq.number
        self.rank[index] = self.limit[index] = self.origin[index] = 0
        self.width[index], self.lead[index], self.directions[index], self.taken[index] = shape
        self.grain[index] = cell.grain if cell else 1
        self.last[index] = -1
        self.layout_updates_for(reply).opened.append(
            messages.SequenceOpened(
                row_seq.number,
                request_id,
                list(columns),
                *((cell.kind, cell.values, cell.rows) if cell else ()),
            )
        )
        return row_seq

    def close(self, row_seq: RowSequence) -> None:
        """No more rows will come."""
        self.catch_up()
        self._retire(row_seq)
        self.layout_updates_for(row_seq.reply).closed.append(row_seq.number)
        del self.live[row_seq.index]
        self._free.append(row_seq.index)

    def place(self, row_seq: RowSequence, rows: int) -> list[tuple[int, int, int]]:
        """Room for the next `rows` ranks: (first rank, its arena row (byte if packed), count) per extent.

        Fewer ranks than asked for are placed if there is no room for the rest and rows may be dropped.

        Raises:
            WeirError: if there is no room and rows may not be dropped.
        """
        self.catch_up()
        placed = []
        i = row_seq.index
        while rows:
            if self.rank[i] == self.limit[i] and not self._extend(row_seq, rows):
                if self.patience is None:
                    break
                raise WeirError(
                    "the host buffer is full and nothing in it was freed in time; drop results that are no longer "
                    "needed, or raise the setting host_bytes",
                    "capture",
                )
            count = int(min(rows, self.limit[i] - self.rank[i]))
            rank = int(self.rank[i])
            placed.append((rank, int(self.origin[i]) + rank * int(self.width[i]), count))
            self.rank[i] += count
            rows -= count
        return placed

    def retire_all(self) -> None:
        """Close every extent, so that readers can take their rows out; row sequences go on in new ones."""
        self.catch_up()
        for row_seq in self.live.values():
            self._retire(row_seq)

    def lag_by(self, x: np.ndarray, rows: int) -> None:
        """The row sequences `x` (by index) have so many rows more than `rank` and `last` say, until `catch_up`.

        So a step that repeats the last one touches no array; whoever reads these two must catch up first.
        """
        self._lag = (x, rows)

    def catch_up(self) -> None:
        """Make `rank` and `last` say what is so."""
        self.epoch += 1
        if self._lag is not None:
            x, rows = self._lag
            self._lag = None
            self.rank[x] += rows
            self.last[x] += rows

    def take_layout_updates(self) -> dict[str, messages.LayoutUpdate]:
        """What readers must be told; it is told once."""
        layout_updates, self.layout_updates = self.layout_updates, {}
        return layout_updates

    def _extend(self, row_seq: RowSequence, rows: int) -> bool:
        i, width, share = row_seq.index, int(self.width[row_seq.index]), EXTENT_SHARE
        rank = int(self.rank[i])
        if rank < row_seq.prompt_rows:
            generous = row_seq.prompt_rows - rank + min(FIRST_GENERATED, row_seq.most_rows - row_seq.prompt_rows)
            share = PROMPT_SHARE
        else:
            generous = min(max(FIRST_GENERATED, rank), row_seq.most_rows - rank)
        if self.arena.pressure > CROWDED:
            generous = max(rows, 16)
        grain = int(self.grain[i])
        most = max(1, self.arena.capacity * grain // (share * width))
        size = min(most, max(rows, generous))
        least = min(size, rows, 16)
        while (start := self.arena.allocate(-(-size * width // grain))) is None and size > least:
            size = max(least, size // 2)
        if start is None and self.patience:
            start = self.arena.allocate(-(-size * width // grain), self.patience)
        if start is None:
            return False
        self.grant(row_seq.reply, start, -(-size * width // grain))
        self._retire(row_seq)
        row_seq.extents.append((start, rank, size))
        self.limit[i], self.origin[i] = rank + size, start * grain - rank * width
        self.layout_updates_for(row_seq.reply).placed.append(messages.ExtentPlaced(row_seq.number, rank, size, start))
        return True

    def _retire(self, row_seq: RowSequence) -> None:
        if row_seq.extents:
            rank, layout_updates = int(self.rank[row_seq.index]), self.layout_updates_for(row_seq.reply)
            for start, first, _ in row_seq.extents:
                layout_updates.retired.append(messages.ExtentRetired(row_seq.number, first, rank - first, start))
            row_seq.extents.clear()
            self.limit[row_seq.index] = rank

    def layout_updates_for(self, reply: str) -> messages.LayoutUpdate:
        """What this reader will be told."""
        layout_updates = self.layout_updates.get(reply)
        if layout_updates is None:
            layout_updates = self.layout_updates[reply] = messages.LayoutUpdate()
        return layout_updates
