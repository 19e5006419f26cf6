"""Principal components of the differences between paired rows."""

from __future__ import annotations

import numpy as np

TOLERANCE = 1e-11
"""Residual of an eigenvector, as a share of its eigenvalue, at which it is found."""
MAX_STEPS = 240
"""Lanczos steps after which all eigenvectors are computed instead."""
CHECK_EVERY = 8


class PairMoments:
    """Second moments of differences, of which those of any subset follow.

    They are kept in whichever space is smaller: as inner products [n, n] of the differences, or as
    their sums of outer products [d, d].

    Args:
        differences: float64 [n, d].
    """

    def __init__(self, differences: np.ndarray) -> None:
        self._rows = differences
        self._by_pair = len(differences) <= differences.shape[1]
        self._second = differences @ differences.T if self._by_pair else differences.T @ differences

    def component(self, kept: np.ndarray, centred: bool) -> np.ndarray:
        """Return the first principal component, a unit vector [d] of either sign; zeros if nothing varies.

        Args:
            kept: bool [n], of which differences.
            centred: whether their mean is subtracted first.
        """
        rows = self._rows[kept]
        mean = rows.mean(0) if centred else np.zeros(rows.shape[1])
        if self._by_pair:
            inner = self._second[np.ix_(kept, kept)]
            if centred:
                means = inner.mean(0)
                inner = inner - means - means[:, None] + means.mean()
            weights = top_eigenvector(inner)
            vector = weights @ rows - weights.sum() * mean
        else:
            left = self._rows[~kept]
            vector = top_eigenvector(self._second - left.T @ left - len(rows) * np.outer(mean, mean))
        length = np.linalg.norm(vector)
        return vector / length if length > 0 else vector


def top_eigenvector(matrix: np.ndarray) -> np.ndarray:
    """Return the eigenvector of the largest eigenvalue of a positive semidefinite matrix [n, n].

    By Lanczos's method with full reorthogonalisation, and by a full decomposition where that does
    not converge. The sign is arbitrary; zeros for a matrix of zeros.
    """
    size = len(matrix)
    scale = np.abs(matrix).max(initial=0.0)
    if scale == 0:
        return np.zeros(size)
    matrix = matrix / scale
    start = np.random.default_rng(0).standard_normal(size)
    basis = np.empty((min(size, MAX_STEPS) + 1, size))
    basis[0] = start / np.linalg.norm(start)
    diagonal, off = [], []
    for step in range(min(size, MAX_STEPS)):
        following = matrix @ basis[step]
        diagonal.append(float(following @ basis[step]))
        for _ in range(2):  # once is not enough where the vectors are nearly parallel
            following -= basis[: step + 1].T @ (basis[: step + 1] @ following)
        off.append(float(np.linalg.norm(following)))
        exhausted = off[-1] < 1e-14
        if exhausted or step % CHECK_EVERY == CHECK_EVERY - 1 or step == size - 1:
            small = np.diag(diagonal) + np.diag(off[:-1], 1) + np.diag(off[:-1], -1)
            values, vectors = np.linalg.eigh(small)
            if exhausted or off[-1] * abs(vectors[-1, -1]) <= TOLERANCE * max(values[-1], 1e-300):
                return vectors[:, -1] @ basis[: step + 1]
        basis[step + 1] = following / off[-1]
    return np.linalg.eigh(matrix)[1][:, -1]
