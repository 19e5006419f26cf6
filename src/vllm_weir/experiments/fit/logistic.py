"""Logistic regression with an L2 penalty, of several subsets of the rows at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MAX_NEWTON, MAX_CONJUGATE, MAX_HALVINGS = 100, 200, 40
TOLERANCE = 1e-9
"""Of the gradient's largest entry, as a share of what it is at the start."""
SMALLEST = 1e-13
"""Of the squared spread along an axis, as a share of the largest."""


def fit_logistic(
    rows: np.ndarray, labels: np.ndarray, kept: np.ndarray, strength: float, intercept: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Minimise ``strength * sum of log losses + |w|^2 / 2`` over weights w and an unpenalised bias.

    That is scikit-learn's ``LogisticRegression(C=strength)``. It is solved by Newton's method, with
    conjugate gradients for the steps, in float64.

    Args:
        rows: float64 [n, d].
        labels: bool [n].
        kept: bool [m, n]: of each of m problems, which rows it has.
        strength: C.
        intercept: whether there is a bias.

    Returns:
        Weights [m, d] and biases [m].
    """
    centre = rows.mean(0) if intercept else np.zeros(rows.shape[1])
    rows = rows - centre
    rows, basis = _principal(rows)
    solution = _Problem(rows, labels, kept.T, strength, intercept).solve()
    weights, biases = solution[:-1].T @ basis.T, solution[-1]
    return weights, biases - weights @ centre


def _principal(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows in their principal axes, [n, r], and these axes as columns, [d, r].

    The weights are combinations of rows, so axes along which nothing varies are left out. In the
    others the Hessians are nearly diagonal, which conjugate gradients need.
    """
    wide = len(rows) < rows.shape[1]
    values, vectors = np.linalg.eigh(rows @ rows.T if wide else rows.T @ rows)
    kept = values > SMALLEST * max(values[-1], 1e-300)
    vectors = vectors[:, kept]
    basis = np.linalg.qr(rows.T @ vectors)[0] if wide else vectors
    return rows @ basis, basis


class _Problem:
    """Its variables are [d + 1, m]: a column for each problem, the bias last."""

    def __init__(self, rows: np.ndarray, labels: np.ndarray, kept: np.ndarray, strength: float, bias: bool) -> None:
        self.rows = np.concatenate([rows, np.full((len(rows), 1), float(bias))], 1)
        self.signs = np.where(labels, 1.0, -1.0)[:, None]
        self.weight = kept * strength
        self.penalty = np.ones((self.rows.shape[1], 1))
        self.penalty[-1] = 0.0 if bias else 1.0

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return the objectives [m]."""
        losses = np.logaddexp(0.0, -self.signs * (self.rows @ x))
        return (self.weight * losses).sum(0) + (self.penalty * x * x).sum(0) / 2

    def solve(self) -> np.ndarray:
        """Return the minima."""
        x = np.zeros((self.rows.shape[1], self.weight.shape[1]))
        value, first = self.loss(x), None
        for _ in range(MAX_NEWTON):
            wrong = 1 / (1 + np.exp(np.clip(self.signs * (self.rows @ x), -500, 500)))
            gradient = self.rows.T @ (-self.signs * wrong * self.weight) + self.penalty * x
            size = np.abs(gradient).max(0)
            first = np.maximum(size, 1e-300) if first is None else first
            if (size <= TOLERANCE * first).all():
                break
            step = self._step(wrong * (1 - wrong) * self.weight, gradient, np.minimum(0.1, np.sqrt(size / first)))
            x, value, moved = self._descend(x, value, step, (gradient * step).sum(0))
            if not moved:
                break  # the objectives are as small as float64 can tell
        return x

    def _step(self, curvature: np.ndarray, gradient: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
        """Return Newton's steps, by conjugate gradients with the Hessians' diagonals as preconditioner."""
        diagonal = (self.rows**2).T @ curvature + self.penalty

        def product(v: np.ndarray) -> np.ndarray:
            return self.rows.T @ (curvature * (self.rows @ v)) + self.penalty * v

        return conjugate_gradients(product, -gradient, np.maximum(diagonal, 1e-12), tolerance)

    def _descend(
        self, x: np.ndarray, value: np.ndarray, step: np.ndarray, slope: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Halve each column's step until its objective falls; a column that cannot fall stays."""
        factor = np.ones(x.shape[1])
        for _ in range(MAX_HALVINGS):
            new = self.loss(x + factor * step)
            good = new <= value + 1e-4 * factor * slope
            if good.all():
                break
            factor = np.where(good, factor, factor / 2)
        factor = np.where(good, factor, 0.0)
        return x + factor * step, np.where(good, new, value), bool((good & (new < value)).any())


def conjugate_gradients(
    product: Callable[[np.ndarray], np.ndarray], right: np.ndarray, diagonal: np.ndarray, tolerance: np.ndarray
) -> np.ndarray:
    """Solve systems with positive definite matrices, a column each.

    Args:
        product: [d, m] -> the matrices' products with the columns.
        right: [d, m], the right sides.
        diagonal: [d, m], the matrices' diagonals.
        tolerance: [m], of the residual's length, as a share of the right side's.
    """
    x, residual = np.zeros_like(right), right.copy()
    scaled = residual / diagonal
    direction = scaled.copy()
    power = (residual * scaled).sum(0)
    goal = tolerance * np.linalg.norm(right, axis=0)
    for _ in range(MAX_CONJUGATE):
        open_ = np.linalg.norm(residual, axis=0) > goal
        if not open_.any():
            break
        image = product(direction)
        curvature = (direction * image).sum(0)
        rate = np.where(open_, power / np.where(curvature > 0, curvature, 1.0), 0.0)
        x += rate * direction
        residual -= rate * image
        scaled = residual / diagonal
        following = (residual * scaled).sum(0)
        direction = scaled + np.where(open_, following / np.where(power > 0, power, 1.0), 0.0) * direction
        power = following
    return x
