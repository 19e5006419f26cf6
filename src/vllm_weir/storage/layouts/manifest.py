"""The manifest of the `sharded` layout: a table, one row a *run* (consecutive records of one site of one request).

A shard carries the manifest of its own runs, so publishing a shard is one step. ``manifest.parquet`` joins them for
readers; what is not in it yet is read from the shards. A request that is finished has one more row, ``finished``, with
its metadata and the number of its rows. Rows count only if they come from the writer that finished their request:
so whatever an interrupted writer left behind is not read. Manifests of earlier versions have no checksums, and no
sites (hook and layer in one).
"""

from __future__ import annotations

import io
import itertools
import posixpath
import zlib
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
# Of checksums no two are alike, so looking for those that are would only take time.
_ALIKE = [f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in SCHEMA if f.name != "checksum"]


class ShardRuns:
    """The runs of one shard in the making."""

    def __init__(self, writer: str, file: str, header: str, dtype: str, stride: int) -> None:
        self.stride = stride
        self.constant = {"writer": writer, "file": file, "compression": header, "dtype": dtype, "stride": stride}
        self.columns: dict[str, list[Any]] = {
            name: [] for name in ("request", "hook", "layer", "rows", "offset", "finished", "metadata")
        }
        self.positions: list[np.ndarray] = []
        self.token_ids: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self.positions)

    def add(self, packed: CheckedBatch, offset: int) -> None:
        """A run whose first record is at byte `offset` of the file."""
        self._row(packed.request_id, packed.site.hook, packed.site.layer, len(packed.positions), offset, False, "")
        self.positions.append(packed.positions)
        self.token_ids.append(packed.token_ids)

    def finish(self, request: str, rows: int, metadata: str) -> None:
        """The mark of a finished request; `rows`: of all its sites together."""
        self._row(request, "", -1, rows, 0, True, metadata)
        self.positions.append(np.zeros(0, np.int64))
        self.token_ids.append(np.zeros(0, np.int64))

    def cut(self, n: int) -> None:
        """Drop all but the first n entries."""
        for column in (*self.columns.values(), self.positions, self.token_ids):
            del column[n:]

    def drop(self, request: str) -> None:
        """Drop the entries of a request; its records are left where they are."""
        keep = [name != request for name in self.columns["request"]]
        for column in (*self.columns.values(), self.positions, self.token_ids):
            column[:] = itertools.compress(column, keep)

    def _row(self, *values: Any) -> None:
        for column, value in zip(self.columns.values(), values):
            column.append(value)

    def table(self, checksums: list[np.ndarray]) -> pa.Table:
        """As an Arrow table of SCHEMA. `checksums`: for each entry those of its rows, uint32."""
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
            elif field.name in self.constant:
                value = self.constant[field.name]
                column = pa.array([value] * n, field.type if field.type == pa.int64() else pa.string())
                arrays.append(column.cast(field.type))
            else:
                plain = pa.string() if field.type == _TEXT else field.type
                arrays.append(pa.array(self.columns[field.name], plain).cast(field.type))
        return pa.Table.from_arrays(arrays, schema=SCHEMA)


def to_parquet(table: pa.Table) -> bytes:
    """A manifest as Parquet bytes, its pages with checksums."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=_ALIKE, write_page_checksum=True)
    return sink.getvalue()


def from_parquet(store: ObjectStore, name: str, data: bytes) -> pa.Table:
    """Read a manifest; raises WeirError naming the file if it is damaged or something else.

    Without Arrow's threads: one that lets go of `data` while the interpreter ends would abort the process.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True, pre_buffer=False)
        table = file.read(use_threads=False)
        if "checksum" not in table.column_names:
            table = table.append_column("checksum", pa.nulls(len(table), SCHEMA.field("checksum").type))
        if "site" not in table.column_names:
            table = table.append_column("site", _sites_of(table))
        table = pa.Table.from_arrays([table[field.name].cast(field.type) for field in SCHEMA], schema=SCHEMA)
        table.validate(full=True)  # else places in a dictionary that is shorter are an error wherever they are used
        _refuse_gaps(table)
        return table
    except (pa.ArrowException, LookupError, OSError, ValueError) as e:
        raise store.error(name, f"its manifest cannot be read: {str(e)[:200]}") from None


def _sites_of(table: pa.Table) -> pa.ChunkedArray:
    """Column ``site`` of a manifest that lacks it, as it would be written today: joined and own ones are compared."""
    names = pc.binary_join_element_wise(table["hook"].cast(pa.string()), table["layer"].cast(pa.string()), ".")
    return pc.if_else(table["finished"], pa.scalar(None, pa.string()), names)


def _refuse_gaps(table: pa.Table) -> None:
    """Raise ValueError where values are missing, but for what may be: checksums, metadata, sites of marks."""
    for field in SCHEMA:
        chunks = table[field.name].chunks
        whole = [] if field.name in ("checksum", "metadata", "site") else chunks
        lists = [chunk.flatten() for chunk in chunks] if pa.types.is_list(field.type) else []
        if any(values.null_count for values in (*whole, *lists)):
            raise ValueError(f"column {field.name} has gaps")


def is_shard(name: str) -> bool:
    """Whether a file is a shard, by its name."""
    base = posixpath.basename(name)
    return base.startswith(SHARD_PREFIX) and base.endswith(SHARD_SUFFIX)


def read_manifest(store: ObjectStore, names: dict[str, int]) -> pa.Table:
    """The manifest of everything published. `names`: the files there are, and their bytes; those that come meanwhile
    are added."""
    tables = []
    known: set[str] = set()
    if MANIFEST in names:
        tables.append(from_parquet(store, MANIFEST, store.read(MANIFEST)))
        known = set(pc.unique(tables[0]["file"].cast(pa.string())).to_pylist())
        if not known <= names.keys():  # a writer at work has joined shards that were not there yet
            names.update(store.names())
        for gone in sorted(known - set(names)):
            raise store.error(gone or MANIFEST, "the manifest names it, and it is not there")
    fresh = sorted(name for name in names if is_shard(name) and name not in known)
    if store.local or len(fresh) < 2:
        tables += [read_shard_manifest(store, name, names[name]) for name in fresh]
    else:
        with ThreadPoolExecutor(16) as pool:  # each takes a few round trips
            tables += pool.map(lambda name: read_shard_manifest(store, name, names[name]), fresh)
    return pa.concat_tables(tables).unify_dictionaries() if tables else SCHEMA.empty_table()


def read_shard_manifest(store: ObjectStore, name: str, size: int) -> pa.Table:
    """The manifest inside a shard."""
    container = read_container(store, name, size)
    if container.metadata.get("weir") != "shard" or "manifest" not in container.tensors:
        raise store.error(name, "is no shard of Weir's")
    place = container.tensors["manifest"]
    data = store.read(name, place.start, place.end)
    crc = container.metadata.get("manifest")  # which earlier versions did not write
    if crc is not None and crc != f"{zlib.crc32(data):08x}":
        raise store.error(name, "damaged: its manifest is not what was written; restore the file from a copy")
    table = from_parquet(store, name, data)
    if any(file != name for file in pc.unique(table["file"].cast(pa.string())).to_pylist()):
        raise store.error(name, "was renamed: its manifest has another name for it")
    return table


def column(table: pa.Table, name: str) -> np.ndarray:
    """A column of numbers as an array."""
    return table[name].to_numpy()


def codes(table: pa.Table, name: str) -> tuple[np.ndarray, list[str]]:
    """A column of strings as indices into its distinct values."""
    chunked = table[name]
    if not pa.types.is_dictionary(chunked.type):
        chunked = chunked.dictionary_encode()
    array = chunked.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.unify_dictionaries().chunk(0) if array.num_chunks else pa.array([], _TEXT)
    return array.indices.to_numpy().astype(np.int64), array.dictionary.to_pylist()


def flat(table: pa.Table, name: str) -> np.ndarray:
    """The values of a list column, one list after the other."""
    return np.concatenate([chunk.flatten().to_numpy() for chunk in table[name].chunks] or [np.zeros(0, np.int64)])


def lengths(table: pa.Table, name: str) -> np.ndarray:
    """How many values each list of a list column has: int64 [rows], -1 where there is no list."""
    return pc.list_value_length(table[name]).fill_null(-1).to_numpy().astype(np.int64)
