"""Row views: the caller's side of a row sequence, rows of one sequence that share their columns."""

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


@dataclass
class Extent:
    """Ranks `rank`.. of a view, [capacity, columns, d_model], or as `RowSequenceView.shaped` says.

    Attributes:
        filled: ranks that it holds, once no more will come.
        own: whether it lives in memory of this process.
    """

    rank: int
    rows: torch.Tensor
    filled: int | None = None
    own: bool = False


@dataclass(frozen=True)
class SlicedRows:
    """Tensors of all columns of a view's first ranks, made before these are complete.

    Attributes:
        memory: the extent that they lie in.
        block: they themselves.
        first: the first rank's position; the others follow it without gaps.
        positions: int64 [ranks] of every site.
    """

    memory: torch.Tensor
    block: SiteSlices
    first: int
    positions: Mapping[Site, torch.Tensor]


class RowSequenceView:
    """Rows by rank, and which position each rank is.

    Attributes:
        kind, values: see `vllm_weir.messages.SequenceOpened`.
        rows: arena rows of a rank.
        rank_bytes: its bytes.
        request_id: the sequence that they belong to.
        ready: what has been cut ahead, see `cut`.
    """

    def __init__(self, opened: messages.SequenceOpened, mapped: MappedBuffer, d_model: int, dtype: torch.dtype) -> None:
        self.request_id = opened.request_id
        self.rank_bytes = opened.rank_bytes(d_model * dtype.itemsize)
        self._d_model, self._dtype = d_model, dtype
        self.kind, self.values, self.rows = opened.kind, opened.values, opened.rows
        self.order = tuple(opened.columns)
        self.columns = _places(self.order)
        self.mapped = mapped
        self.extents: list[Extent] = []
        self.dropped = np.zeros(0, np.int64)
        """Positions whose rows found no room in the worker."""
        self._parts: list[np.ndarray] = []
        self._positions = np.zeros(0, np.int64)
        self.ready: SlicedRows | None = None

    @property
    def positions(self) -> np.ndarray:
        """int64 [ranks that have arrived], ascending."""
        if self._parts:
            self._positions = np.concatenate([self._positions, *self._parts])
            self._parts.clear()
        return self._positions

    def mark(self, marks: np.ndarray) -> None:
        """Rows have arrived: int array [n, 4] of rank, position, count, stride, ranks ascending without gaps."""
        lost = marks[:, 0] < 0
        if lost.any():
            self.dropped = np.concatenate([self.dropped, spread(*marks[lost, 1:].T)])
            marks = marks[~lost]
        self._parts.append(spread(*marks[:, 1:].T))

    def take_out(self) -> list[tuple[Extent, torch.Tensor]]:
        """Extents that could live in memory of this process instead, with a copy of each."""
        out = []
        for extent in self.extents:
            if extent.filled is not None and not extent.own:
                out.append((extent, extent.rows[: extent.filled].clone()))
        return out

    def shaped(self, memory: torch.Tensor) -> torch.Tensor:
        """Bytes of whole ranks as [ranks, columns (or rows of a cell), d_model]; as [ranks, columns, values] if they
        are scores (float32) or packed (uint8)."""
        if self.kind == "packed":
            return memory.view(-1, len(self.order), self.values)
        if self.kind == "scores":
            return memory.view(torch.float32).view(-1, len(self.order), self.values)
        return memory.view(self._dtype).view(-1, self.rows, self._d_model)

    def gather(self, ranks: np.ndarray) -> torch.Tensor:
        """Rows [n, columns, d] at `ranks` (ascending, at least one); not copied if they follow each other in memory.

        What was made of rows is float32 [n, columns, values], compressed rows are uint8 [n, columns, values].
        """
        return self._made(self._gather(ranks))

    def cut(self, sites: Sequence[Site], first: int, count: int) -> None:
        """Make the tensors of `sites`, which are all columns, of the first `count` ranks, which will be positions from
        `first` on, though they may be empty yet; of a view that has no place for them, nothing is made."""
        if len(self.extents) == 1 and not self.extents[0].rank and 0 < count <= len(self.extents[0].rows):
            memory = self.extents[0].rows
            block = SiteSlices(sites, None, self._made(memory[:count]))
            block.every  # noqa: B018 - the first look makes them
            self.ready = SlicedRows(memory, block, first, dict.fromkeys(sites, torch.arange(first, first + count)))

    def block(self, sites: Sequence[Site], first: int, count: int) -> SiteSlices | None:
        """`count` ranks from `first` on as they were cut ahead; None if they were not, or have moved since."""
        cut = self._cut
        if cut is None or first or len(cut.block.rows) != count or tuple(cut.block) != tuple(sites):
            return None
        return cut.block

    def whole(self) -> SlicedRows | None:
        """What was cut ahead, if all of it is here, nothing is beyond it, and it has not moved since."""
        cut, at = self._cut, self.positions
        if cut is None or len(at) != len(cut.block.rows) or at[0] != cut.first or at[-1] - at[0] != len(at) - 1:
            return None
        return cut

    @property
    def _cut(self) -> SlicedRows | None:
        """What was cut ahead and lies there still."""
        cut = self.ready
        return cut if cut is not None and len(self.extents) == 1 and cut.memory is self.extents[0].rows else None

    def run(self, first: int, count: int) -> torch.Tensor:
        """As `gather`, `count` ranks from `first` on."""
        if len(self.extents) > 1:
            return self.gather(np.arange(first, first + count))
        (extent,) = self.extents
        return self._made(extent.rows[first - extent.rank : first - extent.rank + count])

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

    def _made(self, rows: torch.Tensor) -> torch.Tensor:
        """Whole ranks as what they hold."""
        if self.kind != "fold":
            return rows
        made = rows.reshape(len(rows), -1).view(torch.float32)[:, : len(self.order) * self.values]
        return made.unflatten(1, (len(self.order), self.values))


@functools.lru_cache(maxsize=256)
def _places(columns: tuple[int, ...]) -> Mapping[int, int]:
    """Column -> its place; many views have the same."""
    return {column: k for k, column in enumerate(columns)}


def spread(first: np.ndarray, count: np.ndarray, stride: np.ndarray) -> np.ndarray:
    """int64, the positions of runs [n], one run after the other."""
    if len(first) == 1:
        start, n, step = int(first[0]), int(count[0]), int(stride[0])
        return np.arange(start, start + n * step, step)
    if (count == 1).all():
        return first.astype(np.int64)
    run = np.arange(len(count)).repeat(count)
    within = np.arange(len(run)) - (count.cumsum() - count)[run]
    return first[run] + within * stride[run]
