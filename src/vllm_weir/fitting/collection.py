"""Rows of prompts, of which sums and products with directions are all that is handed out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.fitting.folds import Folds, split
from vllm_weir.fitting.layer import LayerFit, fit_layer
from vllm_weir.fitting.methods import METHODS, MethodOptions
from vllm_weir.schema.hooks import Site


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
    """

    method: str
    positive: int
    negative: int
    folds: int = 5
    seed: int = 0
    strength: float = 1.0

    @functools.cached_property
    def parts(self) -> Folds:
        """The folds; prompts of lists of the same length are pairs."""
        paired = self.positive == self.negative
        return split(self.positive, self.negative, paired, self.folds, self.seed, METHODS[self.method].fewest)

    def to_wire(self) -> list[Any]:
        """Return the form in which workers get it."""
        return list(astuple(self))


class RowCollection:
    """One row of each prompt at each of several sites, all of one width.

    Fits are computed from rows that are kept, not from sums that grow while rows arrive. Only the
    directions of ``"diff"`` could be: second moments [d, d] in float64 take more memory than rows
    do, up to 4 d prompts in bfloat16; logistic regressions pass over rows again and again; and the
    AUC needs products with directions that are known only once the last row is there. Rows are
    taken in the order of the prompts, so sums do not depend on the order of arrival.

    Args:
        sites: of the rows.
        device: where fits are computed. Rows wait in host memory.
    """

    def __init__(self, sites: Sequence[Site], device: torch.device) -> None:
        self.sites, self._device = tuple(sites), device
        self._rows: dict[str, torch.Tensor] = {}
        self.failures: dict[str, str] = {}
        """Name of a prompt -> why it has no rows."""

    def put(self, name: str, rows: torch.Tensor) -> None:
        """Keep a prompt's rows, [sites, d]; they replace earlier ones."""
        self._rows[name] = rows

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())

    def fit(self, site: Site, names: Sequence[str], task: FitTask) -> LayerFit:
        """Fit the rows at one site.

        Args:
            site: one of `sites`.
            names: of the prompts, the positive ones first.
            task: what is fitted.

        Raises:
            WeirError: if a prompt has no row, or rows are not finite.
        """
        self._check(names)
        index = self.sites.index(site)
        rows = torch.stack([self._rows[name][index] for name in names])
        method, options = METHODS[task.method], MethodOptions(task.seed, task.strength)

        def fitted(device: torch.device) -> LayerFit:
            exact = rows.to(device).double()
            return fit_layer(exact[: task.positive], exact[task.positive :], method, task.parts, options)

        try:
            return fitted(self._device)
        except torch.OutOfMemoryError:
            return fitted(torch.device("cpu"))
        except WeirError as e:
            raise WeirError(f"block {site.layer}: {e.message}", e.field) from None

    def _check(self, names: Sequence[str]) -> None:
        """Raise WeirError unless every prompt has rows."""
        for i, name in enumerate(names):
            if name not in self._rows:
                why = self.failures.get(name) or self.failures.get("") or "its rows did not arrive"
                raise WeirError(f"prompt {i} of both lists together cannot be read: {why}", "positive")
