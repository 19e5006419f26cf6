"""Products with the inner products of rows, which is all that fits beside sums need of rows."""

from __future__ import annotations

import torch

WIDE = 2
"""Rows are few if there are at most twice as many as they have values: then the inner products of all are kept."""


class InnerProducts:
    """The matrix of inner products of rows, ``rows @ rows.T``, as an operator.

    It is computed once where rows are few. Otherwise each product passes over the rows twice, which
    is less work, and less memory, than [n, n].

    Args:
        rows: float64 [n, d].
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._matrix = _gram(rows) if len(rows) <= WIDE * rows.shape[1] else None

    def times(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the products with vectors, float64 [m, n]."""
        if self._matrix is not None:
            return (self._matrix @ columns.T).T  # it is symmetric, and BLAS is slow with a few long rows on the left
        return (columns @ self._rows) @ self._rows.T


def _gram(rows: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda:
        return rows @ rows.T
    array = rows.numpy()
    return torch.from_numpy(array @ array.T)  # numpy sees that it is symmetric, and computes half of it
