"""Reductions: rows of a prompt that the taps themselves reduce to a mean or a maximum.

1. The chosen tokens among `GROUP` successive positions are a *group*. In a step, each tap joins the
   rows of a group, one after the other, into a *cell* per column: a float32 row in the ring.
2. A group that an earlier step began is seeded with what that step left (`TapReducer.seed`).
3. After the step, the groups of a sequence are joined in order with what earlier steps left
   (`TapReducer.settle`). If the prompt is complete, the result goes to the cells of the step's
   first group. If not, two things are kept for the next step: the join of the complete groups, and
   the last group.

So a result depends on positions alone: not on the batch, nor on how a prompt was cut into steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from vllm_weir.schema.rows import COMPLETE, CONTINUED
from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.columns import JOIN, as_integers


class TapReducer:
    """Joins what the taps left in the ring's cells, on CUDA on the current stream.

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
        """Row sequence -> its first row in `_kept`, and number of rows.

        These are a row per column for the complete groups, joined, and then one for the last group.
        """
        self._free: dict[int, list[int]] = {}
        """Number of rows -> places of that size that are free."""
        self._end = 0

    def seed(self, reductions: np.ndarray, start: int) -> None:
        """Put what earlier steps left of groups into their cells, before the taps run.

        Args:
            reductions: REDUCTION [n] of the step, see `vllm_weir.worker.planning.columns`.
            start: ring row where the step's rows begin.
        """
        continued = reductions[reductions["resumed"] == CONTINUED]
        if not len(continued):
            return
        columns = continued["columns"]
        kept = np.array([self._places[number][0] for number in continued["row_seq"].tolist()])
        reduction, column = _spread(columns)
        cells = (continued["cell"] + start // self.words)[reduction] + column
        device = self._cells.device
        last_groups = self._kept[upload((kept + columns)[reduction] + column, device)]
        self._cells[upload(cells, device)] = last_groups

    def settle(self, reductions: np.ndarray, start: int) -> None:
        """Join the groups after the taps ran; results are left in the first groups' cells. Arguments as in `seed`."""
        if not len(reductions):
            return
        numbers, done = reductions["row_seq"].tolist(), reductions["done"] != 0
        kept_from = np.array([self._places.get(number, (-1, 0))[0] for number in numbers])
        for k in np.flatnonzero(~done & (kept_from < 0)).tolist():
            self._allocate(numbers[k], 2 * int(reductions["columns"][k]))
        kept_to = np.array(
            [-1 if over else self._places[number][0] for number, over in zip(numbers, done.tolist(), strict=True)]
        )
        work = np.empty(len(reductions), JOIN)
        work["cell"] = reductions["cell"] + start // self.words
        work["kept_from"], work["kept_to"] = kept_from, kept_to
        for name in ("groups", "columns", "resumed", "count", "done", "maximum"):
            work[name] = reductions[name]
        join = _join_cuda if self._cells.is_cuda else _join
        join(work, self._cells, self._kept)
        self.forget(number for number, over in zip(numbers, done.tolist(), strict=True) if over)

    def forget(self, row_seqs: Iterable[int]) -> None:
        """Free what is kept of row sequences that have ended."""
        for number in row_seqs:
            if (place := self._places.pop(number, None)) is not None:
                self._free.setdefault(place[1], []).append(place[0])
        if not self._places:
            self._free.clear()
            self._end = 0

    def _allocate(self, number: int, rows: int) -> None:
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
    """Return, for ``sum(counts)`` items, which count each belongs to and its number within that."""
    owner = np.arange(len(counts)).repeat(counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


def _join(work: np.ndarray, cells: torch.Tensor, kept: torch.Tensor) -> None:
    """Join the groups of reductions, all columns at once, in place; `work` is JOIN [n]."""
    reduction, column = _spread(work["columns"])
    fields = as_integers(work)[reduction].T.astype(np.int64)
    cell, groups, columns, resumed, count, done, maximum, kept_from, kept_to = fields
    take_maximum = torch.from_numpy(maximum != 0)[:, None]

    def combine(so_far: torch.Tensor, rows: torch.Tensor, at: np.ndarray) -> torch.Tensor:
        return torch.where(take_maximum[at], torch.maximum(so_far, rows), so_far + rows)

    total = torch.zeros(len(reduction), cells.shape[1]).masked_fill_(take_maximum, float("-inf"))
    at = np.flatnonzero(kept_from >= 0)
    total[at] = kept[(kept_from + column)[at]]
    at = np.flatnonzero(resumed == COMPLETE)
    total[at] = combine(total[at], kept[(kept_from + columns + column)[at]], at)
    for k in range(int(groups.max())):
        at = np.flatnonzero(k < groups - 1 + done)
        total[at] = combine(total[at], cells[(cell + k * columns + column)[at]], at)
    at = np.flatnonzero(done)
    divisor = torch.from_numpy(np.where(maximum, 1, count)[at])[:, None].float()
    cells[(cell + column)[at]] = total[at] / divisor
    at = np.flatnonzero(done == 0)
    last_groups = cells[(cell + (groups - 1) * columns + column)[at]]
    kept[(kept_to + column)[at]] = total[at]
    kept[(kept_to + columns + column)[at]] = last_groups


def _join_cuda(work: np.ndarray, cells: torch.Tensor, kept: torch.Tensor) -> None:
    from vllm_weir.worker.tap.reduction_kernel import join

    join(upload(as_integers(work), cells.device), int(work["columns"].max()), cells, kept)
