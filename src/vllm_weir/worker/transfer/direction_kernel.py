"""Products of rows with directions on CUDA, in float32, summed in the same order for every row.

Tensor cores are not used: in the rows' own dtype they round every sum towards zero.
"""

# Kernels have no annotations: Triton takes them for the types of parameters on the device.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_KERNEL_DIRECTIONS = 8
"""Directions up to which the kernel multiplies; more are multiplied by the library."""
TILE = 4096
"""Rows of a multiplication by the library, always as many, since its order of summation depends on
the shape."""


@triton.jit(do_not_specialize=["m"])
def _products_of_row(rows, matrix, out, m, d_model, BLOCK: tl.constexpr):
    """Multiply one row, that of the program's number, with each of m directions."""
    index = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < d_model
    row = tl.load(rows + index * d_model + offsets, mask=inside, other=0.0).to(tl.float32)
    for k in range(m):
        direction = tl.load(matrix + k * d_model + offsets, mask=inside, other=0.0)
        tl.store(out + index * m + k, tl.sum(row * direction, axis=0))


def products(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the products of contiguous rows [n, d], of any float dtype, with float32 [m, d]: float32 [n, m]."""
    count, d_model = rows.shape
    m = len(matrix)
    out = torch.empty(count, m, dtype=torch.float32, device=rows.device)
    if m <= MAX_KERNEL_DIRECTIONS:
        block = triton.next_power_of_2(d_model)
        if count:
            warps = 4 if block <= 4096 else 16
            _products_of_row[(count,)](rows, matrix, out, m, d_model, BLOCK=block, num_warps=warps)
        return out
    for first in range(0, count, TILE):
        tile = rows[first : first + TILE]
        tile_rows = len(tile)
        if tile_rows < TILE:
            tile = torch.cat([tile, rows.new_zeros(TILE - tile_rows, d_model)])
        out[first : first + tile_rows] = (tile.float() @ matrix.T)[:tile_rows]
    return out
