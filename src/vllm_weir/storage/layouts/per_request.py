"""The `per_request` layout: one safetensors file a request; uncompressed ones `Activations.load` reads too."""

from __future__ import annotations

import json
from typing import Any

from vllm_weir.results.safetensors_header import NAMES
from vllm_weir.schema.compression import ROW_DTYPES, Compression
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.index import Index, IndexBuilder
from vllm_weir.storage.layouts.buffered import (
    BufferedWriter,
    SiteRows,
    publish_tensors,
    read_site,
    reader_of,
    safe_name,
    site_tensors,
)
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import FileBlock
from vllm_weir.storage.safetensors_io import SafetensorsHeader, TensorEntry, read_container

SUFFIX = ".safetensors"


class PerRequestWriter(BufferedWriter):
    """Layout ``per_request``."""

    layout = "per_request"

    def __init__(self, store: ObjectStore, compress: object = None, buffer_bytes: int = 4 << 30) -> None:
        super().__init__(store, compress, buffer_bytes)
        self._files = set(store.names())

    def holds(self, request_id: str) -> bool:
        return safe_name(request_id) + SUFFIX in self._files

    def _check_open(self, request_id: str) -> None:
        if self.holds(request_id):
            self._finished.add(request_id)
        super()._check_open(request_id)

    def _publish_request(self, request_id: str, sites: list[SiteRows], metadata: str) -> None:
        name = safe_name(request_id) + SUFFIX
        tensors = site_tensors(sites)
        plain = all(s.header["method"] == "none" for s in sites)
        meta = {
            "weir": "1" if plain else "records",
            "request": request_id,
            "sites": json.dumps([list(s.site) for s in sites]),
            "headers": json.dumps([s.header for s in sites]),
            "lens": "[]",
            "metadata": metadata,
        }
        publish_tensors(self.store, name, tensors, meta)
        self._files.add(name)
        self.held_bytes -= sum(s.records.nbytes for s in sites)


def read_per_request(store: ObjectStore, names: dict[str, int]) -> Index:
    """The index of a folder of such files (or of one)."""
    out = IndexBuilder("per_request")
    for name in sorted(names):
        if name.endswith(SUFFIX):
            add_file(out, store, name, names[name], read_container(store, name, names[name]))
    return out.build()


def add_file(out: IndexBuilder, store: ObjectStore, name: str, size: int, container: SafetensorsHeader) -> None:
    """Add one file, also of `Activations.save`, which writes neither a request nor headers."""
    meta = container.metadata
    if meta.get("weir") not in ("1", "records"):
        raise store.error(name, "was not written by Weir")
    try:
        sites = [Site(str(hook), int(layer)) for hook, layer in json.loads(meta["sites"])]
        headers = json.loads(meta["headers"]) if "headers" in meta else [None] * len(sites)
        request = meta.get("request", name.removesuffix(SUFFIX))
        if len(headers) != len(sites):
            raise ValueError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise store.error(name, "damaged: its metadata make no sense") from None
    if request in out.requests:
        raise store.error(name, f"request {request[:80]!r} is in another file too")
    code = out.request(request, meta.get("metadata", ""))
    read = reader_of(store, name, container)
    for site, header in zip(sites, headers):
        key = f"{site.hook}.{site.layer}"
        if header is None:
            if key not in container.tensors:
                raise store.error(name, f"damaged: {key!r} is missing")
            header = plain_header(store, name, container.tensors[key])
        found, place, positions, tokens, sums = read_site(store, name, container, key, header, read)
        block = out.block(FileBlock(store, name, header, size))
        out.run(code, found, block, place.start, positions, tokens, checksums=sums)


def plain_header(store: ObjectStore, name: str, tensor: TensorEntry) -> dict[str, Any]:
    """The header of uncompressed rows stored as a tensor [n, d]."""
    dtype = NAMES.get(tensor.dtype, tensor.dtype)
    if dtype not in ROW_DTYPES or len(tensor.shape) < 2 or not tensor.shape[-1]:
        raise store.error(name, f"rows are {', '.join(ROW_DTYPES)} [n, d], found {dtype} {list(tensor.shape)}")
    return Compression().header(tensor.shape[-1], dtype)
