"""The manifest of the `sharded` layout: a table of runs.

A *run* is consecutive records of one site of one request. A shard contains the manifest of its own
runs, so publishing a shard is one step. ``manifest.parquet`` joins them for readers; shards that
are not in it yet are read one by one. A finished request has one more entry, ``finished``, with its
metadata and the number of its rows. Only runs of the writer that finished a request are read, so
what an interrupted writer left behind is ignored. The columns ``checksum`` and ``site`` (hook and
layer in one) may be missing.
"""

from __future__ import annotations

import io
import itertools
import posixpath
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
except ImportError as e:
    raise ImportError("activation files need pyarrow: pip install 'vllm-weir[keep]'") from e

from vllm_weir.storage.batch import CheckedBatch
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.safetensors_io import read_container

MANIFEST = "manifest.parquet"
SHARD_PREFIX, SHARD_SUFFIX = "shard-", ".safetensors"
_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        ("request", pa.string()),
        ("writer", _TEXT),
        ("hook", _TEXT),
        ("layer", pa.int32()),
        ("site", _TEXT),
        ("rows", pa.int64()),
        ("position", pa.list_(pa.int64())),
        ("token_id", pa.list_(pa.int64())),
        ("checksum", pa.list_(pa.uint32())),
        ("file", _TEXT),
        ("offset", pa.int64()),
        ("stride", pa.int64()),
        ("dtype", _TEXT),
        ("compression", _TEXT),
        ("finished", pa.bool_()),
        ("metadata", pa.string()),
    ]
)
# Checksums hardly repeat, so a dictionary of them would only take time.
_DICTIONARY_COLUMNS = [
    f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in SCHEMA if f.name != "checksum"
]


class ShardRuns:
    """The entries of the manifest of a shard that is being written."""

    def __init__(self, writer: str, file: str, header: str, dtype: str, stride: int) -> None:
        self.stride = stride
        self.constants = {"writer": writer, "file": file, "compression": header, "dtype": dtype, "stride": stride}
        self.columns: dict[str, list[Any]] = {
            name: [] for name in ("request", "hook", "layer", "rows", "offset", "finished", "metadata")
        }
        self.positions: list[np.ndarray] = []
        self.token_ids: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self.positions)

    def add(self, batch: CheckedBatch, offset: int) -> None:
        self._add_entry(batch.request_id, batch.site.hook, batch.site.layer, len(batch.positions), offset, False, "")
        self.positions.append(batch.positions)
        self.token_ids.append(batch.token_ids)

    def finish(self, request: str, rows: int, metadata: str) -> None:
        """Mark a request as finished, with the number of rows of all its sites."""
        self._add_entry(request, "", -1, rows, 0, True, metadata)
        self.positions.append(np.zeros(0, np.int64))
        self.token_ids.append(np.zeros(0, np.int64))

    def cut(self, n: int) -> None:
        for column in (*self.columns.values(), self.positions, self.token_ids):
            del column[n:]

    def drop(self, request: str) -> None:
        """Remove the entries of a request. Its records stay in the file."""
        keep = [name != request for name in self.columns["request"]]
        for column in (*self.columns.values(), self.positions, self.token_ids):
            column[:] = itertools.compress(column, keep)

    def _add_entry(self, *values: Any) -> None:
        for column, value in zip(self.columns.values(), values):
            column.append(value)

    def table(self, checksums: list[np.ndarray]) -> pa.Table:
        """Return the entries as a table of SCHEMA; `checksums`: uint32 [rows] of each entry."""
        n = len(self)
        ends = np.concatenate([[0], np.cumsum([len(p) for p in self.positions])]).astype(np.int32)
        lists = {
            name: pa.ListArray.from_arrays(ends, np.concatenate([*parts, np.zeros(0, kind)]).astype(kind, copy=False))
            for name, parts, kind in (
                ("position", self.positions, np.int64),
                ("token_id", self.token_ids, np.int64),
                ("checksum", checksums, np.uint32),
            )
        }
        arrays = []
        for field in SCHEMA:
            if field.name in lists:
                arrays.append(lists[field.name])
            elif field.name == "site":
                pairs = zip(self.columns["hook"], self.columns["layer"])
                arrays.append(pa.array([f"{hook}.{layer}" if hook else None for hook, layer in pairs], _TEXT))
            elif field.name in self.constants:
                value = self.constants[field.name]
                column = pa.array([value] * n, field.type if field.type == pa.int64() else pa.string())
                arrays.append(column.cast(field.type))
            else:
                value_type = pa.string() if field.type == _TEXT else field.type
                arrays.append(pa.array(self.columns[field.name], value_type).cast(field.type))
        return pa.Table.from_arrays(arrays, schema=SCHEMA)


def to_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=_DICTIONARY_COLUMNS, write_page_checksum=True)
    return sink.getvalue()


def from_parquet(store: ObjectStore, name: str, data: bytes) -> pa.Table:
    """Parse a manifest; raise WeirError, naming the file, if it is damaged or foreign.

    Arrow's threads are not used: one that frees `data` while the interpreter shuts down would abort
    the process.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True, pre_buffer=False)
        table = file.read(use_threads=False)
        if "checksum" not in table.column_names:
            table = table.append_column("checksum", pa.nulls(len(table), SCHEMA.field("checksum").type))
        if "site" not in table.column_names:
            table = table.append_column("site", _sites_of(table))
        table = pa.Table.from_arrays([table[field.name].cast(field.type) for field in SCHEMA], schema=SCHEMA)
        # Otherwise codes outside their dictionary would fail later, where they are used.
        table.validate(full=True)
        _refuse_nulls(table)
        return table
    except (pa.ArrowException, LookupError, OSError, ValueError) as e:
        raise store.error(name, f"its manifest cannot be read: {str(e)[:200]}") from None


def _sites_of(table: pa.Table) -> pa.ChunkedArray:
    """Return the column ``site`` of a manifest that lacks it, as it would be written."""
    names = pc.binary_join_element_wise(table["hook"].cast(pa.string()), table["layer"].cast(pa.string()), ".")
    return pc.if_else(table["finished"], pa.scalar(None, pa.string()), names)


def _refuse_nulls(table: pa.Table) -> None:
    for field in SCHEMA:
        chunks = table[field.name].chunks
        required = [] if field.name in ("checksum", "metadata", "site") else chunks
        lists = [chunk.flatten() for chunk in chunks] if pa.types.is_list(field.type) else []
        if any(values.null_count for values in (*required, *lists)):
            raise ValueError(f"column {field.name} has missing values")


def is_shard(name: str) -> bool:
    base = posixpath.basename(name)
    return base.startswith(SHARD_PREFIX) and base.endswith(SHARD_SUFFIX)


def read_manifest(store: ObjectStore, names: dict[str, int], known: Mapping[str, pa.Table] | None = None) -> pa.Table:
    """Read the manifest of everything published, but for the `known` manifests of shards.

    Files that appeared meanwhile are added to `names`.
    """
    known = known or {}
    tables = []
    joined: set[str] = set()
    if MANIFEST in names:
        tables.append(from_parquet(store, MANIFEST, store.read(MANIFEST)))
        joined = set(pc.unique(tables[0]["file"].cast(pa.string())).to_pylist())
        # A writer has published and joined shards since the files were listed.
        if not joined <= names.keys():
            names.update(store.names())
        for missing in sorted(joined - set(names)):
            raise store.error(missing or MANIFEST, "is missing, although the manifest names it")
    unjoined = sorted(name for name in names if is_shard(name) and name not in joined)

    def manifest_of(name: str) -> pa.Table:
        return known[name] if name in known else read_shard_manifest(store, name, names[name])

    if store.local or len(unjoined) < 2:
        tables += map(manifest_of, unjoined)
    else:
        with ThreadPoolExecutor(16) as pool:  # each takes a few round trips
            tables += pool.map(manifest_of, unjoined)
    return pa.concat_tables(tables).unify_dictionaries() if tables else SCHEMA.empty_table()


def read_shard_manifest(store: ObjectStore, name: str, size: int) -> pa.Table:
    """Read the manifest inside a shard."""
    container = read_container(store, name, size)
    if container.metadata.get("weir") != "shard" or "manifest" not in container.tensors:
        raise store.error(name, "is not a shard that Weir wrote")
    entry = container.tensors["manifest"]
    data = store.read(name, entry.start, entry.end)
    crc = container.metadata.get("manifest")  # optional
    if crc is not None and crc != f"{zlib.crc32(data):08x}":
        raise store.error(name, "damaged: its manifest is not what was written; restore the file from a copy")
    table = from_parquet(store, name, data)
    if any(file != name for file in pc.unique(table["file"].cast(pa.string())).to_pylist()):
        raise store.error(name, "was renamed: its manifest names another file")
    return table


def column(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy()


def codes(table: pa.Table, name: str) -> tuple[np.ndarray, list[str]]:
    """Return a column of strings as codes, int64 [entries], and the strings that they stand for."""
    chunked = table[name]
    if not pa.types.is_dictionary(chunked.type):
        chunked = chunked.dictionary_encode()
    array = chunked.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.unify_dictionaries().chunk(0) if array.num_chunks else pa.array([], _TEXT)
    return array.indices.to_numpy().astype(np.int64), array.dictionary.to_pylist()


def flat(table: pa.Table, name: str) -> np.ndarray:
    return np.concatenate([chunk.flatten().to_numpy() for chunk in table[name].chunks] or [np.zeros(0, np.int64)])


def lengths(table: pa.Table, name: str) -> np.ndarray:
    """Return the lengths of a column of lists: int64 [entries], -1 for a null."""
    return pc.list_value_length(table[name]).fill_null(-1).to_numpy().astype(np.int64)
