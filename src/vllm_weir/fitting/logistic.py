"""Logistic regression with an L2 penalty, of several subsets of the rows at once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_weir.fitting.components import InnerProducts

MAX_NEWTON, MAX_CONJUGATE, MAX_HALVINGS = 100, 200, 40
TOLERANCE = 1e-8
"""Of the gradient's length, as a share of what it is at the start."""
LOOSEST = 0.1
"""Residual of a Newton step, as a share of the gradient."""
AXES, POWERS = 64, 2
"""Principal axes that are kept from slowing conjugate gradients down, and products by which they are found."""


def fit_logistic(
    rows: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor, strength: float, intercept: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimise ``strength * sum of log losses + |w|^2 / 2`` over weights w and an unpenalised bias.

    That is scikit-learn's ``LogisticRegression(C=strength)``. The weights are a sum of rows, and
    the search is for its coefficients [n]: it needs the rows' inner products alone, which all
    subsets share. It is Newton's method, with conjugate gradients for the steps.

    Args:
        rows: float64 [n, d].
        labels: bool [n].
        kept: bool [m, n]: of each of m problems, which rows it has.
        strength: C.
        intercept: whether there is a bias.

    Returns:
        Weights [m, d] and biases [m].
    """
    centre = rows.mean(0) if intercept else torch.zeros_like(rows[0])
    rows = rows - centre
    signs = torch.where(labels, 1.0, -1.0).to(rows)
    found = _Problems(InnerProducts(rows), signs, kept.to(rows) * strength, intercept).solve()
    weights = found.sums @ rows
    return weights, found.bias - weights @ centre


class _Vector(NamedTuple):
    """Weights and a bias of each of m problems; the weights are sums of rows."""

    sums: torch.Tensor  # [m, n], the rows' coefficients
    scores: torch.Tensor  # [m, n], the rows' products with the weights, which are `sums` times the inner products
    bias: torch.Tensor  # [m]

    def plus(self, other: _Vector, factor: torch.Tensor) -> _Vector:
        return _Vector(
            self.sums + factor[:, None] * other.sums,
            self.scores + factor[:, None] * other.scores,
            self.bias + factor * other.bias,
        )

    def dot(self, other: _Vector) -> torch.Tensor:
        """Return the inner products [m] of weights and biases."""
        return (self.sums * other.scores).sum(1) + self.bias * other.bias


class _Problems:
    """Problems that differ in their rows' weights.

    Args:
        products: of the rows.
        signs: [n], 1 or -1.
        weights: [m, n], of the rows' losses.
        intercept: whether there is a bias.
    """

    def __init__(self, products: InnerProducts, signs: torch.Tensor, weights: torch.Tensor, intercept: bool) -> None:
        self._products, self._signs, self._weights, self._intercept = products, signs, weights, intercept
        self._axes, self._images, self._squares = _principal_axes(products, weights)

    def solve(self) -> _Vector:
        """Return the minima."""
        zeros = torch.zeros_like(self._weights)
        point, first = _Vector(zeros, zeros, zeros[:, 0]), None
        value = self._loss(point)
        for _ in range(MAX_NEWTON):
            wrong = torch.sigmoid(-self._signs * (point.scores + point.bias[:, None]))
            gradient = self._pull(-self._signs * wrong * self._weights)
            gradient = _Vector(gradient.sums + point.sums, gradient.scores + point.scores, gradient.bias)
            size = gradient.dot(gradient).clamp(min=0).sqrt()
            first = size.clamp(min=1e-300) if first is None else first
            if (size <= TOLERANCE * first).all():
                break
            tolerance = torch.maximum((size / first).sqrt().clamp(max=LOOSEST) * size, TOLERANCE / 2 * first)
            step = self._step(wrong * (1 - wrong) * self._weights, gradient, tolerance)
            point, value, moved = self._descend(point, value, step, gradient.dot(step))
            if not moved:
                break  # the objectives are as small as float64 can tell
        return point

    def _pull(self, by_row: torch.Tensor) -> _Vector:
        """Return the sum of all rows, and of as many ones, times numbers [m, n]."""
        bias = by_row.sum(1) if self._intercept else torch.zeros_like(by_row[:, 0])
        return _Vector(by_row, self._products.times(by_row), bias)

    def _loss(self, point: _Vector) -> torch.Tensor:
        margins = self._signs * (point.scores + point.bias[:, None])
        losses = torch.nn.functional.softplus(-margins, threshold=1e9)
        return (self._weights * losses).sum(1) + (point.sums * point.scores).sum(1) / 2

    def _step(self, curvature: torch.Tensor, gradient: _Vector, tolerance: torch.Tensor) -> _Vector:
        """Return Newton's steps, by conjugate gradients down to residuals of these lengths."""
        level = curvature.sum(1) / (curvature > 0).sum(1).clamp(min=1)
        damping = level[:, None] / (1 + level[:, None] * self._squares)

        def eased(vector: _Vector) -> _Vector:
            along = (vector.scores @ self._axes) * damping
            return _Vector(vector.sums - along @ self._axes.T, vector.scores - along @ self._images.T, vector.bias)

        zeros = torch.zeros_like(curvature)
        step, residual = _Vector(zeros, zeros, zeros[:, 0]), gradient
        direction = eased(residual)
        power = residual.dot(direction)
        for _ in range(MAX_CONJUGATE):
            open_ = residual.dot(residual) > tolerance**2
            if not open_.any():
                break
            image = self._pull(curvature * (direction.scores + direction.bias[:, None]))
            image = _Vector(image.sums + direction.sums, image.scores + direction.scores, image.bias)
            steepness = direction.dot(image)
            rate = torch.where(open_ & (steepness > 0), power / steepness, 0.0)
            step, residual = step.plus(direction, -rate), residual.plus(image, -rate)
            scaled = eased(residual)
            following = residual.dot(scaled)
            direction = scaled.plus(direction, torch.where(power > 0, following / power, 0.0))
            power = following
        return step

    def _descend(
        self, point: _Vector, value: torch.Tensor, step: _Vector, slope: torch.Tensor
    ) -> tuple[_Vector, torch.Tensor, bool]:
        """Halve each problem's step until its objective falls; one that cannot fall stays."""
        factor = torch.ones_like(value)
        for _ in range(MAX_HALVINGS):
            new = self._loss(point.plus(step, factor))
            good = new <= value + 1e-4 * factor * slope
            if good.all():
                break
            factor = torch.where(good, factor, factor / 2)
        factor = torch.where(good, factor, 0.0)
        return point.plus(step, factor), torch.where(good, new, value), bool((good & (new < value)).any())


def _principal_axes(products: InnerProducts, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return about the first principal axes of the rows, as sums of rows.

    Conjugate gradients would need steps for each axis along which rows spread much more than along
    others; with these divided out (`_Problems._step`) they do not.

    Returns the coefficients of unit vectors, [n, k], their products with the inner products, and the squared spread
    along each, [k].
    """
    size = weights.shape[1]
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(min(AXES, size), size, dtype=torch.float64, generator=generator).to(weights.device)
    for _ in range(POWERS):
        block = torch.linalg.qr(products.times(block).T)[0].T
    images = products.times(block)
    values, turn = torch.linalg.eigh(block @ images.T)
    chosen = values > 1e-12 * values[-1].clamp(min=1e-300)
    turn = turn[:, chosen] / values[chosen].sqrt()
    return block.T @ turn, images.T @ turn, values[chosen]
