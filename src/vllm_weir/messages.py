"""Messages between the workers and the caller's process: rows that have arrived, and vectors that are missing.

msgpack, no pickle. A message has three frames: the `MessageHeader`, the arrivals (which rows have arrived) and the
steered positions. The last two are int32 arrays with the fields below, so that a step of hundreds of requests is one
small message. A fourth frame holds the rows themselves when the reader cannot map the worker's memory.
"""

from __future__ import annotations

import msgspec

MARK_FIELDS = ("row_seq", "rank", "position", "count", "stride")
"""Fields of an arrival: `count` rows of a row sequence from index `rank` on, of the positions `position`,
`position + stride`, ... A `rank` of -1 means that these rows were dropped."""
STEER_FIELDS = ("group", "position", "count", "stride")
"""Fields of steered positions: a group's interventions acted at `position`, `position + stride`, ... (`count`)."""
SCORED_FIELDS = ("series", "position", "count")
"""Fields of scored positions: `count` entries of a series, of the positions from `position` on."""


KEPT = "kept\t"
"""Begins the endpoints of readers in the worker itself, which no address does; a key follows."""

RECORDS = ("scores", "packed", "read_outs", "rows_read")
"""Kinds of row sequences whose entries are records of a codec."""


class SequenceOpened(msgspec.Struct, array_like=True):
    """A new row sequence: rows of one request that share their columns."""

    row_seq: int
    request_id: str
    columns: list[int]
    # what one entry (a rank) of the sequence is: ``"rows"``: a row of every column, in the model's dtype; ``"fold"``: a
    # reduction of the prompt's rows, [columns, values] float32 in whole arena rows; ``"scores"``: products with
    # directions, [columns, values] float32; ``"packed"``: compressed rows, [columns, values] bytes; ``"read_outs"``:
    # what is read off the rows, [columns, values] bytes; ``"rows_read"``: the same, behind the row itself, in the
    # model's dtype
    kind: str = "rows"
    values: int = 0
    # size of an entry: arena rows for ``"fold"``, bytes for `RECORDS`, whose entries follow each other without gaps
    width: int = 0

    @property
    def rows(self) -> int:
        """Arena rows of an entry of the kinds ``"rows"`` and ``"fold"``."""
        return self.width or len(self.columns)

    def rank_bytes(self, row_bytes: int) -> int:
        """Return the bytes of an entry, where an arena row has `row_bytes`."""
        return self.width if self.kind in RECORDS else self.rows * row_bytes


class ExtentPlaced(msgspec.Struct, array_like=True):
    """A new extent: `capacity` entries, from index `rank` on, lie from row `start` of the worker's arena on."""

    row_seq: int
    rank: int
    capacity: int
    start: int


class ExtentRetired(msgspec.Struct, array_like=True):
    """An extent is complete: it holds `filled` entries and will get no more."""

    row_seq: int
    rank: int
    filled: int
    start: int


class GroupDefined(msgspec.Struct, array_like=True):
    """A number that stands for some of a request's interventions, named by their indices in `moves`."""

    group: int
    request_id: str
    moves: list[int]


class SeriesOpened(msgspec.Struct, array_like=True):
    """A number that stands for the scores of one request: each entry is its `reported` cells, float32."""

    series: int
    request_id: str
    reported: int


class LayoutUpdate(msgspec.Struct, array_like=True):
    """Changes in the layout of one reader's rows since its last message.

    `restarted` has (request, position) of requests that go on after a preemption: what was told of
    that position and later ones was of drafts that the engine has dropped.
    """

    opened: list[SequenceOpened] = []
    placed: list[ExtentPlaced] = []
    retired: list[ExtentRetired] = []
    closed: list[int] = []
    groups: list[GroupDefined] = []
    series: list[SeriesOpened] = []
    restarted: list[tuple[str, int]] = []

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)


class Told(msgspec.Struct, array_like=True):
    """What a user's function gave for some rows of a request, or saved; or which rows it has spoiled.

    Attributes:
        request_id: of the request.
        name: under which; of spoiled rows that of the function.
        hook, layer: the hook point of the rows.
        positions: int32 bytes, of the rows; None of what was saved.
        shape: of the values, float32.
        data: the values, or msgpack of what was saved (`vllm_weir.util.saved`); of spoiled rows a bool each.
        spoiled: whether the data say which rows were finite, and no longer are.
        first: of a saved list, the item at which `data` begins; those before are as they were. -1: it is gone.
    """

    request_id: str
    name: str
    hook: str
    layer: int
    positions: bytes | None
    shape: list[int]
    data: bytes = b""
    spoiled: bool = False
    first: int = 0


class MessageHeader(msgspec.Struct, array_like=True):
    """First frame of a message: what the other frames hold, or which requests failed and why.

    Attributes:
        token: names the reader's process, as in its `ReaderEndpoint`.
        d_model, dtype: width and dtype of the rows.
        failures: request id -> why it failed.
        pressure: share of the worker's arena in use.
        spill: whether the reader should copy its retired extents out of the arena.
        broken: why rows of this step are lost; every request that the reader still waits for fails.
        engine: index of the worker's data-parallel engine.
        waiting: requests of that engine that wait for room in the device tables.
        scored: int32 [n, 3] as bytes, see `SCORED_FIELDS`: positions whose scores are in `scores`.
        scores: float32 as bytes, the entries of `scored` in that order.
        told: what users' functions gave.
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
    scored: bytes = b""
    scores: bytes = b""
    told: list[Told] = []


class VectorQuery(msgspec.Struct, array_like=True):
    """A worker's question for vectors by digest; the answer has one frame each, float32 bytes, empty if unknown."""

    token: str
    digests: list[str]


class WorkerHello(msgspec.Struct, array_like=True):
    """A worker introduces its arena of `rows` rows of `row_bytes` bytes; the file descriptor comes with it."""

    token: str
    worker: str
    rows: int
    row_bytes: int


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(MessageHeader).decode
decode_wanted = msgspec.msgpack.Decoder(VectorQuery).decode
decode_hello = msgspec.msgpack.Decoder(WorkerHello).decode


class ReaderEndpoint(msgspec.Struct, frozen=True):
    """Addresses at which a caller's process listens."""

    rows: str  # for messages
    vectors: str  # for questions about vectors
    arenas: str  # for workers that introduce their arena; "" if they are on another machine
    token: str  # names the process

    @classmethod
    def parse(cls, text: str) -> ReaderEndpoint:
        """Read the text that travels with a request; the inverse of `str`."""
        return cls(*text.split("\t"))

    def __str__(self) -> str:
        return "\t".join((self.rows, self.vectors, self.arenas, self.token))
