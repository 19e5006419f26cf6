"""The layout sharded, as it is written."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from vllm_weir.errors import WeirError
from vllm_weir.results.checksum import checksums
from vllm_weir.results.safetensors_header import build_header
from vllm_weir.schema.compression import header_bytes
from vllm_weir.storage.atomic_file import AtomicFile
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
from vllm_weir.storage.layouts.sharded_reader import index_of
from vllm_weir.storage.layouts.site_tensors import tensor_layout
from vllm_weir.storage.object_store import ObjectStore

HEADER_SPACE = 4096
"""Bytes at the start of a shard that are kept free for its header, which is written last: it has
the number of rows."""
GATHER_BYTES = 4 << 20
"""Records are gathered in memory up to this many bytes before they are written to the file: file
systems take a few large writes faster than many small ones, and so much stays in a processor's
cache."""
ROW_SPACE, RUN_SPACE, FINISH_SPACE, MANIFEST_SPACE = 24, 160, 160, 8 << 10
"""Upper bounds of the bytes in a shard's manifest for a row, a run, a finished request, and
everything else."""


@dataclass(eq=False)
class OpenShard:
    """A shard that is being written: records in the file, then in `sending`, then in `gathered`.

    Every record is copied once, into `gathered`, where its checksum is computed. `sending` is
    written by a thread while more records are gathered. If that write fails, it is repeated before
    anything that follows it is written.
    """

    file: AtomicFile  # the file
    runs: ShardRuns  # its runs so far
    header: dict  # Header of its records; empty for a shard without records
    thread: ThreadPoolExecutor  # Writes `sending`
    # Buffer of whole records, of which the first `gathered_bytes` are in use
    gathered: bytearray = field(default_factory=bytearray)
    gathered_bytes: int = 0
    spare: bytearray = field(default_factory=bytearray)  # the buffer that is not being filled; the two are swapped
    # what the thread writes, or has failed to write
    sending: memoryview = field(default_factory=lambda: memoryview(b""))
    # Checksums of consecutive records, by the byte of the file at which the first one begins
    checksums: dict[int, np.ndarray] = field(default_factory=dict)
    writing: Future[None] | None = None  # the thread's write, until its outcome is known
    torn: bool = False  # whether records of a batch that was not added whole may lie behind `end`
    end: int = HEADER_SPACE  # Bytes of the file, once everything so far is written
    manifest_space: int = MANIFEST_SPACE  # Upper bound of the bytes of its manifest

    def append(self, batch: CheckedBatch) -> None:
        """Add a batch, of which some stays in memory for now; after an error nothing of it is added."""
        self.mend()
        if batch.nbytes:
            self.torn = True
            self._gather(batch.records)
            self.torn = False
        self.runs.add(batch, self.end)
        self.end += batch.nbytes
        self.manifest_space += ROW_SPACE * len(batch.positions) + RUN_SPACE + len(batch.request_id)

    def write_all(self) -> None:
        """Write everything so far to the file; after a WeirError it can be tried again."""
        self.mend()
        self._send()
        self._wait()

    def secure(self) -> None:
        """Reserve disk space for everything so far and the manifest, or raise WeirError."""
        self.mend()
        self._wait()
        if self.file.reserve(self.end + self.manifest_space):
            self._send()
        else:
            self.write_all()

    def drop(self, request: str) -> None:
        """Forget a request's runs, and free the space of its records at the end of the shard."""
        columns = self.runs.columns
        counts = [rows for name, rows in zip(columns["request"], columns["rows"]) if name == request]
        self.manifest_space -= ROW_SPACE * sum(counts) + (RUN_SPACE + len(request)) * len(counts)
        self.runs.drop(request)
        offsets, rows = columns["offset"], columns["rows"]
        self._cut(offsets[-1] + rows[-1] * self.runs.stride if offsets else HEADER_SPACE)

    def mend(self) -> None:
        """Remove what an interrupted `append` has left."""
        if self.torn:
            self._cut(self.end)

    def _cut(self, end: int) -> None:
        """Remove everything behind byte `end` of the file, wherever it is by now."""
        if self.writing is not None:
            wait([self.writing])
            writing, self.writing = self.writing, None
            if writing.exception() is None:
                self.sending = memoryview(b"")
        unwritten = end - self.file.size
        if unwritten < 0:
            self.file.truncate(end)
            # The space was reserved; others may have taken it meanwhile.
            with contextlib.suppress(WeirError):
                self.file.reserve(end + self.manifest_space)
        self.checksums = {
            start: sums[: (end - start) // self.runs.stride] for start, sums in self.checksums.items() if start < end
        }
        self.gathered_bytes = min(self.gathered_bytes, max(0, unwritten - len(self.sending)))
        self.sending = self.sending[: max(0, unwritten)]
        self.end, self.torn = end, False

    def table(self) -> pa.Table:
        sums = np.concatenate([*self.checksums.values(), np.zeros(0, np.uint32)])
        by_run = []
        columns = self.runs.columns
        for offset, rows, finished in zip(columns["offset"], columns["rows"], columns["finished"]):
            first = 0 if finished else (offset - HEADER_SPACE) // self.runs.stride
            by_run.append(sums[first : first + (0 if finished else rows)])
        return self.runs.table(by_run)

    def _gather(self, records: np.ndarray) -> None:
        """Copy records to `gathered`, and let the thread write each buffer that is full."""
        stride = self.runs.stride
        capacity = max(1, GATHER_BYTES // stride) * stride
        while len(records):
            if self.gathered_bytes + stride > capacity:
                self._send()
            if not self.gathered:
                self.gathered = bytearray(capacity)
            taken = records[: (capacity - self.gathered_bytes) // stride]
            place = np.frombuffer(self.gathered, np.uint8, taken.nbytes, self.gathered_bytes)
            np.copyto(place.reshape(taken.shape), taken)
            self.gathered_bytes += taken.nbytes
            records = records[len(taken) :]

    def _send(self) -> None:
        """Let the thread write what was gathered, after what it was given earlier."""
        gathered = memoryview(self.gathered)[: self.gathered_bytes]
        # Here, while the thread still writes, and while the records are in the cache.
        sums = checksums(np.frombuffer(gathered, np.uint8).reshape(-1, self.runs.stride)) if gathered else None
        self._wait()
        if sums is not None:
            self.checksums[self.file.size] = sums
            self.sending = gathered
            self.gathered, self.spare, self.gathered_bytes = self.spare, self.gathered, 0
            self.writing = self.thread.submit(self.file.write, gathered)

    def _wait(self) -> None:
        """Wait until `sending` is written, or write it if the thread has failed to."""
        if self.writing is not None:
            wait([self.writing])  # if this is interrupted, `writing` is still set for the next call
            writing, self.writing = self.writing, None
            writing.result()
        elif self.sending:
            self.file.write(self.sending)
        self.sending = memoryview(b"")


MIN_UNJOINED = 16
"""`flush` rewrites the joined manifest when it lacks this many shards, and as many as it has."""
KEPT_BYTES = 64 << 20
"""Bytes of manifests of published shards that are kept until they are joined."""


class ShardedWriter(Writer):
    """The writer of the layout ``sharded``. It has one open shard for each kind of records.

    `shard_bytes`: a shard is published once it has this many bytes.
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
