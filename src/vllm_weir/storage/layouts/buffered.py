"""Layouts in which a request's rows are written together: collected in memory until the request is finished."""

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
from vllm_weir.schema.compression import ITEMSIZE, Compression, header_bytes
from vllm_weir.schema.hooks import Site, normalise_hook
from vllm_weir.storage.atomic_file import AtomicFile
from vllm_weir.storage.batch import CheckedBatch
from vllm_weir.storage.index import site_order
from vllm_weir.storage.layouts.base import Writer
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import FETCH, JOIN
from vllm_weir.storage.safetensors_io import SafetensorsHeader, TensorEntry

_LISTS = {"positions": "I64", "token_ids": "I64", "checksums": "U32"}
"""What stands beside a site's records, a value a row; datasets of earlier versions have no checksums."""
Read: TypeAlias = Callable[[int, int], bytes]
_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}")
_SHORTENED = re.compile(r".*\.[0-9a-f]{16}")
"""What names of other requests look like."""


@dataclass(eq=False)
class SiteRows:
    """All rows of one site of one request, by position. `records`: uint8 [n, record_bytes]."""

    site: Site
    positions: np.ndarray
    token_ids: np.ndarray
    records: np.ndarray
    header: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.site.hook}.{self.site.layer}"


class BufferedWriter(Writer):
    """A writer that hands over whole requests.

    Args:
        buffer_bytes: most that unfinished and unpublished requests may take in memory together.
    """

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
        # A copy, because the caller's memory may be used again.
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
        """Every request is published as it finishes."""


def join_sites(parts: list[CheckedBatch]) -> list[SiteRows]:
    """Batches of one request, joined by site and sorted by position; those of a site have one header."""
    by_site: dict[Site, list[CheckedBatch]] = {}
    for part in parts:
        by_site.setdefault(part.site, []).append(part)
    out = []
    for site in sorted(by_site, key=site_order):
        some = by_site[site]
        positions = np.concatenate([p.positions for p in some])
        order = np.argsort(positions, kind="stable")
        tokens, records = (np.concatenate([getattr(p, name) for p in some]) for name in ("token_ids", "records"))
        out.append(SiteRows(site, positions[order], tokens[order], records[order], json.loads(some[0].header)))
    return out


def safe_name(request_id: str) -> str:
    """A file name for a request, different for different requests; the id itself where that can be."""
    if _SAFE.fullmatch(request_id) and not _SHORTENED.fullmatch(request_id):
        return request_id
    digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', request_id)[:60]}.{digest}"


def tensor_layout(header: dict[str, Any], rows: int) -> tuple[str, list[int], int]:
    """How records are stored as a safetensors tensor: (dtype code, shape, bytes); plain rows keep their dtype."""
    width, fields = header_bytes(header), header["fields"]
    kind = fields[0]["dtype"]
    if len(fields) == 1 and kind in CODES:
        return CODES[kind], [rows, width // ITEMSIZE[kind]], rows * width
    return "U8", [rows, width], rows * width


def site_tensors(sites: list[SiteRows], prefix: str = "") -> dict[str, tuple[tuple[str, list[int], int], np.ndarray]]:
    """Tensors of a request, by name, as (layout, data)."""
    out: dict[str, tuple[tuple[str, list[int], int], np.ndarray]] = {}
    for s in sites:
        out[prefix + s.name] = (tensor_layout(s.header, len(s.positions)), s.records)
        lists = (s.positions.astype("<i8"), s.token_ids.astype("<i8"), checksums(s.records).astype("<u4"))
        for (name, dtype), values in zip(_LISTS.items(), lists):
            out[f"{prefix}{s.name}.{name}"] = ((dtype, [len(values)], values.nbytes), values)
    return out


def publish_tensors(
    store: ObjectStore,
    name: str,
    tensors: dict[str, tuple[tuple[str, list[int], int], np.ndarray]],
    metadata: dict[str, str],
    spool: AtomicFile | None = None,
) -> None:
    """Publish a safetensors file of what `site_tensors` gives; after an error nothing of it is left.

    `spool`: the file in the making, empty, if there is one.
    """
    crc: dict[str, int] = {}
    for key, (_, data) in tensors.items():
        site, _, kind = key.rpartition(".")
        if kind in _LISTS:
            crc[site] = zlib.crc32(data.data if data.size else b"", crc.get(site, 0))
    metadata = {**metadata, "lists": json.dumps(crc)}
    spool = store.new_file(name) if spool is None else spool
    try:
        spool.write(build_header({key: layout for key, (layout, _) in tensors.items()}, metadata))
        for _, data in tensors.values():
            if data.size:  # a site without rows has no bytes
                spool.write(data.data)
        spool.publish()
    except Exception:
        spool.discard()
        raise


@functools.lru_cache(maxsize=1)
def _list_crcs(text: str) -> dict[str, int]:
    """Metadata ``lists``: by site the CRC-32 of what stands beside its records. A pack's sites share one text."""
    return dict(json.loads(text))


def reader_of(store: ObjectStore, file: str, container: SafetensorsHeader) -> Read:
    """Reads the file from one byte up to another, where something stands beside rows. Of a remote file all of that is
    fetched at once: a request for each site would take as long as many rows."""
    if store.local:
        return functools.partial(store.read, file)
    starts: list[int] = []
    ends: list[int] = []
    beside = [t for name, t in container.tensors.items() if name.rpartition(".")[2] in _LISTS]
    for start, end in sorted((t.start, t.end) for t in beside if t.end > t.start):
        if starts and start - ends[-1] <= JOIN and end - starts[-1] <= FETCH:
            ends[-1] = end
        else:
            starts.append(start)
            ends.append(end)
    parts = store.read_ranges(file, starts, ends) if starts else []

    def read(start: int, end: int) -> bytes:
        i = bisect.bisect_right(starts, start) - 1
        return parts[i][start - starts[i] : end - starts[i]]

    return read


def _read_lists(read: Read, lists: list[TensorEntry]) -> list[bytes]:
    """The bytes of some tensors: one read where they lie side by side."""
    if any(a.end != b.start for a, b in itertools.pairwise(lists)):
        return [read(t.start, t.end) for t in lists]
    first = lists[0].start
    data = read(first, lists[-1].end)
    return [data[t.start - first : t.end - first] for t in lists]


def read_site(
    store: ObjectStore, file: str, container: SafetensorsHeader, name: str, header: dict[str, Any], read: Read
) -> tuple[Site, TensorEntry, np.ndarray, np.ndarray, np.ndarray | None]:
    """(site, place of the records, positions, token ids, checksums if there are) of one site's tensors, checked.

    `read`: of `reader_of`.
    """
    try:
        hook, _, layer = name.rpartition("/")[2].rpartition(".")
        site = Site(normalise_hook(hook, f"{store.describe(file)}: hook"), int(layer))
        Compression.from_header(header, f"{store.describe(file)}: header")
        place = container.tensors[name]
        crc = _list_crcs(container.metadata.get("lists", "{}")).get(name)
        kinds = _LISTS if f"{name}.checksums" in container.tensors else ("positions", "token_ids")
        lists = [container.tensors[f"{name}.{kind}"] for kind in kinds]
    except (KeyError, ValueError, TypeError) as e:
        if isinstance(e, WeirError):
            raise
        raise store.error(file, f"damaged: {name[:80]!r} is incomplete") from None
    n = lists[0].shape[0] if lists[0].shape else 0
    if site.layer < 0 or any(t.dtype != dtype or t.shape != (n,) for t, dtype in zip(lists, _LISTS.values())):
        raise store.error(file, f"damaged: the positions of {name[:80]!r} do not fit")
    dtype, shape, _ = tensor_layout(header, n)
    if (place.dtype, list(place.shape)) != (dtype, shape):
        raise store.error(
            file, f"damaged: {name[:80]!r} is {NAMES.get(place.dtype, place.dtype)} {list(place.shape)}, "
            f"its header says {NAMES[dtype]} {shape}",
        )  # fmt: skip
    parts = _read_lists(read, lists) if n else [b""] * len(lists)
    if any(len(part) != t.end - t.start for part, t in zip(parts, lists)):
        raise store.error(file, "truncated while it was read")
    if crc is not None and crc != zlib.crc32(b"".join(parts)):
        what = f"positions, tokens or checksums of {name[:80]!r}"
        raise store.error(file, f"damaged: {what} are not what was written; restore the file from a copy")
    positions, tokens = (np.frombuffer(part, "<i8").astype(np.int64) for part in parts[:2])
    sums = np.frombuffer(parts[2], "<u4") if len(parts) > 2 else None
    if n and (positions[0] < 0 or (np.diff(positions) <= 0).any()):
        raise store.error(file, f"damaged: the positions of {name[:80]!r} do not ascend")
    return site, place, positions, tokens, sums
