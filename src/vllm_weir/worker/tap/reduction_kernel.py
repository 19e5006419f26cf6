"""Groups of rows joined on CUDA: one launch for all sequences and columns of a step."""

# Triton takes annotations of a kernel's parameters for their types on the device, so kernels have none.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_weir.schema.reductions import COMPLETE
from vllm_weir.worker.planning.columns import JOIN_FIELDS

_COMPLETE = tl.constexpr(COMPLETE)
_FIELDS = tl.constexpr(len(JOIN_FIELDS))


@triton.jit
def _one_more(so_far, row, largest):
    return tl.where(largest, tl.maximum(so_far, row, propagate_nan=tl.PropagateNan.ALL), so_far + row)


@triton.jit(do_not_specialize=["d_model"])
def _join(work, cells, kept, d_model, BLOCK: tl.constexpr):
    mine = work + tl.program_id(0) * _FIELDS
    column = tl.program_id(1).to(tl.int64)
    columns = tl.load(mine + 2).to(tl.int64)
    if column < columns:
        offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < d_model
        first = cells + (tl.load(mine).to(tl.int64) + column) * d_model + offsets
        groups, resumed, count = tl.load(mine + 1), tl.load(mine + 3), tl.load(mine + 4)
        done, largest = tl.load(mine + 5) != 0, tl.load(mine + 6) != 0
        had, keeps = tl.load(mine + 7).to(tl.int64), tl.load(mine + 8).to(tl.int64)
        before = kept + (had + column) * d_model + offsets
        total = tl.load(before, mask=inside & (had >= 0), other=0.0)
        if largest & (had < 0):
            total += float("-inf")
        if resumed == _COMPLETE:
            total = _one_more(total, tl.load(before + columns * d_model, mask=inside, other=0.0), largest)
        for k in range(groups - 1):
            total = _one_more(total, tl.load(first + k * columns * d_model, mask=inside, other=0.0), largest)
        last = tl.load(first + (groups - 1) * columns * d_model, mask=inside, other=0.0)
        if done:
            total = _one_more(total, last, largest)
            divisor = tl.where(largest, 1, count).to(tl.float32)
            tl.store(first, tl.div_rn(total, tl.zeros_like(total) + divisor), mask=inside)
        else:
            after = kept + (keeps + column) * d_model + offsets
            tl.store(after, total, mask=inside)
            tl.store(after + columns * d_model, last, mask=inside)


def join(work: torch.Tensor, columns: int, cells: torch.Tensor, kept: torch.Tensor) -> None:
    """As `folds._join`; `work` on the device, `columns` the most of any fold."""
    d_model = cells.shape[1]
    block = min(1024, triton.next_power_of_2(d_model))
    _join[(len(work), columns, triton.cdiv(d_model, block))](work, cells, kept, d_model, BLOCK=block, num_warps=4)
