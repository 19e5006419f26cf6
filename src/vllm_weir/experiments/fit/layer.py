"""One block: its direction, its probe, and how well directions fitted on some rows separate the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_weir.experiments.fit.auc import auc
from vllm_weir.experiments.fit.folds import Folds
from vllm_weir.experiments.fit.methods import Method, MethodOptions


@dataclass(frozen=True)
class Direction:
    """A direction and how rows are scored along it.

    Attributes:
        vector: float64 [d], at the method's scale.
        weight: float64 [d], what the probe multiplies rows by: the unit vector, or the weights of a
            regression that has a bias.
        bias: of the probe; a score of 0 lies between the classes.
        gap: how far apart the means of the classes are along the unit vector.
    """

    vector: np.ndarray
    weight: np.ndarray
    bias: float
    gap: float

    @property
    def unit(self) -> np.ndarray:
        """The unit vector [d]."""
        return unit(self.vector)

    def score(self, rows: np.ndarray) -> np.ndarray:
        """Return the probe's scores [n] of rows [n, d]."""
        return rows @ self.weight + self.bias


@dataclass(frozen=True)
class LayerFit:
    """What was fitted at one block.

    Attributes:
        direction: fitted on all rows.
        held: fitted without the rows of fold 0; None if nothing was held out.
        auc: mean over the folds of the AUC of a direction fitted without it; None likewise.
        norm: mean length of a row.
    """

    direction: Direction
    held: Direction | None
    auc: float | None
    norm: float

    @property
    def relative_dose(self) -> float:
        """The gap between the classes as a share of a row's length."""
        return self.direction.gap / self.norm if self.norm else 0.0


def fit_layer(
    positive: np.ndarray, negative: np.ndarray, method: Method, folds: Folds, options: MethodOptions
) -> LayerFit:
    """Fit a block.

    Args:
        positive: float64 [n, d].
        negative: float64 [m, d].
        method: how.
        folds: of the rows.
        options: of the method.
    """
    everything = np.ones(len(positive), bool), np.ones(len(negative), bool)
    subsets = [everything, *(folds.kept(fold) for fold in range(folds.number))]
    found = [
        _direction(vector, bias, positive[first], negative[second])
        for (vector, bias), (first, second) in zip(
            method.find(positive, negative, subsets, options), subsets, strict=True
        )
    ]
    whole, *parts = found
    areas = [
        auc(part.score(positive[~first]), part.score(negative[~second]))
        for part, (first, second) in zip(parts, subsets[1:], strict=True)
    ]
    norms = [np.linalg.norm(rows, axis=1) for rows in (positive, negative)]
    return LayerFit(
        whole,
        parts[0] if parts else None,
        float(np.mean(areas)) if areas else None,
        float(np.concatenate(norms).mean()),
    )


def unit(vector: np.ndarray) -> np.ndarray:
    """Return the unit vector along a vector, or zeros."""
    length = np.linalg.norm(vector)
    return vector / length if length > 0 else vector


def _direction(vector: np.ndarray, bias: float | None, positive: np.ndarray, negative: np.ndarray) -> Direction:
    along = unit(vector)
    high, low = float((positive @ along).mean()), float((negative @ along).mean())
    if bias is None:
        return Direction(vector, along, -(high + low) / 2, high - low)
    return Direction(vector, vector, bias, high - low)
