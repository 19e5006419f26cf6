"""Readers of the kinds of files with texts: they count records, and read any range of them."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import IO, Any

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
    """A file of a source."""

    name: str  # its name in the store
    records: int  # Number of records
    # Byte at which every MARK_LINES-th record begins, and the number of its line (line formats that are not compressed)
    marks: tuple[tuple[int, int], ...] = ()
    blank: bool = False  # whether it has blank lines, which are no records


class Lines:
    """Plain text with one text a line.

    Attributes:
        unit: What a record is called in messages.
    """

    unit = "line"

    def count_lines(self, stream: IO[bytes], name: str) -> InputFile:
        """Count the lines that `text_lines` yields of a file's bytes."""
        is_gzip = name.endswith(".gz")
        marks, records, lines, place = [(0, 1)], 0, 0, 0
        try:
            for line in gzip.GzipFile(fileobj=stream) if is_gzip else stream:
                lines, place = lines + 1, place + len(line)
                text = line.removeprefix(BOM_UTF8) if lines == 1 else line
                records += bool(text) and not text.isspace()
                if records == MARK_LINES * len(marks):
                    marks.append((place, lines + 1))
        except EOFError:
            raise EOFError("the gzip data ends too early") from None
        except zlib.error as e:
            raise OSError(f"not gzip data: {e}") from None
        return InputFile(name, records, () if is_gzip else tuple(marks), blank=records < lines)

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


def _text_column(names: list[str], column: str) -> str:
    """Return `column`, or else the column of chats; raise WeirError if there is neither."""
    if column in names:
        return column
    if CHAT_COLUMN in names:
        return CHAT_COLUMN
    raise WeirError(f"there is no column {column!r}; there are {', '.join(names[:20]) or 'none'}", "column")


Pieces = tuple[list[str], Iterable[tuple[int, Callable[[int], Iterable[pa.Array]]]]]
"""Names of a file's columns, and of each piece of it how many rows it has and what reads one of the columns."""


class Tables(ABC):
    """Files of columns, whose rows are read piece by piece."""

    unit = "row"

    @abstractmethod
    def _pieces(self, store: ObjectStore, name: str) -> AbstractContextManager[Pieces]:
        """Open a file."""

    def count(self, store: ObjectStore, name: str, column: str) -> int:
        with self._pieces(store, name) as (names, pieces):
            _text_column(names, column)
            return sum(rows for rows, _ in pieces)

    def read(
        self, store: ObjectStore, part: InputFile, start: int, stop: int, column: str
    ) -> Iterator[tuple[int, Any]]:
        """Yield the numbers, from 1, and values of rows `start` to `stop` - 1."""
        with self._pieces(store, part.name) as (names, pieces):
            index = names.index(_text_column(names, column))
            first = 0
            for rows, read_column in pieces:
                if first >= stop:
                    return
                if first + rows > start:
                    at = first
                    for array in read_column(index):
                        yield from _values(array, at, start, stop)
                        at += len(array)
                first += rows


class Parquet(Tables):
    """Parquet, read by row groups, and like manifests without Arrow's threads."""

    @contextlib.contextmanager
    def _pieces(self, store: ObjectStore, name: str) -> Iterator[Pieces]:
        with store.open(name) as stream:
            file = pq.ParquetFile(stream, pre_buffer=False)
            names = file.schema_arrow.names

            def read_column(group: int, index: int) -> Iterator[pa.Array]:
                chosen = {"row_groups": [group], "columns": [names[index]]}
                return (batch.column(0) for batch in file.iter_batches(1024, use_threads=False, **chosen))

            groups = range(file.num_row_groups)
            yield names, ((file.metadata.row_group(k).num_rows, partial(read_column, k)) for k in groups)


class Arrow(Tables):
    """Arrow IPC streams, as HF `datasets` saves them, and files."""

    @contextlib.contextmanager
    def _pieces(self, store: ObjectStore, name: str) -> Iterator[Pieces]:
        opened = pa.memory_map(store.path(name)) if store.local else store.open(name)
        with opened as stream:
            options = pa.ipc.IpcReadOptions(use_threads=False)
            magic = stream.read(6)
            stream.seek(0)
            if magic == b"ARROW1":
                file = pa.ipc.open_file(stream, options=options)
                schema, batches = file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
            else:
                batches = pa.ipc.open_stream(stream, options=options)
                schema = batches.schema
            yield schema.names, ((batch.num_rows, partial(_column, batch)) for batch in batches)


def _column(batch: pa.RecordBatch, index: int) -> list[pa.Array]:
    return [batch.column(index)]


def _values(array: pa.Array, first: int, start: int, stop: int) -> Iterator[tuple[int, Any]]:
    """Yield rows `start` to `stop` - 1 of a file, numbered from 1, those of them in a batch whose first is `first`."""
    low, high = max(start - first, 0), min(max(stop - first, 0), len(array))
    yield from enumerate(array.slice(low, high - low).to_pylist() if low < high else [], first + low + 1)


READERS: dict[str, Lines | Tables] = {
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
