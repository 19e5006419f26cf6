"""The `sharded` layout: rows go straight into large safetensors files, and a Parquet manifest says where each is."""

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
from vllm_weir.results.safetensors_header import CODES, build_header
from vllm_weir.schema.compression import ITEMSIZE, header_bytes
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
from vllm_weir.storage.object_store import ObjectStore

GAP = 4096
"""Bytes in which a shard's own header must fit: it is written last, before rows whose number it holds."""
GATHER = 4 << 20
"""Small batches are collected up to this many bytes before they go to the file."""
ROW_ROOM, RUN_ROOM, MARK_ROOM, MANIFEST_ROOM = 24, 160, 160, 8 << 10
"""Bytes that a row, a run, a mark (beside its texts) and everything else take in a shard's manifest, at most."""
SMALL = 1 << 20
"""Batches below this many bytes are small: file systems take a few large writes faster than many small ones."""


@dataclass(eq=False)
class _Shard:
    """A shard in the making: what is in the spool, then `sent`, then the first `held` bytes of `gathered`.

    `sent` is written by a thread while more is gathered. If that fails it is written again before anything follows it.
    `sums`: checksums of consecutive records, by the byte of the file where the first one begins.
    """

    spool: AtomicFile
    runs: ShardRuns
    header: dict
    thread: ThreadPoolExecutor
    gathered: bytearray = field(default_factory=bytearray)
    held: int = 0
    spare: bytearray = field(default_factory=bytearray)
    sent: memoryview = field(default_factory=lambda: memoryview(b""))
    sums: dict[int, np.ndarray] = field(default_factory=dict)
    writing: Future[None] | None = None
    end: int = GAP
    room: int = MANIFEST_ROOM

    def append(self, packed: CheckedBatch) -> None:
        offset, size = self.end, packed.nbytes
        if size >= SMALL:
            self.settle()
            self._write(packed.records.data)
        elif size:
            if self.held + size > GATHER:
                self._send()
            if not self.gathered:
                self.gathered = bytearray(GATHER)
            memoryview(self.gathered)[self.held : self.held + size] = packed.records.data.cast("B")
            self.held += size
        self.end += size
        self.room += ROW_ROOM * len(packed.positions) + RUN_ROOM + len(packed.request_id)
        self.runs.add(packed, offset)

    def settle(self) -> None:
        """Everything so far is in the file afterwards; raises WeirError if it cannot be, and then nothing is lost."""
        self._send()
        self._wait()

    def secure(self) -> None:
        """Have room set aside for everything so far and its manifest; raises WeirError if there is none."""
        self._wait()
        if self.spool.reserve(self.end + self.room):
            self._send()
        else:
            self.settle()

    def drop(self, request: str) -> None:
        """Forget a request's runs, and give back the room of records that no others follow."""
        columns = self.runs.columns
        counts = [rows for name, rows in zip(columns["request"], columns["rows"]) if name == request]
        self.room -= ROW_ROOM * sum(counts) + (RUN_ROOM + len(request)) * len(counts)
        self.runs.drop(request)
        if self.writing is not None:
            wait([self.writing])
            writing, self.writing = self.writing, None
            if writing.exception() is None:
                self.sent = memoryview(b"")
        offsets, rows, stride = columns["offset"], columns["rows"], self.runs.stride
        end = offsets[-1] + rows[-1] * stride if offsets else GAP
        kept = end - self.spool.size
        if kept < 0:
            self.spool.truncate(end)
            with contextlib.suppress(WeirError):  # it had room, and others may have taken it meanwhile
                self.spool.reserve(end + self.room)
        self.sums = {at: sums[: (end - at) // stride] for at, sums in self.sums.items() if at < end}
        self.held = min(self.held, max(0, kept - len(self.sent)))
        self.sent = self.sent[: max(0, kept)]
        self.end = end

    def _send(self) -> None:
        """Have what was gathered written, when what was sent before is."""
        self._wait()
        if self.held:
            self.sent = memoryview(self.gathered)[: self.held]
            self.gathered, self.spare, self.held = self.spare, self.gathered, 0
            self.writing = self.thread.submit(self._write, self.sent)

    def _wait(self) -> None:
        if self.writing is not None:
            wait([self.writing])  # whoever is interrupted here waits again the next time
            writing, self.writing = self.writing, None
            writing.result()
        elif self.sent:
            self._write(self.sent)
        self.sent = memoryview(b"")

    def _write(self, records: memoryview) -> None:
        """Put records into the file, and their checksums where those of another try were."""
        self.sums[self.spool.size] = checksums(np.frombuffer(records, np.uint8).reshape(-1, self.runs.stride))
        self.spool.write(records)

    def table(self) -> pa.Table:
        """The manifest of what is written."""
        sums = np.concatenate([*self.sums.values(), np.zeros(0, np.uint32)])
        parts = []
        for offset, rows, finished in zip(*(self.runs.columns[name] for name in ("offset", "rows", "finished"))):
            first = 0 if finished else (offset - GAP) // self.runs.stride
            parts.append(sums[first : first + (0 if finished else rows)])
        return self.runs.table(parts)


class ShardedWriter(Writer):
    """Layout ``sharded``.

    Args:
        shard_bytes: a shard is published once it is this large.
    """

    layout = "sharded"

    def __init__(self, store: ObjectStore, compress: object = None, shard_bytes: int = 256 << 20) -> None:
        if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
            raise WeirError("shard_bytes is a number of bytes, at least 1", "shard_bytes")
        super().__init__(store, compress)
        self.shard_bytes = shard_bytes
        # Names sort by time, and never meet those of another writer.
        self.name = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        self._count = 0
        self._thread = ThreadPoolExecutor(1, "weir-sharded")
        self._open: dict[str, _Shard] = {}
        self._marks: dict[str, tuple[int, str]] = {}
        self._in: dict[str, set[str]] = {}
        self._out: set[str] = set()
        """Unfinished requests of which some rows are published."""
        names = store.names()
        self._finished = set(index_of(store, read_manifest(store, names), names).requests)
        self._loose = sum(is_shard(name) for name in names) if MANIFEST not in names else 0
        self._joined = sum(is_shard(name) for name in names) - self._loose

    def _append(self, packed: CheckedBatch) -> None:
        if not len(packed.positions) and packed.site in self._seen.get(packed.request_id, {}):
            return  # the first says that the site was asked for
        shard = self._shard(packed.header)
        shard.append(packed)
        self._in.setdefault(packed.request_id, set()).add(packed.header)
        if shard.end >= self.shard_bytes:
            self._publish(packed.header)

    def _finish(self, request_id: str, metadata: str, rows: int) -> None:
        self._marks[request_id] = (rows, metadata)
        for header in self._in.get(request_id, ()):
            self._open[header].room += _mark_room(request_id, metadata)

    def _settle(self, request_id: str) -> None:
        for header in self._in.get(request_id, ()):
            self._open[header].secure()

    def _waits(self, request_id: str) -> bool:
        return request_id in self._marks

    def _drop(self, request_id: str) -> None:
        mark = self._marks.pop(request_id, None)
        if mark is not None:
            self._finished.discard(request_id)
        mine = self._in.pop(request_id, set())
        for header, shard in list(self._open.items()):
            if header in mine:
                shard.drop(request_id)
                shard.room -= _mark_room(request_id, mark[1]) if mark is not None else 0
            if not len(shard.runs):
                del self._open[header]
                shard.spool.discard()
        if request_id in self._out:
            # Without a mark nobody reads what is published; with one, later rows would be taken for more of the same.
            self._out.discard(request_id)
            self.failed.setdefault(
                request_id, "it was abandoned when some of them were published; use another id, or another writer"
            )

    def _shard(self, header: str) -> _Shard:
        shard = self._open.get(header)
        if shard is None:
            name = f"{SHARD_PREFIX}{self.name}-{self._count:06d}{SHARD_SUFFIX}"
            spool = self.store.new_file(name)
            try:
                spool.write(bytes(GAP))
            except WeirError:
                spool.discard()
                raise
            parsed = json.loads(header) if header else {}
            dtype, stride = (parsed["dtype"], header_bytes(parsed)) if parsed else ("", 0)
            shard = self._open[header] = _Shard(
                spool, ShardRuns(self.name, name, header, dtype, stride), parsed, self._thread
            )
            self._count += 1
        return shard

    def _publish(self, header: str) -> None:
        """Publish one open shard, with the marks of the requests that have nothing unpublished elsewhere."""
        shard = self._open[header]
        ready = [r for r in self._marks if self._in.get(r, set()) <= {header}]
        runs, rows_end = len(shard.runs), 0
        try:
            shard.settle()
            rows_end = shard.spool.size
            for request in ready:
                shard.runs.finish(request, *self._marks[request])
            manifest = to_parquet(shard.table())
            shard.spool.write(manifest)
            shard.spool.write_at(0, _shard_header(shard.header, rows_end - GAP, manifest))
            shard.spool.publish()
        except BaseException:
            # All as before, for another try.
            shard.runs.cut(runs)
            if rows_end:
                shard.spool.truncate(rows_end)
            raise
        del self._open[header]
        self._out.update(shard.runs.columns["request"])
        self._out.difference_update(ready)
        for request in ready:
            del self._marks[request]
            self._in.pop(request, None)
        for headers in self._in.values():
            headers.discard(header)
        self._loose += 1

    def _flush(self) -> None:
        for header in list(self._open):
            self._publish(header)
        if self._marks:
            self._shard("")
            self._publish("")
        if self._loose >= max(16, self._joined):
            self._join()

    def _tidy(self, others: bool) -> None:
        if others or self._loose:
            self._join()

    def _end(self) -> None:
        self._let_go()
        if self._loose:
            self._join()

    def _let_go(self) -> None:
        self._thread.shutdown()  # nothing is written to a file that is closed
        while self._open:
            self._open.popitem()[1].spool.discard()

    def _join(self) -> None:
        names = self.store.names()
        self.store.put(MANIFEST, to_parquet(read_manifest(self.store, names)))
        self._joined, self._loose = sum(map(is_shard, names)), 0


def _mark_room(request_id: str, metadata: str) -> int:
    return MARK_ROOM + len(request_id) + len(metadata)


def _shard_header(header: dict, rows_bytes: int, manifest: bytes) -> bytes:
    tensors = {}
    if header:
        fields = header["fields"]
        record = header_bytes(header)
        plain = len(fields) == 1 and fields[0]["dtype"] in CODES
        dtype, width = (fields[0]["dtype"], record // ITEMSIZE[fields[0]["dtype"]]) if plain else ("uint8", record)
        tensors["rows"] = (CODES[dtype], [rows_bytes // record, width], rows_bytes)
    tensors["manifest"] = ("U8", [len(manifest)], len(manifest))
    metadata = {
        "weir": "shard",
        "header": json.dumps(header, sort_keys=True),
        "manifest": f"{zlib.crc32(manifest):08x}",
    }
    return build_header(tensors, metadata, room=GAP)
