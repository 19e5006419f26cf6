"""`BufferedWriter`: keeps a request's rows in memory until it is finished, then publishes them."""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.batch import CheckedBatch
from vllm_weir.storage.index import site_order
from vllm_weir.storage.layouts.base import Writer
from vllm_weir.storage.object_store import ObjectStore

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}")
_SHORTENED_NAME = re.compile(r".*\.[0-9a-f]{16}")
"""File names of requests whose ids are no file names."""


@dataclass(eq=False)
class SiteRows:
    """All rows of one site of a request, by position; records are uint8 [n, record_bytes]."""

    site: Site
    positions: np.ndarray
    token_ids: np.ndarray
    records: np.ndarray
    header: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.site.hook}.{self.site.layer}"


class BufferedWriter(Writer):
    """A writer that publishes whole requests, by `_publish_request`."""

    def __init__(self, store: ObjectStore, compress: object = None, buffer_bytes: int = 4 << 30) -> None:
        if isinstance(buffer_bytes, bool) or not isinstance(buffer_bytes, int) or buffer_bytes < 1:
            raise WeirError("buffer_bytes is a number of bytes, at least 1", "buffer_bytes")
        super().__init__(store, compress)
        self.buffer_bytes = buffer_bytes
        self.held_bytes = 0
        self._parts: dict[str, list[CheckedBatch]] = {}

    def _append(self, packed: CheckedBatch) -> None:
        if self.held_bytes + packed.nbytes > self.buffer_bytes:
            raise WeirError(
                f"{self.held_bytes + packed.nbytes} bytes of unpublished rows are more than buffer_bytes = "
                f"{self.buffer_bytes}; raise it, or use the layout 'sharded', which holds none",
                "buffer_bytes",
            )
        # A copy, because the caller may overwrite its memory.
        packed.records = packed.records.copy()
        self._parts.setdefault(packed.request_id, []).append(packed)
        self.held_bytes += packed.nbytes

    def _finish(self, request_id: str, metadata: str, rows: int) -> None:
        parts = self._parts.get(request_id, [])
        self._publish_request(request_id, join_sites(parts), metadata)
        self._parts.pop(request_id, None)

    def _drop(self, request_id: str) -> None:
        for part in self._parts.pop(request_id, []):
            self.held_bytes -= part.nbytes

    @abstractmethod
    def _publish_request(self, request_id: str, sites: list[SiteRows], metadata: str) -> None: ...

    def _flush(self) -> None:
        """Do nothing: every request is published as it finishes."""


def join_sites(parts: list[CheckedBatch]) -> list[SiteRows]:
    """Join the batches of a request by site, and sort their rows by position."""
    by_site: dict[Site, list[CheckedBatch]] = {}
    for part in parts:
        by_site.setdefault(part.site, []).append(part)
    sites = []
    for site in sorted(by_site, key=site_order):
        batches = by_site[site]
        positions = np.concatenate([b.positions for b in batches])
        order = np.argsort(positions, kind="stable")
        tokens, records = (np.concatenate([getattr(b, name) for b in batches]) for name in ("token_ids", "records"))
        sites.append(SiteRows(site, positions[order], tokens[order], records[order], json.loads(batches[0].header)))
    return sites


def safe_name(request_id: str) -> str:
    """Return a file name for a request: its id if that is a safe name, else with a hash."""
    if _SAFE_NAME.fullmatch(request_id) and not _SHORTENED_NAME.fullmatch(request_id):
        return request_id
    digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', request_id)[:60]}.{digest}"
