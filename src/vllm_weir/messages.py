"""Messages between workers and the caller's process, in msgpack.

Workers report rows, and ask for vectors. A message about rows has three frames: a `MessageHeader`,
the arrivals, and what was steered. The latter two are int32 arrays, so that a step of hundreds of
requests is one small message. A fourth frame holds the rows themselves when the reader cannot map
the worker's memory.
"""

from __future__ import annotations

import msgspec

MARK_FIELDS = ("row_seq", "rank", "position", "count", "stride")
"""Columns of the arrivals: ranks `rank`, `rank` + 1, ... of a row sequence are the rows of `count`
positions from `position` on, `stride` apart; rank -1: they were dropped."""
STEER_FIELDS = ("group", "position", "count", "stride")
"""Columns of what was steered: a group's interventions were applied at these positions."""


class SequenceOpened(msgspec.Struct, array_like=True):
    """A row sequence: rows of one request that share their columns.

    Attributes:
        row_seq: its number.
        request_id: of the request.
        columns: of the rank table.
        kind: what a rank is. ``"rows"``: the rows of one token. ``"fold"``: float32 [columns,
            values], a reduction of the prompt's rows, in whole arena rows. ``"scores"``: float32
            [columns, values], dot products with directions. ``"packed"``: bytes [columns, values],
            compressed rows.
        values: see `kind`.
        width: arena rows of a rank; of ``"scores"`` and ``"packed"``, whose ranks follow each other
            without gaps, its bytes. 0: one arena row for each column.
    """

    row_seq: int
    request_id: str
    columns: list[int]
    kind: str = "rows"
    values: int = 0
    width: int = 0

    @property
    def rows(self) -> int:
        """Arena rows of a rank; of kinds ``"rows"`` and ``"fold"`` only."""
        return self.width or len(self.columns)

    def rank_bytes(self, row_bytes: int) -> int:
        """Return the bytes of a rank, where an arena row has `row_bytes`."""
        return self.width if self.kind in ("scores", "packed") else self.rows * row_bytes


class ExtentPlaced(msgspec.Struct, array_like=True):
    """An extent for `capacity` ranks, from `rank` on, begins at arena row `start`."""

    row_seq: int
    rank: int
    capacity: int
    start: int


class ExtentRetired(msgspec.Struct, array_like=True):
    """An extent is closed; it holds `filled` ranks."""

    row_seq: int
    rank: int
    filled: int
    start: int


class GroupDefined(msgspec.Struct, array_like=True):
    """A number for some of a request's interventions, given by their indices."""

    group: int
    request_id: str
    moves: list[int]


class LayoutUpdate(msgspec.Struct, array_like=True):
    """Changes of the layout of one reader's rows since the last message."""

    opened: list[SequenceOpened] = []
    placed: list[ExtentPlaced] = []
    retired: list[ExtentRetired] = []
    closed: list[int] = []
    groups: list[GroupDefined] = []

    def __bool__(self) -> bool:
        return bool(self.opened or self.placed or self.retired or self.closed or self.groups)


class MessageHeader(msgspec.Struct, array_like=True):
    """The first frame of a message about rows.

    Attributes:
        token: the reader's, which proves that the worker was told its address.
        worker: the sender.
        d_model: width of the rows.
        dtype: of the rows.
        layout_updates: what changed since the last message.
        failures: request id -> why the request failed.
        pressure: share of the worker's arena in use.
        spill: whether the reader should empty its retired extents.
        broken: why rows of this step are lost; every request that the reader waits for fails then.
        engine: the worker's data-parallel engine.
        waiting: how many of that engine's requests wait for table space.
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
    """A worker's question for vectors by digest.

    The answer has a frame for each: its float32 bytes, empty if it is unknown.
    """

    token: str
    digests: list[str]


class WorkerHello(msgspec.Struct, array_like=True):
    """A worker's announcement of its arena, sent with its file descriptor."""

    token: str
    worker: str
    rows: int
    row_bytes: int


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(MessageHeader).decode
decode_wanted = msgspec.msgpack.Decoder(VectorQuery).decode
decode_hello = msgspec.msgpack.Decoder(WorkerHello).decode


class ReaderEndpoint(msgspec.Struct, frozen=True):
    """The addresses where a caller's process listens.

    Attributes:
        rows: for messages about rows.
        vectors: for vector queries.
        arenas: for arenas; empty if workers may be on other machines.
        token: to be sent with every message.
    """

    rows: str
    vectors: str
    arenas: str
    token: str

    @classmethod
    def parse(cls, text: str) -> ReaderEndpoint:
        """Parse the form that travels with a request, ``str(endpoint)``."""
        return cls(*text.split("\t"))

    def __str__(self) -> str:
        return "\t".join((self.rows, self.vectors, self.arenas, self.token))
