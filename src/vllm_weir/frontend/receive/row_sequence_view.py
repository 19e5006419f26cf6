"""The caller's side of a row sequence: rows of one request that share their columns."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.results.site_slices import SiteSlices
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import RowShard


@dataclass
class Extent:
    """A piece of memory that holds consecutive ranks of a view.

    Attributes:
        rank: the first one.
        rows: the memory, [capacity, columns, d_model], or as `RowSequenceView.shaped` says.
        filled: ranks that it holds, once no more will come.
        own: whether it is memory of this process.
    """

    rank: int
    rows: torch.Tensor
    filled: int | None = None
    own: bool = False


@dataclass(frozen=True)
class SlicedRows:
    """Tensors of all columns of a view's first ranks, made before the rows have arrived.

    Attributes:
        memory: the extent that they lie in.
        block: the tensors.
        first: the first rank's position; the others follow it without gaps.
        positions: int64 [ranks] of every site.
    """

    memory: torch.Tensor
    block: SiteSlices
    first: int
    positions: Mapping[Site, torch.Tensor]


class RowSequenceView:
    """Rows by rank (their order of arrival), and the position of each rank.

    Attributes:
        request_id: the sequence that they belong to.
        kind, values: see `vllm_weir.messages.SequenceOpened`.
        rows: arena rows of a rank.
        rank_bytes: bytes of a rank.
        columns: the columns of a rank, in order.
        column_index: column -> its place in `columns`.
        dropped: positions whose rows found no room in the worker.
        presliced: tensors that were made before their rows arrived, see `preslice`.
    """

    def __init__(self, opened: messages.SequenceOpened, mapped: MappedBuffer, d_model: int, dtype: torch.dtype) -> None:
        self.request_id = opened.request_id
        self.rank_bytes = opened.rank_bytes(d_model * dtype.itemsize)
        self._d_model, self._dtype = d_model, dtype
        self.kind, self.values, self.rows = opened.kind, opened.values, opened.rows
        self.columns = tuple(opened.columns)
        self.column_index = _column_index(self.columns)
        self.mapped = mapped
        self.extents: list[Extent] = []
        self.dropped = np.zeros(0, np.int64)
        self._new_positions: list[np.ndarray] = []
        self._positions = np.zeros(0, np.int64)
        self._next_rank = 0
        self._ranks: list[np.ndarray] | None = None
        """Ranks of `positions`; None while they are 0, 1, ..."""
        self.presliced: SlicedRows | None = None

    @property
    def positions(self) -> np.ndarray:
        """int64 [ranks that have arrived], ascending."""
        if self._new_positions:
            self._positions = np.concatenate([self._positions, *self._new_positions])
            self._new_positions.clear()
        return self._positions

    def record(self, arrivals: np.ndarray) -> None:
        """Note rows that have arrived.

        Args:
            arrivals: int [n, 4] of rank, position, count, stride; ranks ascend, and are -1 for
                rows that the worker has dropped. Ranks of rejected drafts are left out.
        """
        lost = arrivals[:, 0] < 0
        if lost.any():
            self.dropped = np.concatenate([self.dropped, expand_runs(*arrivals[lost, 1:].T)])
            arrivals = arrivals[~lost]
        self._record_ranks(arrivals[:, 0], arrivals[:, 2])
        self._new_positions.append(expand_runs(*arrivals[:, 1:].T))

    def forget_from(self, position: int) -> None:
        """Forget the rows of a position and all later ones, after which none arrive any more."""
        left = int(np.searchsorted(self.positions, position))
        if self._ranks is not None:
            self._ranks = [np.concatenate(self._ranks)[:left]]
        self._positions, self.dropped = self.positions[:left], self.dropped[self.dropped < position]

    def _record_ranks(self, first: np.ndarray, count: np.ndarray) -> None:
        """Note the ranks that have arrived, int [n]: `count` each, from `first` on."""
        if not len(first):
            return
        ends = first + count
        if self._ranks is None and (int(first[0]) != self._next_rank or (first[1:] != ends[:-1]).any()):
            self._ranks = [np.arange(self._next_rank)]
        self._next_rank = int(ends[-1])
        if self._ranks is not None:
            self._ranks.append(expand_runs(first, count, np.ones_like(first)))

    @property
    def has_gaps(self) -> bool:
        """Whether ranks were left out."""
        return self._ranks is not None

    def ranks(self, indices: np.ndarray) -> np.ndarray:
        """Return the ranks of ``positions[indices]``."""
        if self._ranks is None:
            return indices
        if len(self._ranks) > 1:
            self._ranks = [np.concatenate(self._ranks)]
        return self._ranks[0][indices]

    def copies_of_filled_extents(self) -> list[tuple[Extent, torch.Tensor]]:
        """Return the extents that can move to memory of this process, with a copy of each."""
        return [
            (extent, extent.rows[: extent.filled].clone())
            for extent in self.extents
            if extent.filled is not None and not extent.own
        ]

    def shaped(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the bytes of whole ranks as a tensor of their shape and dtype.

        That is [ranks, columns, d_model] for rows, [ranks, columns, values] for scores (float32)
        and compressed rows and read-outs (uint8), and [ranks, arena rows of a cell, d_model] for reductions.
        """
        if self.kind in ("packed", "read_outs", "rows_read"):
            return memory.view(-1, len(self.columns), self.values)
        if self.kind == "scores":
            return memory.view(torch.float32).view(-1, len(self.columns), self.values)
        return memory.view(self._dtype).view(-1, self.rows, self._d_model)

    def gives(self, kind: str) -> bool:
        """Return whether `gather` can return this kind."""
        return kind == self.kind or (self.kind == "rows_read" and kind in ("rows", "read_outs"))

    def gather(self, ranks: np.ndarray, kind: str) -> torch.Tensor:
        """Return the rows at `ranks`, ascending, not copied if they follow each other in memory.

        They are [n, columns, d_model]; for scores and reductions float32 [n, columns, values], for
        compressed rows and read-outs uint8 [n, columns, values]. `kind`: which of these, see `gives`.
        """
        return self._part_of(self._gather(ranks), kind)

    def gather_run(self, first: int, count: int, kind: str) -> torch.Tensor:
        """Return `count` ranks from `first` on, as `gather` does."""
        if len(self.extents) > 1:
            return self.gather(np.arange(first, first + count), kind)
        (extent,) = self.extents
        return self._part_of(extent.rows[first - extent.rank : first - extent.rank + count], kind)

    def preslice(self, sites: Sequence[Site | RowShard], first: int, count: int) -> None:
        """Make tensors of the first `count` ranks, arrived or not, if they have a place.

        `sites` are of all columns, in order; the first rank's position is `first`, and others follow without gaps.
        """
        if len(self.extents) == 1 and not self.extents[0].rank and 0 < count <= len(self.extents[0].rows):
            memory = self.extents[0].rows
            block = SiteSlices(sites, None, self._part_of(memory[:count], self.kind))
            block.every  # noqa: B018 - the first look makes them
            at = torch.arange(first, first + count)
            self.presliced = SlicedRows(memory, block, first, {site: at for site in sites if isinstance(site, Site)})

    def presliced_run(self, sites: Sequence[Site | RowShard], first: int, count: int) -> SiteSlices | None:
        """Return `count` ranks from `first` on if they were presliced and have not moved."""
        sliced = self._valid_preslice
        if sliced is None or first or len(sliced.block.rows) != count or tuple(sliced.block) != tuple(sites):
            return None
        return sliced.block

    def complete_preslice(self) -> SlicedRows | None:
        """Return what was presliced if exactly that has arrived and it has not moved."""
        sliced, positions = self._valid_preslice, self.positions
        if sliced is None or self.has_gaps or len(positions) != len(sliced.block.rows):
            return None
        if positions[0] != sliced.first or positions[-1] - positions[0] != len(positions) - 1:
            return None
        return sliced

    @property
    def _valid_preslice(self) -> SlicedRows | None:
        """What was presliced, if its rows have not moved."""
        sliced = self.presliced
        if sliced is None or len(self.extents) != 1 or sliced.memory is not self.extents[0].rows:
            return None
        return sliced

    def _gather(self, ranks: np.ndarray) -> torch.Tensor:
        pieces = []
        for k, extent in enumerate(self.extents):
            end = self.extents[k + 1].rank if k + 1 < len(self.extents) else int(ranks[-1]) + 1
            low, high = np.searchsorted(ranks, (extent.rank, end)) if len(self.extents) > 1 else (0, len(ranks))
            if low == high:
                continue
            first, last = int(ranks[low]) - extent.rank, int(ranks[high - 1]) - extent.rank
            if last - first == high - low - 1:
                pieces.append(extent.rows[first : last + 1])
            else:
                pieces.append(extent.rows[torch.from_numpy(ranks[low:high] - extent.rank)])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _part_of(self, ranks: torch.Tensor, kind: str) -> torch.Tensor:
        """Return of whole ranks the rows, if only these are wanted, or all but a reduction's padding."""
        if kind != self.kind and kind == "rows":
            return ranks[..., : self._d_model * self._dtype.itemsize].view(self._dtype)
        if self.kind != "fold":
            return ranks
        values = ranks.reshape(len(ranks), -1).view(torch.float32)[:, : len(self.columns) * self.values]
        return values.unflatten(1, (len(self.columns), self.values))


@functools.lru_cache(maxsize=256)
def _column_index(columns: tuple[int, ...]) -> Mapping[int, int]:
    """Column -> its first place; cached, since many views have the same columns."""
    return {column: k for k, column in reversed(list(enumerate(columns)))}


def expand_runs(first: np.ndarray, count: np.ndarray, stride: np.ndarray) -> np.ndarray:
    """Return the positions of runs, int64, one run after the other; each argument is int [n]."""
    if len(first) == 1:
        start, n, step = int(first[0]), int(count[0]), int(stride[0])
        return np.arange(start, start + n * step, step)
    if (count == 1).all():
        return first.astype(np.int64)
    run = np.arange(len(count)).repeat(count)
    within = np.arange(len(run)) - (count.cumsum() - count)[run]
    return first[run] + within * stride[run]
