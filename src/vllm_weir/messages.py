"""Framing of what workers tell the caller's process, and of the vectors they fetch from it. msgpack, no pickle.

A message has three frames: the `MessageHeader`, marks of rows that have arrived, and marks of what was steered.
Marks are int32 arrays, so that a step of hundreds of requests is one small message. A fourth frame holds the rows
themselves when the reader cannot map the worker's memory.
"""

from __future__ import annotations

import msgspec

MARK_FIELDS = ("row_seq", "rank", "position", "count", "stride")
"""Rows `rank`.. of a row sequence are those of `count` positions from `position`, `stride` apart; rank -1: dropped."""
STEER_FIELDS = ("group", "position", "count", "stride")
"""A group's interventions were applied at these positions."""


class SequenceOpened(msgspec.Struct, array_like=True):
    """A row sequence: rows of one request that share their columns.

    `kind` is ``"rows"``; for ``"fold"`` a rank is a cell of arena rows instead, which holds [columns, values] float32,
    a reduction of the prompt's rows. For ``"scores"`` a rank is [columns, values] float32, products with directions,
    and for ``"packed"`` [columns, values] bytes, compressed rows: of both, `width` counts bytes, and ranks follow each
    other without gaps.
    """

    row_seq: int
    request_id: str
    columns: list[int]
    kind: str = "rows"
    values: int = 0
    width: int = 0

    @property
    def rows(self) -> int:
        """Arena rows of a rank (of rows, and of a fold)."""
        return self.width or len(self.columns)

    def rank_bytes(self, row_bytes: int) -> int:
        """Bytes of a rank, where an arena row has `row_bytes`."""
        return self.width if self.kind in ("scores", "packed") else self.rows * row_bytes


class ExtentPlaced(msgspec.Struct, array_like=True):
    """Ranks from `rank` on lie from row `start` of the worker's arena on, `capacity` of them."""

    row_seq: int
    rank: int
    capacity: int
    start: int


class ExtentRetired(msgspec.Struct, array_like=True):
    """An extent holds `filled` ranks and will get no more."""

    row_seq: int
    rank: int
    filled: int
    start: int


class GroupDefined(msgspec.Struct, array_like=True):
    """A number for some interventions (their indices) of a request."""

    group: int
    request_id: str
    moves: list[int]


class LayoutUpdate(msgspec.Struct, array_like=True):
    """What changed in the layout of one reader's rows."""

    opened: list[SequenceOpened] = []
    placed: list[ExtentPlaced] = []
    retired: list[ExtentRetired] = []
    closed: list[int] = []
    groups: list[GroupDefined] = []

    def __bool__(self) -> bool:
        return bool(self.opened or self.placed or self.retired or self.closed or self.groups)


class MessageHeader(msgspec.Struct, array_like=True):
    """What the frames beside it hold, or which requests failed and why.

    `pressure` is the share of the worker's arena in use; `spill` asks the reader to empty its retired extents.
    `engine` is the worker's data-parallel engine, and `waiting` how many requests of it wait for table space.
    `broken` says why rows of this step are lost: every request that the reader still waits for fails.
    """

    token: str
    worker: str
    d_model: int
    dtype: str
    layout_updates: LayoutUpdate = msgspec.field(default_factory=LayoutUpdate)
    failures: dict[str, str] = {}
    pressure: float = 0.0
    spill: bool = False
    broken: str = ""
    engine: int = 0
    waiting: int = 0


class VectorQuery(msgspec.Struct, array_like=True):
    """A worker asks for vectors by digest; the answer is their float32 bytes, one frame each, empty if unknown."""

    token: str
    digests: list[str]


class WorkerHello(msgspec.Struct, array_like=True):
    """A worker introduces its arena: `rows` rows of `row_bytes` bytes; the file descriptor comes along."""

    token: str
    worker: str
    rows: int
    row_bytes: int


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(MessageHeader).decode
decode_wanted = msgspec.msgpack.Decoder(VectorQuery).decode
decode_hello = msgspec.msgpack.Decoder(WorkerHello).decode


class ReaderEndpoint(msgspec.Struct, frozen=True):
    """Where a caller's process listens: for messages, for questions about vectors, and for arenas ("" if remote)."""

    rows: str
    vectors: str
    arenas: str
    token: str

    @classmethod
    def parse(cls, text: str) -> ReaderEndpoint:
        """From the form that travels with a request."""
        return cls(*text.split("\t"))

    def __str__(self) -> str:
        return "\t".join((self.rows, self.vectors, self.arenas, self.token))
