"""The fit of one block: its direction, its probe, and how well they separate the prompts of held-out folds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.fitting.methods import METHODS, Classes, Method, MethodOptions, mean_of

MOST_TRIED = 32
"""Held-out prompts of each class on which a direction is tried."""


class Folds(NamedTuple):
    """The fold of each prompt."""

    number: int  # how many folds; 0 if too few prompts were given to hold any out
    positive: np.ndarray  # int [n], the fold of each positive prompt
    negative: np.ndarray  # int [m], of each negative prompt; of pairs, it is the partner's

    @property
    def tried(self) -> tuple[np.ndarray, np.ndarray]:
        """The positive and the negative prompts of fold 0 on which a direction is tried; int [<= MOST_TRIED]."""
        first, second = (np.flatnonzero(part == 0)[:MOST_TRIED] for part in (self.positive, self.negative))
        return first, second


def split(positive: int, negative: int, paired: bool, folds: int, seed: int, fewest: int = 1) -> Folds:
    """Share prompts out to folds of sizes that differ by at most one; the same seed shares alike.

    Prompts i of both classes that are `paired` are never split. Of `folds` there are fewer if a class has fewer
    prompts, or less than `fewest` of each would be left to be fitted on.
    """
    shortest = min(positive, negative)
    count = min(folds, shortest)
    if count < 2 or shortest - -(-shortest // count) < fewest:
        return Folds(0, np.zeros(positive, np.int64), np.zeros(negative, np.int64))
    generator = np.random.default_rng(seed)
    first = _shares(positive, count, generator)
    return Folds(count, first, first if paired else _shares(negative, count, generator))


def _shares(number: int, count: int, generator: np.random.Generator) -> np.ndarray:
    return generator.permutation(number) % count


@dataclass(frozen=True)
class Direction:
    """A direction and how rows are scored along it."""

    vector: np.ndarray  # float64 [d], at the method's scale
    # float64 [d], what the probe multiplies rows by: the unit vector, or the weights of a regression that has a bias
    weight: np.ndarray
    bias: float  # of the probe; a score of 0 lies between the classes
    gap: float  # how far apart the means of the classes are along the unit vector

    @property
    def unit(self) -> np.ndarray:
        return unit(self.vector)

    def score(self, rows: np.ndarray) -> np.ndarray:
        """Return the probe's scores [n] of rows [n, d]."""
        return rows @ self.weight + self.bias

    def to_wire(self) -> list[Any]:
        return [self.vector.tobytes(), self.weight.tobytes(), self.bias, self.gap]

    @classmethod
    def from_wire(cls, data: list[Any]) -> Direction:
        return cls(np.frombuffer(data[0]), np.frombuffer(data[1]), *data[2:])


@dataclass(frozen=True)
class LayerFit:
    """What was fitted at one block."""

    direction: Direction  # fitted on all rows
    held: Direction | None  # fitted without the rows of fold 0; None if nothing was held out
    auc: float | None  # mean over the folds of the AUC of a direction fitted without it; None likewise
    norm: float  # mean length of a row
    # of the prompts that `Folds.tried` chooses, the mean share of a row's length that `held`'s gap has, and that the
    # row's part along `held` has; None likewise
    doses: tuple[float, float] | None

    @property
    def relative_dose(self) -> float:
        """The gap between the classes as a share of a row's length."""
        return self.direction.gap / self.norm if self.norm else 0.0

    def to_wire(self) -> list[Any]:
        held = None if self.held is None else self.held.to_wire()
        return [self.direction.to_wire(), held, self.auc, self.norm, None if self.doses is None else list(self.doses)]

    @classmethod
    def from_wire(cls, data: list[Any]) -> LayerFit:
        direction, held, area, norm, doses = data
        return cls(
            Direction.from_wire(direction),
            None if held is None else Direction.from_wire(held),
            area,
            norm,
            None if doses is None else tuple(doses),
        )


def fit_layer(
    positive: torch.Tensor, negative: torch.Tensor, method: Method, folds: Folds, options: MethodOptions
) -> LayerFit:
    """Fit a block to rows float64 [n, d] and [k, d], on their device."""
    if not (positive.isfinite().all() and negative.isfinite().all()):
        raise WeirError("rows hold NaN or infinite values; leave the block out", "layers")
    first, second = (_subsets(side, folds.number).to(positive.device) for side in (folds.positive, folds.negative))
    vectors, biases = method.find(Classes(positive, negative, first, second), options)
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    units = torch.where(lengths[:, None] > 0, vectors / lengths[:, None], 0.0)
    along = [(rows @ units.T) for rows in (positive, negative)]
    high, low = (torch.diagonal(mean_of(side, kept)) for side, kept in zip(along, (first, second), strict=True))
    if biases is None:
        weights, biases = units, -(high + low) / 2
    else:
        weights, along = vectors, [side * lengths for side in along]
    scores = [(side + biases).T.cpu().numpy() for side in along]
    directions = [
        Direction(vectors[k].cpu().numpy(), weights[k].cpu().numpy(), float(biases[k]), float(high[k] - low[k]))
        for k in range(min(len(vectors), 2))
    ]
    return LayerFit(
        directions[0],
        directions[1] if folds.number else None,
        _mean_auc(scores[0], scores[1], folds),
        float(torch.cat([torch.linalg.vector_norm(rows, dim=1) for rows in (positive, negative)]).mean()),
        _doses(positive, negative, directions[1], folds) if folds.number else None,
    )


def _subsets(folds: np.ndarray, number: int) -> torch.Tensor:
    """Return which rows are fitted on, bool [1 + number, n]: all, and then without each fold."""
    return torch.from_numpy(np.stack([folds >= 0, *(folds != fold for fold in range(number))]))


def _mean_auc(positive: np.ndarray, negative: np.ndarray, folds: Folds) -> float | None:
    """Return the mean AUC of the folds, by scores [1 + folds, n] and [1 + folds, k]."""
    areas = [
        auc(positive[1 + fold][folds.positive == fold], negative[1 + fold][folds.negative == fold])
        for fold in range(folds.number)
    ]
    return float(np.mean(areas)) if areas else None


def _doses(positive: torch.Tensor, negative: torch.Tensor, direction: Direction, folds: Folds) -> tuple[float, float]:
    rows = torch.cat([side[torch.from_numpy(k)] for side, k in zip((positive, negative), folds.tried, strict=True)])
    lengths = torch.linalg.vector_norm(rows, dim=1).cpu().numpy()
    along = np.abs((rows @ torch.from_numpy(direction.unit).to(rows.device)).cpu().numpy())
    return _mean_share(np.full(len(lengths), abs(direction.gap)), lengths), _mean_share(along, lengths)


def _mean_share(values: np.ndarray, of: np.ndarray) -> float:
    return float(np.divide(values, of, out=np.zeros_like(of), where=of > 0).mean())


def unit(vector: np.ndarray) -> np.ndarray:
    """Return the unit vector along a vector, or zeros."""
    length = np.linalg.norm(vector)
    return vector / length if length > 0 else vector


def auc(positive: np.ndarray, negative: np.ndarray) -> float:
    """Return the share of (positive, negative) pairs of scores, [n] and [m], in the right order; ties count half."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left")
    not_above = np.searchsorted(ordered, positive, side="right")
    return float((below + not_above).mean() / (2 * len(negative)))


@dataclass(frozen=True)
class FitTask:
    """What is fitted, alike at every block and in every process."""

    method: str  # name of the method
    positive: int  # number of positive prompts
    negative: int  # number of negative prompts
    folds: int = 5  # how many are wanted
    seed: int = 0  # of the folds, and of the method
    strength: float = 1.0  # as in `MethodOptions`
    columns: Sequence[int] | None = None  # first and end of the part of a row that is fitted; None for all of it

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
