"""The methods of `weir.fit`: from the rows of two classes at one block to a direction and a bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.fit.logistic import fit_logistic
from vllm_weir.experiments.fit.pairs import PairMoments

Kept = tuple[np.ndarray, np.ndarray]
"""Which rows of the two classes, bool [n] and [m]."""


@dataclass(frozen=True)
class MethodOptions:
    """What methods depend on besides the rows.

    Attributes:
        seed: of the signs of LAT's differences.
        strength: C of the logistic regressions.
    """

    seed: int = 0
    strength: float = 1.0


Finder = Callable[[np.ndarray, np.ndarray, Sequence[Kept], MethodOptions], list[tuple[np.ndarray, float | None]]]
"""(positive rows, negative rows, subsets, options) -> of each subset a direction, and the bias of a method with one."""


@dataclass(frozen=True)
class Method:
    """One way to find a direction.

    Attributes:
        find: finds it for each subset of the rows.
        summary: one clause on the vector and its scale.
        pairs: whether it needs pairs: prompt i of both classes say the same but for the class.
        fewest: how many prompts of each class it needs.
    """

    find: Finder
    summary: str
    pairs: bool = False
    fewest: int = 1


def _diff(positive: np.ndarray, negative: np.ndarray, subsets: Sequence[Kept], _: MethodOptions) -> list:
    return [(positive[first].mean(0) - negative[second].mean(0), None) for first, second in subsets]


def _component(centred: bool, flipped: bool = False) -> Finder:
    """Return the finder of the first principal component of differences, of random sign if `flipped`."""

    def find(positive: np.ndarray, negative: np.ndarray, subsets: Sequence[Kept], options: MethodOptions) -> list:
        differences = positive - negative
        signs = np.ones(len(differences))
        if flipped:
            signs[np.random.default_rng(options.seed).permutation(len(signs))[: len(signs) // 2]] = -1.0
        moments = PairMoments(differences * signs[:, None])
        return [(_towards(moments.component(first, centred), differences[first]), None) for first, _ in subsets]

    return find


def _towards(vector: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """Return the vector with the sign that most pairs vote for; in a tie, their mean decides."""
    along = differences @ vector
    votes = float(np.sign(along).sum()) or float(along.mean())
    return -vector if votes < 0 else vector


def _logistic(positive: np.ndarray, negative: np.ndarray, subsets: Sequence[Kept], options: MethodOptions) -> list:
    labels = np.arange(len(positive) + len(negative)) < len(positive)
    kept = np.stack([np.concatenate(subset) for subset in subsets])
    weights, biases = fit_logistic(np.concatenate([positive, negative]), labels, kept, options.strength)
    return list(zip(weights, biases.tolist(), strict=True))


def _logistic_pairs(
    positive: np.ndarray, negative: np.ndarray, subsets: Sequence[Kept], options: MethodOptions
) -> list:
    half = (positive - negative) / 2
    labels = np.arange(2 * len(half)) < len(half)
    kept = np.stack([np.concatenate([first, first]) for first, _ in subsets])
    weights, _ = fit_logistic(np.concatenate([half, -half]), labels, kept, options.strength, intercept=False)
    return [(weight, None) for weight in weights]


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
    """Return a method for so many prompts of the two classes.

    Raises:
        WeirError: naming the field, if there is no such method, or the prompts are too few or not
            paired.
    """
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
