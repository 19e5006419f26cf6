"""Products of rows with directions on CUDA, in the same order for every row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, MOST, VALUES = 32, 64, 64
"""Rows, directions and values of a tile."""


@triton.jit(do_not_specialize=["count", "m"])
def _products(
    rows,
    factors,
    out,
    count,
    m,
    d_model,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    VALUES: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    of = tl.program_id(1) * M + tl.arange(0, M)
    sums = tl.zeros((ROWS, M), tl.float32)
    for first in range(0, d_model, VALUES):
        value = first + tl.arange(0, VALUES)
        inside = value < d_model
        some = tl.load(
            rows + at[:, None] * d_model + value[None, :], mask=(at < count)[:, None] & inside[None, :], other=0.0
        )
        for part in tl.static_range(PARTS):
            factor = tl.load(
                factors + (part * m + of)[None, :].to(tl.int64) * d_model + value[:, None],
                mask=(of < m)[None, :] & inside[:, None],
                other=0.0,
            )
            sums = tl.dot(some.to(factor.dtype), factor, sums, input_precision="ieee")
    tl.store(out + at[:, None] * m + of[None, :], sums, mask=(at < count)[:, None] & (of < m)[None, :])


def products(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """float32 [n, m], rows [n, d] times the sum of `factors` [parts, m, d]; both contiguous."""
    count, d_model = rows.shape
    parts, m, _ = factors.shape
    out = torch.empty(count, m, dtype=torch.float32, device=rows.device)
    width = min(MOST, max(16, triton.next_power_of_2(m)))
    if count:
        grid = (triton.cdiv(count, ROWS), triton.cdiv(m, width))
        _products[grid](
            rows, factors, out, count, m, d_model, PARTS=parts, ROWS=ROWS, M=width, VALUES=VALUES, num_warps=4
        )
    return out
