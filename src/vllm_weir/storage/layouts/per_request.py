"""The layouts of one file for each request: per_request, and that of speculators."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.results.safetensors_header import NAMES
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.compression import STORED_DTYPES, Compression
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import row_width
from vllm_weir.storage.index import Index, IndexBuilder
from vllm_weir.storage.layouts.site_tensors import (
    BufferedWriter,
    SiteRows,
    list_reader,
    publish_tensors,
    read_site,
    safe_name,
    site_tensors,
    tensor_layout,
)
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


# The `speculators` layout: a file for each record, as the trainer of draft models of that name reads them.
#
# ``hs_{record}.safetensors`` (``{request}.safetensors`` of a request that is no record) with
# ``hidden_states`` [tokens, layers, d] and ``token_ids`` [tokens]. The metadata, which its reader does
# not look at, says which layers these are.

LAYOUT, SUFFIX = "speculators", ".safetensors"
_RECORD = re.compile(r"(\d{10})-[0-9a-f]{12}")
"""Ids that `weir extract` gives to the requests of its records."""
CAPTURE = Capture("resid_post", positions="prompt")
"""What is written, of any blocks and in any dtype."""


def check_capture(capture: Capture) -> None:
    """Raise WeirError for a capture whose rows are none for this layout."""
    for name in ("hook", "positions", "compress", "reduce", "heads", "neurons"):
        if getattr(capture, name) != getattr(CAPTURE, name):
            raise WeirError("the layout speculators takes whole rows of resid_post at all prompt positions", name)


class SpeculatorsWriter(BufferedWriter):
    """The writer of the layout ``speculators``."""

    layout = LAYOUT

    def __init__(self, store: ObjectStore, compress: object = None, buffer_bytes: int = 4 << 30) -> None:
        super().__init__(store, compress, buffer_bytes)
        if self.compression.method != "none":
            raise WeirError("the layout speculators takes rows as they are; leave compress out", "compress")
        self._files = set(store.names())

    def holds(self, request_id: str) -> bool:
        return file_of(request_id) in self._files

    def _check_open(self, request_id: str) -> None:
        if self.holds(request_id):
            self._finished.add(request_id)
        super()._check_open(request_id)

    def _publish_request(self, request_id: str, sites: list[SiteRows], metadata: str) -> None:
        publish_states(self.store, file_of(request_id), request_id, sites, metadata)
        self._files.add(file_of(request_id))
        self.held_bytes -= sum(site.records.nbytes for site in sites)


def file_of(request_id: str) -> str:
    """Return the name of a request's file."""
    record = _RECORD.fullmatch(request_id)
    return f"hs_{int(record[1])}{SUFFIX}" if record else f"{safe_name(request_id)}{SUFFIX}"


def publish_states(store: ObjectStore, name: str, request_id: str, sites: list[SiteRows], metadata: str = "") -> None:
    """Publish the file of one request; raise WeirError if these are not rows of all positions from the first on."""
    _check_sites(request_id, sites)
    first = sites[0]
    code, shape, nbytes = tensor_layout(first.header, len(first.positions))
    states = np.stack([site.records for site in sites], axis=1)
    tokens = first.token_ids.astype("<i8")
    meta = {
        "weir": LAYOUT,
        "request": request_id,
        "layer_ids": json.dumps([site.site.layer + 1 for site in sites]),
        "metadata": metadata,
    }
    tensors = {
        "hidden_states": ((code, [shape[0], len(sites), *shape[1:]], nbytes * len(sites)), states),
        "token_ids": (("I64", [len(tokens)], tokens.nbytes), tokens),
    }
    publish_tensors(store, name, tensors, meta)


def _check_sites(request_id: str, sites: list[SiteRows]) -> None:
    if not sites:
        raise WeirError(f"request {request_id[:80]!r} has no rows", "batch")
    for site in sites:
        if site.site.hook != "resid_post" or site.header["method"] != "none":
            raise WeirError("the layout speculators takes uncompressed rows of resid_post", "batch.hook")
        if site.header != sites[0].header or not np.array_equal(site.positions, np.arange(len(sites[0].positions))):
            raise WeirError(
                "the layout speculators takes rows of one dtype at all positions from the first on, the same of each "
                f"block; {site.site} of request {request_id[:80]!r} has others",
                "batch.positions",
            )
