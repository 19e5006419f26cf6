"""First-order estimates, and which of them are the largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.experiments.grid import Grid
from vllm_weir.schema.hooks import Site


def first_order(source: torch.Tensor, base: torch.Tensor, gradient: torch.Tensor, by_head: bool) -> np.ndarray:
    """Estimate what rows of one run do to a metric in another; return [positions], `by_head` [positions, heads].

    The estimate is ``sum over d of (source - base) * gradient``, summed in float64, of rows [positions, ...] and the
    metric's gradient with respect to those of the base; `by_head` they are [positions, heads, d_head].
    """
    products = (source.double() - base.double()) * gradient.double()
    return products.flatten(2 if by_head else 1).sum(-1).cpu().numpy()


@dataclass(frozen=True)
class PatchedPlace:
    """A place that can be patched: the row of a site at a position, or one head of it."""

    site: Site
    position: int
    head: int | None = None

    def __str__(self) -> str:
        return f"{self.site} at {self.position}" + ("" if self.head is None else f", head {self.head}")


def largest(grid: Grid, count: int) -> list[tuple[PatchedPlace, float]]:
    """Return the places with the largest estimates by magnitude, largest first, with their estimates.

    Places whose estimate is exactly 0 are left out: the two runs have the same rows there, or the
    metric does not depend on them.
    """
    numbers = grid.array.ravel()
    order = np.argsort(-np.abs(numbers), kind="stable")[:count]
    return [(_place(grid, index), float(numbers[index])) for index in order if numbers[index] != 0]


def _place(grid: Grid, index: int) -> PatchedPlace:
    labels: Sequence = [
        labels[i] for labels, i in zip(grid.axes.values(), np.unravel_index(index, grid.array.shape), strict=True)
    ]
    hook, layer, position, *head = labels
    return PatchedPlace(Site(str(hook), int(layer)), int(position), int(head[0]) if head else None)
