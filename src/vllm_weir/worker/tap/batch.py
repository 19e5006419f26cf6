"""The tokens of a step, as what is called in taps needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """The tokens of a step.

    Attributes:
        programs: int [n].
        request_ids: of its requests, in order.
        owners: int [n], the request of each token.
        positions: int [n], in its sequence.
    """

    programs: np.ndarray
    request_ids: Sequence[str]
    owners: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(
        cls, programs: np.ndarray, request_ids: Sequence[str], num_tokens: Sequence[int], starts: Sequence[int]
    ) -> Batch:
        """Return the tokens of requests that have so many each, the first at these positions."""
        counts = np.asarray(num_tokens, np.int64)
        owners = np.repeat(np.arange(len(counts)), counts)
        firsts = np.cumsum(counts) - counts
        return cls(
            programs,
            request_ids,
            owners,
            np.asarray(starts, np.int64)[owners] + np.arange(len(owners)) - firsts[owners],
        )
