"""The `packed` layout: many requests in one safetensors file, each whole; files roll by size."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.results.safetensors_header import MAX_HEADER
from vllm_weir.storage.atomic_file import AtomicFile
from vllm_weir.storage.index import Index, IndexBuilder, text_field
from vllm_weir.storage.layouts.buffered import (
    BufferedWriter,
    SiteRows,
    publish_tensors,
    read_site,
    reader_of,
    site_tensors,
)
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import FileBlock
from vllm_weir.storage.safetensors_io import read_container

PREFIX, SUFFIX = "pack-", ".safetensors"
HEADER_BYTES = 32 << 20
"""A file is published, too, once its header is about this large: readers parse it whole, and take none over 100 MB."""
SITE_BYTES = 640
"""What one site of one request adds to the header, at most: names, places and checksums of its tensors."""
LIST_BYTES = 20
"""What stands beside a row: its position, its token, its checksum."""
FILE_BYTES = 4096
"""What a file takes beside its requests, at most."""


class PackedWriter(BufferedWriter):
    """Layout ``packed``.

    Args:
        pack_bytes: a file is published once its requests are this large.
    """

    layout = "packed"

    def __init__(
        self, store: ObjectStore, compress: object = None, pack_bytes: int = 256 << 20, buffer_bytes: int = 4 << 30
    ) -> None:
        if isinstance(pack_bytes, bool) or not isinstance(pack_bytes, int) or pack_bytes < 1:
            raise WeirError("pack_bytes is a number of bytes, at least 1", "pack_bytes")
        super().__init__(store, compress, buffer_bytes)
        self.pack_bytes = pack_bytes
        self.name = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        self._count = 0
        self._waiting: dict[str, tuple[list[SiteRows], str]] = {}
        self._waiting_bytes = self._header_bytes = self._list_bytes = 0
        self._spool: AtomicFile | None = None
        """Where the waiting requests will be written, with room for those that were settled."""
        self._finished = set(read_packed(store, store.names()).requests)

    def _publish_request(self, request_id: str, sites: list[SiteRows], metadata: str) -> None:
        share = _header_share(request_id, sites, metadata)
        if share > MAX_HEADER // 2:
            raise WeirError(f"{len(metadata):,} characters are more than the header of a file takes", "metadata")
        self._waiting[request_id] = (sites, metadata)
        self._waiting_bytes += sum(s.records.nbytes for s in sites)
        self._header_bytes += share
        self._list_bytes += sum(LIST_BYTES * len(s.positions) for s in sites)
        if self._waiting_bytes >= self.pack_bytes or self._header_bytes >= HEADER_BYTES:
            self._flush()

    def _settle(self, request_id: str) -> None:
        if request_id not in self._waiting:
            return
        if self._spool is None:
            self._spool = self.store.new_file(self._next)
        self._spool.reserve(self._waiting_bytes + self._list_bytes + self._header_bytes + FILE_BYTES)

    def _waits(self, request_id: str) -> bool:
        return request_id in self._waiting

    def _drop(self, request_id: str) -> None:
        if request_id in self._waiting:
            sites, metadata = self._waiting.pop(request_id)
            size = sum(s.records.nbytes for s in sites)
            self._waiting_bytes -= size
            self._header_bytes -= _header_share(request_id, sites, metadata)
            self._list_bytes -= sum(LIST_BYTES * len(s.positions) for s in sites)
            if not self._waiting:
                self._let_go()
            if request_id not in self._parts:  # it was finished
                self._finished.discard(request_id)
                self.held_bytes -= size
        super()._drop(request_id)

    def _flush(self) -> None:
        if not self._waiting:
            return
        requests: list[dict[str, Any]] = []
        headers: list[dict[str, Any]] = []
        tensors: dict[str, tuple[tuple[str, list[int], int], np.ndarray]] = {}
        for n, (request, (sites, metadata)) in enumerate(self._waiting.items()):
            used = []
            for s in sites:
                if s.header not in headers:
                    headers.append(s.header)
                used.append([f"{n}/{s.name}", headers.index(s.header)])
            requests.append({"request": request, "sites": used, "metadata": metadata})
            tensors |= site_tensors(sites, f"{n}/")
        meta = {"weir": "pack", "headers": json.dumps(headers), "requests": json.dumps(requests)}
        spool, self._spool = self._spool, None
        publish_tensors(self.store, self._next, tensors, meta, spool)
        self._count += 1
        self.held_bytes -= self._waiting_bytes
        self._waiting, self._waiting_bytes, self._header_bytes, self._list_bytes = {}, 0, 0, 0

    def _let_go(self) -> None:
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.discard()

    @property
    def _next(self) -> str:
        """The file that comes next."""
        return f"{PREFIX}{self.name}-{self._count:06d}{SUFFIX}"


def _header_share(request: str, sites: list[SiteRows], metadata: str) -> int:
    """About how many bytes of a file's header a request takes; its texts are quoted there twice."""
    return SITE_BYTES * len(sites) + len(json.dumps(json.dumps([request, metadata])))


def is_pack(name: str) -> bool:
    """Whether a file is one of this layout, by its name."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def read_packed(store: ObjectStore, names: dict[str, int]) -> Index:
    """The index of a folder of such files (or of one)."""
    out = IndexBuilder("packed")
    for name in sorted(names):
        if is_pack(name):
            _add_file(out, store, name, names[name])
    return out.build()


def _add_file(out: IndexBuilder, store: ObjectStore, name: str, size: int) -> None:
    container = read_container(store, name, size)
    if container.metadata.get("weir") != "pack":
        raise store.error(name, "is no pack of Weir's")
    try:
        headers = json.loads(container.metadata["headers"])
        requests = [
            (text_field(r, "request"), text_field(r, "metadata"), [(str(t), headers[h]) for t, h in r["sites"]])
            for r in json.loads(container.metadata["requests"])
        ]
    except (KeyError, TypeError, ValueError, IndexError, RecursionError):
        raise store.error(name, "damaged: its metadata make no sense") from None
    blocks: dict[str, int] = {}
    read = reader_of(store, name, container)
    for request, metadata, sites in requests:
        if request in out.requests:
            continue  # two writers did it; the first counts
        code = out.request(request, metadata)
        for key, header in sites:
            site, place, positions, tokens, sums = read_site(store, name, container, key, header, read)
            kind = json.dumps(header, sort_keys=True)
            if kind not in blocks:
                blocks[kind] = out.block(FileBlock(store, name, header, size))
            out.run(code, site, blocks[kind], place.start, positions, tokens, checksums=sums)
