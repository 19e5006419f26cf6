"""The `packed` layout: safetensors files of about a fixed size, each of many requests."""

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
from vllm_weir.storage.layouts.site_tensors import (
    BufferedWriter,
    SiteRows,
    list_reader,
    publish_tensors,
    read_site,
    site_tensors,
)
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import FileBlock
from vllm_weir.storage.safetensors_io import read_container

PREFIX, SUFFIX = "pack-", ".safetensors"
HEADER_BYTES = 32 << 20
"""A file is also published once its header is about this large: readers parse it whole, and accept
up to 100 MB."""
SITE_BYTES = 640
"""Bytes that one site of one request adds to the header, at most: names, places and checksums of
its tensors."""
LIST_BYTES = 20
"""Bytes stored for a row beside its record: position, token id and checksum."""
FILE_BYTES = 4096
"""Bytes of a file that belong to no request, at most."""


class PackedWriter(BufferedWriter):
    """The writer of the layout ``packed``. `pack_bytes`: a file is published once its requests have this many bytes."""

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
        self._file: AtomicFile | None = None
        """The file for the waiting requests, with space reserved for those that were settled."""
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
        if self._file is None:
            self._file = self.store.new_file(self._next_name)
        self._file.reserve(self._waiting_bytes + self._list_bytes + self._header_bytes + FILE_BYTES)

    def _is_pending(self, request_id: str) -> bool:
        return request_id in self._waiting

    def _drop(self, request_id: str) -> None:
        if request_id in self._waiting:
            sites, metadata = self._waiting.pop(request_id)
            size = sum(s.records.nbytes for s in sites)
            self._waiting_bytes -= size
            self._header_bytes -= _header_share(request_id, sites, metadata)
            self._list_bytes -= sum(LIST_BYTES * len(s.positions) for s in sites)
            if not self._waiting:
                self._close_files()
            if request_id not in self._parts:  # it is finished
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
            request_sites = []
            for s in sites:
                if s.header not in headers:
                    headers.append(s.header)
                request_sites.append([f"{n}/{s.name}", headers.index(s.header)])
            requests.append({"request": request, "sites": request_sites, "metadata": metadata})
            tensors |= site_tensors(sites, f"{n}/")
        meta = {"weir": "pack", "headers": json.dumps(headers), "requests": json.dumps(requests)}
        file, self._file = self._file, None
        publish_tensors(self.store, self._next_name, tensors, meta, file)
        self._count += 1
        self.held_bytes -= self._waiting_bytes
        self._waiting, self._waiting_bytes, self._header_bytes, self._list_bytes = {}, 0, 0, 0

    def _close_files(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.discard()

    @property
    def _next_name(self) -> str:
        return f"{PREFIX}{self.name}-{self._count:06d}{SUFFIX}"


def _header_share(request: str, sites: list[SiteRows], metadata: str) -> int:
    """Estimate the bytes of a file's header that a request takes; its texts are quoted twice."""
    return SITE_BYTES * len(sites) + len(json.dumps(json.dumps([request, metadata])))


def is_pack(name: str) -> bool:
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def read_packed(store: ObjectStore, names: dict[str, int]) -> Index:
    builder = IndexBuilder("packed")
    for name in sorted(names):
        if is_pack(name):
            _add_file(builder, store, name, names[name])
    return builder.build()


def _add_file(builder: IndexBuilder, store: ObjectStore, name: str, size: int) -> None:
    container = read_container(store, name, size)
    if container.metadata.get("weir") != "pack":
        raise store.error(name, "was not written by Weir")
    try:
        headers = json.loads(container.metadata["headers"])
        requests = [
            (text_field(r, "request"), text_field(r, "metadata"), [(str(t), headers[h]) for t, h in r["sites"]])
            for r in json.loads(container.metadata["requests"])
        ]
    except (KeyError, TypeError, ValueError, IndexError, RecursionError):
        raise store.error(name, "damaged: its metadata is not valid") from None
    blocks: dict[str, int] = {}
    read = list_reader(store, name, container)
    for request, metadata, sites in requests:
        if request in builder.requests:
            continue  # two writers have written it; the first counts
        code = builder.add_request(request, metadata)
        for key, header in sites:
            stored = read_site(store, name, container, key, header, read)
            kind = json.dumps(header, sort_keys=True)
            if kind not in blocks:
                blocks[kind] = builder.add_block(FileBlock(store, name, header, size))
            stored.add_to(builder, code, blocks[kind])
