"""A linear probe and measures of it, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_weir.fitting import layer


@dataclass(frozen=True)
class LogisticProbe:
    """A direction in the residual stream and a threshold on it."""

    weight: torch.Tensor  # float64 [d], in the units of the rows themselves
    bias: float  # float

    def score(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the log-odds of the positive class, float64 [...], of rows [..., d]."""
        return rows.double() @ self.weight + self.bias


def fit_probe(x: torch.Tensor, y: torch.Tensor, l2: float = 0.01) -> LogisticProbe:
    """Fit logistic regression with an L2 penalty on standardised rows, by L-BFGS.

    Args:
        x: rows [n, d].
        y: labels [n], 0 or 1 (or bool); both must occur.
        l2: weight of the penalty against the mean loss of a row.
    """
    if x.ndim != 2 or y.shape != (len(x),):
        raise ValueError(f"need rows [n, d] and labels [n], got {tuple(x.shape)} and {tuple(y.shape)}")
    x, y = x.double(), y.double()
    if not 0 < y.mean() < 1:
        raise ValueError("both classes must occur")
    centre, spread = x.mean(0), x.std(0, correction=0)
    # A constant feature carries no information, and must not be divided by zero.
    scale = torch.where(spread > 1e-9 * (centre.abs() + 1e-12), 1 / spread, torch.zeros_like(spread))
    z = (x - centre) * scale
    weight = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(z @ weight + bias, y)
        loss = loss + l2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    direction = weight.detach() * scale
    return LogisticProbe(direction, float(bias.detach() - direction @ centre))


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the area under the ROC curve.

    It is the share of (positive, negative) pairs in the right order; ties count half.

    Args:
        scores: [n].
        labels: [n], 0 or 1 (or bool); both must occur.
    """
    positive, negative = scores[labels.bool()], scores[~labels.bool()]
    if not len(positive) or not len(negative):
        raise ValueError("both classes must occur")
    return layer.auc(positive.double().cpu().numpy(), negative.double().cpu().numpy())


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of scores [n] on the right side of zero."""
    return float(((scores > 0) == labels.bool()).double().mean())


def mean_difference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean of positive rows minus that of negative ones, float64 [d].

    Args:
        x: rows [n, d].
        y: labels [n].
    """
    x, positive = x.double(), y.bool()
    return x[positive].mean(0) - x[~positive].mean(0)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the cosine of the angle between two vectors [d]."""
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))
