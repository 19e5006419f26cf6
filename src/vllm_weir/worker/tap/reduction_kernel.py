"""The CUDA kernel that joins groups of reduced rows: one launch for all reductions of a step."""

# Triton takes annotations of a kernel's parameters for device types, so kernels have none.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_weir.schema.rows import COMPLETE
from vllm_weir.worker.planning.columns import JOIN_FIELDS

_COMPLETE = tl.constexpr(COMPLETE)
_FIELDS = tl.constexpr(len(JOIN_FIELDS))


@triton.jit
def _combine(so_far, row, maximum):
    return tl.where(maximum, tl.maximum(so_far, row, propagate_nan=tl.PropagateNan.ALL), so_far + row)


@triton.jit(do_not_specialize=["d_model"])
def _join(work, cells, kept, d_model, BLOCK: tl.constexpr):
    fields = work + tl.program_id(0) * _FIELDS
    column = tl.program_id(1).to(tl.int64)
    columns = tl.load(fields + 2).to(tl.int64)
    if column < columns:
        offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < d_model
        first_cell = cells + (tl.load(fields).to(tl.int64) + column) * d_model + offsets
        groups, resumed, count = tl.load(fields + 1), tl.load(fields + 3), tl.load(fields + 4)
        done, maximum = tl.load(fields + 5) != 0, tl.load(fields + 6) != 0
        kept_row, keep_row = tl.load(fields + 7).to(tl.int64), tl.load(fields + 8).to(tl.int64)
        before = kept + (kept_row + column) * d_model + offsets
        total = tl.load(before, mask=inside & (kept_row >= 0), other=0.0)
        if maximum & (kept_row < 0):
            total += float("-inf")
        if resumed == _COMPLETE:
            total = _combine(total, tl.load(before + columns * d_model, mask=inside, other=0.0), maximum)
        for k in range(groups - 1):
            total = _combine(total, tl.load(first_cell + k * columns * d_model, mask=inside, other=0.0), maximum)
        last_group = tl.load(first_cell + (groups - 1) * columns * d_model, mask=inside, other=0.0)
        if done:
            total = _combine(total, last_group, maximum)
            divisor = tl.where(maximum, 1, count).to(tl.float32)
            tl.store(first_cell, tl.div_rn(total, tl.zeros_like(total) + divisor), mask=inside)
        else:
            after = kept + (keep_row + column) * d_model + offsets
            tl.store(after, total, mask=inside)
            tl.store(after + columns * d_model, last_group, mask=inside)


def join(work: torch.Tensor, columns: int, cells: torch.Tensor, kept: torch.Tensor) -> None:
    """Join groups as `vllm_weir.worker.tap.reductions._join` does.

    Args:
        work: int32 [n, fields] on the device, `JOIN` as integers.
        columns: the most columns of any reduction.
        cells: float32 [cells, d_model].
        kept: float32 [rows, d_model].
    """
    d_model = cells.shape[1]
    block = min(1024, triton.next_power_of_2(d_model))
    _join[(len(work), columns, triton.cdiv(d_model, block))](work, cells, kept, d_model, BLOCK=block, num_warps=4)
