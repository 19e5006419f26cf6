"""`Index`: what a dataset holds and where, as arrays; the same for every layout and foreign format."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.results.checksum import checksums
from vllm_weir.schema.hooks import HOOKS, Site
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import RecordBlock, check_inside

if TYPE_CHECKING:
    pass


@dataclass(eq=False)
class Index:
    """Runs of rows. Run i: `rows[i]` records of one site of one request, at ``offset[i] + j * stride[i]`` of a block.

    Attributes:
        layout: what was read.
        requests, sites, blocks: what the codes point to.
        metadata: JSON text for each request; empty for none.
        request, site, block: codes, int64 [runs].
        offset, stride, rows: int64 [runs].
        positions, token_ids: int64 [all rows], run by run; token -1 where unknown.
        checksums: uint32 [all rows], of their records.
        summed: bool [runs]; False for runs that were stored without checksums.
        incomplete: requests that were begun and not finished, and are left out.
        notes: what a reader should know (foreign formats).
        lossy: how rows were compressed with loss before, where the headers do not say it (foreign formats).
        store, files: where there are shards and manifests to compare, and their names (layout ``sharded``).
    """

    layout: str
    requests: list[str]
    sites: list[Site]
    blocks: list[RecordBlock]
    metadata: list[str]
    request: np.ndarray
    site: np.ndarray
    block: np.ndarray
    offset: np.ndarray
    stride: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    token_ids: np.ndarray
    checksums: np.ndarray
    summed: np.ndarray
    incomplete: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lossy: str = ""
    store: ObjectStore | None = None
    files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if {int(self.rows.sum()), len(self.token_ids), len(self.checksums)} != {len(self.positions)}:
            raise WeirError(f"the index of this {self.layout} dataset is damaged: its counts do not fit")
        for block, runs in self.by_block():
            check_inside(block, self.offset[runs], self.rows[runs], self.stride[runs])
        self.start = np.concatenate([[0], np.cumsum(self.rows)]).astype(np.int64)
        self.code = {request: i for i, request in enumerate(self.requests)}

    def describe(self, request: int) -> dict[str, Any]:
        """A request's metadata."""
        try:
            out = json.loads(self.metadata[request] or "{}")
        except ValueError:
            out = None
        if not isinstance(out, dict):
            what = f"the metadata of request {self.requests[request][:80]!r} are damaged"
            blocks = [self.blocks[code] for code in self.block[self.runs_of(request)][:1].tolist()]
            raise blocks[0].store.error(blocks[0].name, what) if blocks else WeirError(what)
        return out

    def by_block(self) -> Iterator[tuple[RecordBlock, np.ndarray]]:
        """The blocks, each with the runs that lie in it, int64 [its runs], ascending."""
        order = np.argsort(self.block, kind="stable")
        bounds = np.searchsorted(self.block[order], np.arange(len(self.blocks) + 1))
        for i, block in enumerate(self.blocks):
            yield block, order[bounds[i] : bounds[i + 1]]

    def runs_of(self, request: int) -> np.ndarray:
        """The runs of a request, int64 [its runs], ascending."""
        order, bounds = self._by_request
        return order[bounds[request] : bounds[request + 1]]

    @functools.cached_property
    def _by_request(self) -> tuple[np.ndarray, np.ndarray]:
        """The runs in the order of their requests, and where each request's begin: who reads request by request would
        else look through all of them every time."""
        order = np.argsort(self.request, kind="stable")
        return order, np.searchsorted(self.request[order], np.arange(len(self.requests) + 1))

    def expand(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All rows of some runs: (which run, index into `positions`), each int64 [rows]."""
        counts = self.rows[runs]
        which = np.repeat(runs, counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return which, self.start[which] + within

    def gather(self, which: np.ndarray, at: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Records of rows (as `expand` names them): block -> (which of the rows, uint8 [n, width]).

        Raises WeirError naming the file if one of them does not fit its checksum.
        """
        offsets = self.offsets(which, at)
        blocks = self.block[which]
        out = {}
        for block in np.unique(blocks).tolist():
            mine = np.flatnonzero(blocks == block)
            records = self.blocks[block].gather(offsets[mine])
            wrong = mine[self.misfits(which[mine], at[mine], records)]
            if len(wrong):
                raise self.damage(which[wrong], at[wrong])
            out[block] = (mine, records)
        return out

    def offsets(self, which: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Where in their blocks the records of rows (as `expand` names them) begin: int64 [rows]."""
        return self.offset[which] + (at - self.start[which]) * self.stride[which]

    def misfits(self, which: np.ndarray, at: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Which of these records, of rows of one block, do not fit their checksums: int64 [misfits], ascending."""
        summed = self.summed[which]
        if not summed.any():
            return np.zeros(0, np.int64)
        return np.flatnonzero((checksums(records) != self.checksums[at]) & summed)

    def damage(self, which: np.ndarray, at: np.ndarray) -> WeirError:
        """An error that names the file, and the first of some rows of one block that do not fit their checksums."""
        run, byte, position = int(which[0]), int(self.offsets(which[:1], at[:1])[0]), int(self.positions[at[0]])
        block, site = self.blocks[int(self.block[run])], self.sites[int(self.site[run])]
        request = self.requests[int(self.request[run])]
        row = f"the row at byte {byte} (position {position} of {site} of request {request[:80]!r})"
        wrong = f"and {len(at) - 1:,} more do not fit their checksums" if len(at) > 1 else "does not fit its checksum"
        return block.store.error(block.name, f"damaged: {row} {wrong}; restore the file from a copy")

    def uneven(self, which: np.ndarray, parts: Iterable[tuple[np.ndarray, int]]) -> WeirError:
        """An error about rows of one site of several widths. `parts`: (which of the rows, int64; their width)."""
        kinds: dict[int, set[int]] = {}
        for mine, width in parts:
            kinds.setdefault(width, set()).update(self.request[which[mine]].tolist())
        told = ", ".join(
            f"{width} ({self.requests[min(some)][:80]!r}{f' and {len(some) - 1:,} more' if len(some) > 1 else ''})"
            for width, some in sorted(kinds.items())
        )
        site = self.sites[int(self.site[which[0]])]
        return WeirError(
            f"rows of {site} differ in width between requests: {told}; read requests of one width at a time", "requests"
        )


class IndexBuilder:
    """Collects runs one by one, for formats that are read file by file."""

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

    def request(self, name: str, metadata: str = "") -> int:
        """The code of a request."""
        if name not in self.requests:
            self.requests[name] = len(self.requests)
            self.metadata.append(metadata)
        return self.requests[name]

    def block(self, block: RecordBlock) -> int:
        """The code of a new block."""
        self.blocks.append(block)
        return len(self.blocks) - 1

    def run(
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
        """A run of records; `stride` bytes apart, if not one after the other; `checksums`: uint32 [rows], if any."""
        code = self.sites.setdefault(site, len(self.sites))
        step = self.blocks[block].width if stride is None else stride
        self.runs.append((request, code, block, offset, step, len(positions), checksums is not None))
        self.positions.append(np.asarray(positions, np.int64))
        tokens = np.full(len(positions), -1, np.int64) if token_ids is None else np.asarray(token_ids, np.int64)
        self.token_ids.append(tokens)
        self.checksums.append(np.zeros(len(positions), np.uint32) if checksums is None else checksums)

    def build(self) -> Index:
        """The index."""
        table = np.array(self.runs, np.int64).reshape(-1, 7)
        none = [np.zeros(0, np.int64)]
        sites = sorted(self.sites, key=site_order)
        place = np.zeros(len(sites), np.int64)
        for new, site in enumerate(sites):
            place[self.sites[site]] = new
        return Index(
            self.layout, list(self.requests), sites, self.blocks, self.metadata, table[:, 0],
            place[table[:, 1]] if len(table) else table[:, 1], table[:, 2], table[:, 3], table[:, 4], table[:, 5],
            np.concatenate(self.positions or none), np.concatenate(self.token_ids or none),
            np.concatenate(self.checksums or none).astype(np.uint32, copy=False), table[:, 6] > 0, notes=self.notes,
            lossy=self.lossy,
        )  # fmt: skip


def site_order(site: Site) -> tuple[int, int]:
    """Sites sort by block and then by place in the block."""
    return site.layer, HOOKS.index(site.hook)


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """What to call requests that have a path each: its last part where that is enough to tell them apart."""
    every = set(paths)
    times = Counter(path.rpartition("/")[2] for path in every)
    return {path: last if times[last := path.rpartition("/")[2]] == 1 else path for path in every}


def text_field(data: Mapping[str, Any], name: str) -> str:
    """A string entry; raises KeyError or TypeError."""
    value = data[name]
    if not isinstance(value, str):
        raise TypeError(name)
    return value


PLAIN = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
