"""The methods of `weir.fit`: from the rows of two classes at one block to directions and biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.fitting.components import first_components
from vllm_weir.fitting.logistic import fit_logistic


@dataclass(frozen=True)
class Classes:
    """The rows of two classes at one block, and subsets of them."""

    positive: torch.Tensor  # float64 [n, d]
    negative: torch.Tensor  # float64 [k, d]
    first: torch.Tensor  # bool [m, n], which positive rows each subset has
    second: torch.Tensor  # bool [m, k], which negative rows


@dataclass(frozen=True)
class MethodOptions:
    """What methods depend on besides the rows."""

    seed: int = 0  # of the signs of LAT's differences
    strength: float = 1.0  # C of the logistic regressions


Finder = Callable[[Classes, MethodOptions], tuple[torch.Tensor, torch.Tensor | None]]
"""Returns a direction of each subset, [m, d], and the biases [m] of a method that has one."""


@dataclass(frozen=True)
class Method:
    """One way to find a direction."""

    find: Finder  # finds it for each subset of the rows
    summary: str  # one clause on the vector and its scale
    pairs: bool = False  # whether it needs pairs: prompt i of both classes say the same but for the class
    fewest: int = 1  # how many prompts of each class it needs


def mean_of(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the means [m, ...] over the chosen ones, bool [m, n], of values [n, ...]."""
    return (chosen.to(values) @ values) / chosen.sum(1, keepdim=values.ndim > 1)


def _diff(classes: Classes, _: MethodOptions) -> tuple[torch.Tensor, None]:
    return mean_of(classes.positive, classes.first) - mean_of(classes.negative, classes.second), None


def _component(centred: bool, flipped: bool = False) -> Finder:
    """Return the finder of the first principal component of differences, half of them turned round if `flipped`."""

    def find(classes: Classes, options: MethodOptions) -> tuple[torch.Tensor, None]:
        differences = classes.positive - classes.negative
        signs = np.ones(len(differences))
        if flipped:
            signs[np.random.default_rng(options.seed).permutation(len(signs))[: len(signs) // 2]] = -1.0
        turned = differences * torch.from_numpy(signs).to(differences)[:, None] if flipped else differences
        vectors = first_components(turned, classes.first, centred)
        return _towards(vectors, differences, classes.first), None

    return find


def _towards(vectors: torch.Tensor, differences: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return vectors [m, d] with the signs that most of the kept pairs vote for; in a tie, their mean decides."""
    along = (vectors @ differences.T) * kept
    votes = along.sign().sum(1)
    votes = torch.where(votes == 0, along.sum(1), votes)
    return torch.where(votes < 0, -1.0, 1.0)[:, None] * vectors


def _logistic(classes: Classes, options: MethodOptions) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.cat([classes.positive, classes.negative])
    labels = torch.arange(len(rows), device=rows.device) < len(classes.positive)
    return fit_logistic(rows, labels, torch.cat([classes.first, classes.second], 1), options.strength)


def _logistic_pairs(classes: Classes, options: MethodOptions) -> tuple[torch.Tensor, None]:
    """Fit on halves of differences: the loss of a row's partner, which is its negative, equals its own."""
    half = (classes.positive - classes.negative) / 2
    labels = torch.ones(len(half), dtype=torch.bool, device=half.device)
    return fit_logistic(half, labels, classes.first, 2 * options.strength, intercept=False)[0], None


MethodName = Literal["diff", "pca", "pca_center", "lat", "logistic", "logistic_pairs"]
METHODS: dict[str, Method] = {
    "diff": Method(_diff, "mean of the positive rows less mean of the negative ones, in the rows' units"),
    "pca": Method(
        _component(True),
        "unit vector, the first principal component of the pairs' differences less their mean (repeng's pca_diff)",
        pairs=True,
        fewest=2,
    ),
    "pca_center": Method(
        _component(False),
        "unit vector, the first principal component of rows less their pair's mean (repeng's pca_center)",
        pairs=True,
    ),
    "lat": Method(
        _component(True, flipped=True),
        "unit vector, the first principal component of differences taken in random order within pairs (LAT)",
        pairs=True,
        fewest=2,
    ),
    "logistic": Method(_logistic, "weights of a logistic regression on the rows, in log odds per unit of the row"),
    "logistic_pairs": Method(
        _logistic_pairs,
        "weights of a logistic regression without bias on rows less their pair's mean (steering-vectors)",
        pairs=True,
    ),
}


def method_of(name: object, positive: int, negative: int) -> Method:
    """Return a method for so many prompts of the two classes; raise WeirError if they are too few or unpaired."""
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise WeirError(f"unknown method {brief(name)!r}; choose from {', '.join(METHODS)}", "method")
    if method.pairs and positive != negative:
        raise WeirError(
            f"{name!r} is fitted on pairs, and {positive} positive prompts do not pair up with {negative} negative "
            "ones; give prompt i of both for the same content, or take 'diff' or 'logistic'",
            "negative",
        )
    if min(positive, negative) < method.fewest:
        raise WeirError(f"{name!r} needs at least {method.fewest} pairs of prompts", "positive")
    return method
