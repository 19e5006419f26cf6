"""Comparison of noise tensors: equal, multiples, or sums of each other, up to rounding.

Independent noise never matches by chance. A tensor of noise equals another, or a combination of
others, only if the model computed it from them, so a match is evidence of an addition or a
multiplication in the model.
"""

from __future__ import annotations

import math

import torch

FAINT = 1e-6
"""A tensor with a root mean square below this is taken for zero (the noise's own is 1).

It is this small because factors can be as small as any weight: vLLM's dummy weights are 1e-3 and
less.
"""
NEARLY_ONE = 2.5e-5
"""A factor that is so close to 1 is taken for 1."""
SLIGHT = 1e-3
"""A relative contribution below this is taken for rounding."""


class Matcher:
    """Compares noise tensors up to the rounding of `dtype`, the model's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.tolerance = 1e-4 if dtype == torch.float32 else 0.08
        self.eps = torch.finfo(torch.float32 if dtype == torch.float32 else torch.bfloat16).eps

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Return whether two tensors are equal; False if `b` is zero."""
        return a.shape == b.shape and rms(b) > FAINT and float((a - b).abs().max()) <= self.tolerance * rms(b)

    def factor(self, part: torch.Tensor, whole: torch.Tensor) -> float | None:
        """Return c such that ``c * part == whole``, or None; round to 1 only within the factor's own error."""
        if part.shape != whole.shape or rms(part) <= FAINT or rms(whole) <= FAINT:
            return None
        c = float((part.double() * whole).sum() / (part.double() ** 2).sum())
        if abs(c - 1) < max(NEARLY_ONE, self._factor_error(whole)):
            c = 1.0
        return c if self.same(c * part, whole) else None

    def factors(self, a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor) -> tuple[float, float] | None:
        """Return (c, d) such that ``c * a + d * b == whole``, or None."""
        sizes = rms(a), rms(b), rms(whole)
        if not (a.shape == b.shape == whole.shape and min(sizes) > FAINT and math.isfinite(sum(sizes))):
            return None
        parts = torch.stack([a.double().flatten(), b.double().flatten()], 1)
        (aa, ab), (_, bb) = (parts.T @ parts).tolist()
        if not _independent(aa, ab, bb):
            return None
        solution = torch.linalg.lstsq(parts, whole.double().flatten()[:, None]).solution[:, 0].tolist()
        c, d = (1.0 if abs(x - 1) < self.tolerance / 4 else x for x in solution)
        if abs(c - d) <= self._factor_error(whole) * abs(c):
            c = d = (c + d) / 2
        return (c, d) if min(abs(c), abs(d)) > SLIGHT and self.same(c * a + d * b, whole) else None

    def gain(self, a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor) -> float | None:
        """Return c such that ``c * (a + b) == whole``, or None.

        Return None also if `a` and `b` have different factors. Round to 1 only within the factor's
        own error, since the tolerance of `same` is far wider.
        """
        if not (a.shape == b.shape == whole.shape and min(rms(a), rms(b), rms(whole)) > FAINT):
            return None
        one, other, total = (t.double().flatten() for t in (a, b, whole))
        dots = [one @ one, one @ other, other @ other, one @ total, other @ total]
        aa, ab, bb, aw, bw = torch.stack(dots).tolist()
        if not _independent(aa, ab, bb):
            return None
        determinant = aa * bb - ab * ab
        c, d = (bb * aw - ab * bw) / determinant, (aa * bw - ab * aw) / determinant
        error = self._factor_error(whole)
        if not abs(c - d) <= error * abs(c):
            return None
        c = 1.0 if abs(c - 1) <= error else (c + d) / 2
        return c if self.same(c * (a + b), whole) else None

    def _factor_error(self, whole: torch.Tensor) -> float:
        """Return the relative error of a factor that is fitted to all elements of `whole`."""
        return 8 * self.eps / math.sqrt(whole.numel())


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().pow(2).mean().sqrt()) if tensor.numel() else 0.0


def _independent(aa: float, ab: float, bb: float) -> bool:
    return aa * bb - ab * ab > SLIGHT**2 * aa * bb
