"""How each kind of file is counted and read, a part at a time."""

from __future__ import annotations

import codecs
import contextlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from vllm_weir.errors import WeirError
from vllm_weir.storage.object_store import ObjectStore

STRIDE = 256
"""Of every so many lines the place is kept, so that a reader may begin in the middle of a file."""
CHATS = "messages"


@dataclass(frozen=True)
class InputFile:
    """One file.

    Attributes:
        name: in its store.
        records: how many.
        marks: bytes at which every STRIDE-th line begins (line formats that are not compressed).
    """

    name: str
    records: int
    marks: tuple[int, ...] = ()


class RecordCounter(Protocol):
    """Sees a file's bytes once, in order."""

    def feed(self, block: bytes) -> None: ...
    def part(self, store: ObjectStore, column: str) -> InputFile: ...


class FileReader(Protocol):
    """A kind of file. `read` yields for each record its raw value, or an exception that says what is wrong with it."""

    unit: str

    def counter(self, name: str) -> RecordCounter: ...
    def read(self, store: ObjectStore, part: InputFile, begin: int, end: int, column: str) -> Iterator[Any]: ...


class _LineCounter:
    def __init__(self, name: str) -> None:
        self.name, self.lines, self.at, self.marks = name, 0, 0, [0]
        self.unzip = zlib.decompressobj(31) if name.endswith(".gz") else None
        self.open_line = False

    def feed(self, block: bytes) -> None:
        if self.unzip is not None:
            block = self._unzipped(block)
        begin = 0
        while (end := block.find(b"\n", begin)) >= 0:
            self.lines += 1
            begin = end + 1
            if self.lines % STRIDE == 0:
                self.marks.append(self.at + begin)
        self.open_line = begin < len(block) or (self.open_line and not block)
        self.at += len(block)

    def _unzipped(self, block: bytes) -> bytes:
        assert self.unzip is not None
        out = b""
        try:
            while block:
                out += self.unzip.decompress(block)
                block = self.unzip.unused_data
                if self.unzip.eof and block:  # files of several members
                    self.unzip = zlib.decompressobj(31)
        except zlib.error as e:
            raise OSError(f"no gzip data: {e}") from None
        return out

    def part(self, store: ObjectStore, column: str) -> InputFile:
        if self.unzip is not None and not self.unzip.eof and self.at:
            raise OSError("the gzip data end too early")
        lines = self.lines + self.open_line
        return InputFile(self.name, lines, () if self.unzip is not None else tuple(self.marks))


class Lines:
    """Plain text, one text a line; an empty line is an empty text."""

    unit = "line"

    def counter(self, name: str) -> RecordCounter:
        return _LineCounter(name)

    def read(self, store: ObjectStore, part: InputFile, begin: int, end: int, column: str) -> Iterator[Any]:
        skip = begin
        with store.open(part.name, "gzip" if not part.marks else None) as stream:
            if part.marks:
                mark = begin // STRIDE
                stream.seek(part.marks[mark])
                skip = begin - mark * STRIDE
            lines = islice(stream, skip, skip + end - begin)
            got = 0
            for line in lines:
                if begin + got == 0:  # some editors put one in front of a file
                    line = line.removeprefix(codecs.BOM_UTF8)
                got += 1
                yield self.value(line.removesuffix(b"\n").removesuffix(b"\r"), column)
        if got != end - begin:
            raise EOFError("it has become shorter while it was read")

    def value(self, line: bytes, column: str) -> Any:
        try:
            return line.decode()
        except UnicodeDecodeError as e:
            return ValueError(f"not UTF-8 ({e})")


class JsonLines(Lines):
    """One JSON object a line."""

    def value(self, line: bytes, column: str) -> Any:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as e:
            return ValueError(f"no JSON ({str(e)[:120]})")
        if not isinstance(found, dict):
            return ValueError(f"a JSON object is expected, got a {type(found).__name__}")
        if column in found:
            return found[column]
        if CHATS in found:
            return found[CHATS]
        return _missing(column, found)


def _missing(column: str, found: Any) -> ValueError:
    """The record has no such column."""
    have = ", ".join(map(str, list(found)[:12])) or "none"
    return ValueError(f"no column {column!r}; it has {have}")


@dataclass
class _Whole:
    """Counts by looking at the finished file, not at its bytes."""

    name: str
    count: Any

    def feed(self, block: bytes) -> None: ...

    def part(self, store: ObjectStore, column: str) -> InputFile:
        return InputFile(self.name, self.count(store, self.name, column))


def _column(names: list[str], column: str, field: str = "column") -> str:
    if column in names:
        return column
    if CHATS in names:
        return CHATS
    raise WeirError(f"there is no column {column!r}; there are {', '.join(names[:20]) or 'none'}", field)


class Parquet:
    """Parquet, by row groups. Without Arrow's threads, as manifests are read."""

    unit = "row"

    def counter(self, name: str) -> RecordCounter:
        return _Whole(name, self._count)

    def _count(self, store: ObjectStore, name: str, column: str) -> int:
        with store.open(name) as stream:
            file = pq.ParquetFile(stream, pre_buffer=False)
            _column(file.schema_arrow.names, column)
            return file.metadata.num_rows

    def read(self, store: ObjectStore, part: InputFile, begin: int, end: int, column: str) -> Iterator[Any]:
        with store.open(part.name) as stream:
            file = pq.ParquetFile(stream, pre_buffer=False)
            name = _column(file.schema_arrow.names, column)
            first = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if first < end and first + rows > begin:
                    at = first
                    for batch in file.iter_batches(1024, row_groups=[group], columns=[name], use_threads=False):
                        yield from _values(batch.column(0), begin - at, end - at)
                        at += len(batch)
                first += rows


class Arrow:
    """Arrow IPC, as HF `datasets` saves it (streams; files too)."""

    unit = "row"

    def counter(self, name: str) -> RecordCounter:
        return _Whole(name, self._count)

    def _count(self, store: ObjectStore, name: str, column: str) -> int:
        with self._batches(store, name) as (schema, batches):
            _column(schema.names, column)
            return sum(batch.num_rows for batch in batches)

    def read(self, store: ObjectStore, part: InputFile, begin: int, end: int, column: str) -> Iterator[Any]:
        with self._batches(store, part.name) as (schema, batches):
            place = schema.names.index(_column(schema.names, column))
            first = 0
            for batch in batches:
                if first >= end:
                    return
                yield from _values(batch.column(place), begin - first, end - first)
                first += batch.num_rows

    @contextlib.contextmanager
    def _batches(self, store: ObjectStore, name: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        opened = pa.memory_map(store.path(name)) if store.local else store.open(name)
        with opened as stream:
            options = pa.ipc.IpcReadOptions(use_threads=False)
            head = stream.read(6)
            stream.seek(0)
            if head == b"ARROW1":
                file = pa.ipc.open_file(stream, options=options)
                yield file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
            else:
                reader = pa.ipc.open_stream(stream, options=options)
                yield reader.schema, iter(reader)


def _values(array: pa.Array, begin: int, end: int) -> list[Any]:
    """Entries `begin` to `end` - 1 (clipped) as Python values."""
    low, high = max(begin, 0), min(max(end, 0), len(array))
    return array.slice(low, high - low).to_pylist() if low < high else []


READERS: dict[str, FileReader] = {"jsonl": JsonLines(), "txt": Lines(), "parquet": Parquet(), "arrow": Arrow()}
_ENDINGS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "txt", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
_BESIDE = {"state.json", "dataset_info.json", "dataset_dict.json"}
"""Files that say something about a saved dataset, and hold no records."""


def kind_of(name: str) -> str:
    """A file's kind by its name; empty for others."""
    base = name.rpartition("/")[2]
    if base in _BESIDE:
        return ""
    stem = base.removesuffix(".gz")
    kind = next((kind for ending, kind in _ENDINGS.items() if stem.endswith(ending)), "")
    return kind if stem == base or kind in ("jsonl", "txt") else ""
