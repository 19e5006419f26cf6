"""Readers of the kinds of files with texts: they count records, and read any range of them."""

from __future__ import annotations

import contextlib
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vllm_weir.errors import WeirError
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.util.text_lines import text_lines

MARK_LINES = 256
"""The place of every so many records is kept, so that reading can begin in the middle of a file."""
CHAT_COLUMN = "messages"


@dataclass(frozen=True)
class InputFile:
    """A file of a source.

    Attributes:
        name: Its name in the store.
        records: Number of records.
        marks: Byte at which every MARK_LINES-th record begins, and the number of its line (line
            formats that are not compressed).
        blank: Whether it has blank lines, which are no records.
    """

    name: str
    records: int
    marks: tuple[tuple[int, int], ...] = ()
    blank: bool = False


class _LineCounter:
    """Counts the lines that `text_lines` yields, of a file whose bytes it is fed in order."""

    def __init__(self, name: str) -> None:
        self.name, self.lines, self.records, self.offset = name, 0, 0, 0
        self.head, self.marks = b"", [(0, 1)]
        self.decompressor = zlib.decompressobj(31) if name.endswith(".gz") else None
        self.in_line, self.is_blank = False, True

    def feed(self, block: bytes) -> None:
        if self.decompressor is not None:
            block = self._decompressed(block)
        if not self.offset:  # the first bytes may be a byte-order mark
            self.head += block
            if len(self.head) < len(BOM_UTF8):
                return
            block = self.head.removeprefix(BOM_UTF8)
            self.offset = len(self.head) - len(block)
        self._count(block)

    def _count(self, block: bytes) -> None:
        line_start = 0
        while (end := block.find(b"\n", line_start)) >= 0:
            self._add(block[line_start:end])
            self._end_line()
            line_start = end + 1
            if self.records == MARK_LINES * len(self.marks):
                self.marks.append((self.offset + line_start, self.lines + 1))
        self._add(block[line_start:])
        self.offset += len(block)

    def _add(self, text: bytes) -> None:
        """Take a part of a line."""
        if text:
            self.in_line, self.is_blank = True, self.is_blank and text.isspace()

    def _end_line(self) -> None:
        self.lines, self.records = self.lines + 1, self.records + (not self.is_blank)
        self.in_line, self.is_blank = False, True

    def _decompressed(self, block: bytes) -> bytes:
        assert self.decompressor is not None
        text = b""
        try:
            while block:
                text += self.decompressor.decompress(block)
                block = self.decompressor.unused_data
                if self.decompressor.eof and block:  # a file may have several members
                    self.decompressor = zlib.decompressobj(31)
        except zlib.error as e:
            raise OSError(f"not gzip data: {e}") from None
        return text

    def part(self, store: ObjectStore, column: str) -> InputFile:
        if not self.offset:
            self._count(self.head)
        if self.decompressor is not None and not self.decompressor.eof and self.offset:
            raise OSError("the gzip data ends too early")
        if self.in_line:
            self._end_line()
        marks = () if self.decompressor is not None else tuple(self.marks)
        return InputFile(self.name, self.records, marks, blank=self.records < self.lines)


class Lines:
    """Plain text with one text a line.

    Attributes:
        unit: What a record is called in messages.
    """

    unit = "line"

    def counter(self, name: str) -> _LineCounter:
        return _LineCounter(name)

    def read(
        self, store: ObjectStore, part: InputFile, start: int, stop: int, column: str
    ) -> Iterator[tuple[int, Any]]:
        """Yield the lines and texts of records `start` to `stop` - 1, or an exception for an invalid line."""
        records_read, skip, first_line = 0, start, 1
        with store.open(part.name, "gzip" if not part.marks else None) as stream:
            if part.marks:
                mark = start // MARK_LINES
                place, first_line = part.marks[mark]
                stream.seek(place)
                skip = start - mark * MARK_LINES
            for number, line in islice(text_lines(stream, first_line), skip, skip + stop - start):
                records_read += 1
                yield number, self.value(line, column)
        if records_read != stop - start:
            raise EOFError("it has become shorter while it was read")

    def value(self, line: bytes, column: str) -> Any:
        """Return the value of a line, or an exception for an invalid one."""
        try:
            return line.decode()
        except UnicodeDecodeError as e:
            return ValueError(f"not UTF-8 ({e})")


class JsonLines(Lines):
    """Text with one JSON object a line."""

    def value(self, line: bytes, column: str) -> Any:
        """Return the value of the column, or else of that of chats, or an exception."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            return ValueError(f"not JSON ({str(e)[:120]})")
        if not isinstance(record, dict):
            return ValueError(f"expected a JSON object, got a {type(record).__name__}")
        for name in (column, CHAT_COLUMN):
            if name in record:
                return record[name]
        have = ", ".join(map(str, list(record)[:12])) or "none"
        return ValueError(f"no column {column!r}; it has {have}")


@dataclass
class _FileCounter:
    """Counts the records of a file by opening it, not from the bytes that it is fed."""

    name: str
    count: Any

    def feed(self, block: bytes) -> None: ...

    def part(self, store: ObjectStore, column: str) -> InputFile:
        return InputFile(self.name, self.count(store, self.name, column))


def _text_column(names: list[str], column: str) -> str:
    """Return `column`, or else the column of chats; raise WeirError if there is neither."""
    if column in names:
        return column
    if CHAT_COLUMN in names:
        return CHAT_COLUMN
    raise WeirError(f"there is no column {column!r}; there are {', '.join(names[:20]) or 'none'}", "column")


class Parquet:
    """Parquet, read by row groups, and like manifests without Arrow's threads."""

    unit = "row"

    def counter(self, name: str) -> _FileCounter:
        return _FileCounter(name, self._count)

    def _count(self, store: ObjectStore, name: str, column: str) -> int:
        with store.open(name) as stream:
            file = pq.ParquetFile(stream, pre_buffer=False)
            _text_column(file.schema_arrow.names, column)
            return file.metadata.num_rows

    def read(
        self, store: ObjectStore, part: InputFile, start: int, stop: int, column: str
    ) -> Iterator[tuple[int, Any]]:
        """Yield the numbers, from 1, and values of rows `start` to `stop` - 1."""
        with store.open(part.name) as stream:
            file = pq.ParquetFile(stream, pre_buffer=False)
            name = _text_column(file.schema_arrow.names, column)
            group_start = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if group_start < stop and group_start + rows > start:
                    batch_start = group_start
                    for batch in file.iter_batches(1024, row_groups=[group], columns=[name], use_threads=False):
                        yield from _values(batch.column(0), batch_start, start, stop)
                        batch_start += len(batch)
                group_start += rows


class Arrow:
    """Arrow IPC streams, as HF `datasets` saves them, and files."""

    unit = "row"

    def counter(self, name: str) -> _FileCounter:
        return _FileCounter(name, self._count)

    def _count(self, store: ObjectStore, name: str, column: str) -> int:
        with self._batches(store, name) as (schema, batches):
            _text_column(schema.names, column)
            return sum(batch.num_rows for batch in batches)

    def read(
        self, store: ObjectStore, part: InputFile, start: int, stop: int, column: str
    ) -> Iterator[tuple[int, Any]]:
        """Yield the numbers, from 1, and values of rows `start` to `stop` - 1."""
        with self._batches(store, part.name) as (schema, batches):
            column_index = schema.names.index(_text_column(schema.names, column))
            batch_start = 0
            for batch in batches:
                if batch_start >= stop:
                    return
                yield from _values(batch.column(column_index), batch_start, start, stop)
                batch_start += batch.num_rows

    @contextlib.contextmanager
    def _batches(self, store: ObjectStore, name: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        opened = pa.memory_map(store.path(name)) if store.local else store.open(name)
        with opened as stream:
            options = pa.ipc.IpcReadOptions(use_threads=False)
            magic = stream.read(6)
            stream.seek(0)
            if magic == b"ARROW1":
                file = pa.ipc.open_file(stream, options=options)
                yield file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
            else:
                reader = pa.ipc.open_stream(stream, options=options)
                yield reader.schema, iter(reader)


def _values(array: pa.Array, first: int, start: int, stop: int) -> Iterator[tuple[int, Any]]:
    """Yield rows `start` to `stop` - 1 of a file, numbered from 1, those of them in a batch whose first is `first`."""
    low, high = max(start - first, 0), min(max(stop - first, 0), len(array))
    yield from enumerate(array.slice(low, high - low).to_pylist() if low < high else [], first + low + 1)


READERS: dict[str, Lines | Parquet | Arrow] = {
    "jsonl": JsonLines(),
    "txt": Lines(),
    "parquet": Parquet(),
    "arrow": Arrow(),
}
_ENDINGS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "txt", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
_DESCRIPTIONS = {"state.json", "dataset_info.json", "dataset_dict.json"}
"""Files that describe a saved dataset and have no records."""


def kind_of(name: str) -> str:
    base = name.rpartition("/")[2]
    if base in _DESCRIPTIONS:
        return ""
    stem = base.removesuffix(".gz")
    kind = next((kind for ending, kind in _ENDINGS.items() if stem.endswith(ending)), "")
    return kind if stem == base or kind in ("jsonl", "txt") else ""
