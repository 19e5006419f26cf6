"""The `per_request` layout: a safetensors file for each request, as of `Activations.save`."""

from __future__ import annotations

import json
from typing import Any

from vllm_weir.results.safetensors_header import NAMES
from vllm_weir.schema.compression import STORED_DTYPES, Compression
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import row_width
from vllm_weir.storage.index import Index, IndexBuilder
from vllm_weir.storage.layouts.buffered import BufferedWriter, SiteRows, safe_name
from vllm_weir.storage.layouts.site_tensors import list_reader, publish_tensors, read_site, site_tensors
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import FileBlock
from vllm_weir.storage.safetensors_io import SafetensorsHeader, TensorEntry, read_container

SUFFIX = ".safetensors"


class PerRequestWriter(BufferedWriter):
    """The writer of the layout ``per_request``."""

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
        uncompressed = all(s.header["method"] == "none" for s in sites)
        meta = {
            "weir": "1" if uncompressed else "records",
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
    builder = IndexBuilder("per_request")
    for name in sorted(names):
        if name.endswith(SUFFIX):
            add_file(builder, store, name, names[name], read_container(store, name, names[name]))
    return builder.build()


def add_file(builder: IndexBuilder, store: ObjectStore, name: str, size: int, container: SafetensorsHeader) -> None:
    """Add one file; those of `Activations.save` name neither a request nor headers."""
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
        raise store.error(name, "damaged: its metadata is not valid") from None
    if request in builder.requests:
        raise store.error(name, f"request {request[:80]!r} is in another file too")
    code = builder.add_request(request, meta.get("metadata", ""))
    read = list_reader(store, name, container)
    for site, header in zip(sites, headers):
        key = f"{site.hook}.{site.layer}"
        if header is None:
            if key not in container.tensors:
                raise store.error(name, f"damaged: {key!r} is missing")
            tensor = container.tensors[key]
            if 0 in tensor.shape[1:] and tensor.shape[0] == 0:
                continue  # patterns without rows have no keys either, and nothing says their width
            header = plain_header(store, name, tensor, tensor.shape[1:])
        stored = read_site(store, name, container, key, header, read)
        block = builder.add_block(FileBlock(store, name, header, size))
        stored.add_to(builder, code, block)


def plain_header(store: ObjectStore, name: str, tensor: TensorEntry, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the header of uncompressed rows of a shape, which are stored in a tensor."""
    dtype = NAMES.get(tensor.dtype, tensor.dtype)
    if dtype not in STORED_DTYPES or not shape or not row_width(shape):
        raise store.error(name, f"rows are {', '.join(STORED_DTYPES)} [n, d], found {dtype} {list(tensor.shape)}")
    return Compression().header(row_width(shape), dtype, shape)
