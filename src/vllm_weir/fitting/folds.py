"""Which prompts are held out together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST_TRIED = 32
"""Held-out prompts of each class on which a direction is tried."""


class Folds(NamedTuple):
    """The fold of each prompt.

    Attributes:
        number: how many folds; 0 if too few prompts were given to hold any out.
        positive: int [n], the fold of each positive prompt.
        negative: int [m], of each negative prompt; of pairs, it is the partner's.
    """

    number: int
    positive: np.ndarray
    negative: np.ndarray

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
