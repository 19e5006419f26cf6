"""The first principal components of subsets of differences, found together."""

from __future__ import annotations

import torch

TOLERANCE = 1e-10
"""Residual of an eigenvector, as a share of its eigenvalue, at which it is found."""
MAX_STEPS = 240
"""Lanczos steps after which all eigenvectors are computed instead."""
CHECK_EVERY = 8
EXHAUSTED = 1e-14
"""Length of what a Lanczos step adds at which nothing is left."""


def first_components(differences: torch.Tensor, kept: torch.Tensor, centred: bool) -> torch.Tensor:
    """Return the first principal component of each subset, unit vectors [m, d] of either sign.

    A component is a sum of differences, so the search is for its [n] weights: Lanczos's method on
    the inner products, of which those of a subset are a part. Zeros where nothing varies.

    `differences`: float64 [n, d]; `kept`: bool [m, n], the subsets; `centred`: whether each subset's mean is subtracted
    first.
    """
    scale = (differences * differences).sum(1).max().sqrt()
    if scale == 0:
        return differences.new_zeros(len(kept), differences.shape[1])
    scaled = differences / scale
    subsets = _Subsets(InnerProducts(scaled), kept, centred)
    weights, found = _lanczos(subsets)
    vectors = subsets.project(weights) @ scaled
    for k in (~found).nonzero().flatten().tolist():
        vectors[k] = _decomposed(scaled[kept[k]], centred)
    lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return torch.where(lengths > 0, vectors / lengths, 0.0)


class _Subsets:
    """The inner products of the differences of each subset, from those of all."""

    def __init__(self, products: InnerProducts, kept: torch.Tensor, centred: bool) -> None:
        self._products, self._centred = products, centred
        self._kept = kept.double()
        self.sizes = kept.sum(1).tolist()
        self._counts = self._kept.sum(1, keepdim=True)

    def project(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights [m, n] without those of differences that are left out, and without their mean."""
        weights = weights * self._kept
        return weights - self._kept * (weights.sum(1, keepdim=True) / self._counts) if self._centred else weights

    def times(self, weights: torch.Tensor) -> torch.Tensor:
        return self.project(self._products.times(weights))

    def start(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(self._kept.shape[1], dtype=torch.float64, generator=generator)
        return self.project(start.to(self._kept.device).expand_as(self._kept))


def _lanczos(subsets: _Subsets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eigenvectors of the largest eigenvalues, [m, n], and which of them were found, bool [m].

    With full reorthogonalisation. What is exhausted goes on with zeros, which change nothing.
    """
    start = subsets.start()
    (count, size), steps = start.shape, min(max(subsets.sizes), MAX_STEPS)
    basis = start.new_zeros(count, steps + 1, size)
    basis[:, 0] = _normalised(start)[0]
    diagonal, off = start.new_zeros(2, steps, count)
    for step in range(steps):
        here, so_far = basis[:, step], basis[:, : step + 1]
        following = subsets.times(here)
        diagonal[step] = (following * here).sum(1)
        for _ in range(2):  # once is not enough where the vectors are nearly parallel
            along = torch.bmm(so_far, following.unsqueeze(2))
            following = following - torch.bmm(along.transpose(1, 2), so_far).squeeze(1)
        basis[:, step + 1], off[step] = _normalised(following)
        if step % CHECK_EVERY == CHECK_EVERY - 1 or step == steps - 1:
            weights, found = _ritz(diagonal[: step + 1].cpu(), off[: step + 1].cpu())
            if found.all():
                break
    return torch.bmm(weights.to(start.device).unsqueeze(1), so_far).squeeze(1), found


def _normalised(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors [m, n] at length 1, or zeros where nothing is left, and their lengths."""
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    lengths = torch.where(lengths > EXHAUSTED, lengths, 0.0)
    return torch.where(lengths[:, None] > 0, vectors / lengths[:, None], 0.0), lengths


def _ritz(diagonal: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights [m, steps] of the basis in the eigenvectors, and which of these are good, bool [m].

    Both arguments are [steps, m]; the last of those beside the diagonal lead out of the basis.
    """
    beside = torch.diag_embed(off[:-1].T, 1)
    values, vectors = torch.linalg.eigh(torch.diag_embed(diagonal.T) + beside + beside.transpose(1, 2))
    residual = off[-1] * vectors[:, -1, -1].abs()
    return vectors[:, :, -1], residual <= TOLERANCE * values[:, -1].clamp(min=1e-300)


def _decomposed(rows: torch.Tensor, centred: bool) -> torch.Tensor:
    """Return the first principal component of rows [n, d] by a full decomposition, at any length."""
    rows = rows - rows.mean(0) if centred else rows
    if len(rows) > rows.shape[1]:
        return torch.linalg.eigh(rows.T @ rows)[1][:, -1]
    return torch.linalg.eigh(rows @ rows.T)[1][:, -1] @ rows


WIDE = 2
"""Rows are few if there are at most twice as many as they have values: then the inner products of all are kept."""


class InnerProducts:
    """The matrix of inner products of rows, ``rows @ rows.T``, as an operator.

    It is computed once where rows are few. Otherwise each product passes over the rows twice, which
    is less work, and less memory, than [n, n].

    `rows`: float64 [n, d].
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
