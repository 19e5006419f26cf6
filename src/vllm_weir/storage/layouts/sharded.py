"""The `sharded` layout: large safetensors files, and a Parquet manifest of the rows in them."""

from __future__ import annotations

import json
import secrets
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from vllm_weir.errors import WeirError
from vllm_weir.results.safetensors_header import build_header
from vllm_weir.schema.compression import header_bytes
from vllm_weir.storage.batch import CheckedBatch
from vllm_weir.storage.layouts.base import Writer
from vllm_weir.storage.layouts.manifest import (
    MANIFEST,
    SHARD_PREFIX,
    SHARD_SUFFIX,
    ShardRuns,
    is_shard,
    read_manifest,
    to_parquet,
)
from vllm_weir.storage.layouts.open_shard import FINISH_SPACE, HEADER_SPACE, OpenShard
from vllm_weir.storage.layouts.sharded_reader import index_of
from vllm_weir.storage.layouts.site_tensors import tensor_layout
from vllm_weir.storage.object_store import ObjectStore

MIN_UNJOINED = 16
"""`flush` rewrites the joined manifest when it lacks this many shards, and as many as it has."""
KEPT_BYTES = 64 << 20
"""Bytes of manifests of published shards that are kept until they are joined."""


class ShardedWriter(Writer):
    """The writer of the layout ``sharded``. It has one open shard for each kind of records.

    Args:
        shard_bytes: A shard is published once it has this many bytes.
    """

    layout = "sharded"

    def __init__(self, store: ObjectStore, compress: object = None, shard_bytes: int = 256 << 20) -> None:
        if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
            raise WeirError("shard_bytes is a number of bytes, at least 1", "shard_bytes")
        super().__init__(store, compress)
        self.shard_bytes = shard_bytes
        # Names sort by time and are distinct from those of other writers.
        self.name = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        self._count = 0
        self._thread = ThreadPoolExecutor(1, "weir-sharded")
        self._open: dict[str, OpenShard] = {}
        """Open shards, by the header of their records."""
        self._pending: dict[str, tuple[int, str]] = {}
        """Finished, unpublished requests: number of rows, and metadata."""
        self._open_headers: dict[str, set[str]] = {}
        """Requests -> headers of the open shards with rows of theirs."""
        self._partly_published: set[str] = set()
        """Unfinished requests of which some rows are published."""
        names = store.names()
        self._finished = set(index_of(store, read_manifest(store, names), names).requests)
        shards = sum(is_shard(name) for name in names)
        self._unjoined = shards if MANIFEST not in names else 0
        """Shards that the joined manifest lacks, as far as this writer knows."""
        self._joined = shards - self._unjoined
        self._kept: dict[str, pa.Table] = {}
        """Manifests of shards that this writer has published and not joined, up to KEPT_BYTES."""
        self._kept_bytes = 0

    def _append(self, packed: CheckedBatch) -> None:
        if not len(packed.positions) and packed.site in self._written.get(packed.request_id, {}):
            # Only a site's first batch matters without rows: it says that the site was captured.
            return
        shard = self._shard(packed.header)
        shard.append(packed)
        self._open_headers.setdefault(packed.request_id, set()).add(packed.header)
        if shard.end >= self.shard_bytes:
            self._publish(packed.header)

    def _finish(self, request_id: str, metadata: str, rows: int) -> None:
        self._pending[request_id] = (rows, metadata)
        for header in self._open_headers.get(request_id, ()):
            self._open[header].manifest_space += _finish_space(request_id, metadata)

    def _settle(self, request_id: str) -> None:
        for header in self._open_headers.get(request_id, ()):
            self._open[header].secure()

    def _is_pending(self, request_id: str) -> bool:
        return request_id in self._pending

    def _drop(self, request_id: str) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            self._finished.discard(request_id)
        headers = self._open_headers.pop(request_id, set())
        for header, shard in list(self._open.items()):
            if header in headers:
                shard.drop(request_id)
                shard.manifest_space -= _finish_space(request_id, pending[1]) if pending is not None else 0
            shard.mend()
            if not len(shard.runs):
                del self._open[header]
                shard.file.discard()
        if request_id in self._partly_published:
            # Readers ignore published rows of an unfinished request, but not if this writer
            # finished it later.
            self._partly_published.discard(request_id)
            self.failed.setdefault(
                request_id, "it was abandoned when some of them were published; use another id, or another writer"
            )

    def _shard(self, header: str) -> OpenShard:
        """Return the open shard for a header; the empty header is for a shard without records."""
        shard = self._open.get(header)
        if shard is None:
            name = f"{SHARD_PREFIX}{self.name}-{self._count:06d}{SHARD_SUFFIX}"
            file = self.store.new_file(name)
            try:
                file.write(bytes(HEADER_SPACE))
            except WeirError:
                file.discard()
                raise
            parsed = json.loads(header) if header else {}
            dtype, stride = (parsed["dtype"], header_bytes(parsed)) if parsed else ("", 0)
            runs = ShardRuns(self.name, name, header, dtype, stride)
            shard = self._open[header] = OpenShard(file, runs, parsed, self._thread)
            self._count += 1
        return shard

    def _publish(self, header: str) -> None:
        """Publish an open shard, and mark requests finished that need no other."""
        shard = self._open[header]
        ready = [request for request in self._pending if self._open_headers.get(request, set()) <= {header}]
        runs, rows_end = len(shard.runs), 0
        try:
            shard.write_all()
            rows_end = shard.file.size
            for request in ready:
                shard.runs.finish(request, *self._pending[request])
            table = shard.table()
            manifest = to_parquet(table)
            shard.file.write(manifest)
            shard.file.write_at(0, _shard_header(shard.header, rows_end - HEADER_SPACE, manifest))
            shard.file.publish()
        except BaseException:
            # Undo everything but the rows, so that it can be tried again.
            shard.runs.cut(runs)
            if rows_end:
                shard.file.truncate(rows_end)
            raise
        del self._open[header]
        self._partly_published.update(shard.runs.columns["request"])
        self._partly_published.difference_update(ready)
        for request in ready:
            del self._pending[request]
            self._open_headers.pop(request, None)
        for headers in self._open_headers.values():
            headers.discard(header)
        self._unjoined += 1
        if self._kept_bytes + table.nbytes <= KEPT_BYTES:
            self._kept[shard.file.name] = table
            self._kept_bytes += table.nbytes

    def _flush(self) -> None:
        for header in list(self._open):
            self._publish(header)
        if self._pending:  # requests without rows
            self._shard("")
            self._publish("")
        if self._unjoined >= max(MIN_UNJOINED, self._joined):
            self._join()

    def _tidy(self, others: bool) -> None:
        if others or self._unjoined:
            self._join()

    def _end(self) -> None:
        self._close_files()
        if self._unjoined:
            self._join()

    def _close_files(self) -> None:
        self._thread.shutdown()  # first, so that it does not write to a closed file
        while self._open:
            self._open.popitem()[1].file.discard()

    def _join(self) -> None:
        names = self.store.names()
        self.store.put(MANIFEST, to_parquet(read_manifest(self.store, names, self._kept)))
        self._kept.clear()
        self._kept_bytes = 0
        self._joined, self._unjoined = sum(map(is_shard, names)), 0


def _finish_space(request_id: str, metadata: str) -> int:
    return FINISH_SPACE + len(request_id) + len(metadata)


def _shard_header(header: dict, rows_bytes: int, manifest: bytes) -> bytes:
    tensors = {}
    if header:
        tensors["rows"] = tensor_layout(header, rows_bytes // header_bytes(header))
    tensors["manifest"] = ("U8", [len(manifest)], len(manifest))
    metadata = {
        "weir": "shard",
        "header": json.dumps(header, sort_keys=True),
        "manifest": f"{zlib.crc32(manifest):08x}",
    }
    return build_header(tensors, metadata, room=HEADER_SPACE)
