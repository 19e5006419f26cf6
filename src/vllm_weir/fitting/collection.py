"""`FitTask`: what is fitted; and the fit of the rows of one hook point, here or on a worker."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.fitting.layer import Folds, LayerFit, fit_layer, split
from vllm_weir.fitting.methods import METHODS, MethodOptions


@dataclass(frozen=True)
class FitTask:
    """What is fitted, alike at every block and in every process.

    Attributes:
        method: name of the method.
        positive: number of positive prompts.
        negative: number of negative prompts.
        folds: how many are wanted.
        seed: of the folds, and of the method.
        strength: as in `MethodOptions`.
        columns: first and end of the part of a row that is fitted; None for all of it.
    """

    method: str
    positive: int
    negative: int
    folds: int = 5
    seed: int = 0
    strength: float = 1.0
    columns: Sequence[int] | None = None

    @functools.cached_property
    def parts(self) -> Folds:
        """The folds; prompts of lists of the same length are pairs."""
        paired = self.positive == self.negative
        return split(self.positive, self.negative, paired, self.folds, self.seed, METHODS[self.method].fewest)

    def to_wire(self) -> list[Any]:
        return list(astuple(self))


def fit_rows(rows: torch.Tensor, device: torch.device, layer: int, task: FitTask) -> LayerFit:
    """Fit rows [prompts, d] of one site, those of positive prompts first, on a device unless its memory is too small.

    Fits are computed from rows that are kept, not from sums that grow while rows arrive. Only the
    directions of ``"diff"`` could be: second moments [d, d] in float64 take more memory than rows
    do, up to 4 d prompts in bfloat16; logistic regressions pass over rows again and again; and the
    AUC needs products with directions that are known only once the last row is there. Rows are
    taken in the order of the prompts, so sums do not depend on the order of arrival. WeirError, which
    names the layer, if rows are not finite.
    """
    method, options = METHODS[task.method], MethodOptions(task.seed, task.strength)
    rows = rows if task.columns is None else rows[:, slice(*task.columns)]

    def fitted(on: torch.device) -> LayerFit:
        exact = rows.to(on).double()
        return fit_layer(exact[: task.positive], exact[task.positive :], method, task.parts, options)

    try:
        return fitted(device)
    except torch.OutOfMemoryError:
        return fitted(torch.device("cpu"))
    except WeirError as e:
        raise WeirError(f"block {layer}: {e.message}", e.field) from None


def fit_on_worker(rows: torch.Tensor, device: torch.device, layer: int, task: Sequence[Any]) -> list[Any]:
    """Do what `fit_rows` does, with a `FitTask` and a `LayerFit` in their wire forms."""
    return fit_rows(rows, device, layer, FitTask(*task)).to_wire()
