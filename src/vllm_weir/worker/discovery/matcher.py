"""Whether tensors of noise are equal, multiples of each other, or sums of two: up to the rounding of their dtype."""

from __future__ import annotations

import math

import torch

FAINT = 1e-6
"""A tensor of a smaller root mean square than this part of the noise's is taken for zero.

A gain may be as small as any weight is: vLLM's dummy weights are of 1e-3 and less.
"""
SLIGHT = 1e-3
"""A smaller part of something is none: rounding alone makes up for as much."""


class Matcher:
    """Compares tensors of noise up to the rounding of `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.tolerance = 1e-4 if dtype == torch.float32 else 0.08
        self.eps = torch.finfo(torch.float32 if dtype == torch.float32 else torch.bfloat16).eps

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two tensors are equal; a tensor of nothing equals none."""
        return a.shape == b.shape and rms(b) > FAINT and float((a - b).abs().max()) <= self.tolerance * rms(b)

    def factor(self, part: torch.Tensor, whole: torch.Tensor) -> float | None:
        """c such that ``c * part == whole``, or None."""
        if part.shape != whole.shape or rms(part) <= FAINT or rms(whole) <= FAINT:
            return None
        c = float((part.double() * whole).sum() / (part.double() ** 2).sum())
        if abs(c - 1) < self.tolerance / 4:
            c = 1.0
        return c if self.same(c * part, whole) else None

    def factors(self, a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor) -> tuple[float, float] | None:
        """(c, d) such that ``c * a + d * b == whole``, or None."""
        sizes = rms(a), rms(b), rms(whole)
        if not (a.shape == b.shape == whole.shape and min(sizes) > FAINT and math.isfinite(sum(sizes))):
            return None
        parts = torch.stack([a.double().flatten(), b.double().flatten()], 1)
        (aa, ab), (_, bb) = (parts.T @ parts).tolist()
        if not _apart(aa, ab, bb):
            return None
        solution = torch.linalg.lstsq(parts, whole.double().flatten()[:, None]).solution[:, 0].tolist()
        c, d = (1.0 if abs(x - 1) < self.tolerance / 4 else x for x in solution)
        if abs(c - d) <= self._known(whole) * abs(c):
            c = d = (c + d) / 2
        return (c, d) if min(abs(c), abs(d)) > SLIGHT and self.same(c * a + d * b, whole) else None

    def gain(self, a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor) -> float | None:
        """c such that ``c * (a + b) == whole``, or None, also where one of them has a factor of its own.

        A gain of nearly 1 is not taken for 1: the tolerance of `same` would be used up by it.
        """
        if not (a.shape == b.shape == whole.shape and min(rms(a), rms(b), rms(whole)) > FAINT):
            return None
        one, other, sum_ = (t.double().flatten() for t in (a, b, whole))
        dots = [one @ one, one @ other, other @ other, one @ sum_, other @ sum_]
        aa, ab, bb, aw, bw = torch.stack(dots).tolist()
        if not _apart(aa, ab, bb):
            return None
        area = aa * bb - ab * ab
        c, d = (bb * aw - ab * bw) / area, (aa * bw - ab * aw) / area
        known = self._known(whole)
        if not abs(c - d) <= known * abs(c):
            return None
        c = 1.0 if abs(c - 1) <= known else (c + d) / 2
        return c if self.same(c * (a + b), whole) else None

    def _known(self, whole: torch.Tensor) -> float:
        """How well a factor is known, relatively: from many numbers, far better than each of them is."""
        return 8 * self.eps / math.sqrt(whole.numel())


def rms(tensor: torch.Tensor) -> float:
    """Root of the mean square; 0 of nothing."""
    return float(tensor.double().pow(2).mean().sqrt()) if tensor.numel() else 0.0


def _apart(aa: float, ab: float, bb: float) -> bool:
    """Whether two tensors of these products are no multiples of each other: else nothing tells their factors."""
    return aa * bb - ab * ab > SLIGHT**2 * aa * bb
