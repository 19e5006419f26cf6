"""How far rows are from a reference."""

from __future__ import annotations

import torch


def rel_err(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|, where b is the reference; shapes must agree, and nan counts as infinite."""
    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {tuple(a.shape)} against the reference's {tuple(b.shape)}")
    a, b = a.double(), b.double()
    error = float((a - b).abs().max() / b.abs().max())
    return error if error == error else float("inf")
