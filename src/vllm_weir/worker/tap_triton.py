"""The tap on CUDA: one launch, one program a token, early exit where nothing is wanted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_weir.worker.plan import STAGES


@triton.jit
def _tap(
    hidden,
    residual,
    tap,
    plan,
    ranks,
    ring,
    hidden_stride,
    residual_stride,
    plan_width,
    rank_width,
    d_model,
    HAS_RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(plan + token, mask=token < plan_width, other=-1).to(tl.int64)
    if slot >= 0:
        profile = tl.load(plan + plan_width + token).to(tl.int64)
        site = tl.load(tap).to(tl.int64)
        at = ranks + profile * rank_width + site * STAGES
        r0 = tl.load(at)
        r1 = tl.load(at + 1)
        r2 = tl.load(at + 2)
        if (r0 >= 0) | (r1 >= 0) | (r2 >= 0):
            for start in range(0, d_model, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                inside = offsets < d_model
                row = tl.load(hidden + token * hidden_stride + offsets, mask=inside)
                if HAS_RESIDUAL:
                    row = row + tl.load(residual + token * residual_stride + offsets, mask=inside)
                tl.store(ring + (slot + r0) * d_model + offsets, row, mask=inside & (r0 >= 0))
                tl.store(ring + (slot + r1) * d_model + offsets, row, mask=inside & (r1 >= 0))
                tl.store(ring + (slot + r2) * d_model + offsets, row, mask=inside & (r2 >= 0))


def launch(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    tap: torch.Tensor,
    plan: torch.Tensor,
    ranks: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """Write the wanted rows of ``hidden (+ residual)``, both [tokens, d_model], into `ring`."""
    tokens, d_model = hidden.shape
    if not tokens:
        return
    if hidden.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the tap needs rows that are contiguous in memory")
    _tap[(tokens,)](
        hidden,
        hidden if residual is None else residual,
        tap,
        plan,
        ranks,
        ring,
        hidden.stride(0),
        0 if residual is None else residual.stride(0),
        plan.shape[1],
        ranks.shape[1],
        d_model,
        HAS_RESIDUAL=residual is not None,
        STAGES=STAGES,
        BLOCK=min(2048, triton.next_power_of_2(d_model)),
        num_warps=4,
    )
