"""The Parquet files of features: their columns, and how records become bytes and tables again.

A file is a *part*. It holds whole records, and each of its row groups does, too, so a record is read
from one row group.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vllm_weir.storage.atomic_file import store_errors
from vllm_weir.storage.object_store import ObjectStore

LAYOUT = "features"
INFO = "features.json"
"""File that says which autoencoder the features are of, and how they were chosen."""
FORMAT, VERSION = "weir-features", 1
SCHEMA = pa.schema(
    [
        pa.field("record", pa.int64(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("token_id", pa.int32(), nullable=False),
        pa.field("generated", pa.bool_(), nullable=False),
        pa.field("features", pa.list_(pa.int32()), nullable=False),
        pa.field("values", pa.list_(pa.float32()), nullable=False),
    ]
)
WITHOUT_ROWS = b"weir.without_rows"
"""Key of a file's metadata: the records whose tokens were not selected, JSON."""
GROUP_ROWS = 1 << 16
"""A row group ends with the record that brings it to so many rows."""
_PART = re.compile(r"features-[0-9a-f]+-\d{6}\.parquet")


@dataclass(frozen=True, eq=False)
class RecordFeatures:
    """Active features on the rows of one record; those that are not listed have activation 0.

    Attributes:
        record: its number in the source.
        positions: of the rows, int64 [rows], ascending.
        token_ids: the token at each position, int64 [rows].
        generated: whether the token was generated, bool [rows].
        offsets: row i has the features ``offsets[i]`` to ``offsets[i + 1] - 1``, int64 [rows + 1].
        ids: features, int64 [active].
        values: their activations, float32 [active].
    """

    record: int
    positions: np.ndarray
    token_ids: np.ndarray
    generated: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray
    values: np.ndarray

    @classmethod
    def without_rows(cls, record: int) -> RecordFeatures:
        """Return those of a record of which no token was selected."""
        none = np.zeros(0, np.int64)
        return cls(record, none, none, none.astype(bool), np.zeros(1, np.int64), none, none.astype(np.float32))

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        arrays = (self.positions, self.token_ids, self.generated, self.offsets, self.ids, self.values)
        return sum(array.nbytes for array in arrays)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the features and activations of a row, as it has them."""
        start, stop = self.offsets[index], self.offsets[index + 1]
        return self.ids[start:stop], self.values[start:stop]

    def of(self, feature: int) -> np.ndarray:
        """Return the activations of one feature, float32 [rows]."""
        found = self.ids == feature
        out = np.zeros(len(self), np.float32)
        out[self._row_of_active()[found]] = self.values[found]
        return out

    def dense(self, d_sae: int) -> np.ndarray:
        """Return all activations, float32 [rows, d_sae]."""
        out = np.zeros((len(self), d_sae), np.float32)
        out[self._row_of_active(), self.ids] = self.values
        return out

    def _row_of_active(self) -> np.ndarray:
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))


def part_name(writer: str, count: int) -> str:
    return f"features-{writer}-{count:06d}.parquet"


def part_names(names: Sequence[str]) -> list[str]:
    """Return those that are parts, sorted: earlier writers come first."""
    return sorted(name for name in names if _PART.fullmatch(name))


def to_parquet(records: Sequence[RecordFeatures]) -> memoryview:
    sink = pa.BufferOutputStream()
    empty = [record.record for record in records if not len(record)]
    schema = SCHEMA.with_metadata({WITHOUT_ROWS: json.dumps(empty)}) if empty else SCHEMA
    with pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True) as writer:
        for group in _groups([record for record in records if len(record)]):
            table = _table(group)
            writer.write_table(table, row_group_size=max(len(table), 1))
    return memoryview(sink.getvalue())


def _groups(records: Sequence[RecordFeatures]) -> Iterator[list[RecordFeatures]]:
    group: list[RecordFeatures] = []
    rows = 0
    for record in records:
        group.append(record)
        rows += len(record)
        if rows >= GROUP_ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _table(records: Sequence[RecordFeatures]) -> pa.Table:
    counts = np.concatenate([np.diff(record.offsets) for record in records])
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    ids = np.concatenate([record.ids for record in records]).astype(np.int32)
    values = np.concatenate([record.values for record in records]).astype(np.float32)
    lengths = [len(record) for record in records]
    flat = {
        "record": np.repeat([record.record for record in records], lengths),
        "position": np.concatenate([record.positions for record in records]),
        "token_id": np.concatenate([record.token_ids for record in records]),
        "generated": np.concatenate([record.generated for record in records]),
    }
    columns = [pa.array(array, SCHEMA.field(name).type) for name, array in flat.items()]
    lists = [pa.ListArray.from_arrays(offsets, pa.array(array)) for array in (ids, values)]
    return pa.Table.from_arrays([*columns, *lists], schema=SCHEMA)


def read_group(part: pq.ParquetFile, group: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a row group, or some of its columns; inside `open_part`.

    Arrow's threads are not used: one that frees a buffer while the interpreter shuts down would
    abort the process.
    """
    return part.read_row_group(group, columns=None if columns is None else list(columns), use_threads=False)


def records_without_rows(part: pq.ParquetFile) -> list[int]:
    """Return the records of a part that have no rows, of which its row groups say nothing."""
    return [int(record) for record in json.loads((part.schema_arrow.metadata or {}).get(WITHOUT_ROWS, b"[]"))]


def records_of(table: pa.Table) -> list[RecordFeatures]:
    """Return the records of a row group or of some of its rows."""
    table = table.combine_chunks()
    flat = {name: table[name].to_numpy() for name in ("record", "position", "token_id", "generated")}
    lists = {name: table[name].combine_chunks() for name in ("features", "values")}
    bounds = lists["features"].offsets.to_numpy().astype(np.int64)
    first = bounds[0] if len(bounds) else 0
    ids = lists["features"].flatten().to_numpy().astype(np.int64)
    values = lists["values"].flatten().to_numpy()
    starts = run_starts(flat["record"])
    out = []
    for start, stop in zip(starts, [*starts[1:], len(table)]):
        offsets = bounds[start : stop + 1] - first
        at = slice(offsets[0], offsets[-1])
        out.append(
            RecordFeatures(
                int(flat["record"][start]),
                flat["position"][start:stop].astype(np.int64),
                flat["token_id"][start:stop].astype(np.int64),
                flat["generated"][start:stop],
                offsets - offsets[0],
                ids[at],
                values[at],
            )
        )
    return out


def run_starts(records: np.ndarray) -> list[int]:
    if not len(records):
        return []
    return [0, *(np.flatnonzero(np.diff(records)) + 1).tolist()]


@contextlib.contextmanager
def open_part(store: ObjectStore, name: str) -> Iterator[pq.ParquetFile]:
    """Open a part; raise WeirError that names the file if it, or what is read from it in the block, is damaged."""
    with store_errors("read", store.describe(name)):
        try:
            with store.open(name) as stream, pq.ParquetFile(stream, page_checksum_verification=True) as part:
                if part.schema_arrow.names != SCHEMA.names:
                    raise store.error(name, f"has the columns {', '.join(part.schema_arrow.names)[:120]}")
                yield part
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError) as e:  # Arrow's errors about contents are OSErrors without a number
            if isinstance(e, OSError) and e.errno is not None:
                raise
            raise store.error(name, f"damaged: {str(e)[:160]}") from None
