"""`Index`: what a dataset contains and where it is stored, the same for every format."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.results.checksum import checksums
from vllm_weir.schema.compression import STORED_DTYPES, shape_text
from vllm_weir.schema.hooks import HOOKS, Site
from vllm_weir.schema.rows import RowShape
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import RecordBlock, check_inside

UNCOMPRESSED_DTYPES = {name: getattr(torch, name) for name in STORED_DTYPES}
"""Dtypes of uncompressed rows, by their names in headers."""


@dataclass(eq=False)
class Index:
    """The rows of a dataset, in runs.

    A *run* is consecutive records of one site of one request in one block. Record j of run i begins
    at ``run_offset[i] + j * run_stride[i]`` of its block. Requests, sites and blocks are named by
    *codes*, their places in `requests`, `sites` and `blocks`. A row is named by its run and its
    *row id*, its place in `positions`, `token_ids` and `checksums`.

    Attributes:
        layout: What was read.
        requests, sites, blocks: What the codes stand for.
        metadata: JSON text of each request; empty for none.
        run_request, run_site, run_block: Codes, int64 [runs].
        run_offset, run_stride, run_rows: int64 [runs].
        positions, token_ids: int64 [rows], run by run; token id -1 where it is unknown.
        checksums: uint32 [rows], of the records.
        run_has_checksums: bool [runs]; False for runs that were stored without checksums.
        incomplete: Requests that were begun and not finished, and are left out.
        notes: What a user should know about the data (foreign formats).
        lossy: How rows were compressed before, where the headers do not say it (foreign formats).
        store, files: Names of shards and manifests that can be compared, and their store (layout
            ``sharded``).
        run_start: Row id of each run's first row, int64 [runs + 1].
        request_codes: Request -> code.
    """

    layout: str
    requests: list[str]
    sites: list[Site]
    blocks: list[RecordBlock]
    metadata: list[str]
    run_request: np.ndarray
    run_site: np.ndarray
    run_block: np.ndarray
    run_offset: np.ndarray
    run_stride: np.ndarray
    run_rows: np.ndarray
    positions: np.ndarray
    token_ids: np.ndarray
    checksums: np.ndarray
    run_has_checksums: np.ndarray
    incomplete: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lossy: str = ""
    store: ObjectStore | None = None
    files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if {int(self.run_rows.sum()), len(self.token_ids), len(self.checksums)} != {len(self.positions)}:
            raise WeirError(f"the index of this {self.layout} dataset is damaged: its counts do not match")
        for block, runs in self.by_block():
            check_inside(block, self.run_offset[runs], self.run_rows[runs], self.run_stride[runs])
        self.run_start = np.concatenate([[0], np.cumsum(self.run_rows)]).astype(np.int64)
        self.request_codes = {request: code for code, request in enumerate(self.requests)}

    def request_metadata(self, request: int) -> dict[str, Any]:
        """Return the metadata of a request, by its code."""
        try:
            metadata = json.loads(self.metadata[request] or "{}")
        except ValueError:
            metadata = None
        if not isinstance(metadata, dict):
            message = f"the metadata of request {self.requests[request][:80]!r} is damaged"
            blocks = [self.blocks[code] for code in self.run_block[self.runs_of(request)][:1].tolist()]
            raise blocks[0].store.error(blocks[0].name, message) if blocks else WeirError(message)
        return metadata

    def by_block(self) -> Iterator[tuple[RecordBlock, np.ndarray]]:
        """Yield each block with the runs in it, int64 [its runs], ascending."""
        order = np.argsort(self.run_block, kind="stable")
        bounds = np.searchsorted(self.run_block[order], np.arange(len(self.blocks) + 1))
        for i, block in enumerate(self.blocks):
            yield block, order[bounds[i] : bounds[i + 1]]

    def runs_of(self, request: int) -> np.ndarray:
        order, bounds = self._runs_by_request
        return order[bounds[request] : bounds[request + 1]]

    @functools.cached_property
    def _runs_by_request(self) -> tuple[np.ndarray, np.ndarray]:
        """The runs sorted by request, and where those of each request begin."""
        order = np.argsort(self.run_request, kind="stable")
        return order, np.searchsorted(self.run_request[order], np.arange(len(self.requests) + 1))

    def expand(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of some runs: the run of each and its row id, each int64 [rows]."""
        counts = self.run_rows[runs]
        row_runs = np.repeat(runs, counts)
        within_run = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return row_runs, self.run_start[row_runs] + within_run

    def gather(self, row_runs: np.ndarray, row_ids: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Read the records of rows: block -> (indices into the rows, records uint8 [n, width])."""
        offsets = self.offsets(row_runs, row_ids)
        row_blocks = self.run_block[row_runs]
        by_block = {}
        for block in np.unique(row_blocks).tolist():
            chosen = np.flatnonzero(row_blocks == block)
            records = self.blocks[block].gather(offsets[chosen])
            wrong = chosen[self.mismatches(row_runs[chosen], row_ids[chosen], records)]
            if len(wrong):
                raise self.damage_error(row_runs[wrong], row_ids[wrong])
            by_block[block] = (chosen, records)
        return by_block

    def offsets(self, row_runs: np.ndarray, row_ids: np.ndarray) -> np.ndarray:
        """Return where the records of rows begin in their blocks: int64 [rows]."""
        return self.run_offset[row_runs] + (row_ids - self.run_start[row_runs]) * self.run_stride[row_runs]

    def mismatches(self, row_runs: np.ndarray, row_ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Return which rows of one block do not match their checksums: int64, ascending."""
        has_checksum = self.run_has_checksums[row_runs]
        if not has_checksum.any():
            return np.zeros(0, np.int64)
        return np.flatnonzero((checksums(records) != self.checksums[row_ids]) & has_checksum)

    def damage_error(self, row_runs: np.ndarray, row_ids: np.ndarray) -> WeirError:
        """Return an error that names the file and the first of some damaged rows of one block."""
        run, position = int(row_runs[0]), int(self.positions[row_ids[0]])
        offset = int(self.offsets(row_runs[:1], row_ids[:1])[0])
        block, site = self.blocks[int(self.run_block[run])], self.sites[int(self.run_site[run])]
        request = self.requests[int(self.run_request[run])]
        row = f"the row at byte {offset} (position {position} of {site} of request {request[:80]!r})"
        if len(row_ids) > 1:
            damage = f"{row} and {len(row_ids) - 1:,} more do not match their checksums"
        else:
            damage = f"{row} does not match its checksum"
        return block.store.error(block.name, f"damaged: {damage}; restore the file from a copy")

    def width_error(self, row_runs: np.ndarray, parts: Iterable[tuple[np.ndarray, RowShape]]) -> WeirError:
        """Return an error about rows of one site that differ in shape.

        `row_runs` are the runs of the rows; `parts` has indices into the rows, int64, and their shape.
        """
        requests_by_shape: dict[RowShape, set[int]] = {}
        for chosen, shape in parts:
            requests_by_shape.setdefault(shape, set()).update(self.run_request[row_runs[chosen]].tolist())
        listed = []
        for shape, requests in sorted(requests_by_shape.items()):
            more = f" and {len(requests) - 1:,} more" if len(requests) > 1 else ""
            listed.append(f"{shape_text(shape)} ({self.requests[min(requests)][:80]!r}{more})")
        site = self.sites[int(self.run_site[row_runs[0]])]
        return WeirError(
            f"rows of {site} differ in width between requests: {', '.join(listed)}; read requests of one width at a "
            "time",
            "requests",
        )


class IndexBuilder:
    """Builds an `Index` run by run, for formats that are read file by file."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.requests: dict[str, int] = {}
        self.metadata: list[str] = []
        self.sites: dict[Site, int] = {}
        self.blocks: list[RecordBlock] = []
        self.runs: list[tuple[int, ...]] = []
        self.positions: list[np.ndarray] = []
        self.token_ids: list[np.ndarray] = []
        self.checksums: list[np.ndarray] = []
        self.notes: list[str] = []
        self.lossy = ""

    def add_request(self, name: str, metadata: str = "") -> int:
        if name not in self.requests:
            self.requests[name] = len(self.requests)
            self.metadata.append(metadata)
        return self.requests[name]

    def add_block(self, block: RecordBlock) -> int:
        self.blocks.append(block)
        return len(self.blocks) - 1

    def add_run(
        self,
        request: int,
        site: Site,
        block: int,
        offset: int,
        positions: np.ndarray,
        token_ids: np.ndarray | None = None,
        stride: int | None = None,
        checksums: np.ndarray | None = None,
    ) -> None:
        """Add a run of records, from byte `offset` of a block on; request and block are given by their codes.

        `positions` and `token_ids` (None if unknown) are int64 [rows]; `stride` is in bytes, None for records
        that follow each other; `checksums` are uint32 [rows].
        """
        site_code = self.sites.setdefault(site, len(self.sites))
        if stride is None:
            stride = self.blocks[block].width
        self.runs.append((request, site_code, block, offset, stride, len(positions), checksums is not None))
        self.positions.append(np.asarray(positions, np.int64))
        tokens = np.full(len(positions), -1, np.int64) if token_ids is None else np.asarray(token_ids, np.int64)
        self.token_ids.append(tokens)
        self.checksums.append(np.zeros(len(positions), np.uint32) if checksums is None else checksums)

    def build(self) -> Index:
        """Return the index, its sites sorted."""
        columns = np.array(self.runs, np.int64).reshape(-1, 7).T
        request, site, block, offset, stride, rows, has_checksums = columns
        sites = sorted(self.sites, key=site_order)
        new_site_codes = np.zeros(len(sites), np.int64)
        for code, one in enumerate(sites):
            new_site_codes[self.sites[one]] = code
        nothing = [np.zeros(0, np.int64)]
        return Index(
            layout=self.layout,
            requests=list(self.requests),
            sites=sites,
            blocks=self.blocks,
            metadata=self.metadata,
            run_request=request,
            run_site=new_site_codes[site],
            run_block=block,
            run_offset=offset,
            run_stride=stride,
            run_rows=rows,
            positions=np.concatenate(self.positions or nothing),
            token_ids=np.concatenate(self.token_ids or nothing),
            checksums=np.concatenate(self.checksums or nothing).astype(np.uint32, copy=False),
            run_has_checksums=has_checksums > 0,
            notes=self.notes,
            lossy=self.lossy,
        )


def site_order(site: Site) -> tuple[int, int]:
    """Return the key that sorts sites by block, and then by their place in the block."""
    return site.layer, HOOKS.index(site.hook)


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Shorten paths to their last parts, where these tell them apart; return path -> name."""
    distinct = set(paths)
    counts = Counter(path.rpartition("/")[2] for path in distinct)
    return {path: last if counts[last := path.rpartition("/")[2]] == 1 else path for path in distinct}


def text_field(data: Mapping[str, Any], name: str) -> str:
    value = data[name]
    if not isinstance(value, str):
        raise TypeError(name)
    return value
