"""Strips: the caller's side of a strand, rows of one sequence that share their columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.frontend.mirror import Mirror


@dataclass
class Extent:
    """Ranks `rank`.. of a strip, [columns, capacity, d_model].

    Attributes:
        filled: ranks that it holds, once no more will come.
        own: whether it lives in memory of this process.
    """

    rank: int
    rows: torch.Tensor
    filled: int | None = None
    own: bool = False


class Strip:
    """Rows by rank, and which position each rank is."""

    def __init__(self, columns: list[int], mirror: Mirror) -> None:
        self.columns = {column: k for k, column in enumerate(columns)}
        self.mirror = mirror
        self.extents: list[Extent] = []
        self.dropped = np.zeros(0, np.int64)
        """Positions whose rows found no room in the worker."""
        self._parts: list[np.ndarray] = []
        self._positions = np.zeros(0, np.int64)

    @property
    def positions(self) -> np.ndarray:
        """int64 [ranks that have arrived], ascending."""
        if self._parts:
            self._positions = np.concatenate([self._positions, *self._parts])
            self._parts.clear()
        return self._positions

    def mark(self, marks: np.ndarray) -> None:
        """Rows have arrived: int array [n, 4] of rank, position, count, stride, ranks ascending without gaps."""
        if (marks[:, 2] == 1).all() and (marks[:, 0] >= 0).all():
            self._parts.append(marks[:, 1].astype(np.int64))
            return
        for rank, position, count, stride in marks.tolist():
            run = np.arange(position, position + count * stride, stride)
            if rank < 0:
                self.dropped = np.concatenate([self.dropped, run])
            else:
                self._parts.append(run)

    def take_out(self) -> list[tuple[Extent, torch.Tensor]]:
        """Extents that could live in memory of this process instead, with a copy of each."""
        out = []
        for extent in self.extents:
            if extent.filled is not None and not extent.own:
                out.append((extent, extent.rows[:, : extent.filled].clone()))
        return out

    def gather(self, column: int, ranks: np.ndarray) -> list[torch.Tensor]:
        """Rows of a column at ascending `ranks`, in pieces [n, d]; without a copy where ranks follow each other."""
        pieces = []
        k = self.columns[column]
        for n, extent in enumerate(self.extents):
            end = self.extents[n + 1].rank if n + 1 < len(self.extents) else np.iinfo(np.int64).max
            low, high = np.searchsorted(ranks, (extent.rank, end))
            if low == high:
                continue
            some = ranks[low:high] - extent.rank
            if some[-1] - some[0] == len(some) - 1:
                pieces.append(extent.rows[k, int(some[0]) : int(some[-1]) + 1])
            else:
                pieces.append(extent.rows[k, torch.from_numpy(some)])
        return pieces
