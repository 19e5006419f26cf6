"""Reductions: rows of a prompt that the taps themselves reduce.

A tap joins the rows of one *group*, the chosen tokens among `GROUP` positions, one after the other, and leaves the
result in *cells*, float32 rows in the ring, one for each column. At the end of the step the groups of a sequence are
joined in their order, to what earlier steps have left. So a reduction depends on positions alone: not on the batch, nor
on how a prompt was cut into steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from vllm_weir.schema.reductions import COMPLETE, CONTINUED
from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.columns import JOIN, as_integers


class TapReducer:
    """Joins what the taps have left in the ring's cells, on CUDA on the current stream.

    Args:
        ring: [rows, d_model].

    Attributes:
        words: ring rows of a cell.
    """

    def __init__(self, ring: torch.Tensor) -> None:
        self.words = 4 // ring.element_size()
        count, d_model = len(ring) // self.words, ring.shape[1]
        self._cells = ring[: count * self.words].view(-1).view(torch.float32).view(count, d_model)
        self._kept = torch.empty(0, d_model, dtype=torch.float32, device=ring.device)
        self._places: dict[int, tuple[int, int]] = {}
        """Row sequence -> first row in `_kept` of what there is of it, and rows: the groups that are complete,
        joined, and then the last one."""
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def seed(self, folds: np.ndarray, start: int) -> None:
        """Before the taps: put into the cells, from ring row `start` on, what earlier steps made of their groups."""
        some = folds[folds["resumed"] == CONTINUED]
        if not len(some):
            return
        columns, kept = some["columns"], np.array([self._places[n][0] for n in some["row_seq"].tolist()])
        of, column = _spread(columns)
        cells = (some["cell"] + start // self.words)[of] + column
        device = self._cells.device
        self._cells[upload(cells, device)] = self._kept[upload((kept + columns)[of] + column, device)]

    def settle(self, folds: np.ndarray, start: int) -> None:
        """After them: join the groups. The results are left in the first groups' cells."""
        if not len(folds):
            return
        numbers, done = folds["row_seq"].tolist(), folds["done"] != 0
        kept = np.array([self._places.get(number, (-1, 0))[0] for number in numbers])
        for k in np.flatnonzero(~done & (kept < 0)).tolist():
            self._keep(numbers[k], 2 * int(folds["columns"][k]))
        to = np.array([-1 if over else self._places[n][0] for n, over in zip(numbers, done.tolist(), strict=True)])
        work = np.empty(len(folds), JOIN)
        work["cell"], work["kept_from"], work["kept_to"] = folds["cell"] + start // self.words, kept, to
        for name in ("groups", "columns", "resumed", "count", "done", "maximum"):
            work[name] = folds[name]
        join = _join_cuda if self._cells.is_cuda else _join
        join(work, self._cells, self._kept)
        self.forget(n for n, over in zip(numbers, done.tolist(), strict=True) if over)

    def forget(self, row_seqs: Iterable[int]) -> None:
        """These have ended."""
        for number in row_seqs:
            if (place := self._places.pop(number, None)) is not None:
                self._free.setdefault(place[1], []).append(place[0])
        if not self._places:
            self._free.clear()
            self._end = 0

    def _keep(self, number: int, rows: int) -> None:
        free = self._free.get(rows)
        if free:
            self._places[number] = free.pop(), rows
            return
        self._places[number] = self._end, rows
        self._end += rows
        if self._end > len(self._kept):
            grown = self._kept.new_empty(2 * self._end, self._kept.shape[1])
            grown[: len(self._kept)] = self._kept
            self._kept = grown


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """0 as often as the first count says, then 1, ..; and each one's number among its like."""
    of = np.arange(len(counts)).repeat(counts)
    return of, np.arange(len(of)) - (counts.cumsum() - counts)[of]


def _join(work: np.ndarray, cells: torch.Tensor, kept: torch.Tensor) -> None:
    """Join groups as `work` says, JOIN [n]."""
    of, column = _spread(work["columns"])
    cell, groups, columns, resumed, count, done, largest, had, keeps = as_integers(work)[of].T.astype(np.int64)
    largest_here = torch.from_numpy(largest != 0)[:, None]

    def joined(so_far: torch.Tensor, rows: torch.Tensor, at: np.ndarray) -> torch.Tensor:
        return torch.where(largest_here[at], torch.maximum(so_far, rows), so_far + rows)

    total = torch.zeros(len(of), cells.shape[1]).masked_fill_(largest_here, float("-inf"))
    at = np.flatnonzero(had >= 0)
    total[at] = kept[(had + column)[at]]
    at = np.flatnonzero(resumed == COMPLETE)
    total[at] = joined(total[at], kept[(had + columns + column)[at]], at)
    for k in range(int(groups.max())):
        at = np.flatnonzero(k < groups - 1 + done)
        total[at] = joined(total[at], cells[(cell + k * columns + column)[at]], at)
    at = np.flatnonzero(done)
    cells[(cell + column)[at]] = total[at] / torch.from_numpy(np.where(largest, 1, count)[at])[:, None].float()
    at = np.flatnonzero(done == 0)
    last = cells[(cell + (groups - 1) * columns + column)[at]]
    kept[(keeps + column)[at]], kept[(keeps + columns + column)[at]] = total[at], last


def _join_cuda(work: np.ndarray, cells: torch.Tensor, kept: torch.Tensor) -> None:
    from vllm_weir.worker.tap.reduction_kernel import join

    join(upload(as_integers(work), cells.device), int(work["columns"].max()), cells, kept)
