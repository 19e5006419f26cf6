"""Layouts that hold a request's rows until its file is written, and the tensors of its sites."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import re
import zlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.results.checksum import checksums
from vllm_weir.results.safetensors_header import CODES, NAMES, build_header
from vllm_weir.schema.compression import Compression, header_bytes, header_shape
from vllm_weir.schema.hooks import Site, normalise_hook
from vllm_weir.storage.atomic_file import AtomicFile
from vllm_weir.storage.batch import CheckedBatch
from vllm_weir.storage.index import IndexBuilder, site_order
from vllm_weir.storage.layouts.base import Writer
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import MAX_FETCH, MERGE_GAP
from vllm_weir.storage.safetensors_io import SafetensorsHeader, TensorEntry

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


_LISTS = {"positions": "I64", "token_ids": "I64", "checksums": "U32"}
"""Tensors beside a site's records, with a value for each row. Checksums may be missing."""
RangeReader: TypeAlias = Callable[[int, int], bytes]
"""Returns the bytes of a file from one byte up to another."""


def tensor_layout(header: dict[str, Any], rows: int) -> tuple[str, list[int], int]:
    """Return (dtype code, shape, bytes) of records as a tensor; plain rows keep dtype and shape."""
    width, fields = header_bytes(header), header["fields"]
    kind = fields[0]["dtype"]
    if len(fields) == 1 and kind in CODES:
        return CODES[kind], [rows, *header_shape(header)], rows * width
    return "U8", [rows, width], rows * width


def site_tensors(sites: list[SiteRows], prefix: str = "") -> dict[str, tuple[tuple[str, list[int], int], np.ndarray]]:
    """Return the tensors of a request: name -> ((dtype code, shape, bytes), data)."""
    tensors: dict[str, tuple[tuple[str, list[int], int], np.ndarray]] = {}
    for s in sites:
        tensors[prefix + s.name] = (tensor_layout(s.header, len(s.positions)), s.records)
        lists = (s.positions.astype("<i8"), s.token_ids.astype("<i8"), checksums(s.records).astype("<u4"))
        for (name, dtype), values in zip(_LISTS.items(), lists):
            tensors[f"{prefix}{s.name}.{name}"] = ((dtype, [len(values)], values.nbytes), values)
    return tensors


def publish_tensors(
    store: ObjectStore,
    name: str,
    tensors: dict[str, tuple[tuple[str, list[int], int], np.ndarray]],
    metadata: dict[str, str],
    file: AtomicFile | None = None,
) -> None:
    """Publish a safetensors file, into the empty new `file` if one was begun; after an error nothing is left."""
    crc: dict[str, int] = {}
    for key, (_, data) in tensors.items():
        site, _, kind = key.rpartition(".")
        if kind in _LISTS:
            crc[site] = zlib.crc32(data.data if data.size else b"", crc.get(site, 0))
    metadata = {**metadata, "lists": json.dumps(crc)}
    file = store.new_file(name) if file is None else file
    try:
        file.write(build_header({key: layout for key, (layout, _) in tensors.items()}, metadata))
        for _, data in tensors.values():
            if data.size:  # a site without rows has no bytes
                file.write(data.data)
        file.publish()
    except Exception:
        file.discard()
        raise


@functools.lru_cache(maxsize=1)
def _list_crcs(text: str) -> dict[str, int]:
    """Parse the metadata ``lists``, which all sites share: site -> CRC-32 of its lists."""
    return dict(json.loads(text))


def list_reader(store: ObjectStore, file: str, container: SafetensorsHeader) -> RangeReader:
    """Return a function that reads byte ranges of the tensors beside the records.

    Those of a remote file are fetched all at once, since a request for each site would take long.
    """
    if store.local:
        return functools.partial(store.read, file)
    starts: list[int] = []
    ends: list[int] = []
    lists = [t for name, t in container.tensors.items() if name.rpartition(".")[2] in _LISTS]
    for start, end in sorted((t.start, t.end) for t in lists if t.end > t.start):
        if starts and start - ends[-1] <= MERGE_GAP and end - starts[-1] <= MAX_FETCH:
            ends[-1] = end
        else:
            starts.append(start)
            ends.append(end)
    parts = store.read_ranges(file, starts, ends) if starts else []

    def read(start: int, end: int) -> bytes:
        i = bisect.bisect_right(starts, start) - 1
        return parts[i][start - starts[i] : end - starts[i]]

    return read


def _read_lists(read: RangeReader, lists: list[TensorEntry]) -> list[bytes]:
    """Return the bytes of some tensors, with one read if they are adjacent."""
    if any(a.end != b.start for a, b in itertools.pairwise(lists)):
        return [read(t.start, t.end) for t in lists]
    first = lists[0].start
    data = read(first, lists[-1].end)
    return [data[t.start - first : t.end - first] for t in lists]


@dataclass(frozen=True, eq=False)
class StoredSite:
    """One site of one request in a safetensors file.

    Attributes:
        site: The site.
        records: Place of the records.
        positions, token_ids: int64 [n].
        checksums: uint32 [n], if they were stored.
    """

    site: Site
    records: TensorEntry
    positions: np.ndarray
    token_ids: np.ndarray
    checksums: np.ndarray | None

    def add_to(self, builder: IndexBuilder, request: int, block: int) -> None:
        builder.add_run(
            request, self.site, block, self.records.start, self.positions, self.token_ids, checksums=self.checksums
        )


def read_site(
    store: ObjectStore, file: str, container: SafetensorsHeader, name: str, header: dict[str, Any], read: RangeReader
) -> StoredSite:
    """Read and check the tensors of one site, all but the records; `read` is from `list_reader`."""
    try:
        hook, _, layer = name.rpartition("/")[2].rpartition(".")
        site = Site(normalise_hook(hook, f"{store.describe(file)}: hook"), int(layer))
        Compression.from_header(header, f"{store.describe(file)}: header")
        records = container.tensors[name]
        crc = _list_crcs(container.metadata.get("lists", "{}")).get(name)
        kinds = _LISTS if f"{name}.checksums" in container.tensors else ("positions", "token_ids")
        lists = [container.tensors[f"{name}.{kind}"] for kind in kinds]
    except (KeyError, ValueError, TypeError) as e:
        if isinstance(e, WeirError):
            raise
        raise store.error(file, f"damaged: {name[:80]!r} is incomplete") from None
    n = lists[0].shape[0] if lists[0].shape else 0
    if site.layer < 0 or any(t.dtype != dtype or t.shape != (n,) for t, dtype in zip(lists, _LISTS.values())):
        raise store.error(file, f"damaged: the positions of {name[:80]!r} do not match its other tensors")
    dtype, shape, _ = tensor_layout(header, n)
    if (records.dtype, list(records.shape)) != (dtype, shape):
        raise store.error(
            file, f"damaged: {name[:80]!r} is {NAMES.get(records.dtype, records.dtype)} {list(records.shape)}, "
            f"its header says {NAMES[dtype]} {shape}",
        )  # fmt: skip
    parts = _read_lists(read, lists) if n else [b""] * len(lists)
    if any(len(part) != t.end - t.start for part, t in zip(parts, lists)):
        raise store.error(file, "truncated while it was read")
    if crc is not None and crc != zlib.crc32(b"".join(parts)):
        lists_of = f"positions, tokens or checksums of {name[:80]!r}"
        raise store.error(file, f"damaged: {lists_of} are not what was written; restore the file from a copy")
    positions, tokens = (np.frombuffer(part, "<i8").astype(np.int64) for part in parts[:2])
    sums = np.frombuffer(parts[2], "<u4") if len(parts) > 2 else None
    if n and (positions[0] < 0 or (np.diff(positions) <= 0).any()):
        raise store.error(file, f"damaged: the positions of {name[:80]!r} do not ascend")
    return StoredSite(site, records, positions, tokens, sums)
