"""The tap on CUDA: one launch, one program a token, early exit where nothing is wanted."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from vllm_weir.spec import interventions as kinds
from vllm_weir.worker import programs
from vllm_weir.worker.select import STAGES

_NORM = tl.constexpr(kinds.NORM)
_AFFINE = tl.constexpr(kinds.AFFINE)
_CLAMP = tl.constexpr(kinds.CLAMP)
_BLEND = tl.constexpr(kinds.BLEND)
_KEEP_NORM = tl.constexpr(kinds.KEEP_NORM)
_LAST = tl.constexpr(programs.LAST)
_AFTER_POST = tl.constexpr(programs.AFTER_POST)
_INTS = tl.constexpr(len(programs.INT_FIELDS))
_FLOATS = tl.constexpr(len(programs.FLOAT_FIELDS))


@triton.jit
def _term(node, h, ints, floats, vectors, d_model, offsets, inside):
    """What one instruction adds to the row `h`."""
    kind = tl.load(ints + node * _INTS)
    u = tl.load(ints + node * _INTS + 1).to(tl.int64)
    w = tl.load(ints + node * _INTS + 2).to(tl.int64)
    a = tl.load(floats + node * _FLOATS)
    direction = tl.load(vectors + u * d_model + offsets, mask=inside, other=0.0)
    factor = a
    if kind == _NORM:
        factor = a * tl.sqrt(tl.sum(h * h, axis=0))
    if w >= 0:
        along = tl.sum(h * tl.load(vectors + w * d_model + offsets, mask=inside, other=0.0), axis=0)
        if kind == _AFFINE:
            factor = a * along + tl.load(floats + node * _FLOATS + 1)
        if kind == _CLAMP:
            low = tl.load(floats + node * _FLOATS + 2)
            high = tl.load(floats + node * _FLOATS + 3)
            factor = a * (tl.minimum(tl.maximum(along, low), high) - along)
    out = factor * direction
    if kind == _BLEND:
        out = a * (direction - h)
    if kind == _KEEP_NORM:
        norm = tl.sqrt(tl.sum(h * h, axis=0))
        turned = h + (a + tl.load(floats + node * _FLOATS + 1) * norm) * direction
        length = tl.sqrt(tl.sum(turned * turned, axis=0))
        out = tl.where(length > 0, turned * (norm / length) - h, 0.0)
    return out


# What does not help the code would only make more kernels of it.
@triton.jit(do_not_specialize=["plan_size", "rank_width", "num_taps"])
def _tap(
    hidden,
    other,
    tap,
    plan,
    ranks,
    ring,
    heads,
    ints,
    floats,
    vectors,
    hidden_stride,
    other_stride,
    plan_size,
    rank_width,
    num_taps,
    d_model,
    HAS_OTHER: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    planned = token < plan_size
    slot = tl.load(plan + token * 3, mask=planned, other=-1).to(tl.int64)
    program = tl.load(plan + token * 3 + 2, mask=planned, other=-1).to(tl.int64)
    site = tl.load(tap).to(tl.int64)
    scale = tl.load(tap + 1).to(tl.float32, bitcast=True)
    node = tl.load(heads + program * num_taps + site, mask=program >= 0, other=-1).to(tl.int64)
    profile = tl.load(plan + token * 3 + 1, mask=slot >= 0, other=0).to(tl.int64)
    at = ranks + profile * rank_width + site * STAGES
    r0 = tl.load(at, mask=slot >= 0, other=-1)
    r1 = tl.load(at + 1, mask=slot >= 0, other=-1)
    r2 = tl.load(at + 2, mask=slot >= 0, other=-1)
    if AHEAD:
        # Up to here only tables were read, which are complete before the kernel that this one follows starts. All
        # programs wait, also those with nothing to do: what comes after the tap takes its end for that kernel's end.
        gdc_wait()
    if (node >= 0) | (r0 >= 0) | (r1 >= 0) | (r2 >= 0):
        offsets = tl.arange(0, BLOCK)
        inside = offsets < d_model
        row = tl.load(hidden + token * hidden_stride + offsets, mask=inside, other=0.0)
        if HAS_OTHER:
            beside = tl.load(other + token * other_stride + offsets, mask=inside, other=0.0)
            other_scale = tl.load(tap + 2).to(tl.float32, bitcast=True)
            # As the model rounds: a sum is scaled, or terms of different scales are added.
            both = (row.to(tl.float32) + beside.to(tl.float32)).to(row.dtype).to(tl.float32) * scale
            one = (row.to(tl.float32) * scale).to(row.dtype).to(tl.float32)
            terms = one + (beside.to(tl.float32) * other_scale).to(row.dtype).to(tl.float32)
            row = tl.where(scale == other_scale, both, terms).to(row.dtype)
        else:
            row = (row.to(tl.float32) * scale).to(row.dtype)
        tl.store(ring + (slot + r0) * d_model + offsets, row, mask=inside & (r0 >= 0))
        if node < 0:
            tl.store(ring + (slot + r1) * d_model + offsets, row, mask=inside & (r1 >= 0))
            tl.store(ring + (slot + r2) * d_model + offsets, row, mask=inside & (r2 >= 0))
        else:
            h = row.to(tl.float32)
            delta = tl.zeros_like(h)
            flags = tl.load(ints + node * _INTS + 4)
            while (node >= 0) & ((flags & _AFTER_POST) == 0):
                delta += _term(node, h, ints, floats, vectors, d_model, offsets, inside)
                if (flags & _LAST) != 0:
                    h = h + delta
                    delta = delta * 0.0
                node = tl.load(ints + node * _INTS + 3).to(tl.int64)
                flags = tl.load(ints + node * _INTS + 4, mask=node >= 0, other=0)
            tl.store(ring + (slot + r1) * d_model + offsets, h.to(row.dtype), mask=inside & (r1 >= 0))
            while node >= 0:
                delta += _term(node, h, ints, floats, vectors, d_model, offsets, inside)
                if (tl.load(ints + node * _INTS + 4) & _LAST) != 0:
                    h = h + delta
                    delta = delta * 0.0
                node = tl.load(ints + node * _INTS + 3).to(tl.int64)
            tl.store(ring + (slot + r2) * d_model + offsets, h.to(row.dtype), mask=inside & (r2 >= 0))
            written = h * (1.0 / scale)
            if HAS_OTHER:
                free = tl.load(tap + 3) == 0
                written = tl.where(free, written, written - beside.to(tl.float32))
                nothing = (h * 0.0).to(row.dtype)
                tl.store(other + token * other_stride + offsets, nothing, mask=inside & free)
            tl.store(hidden + token * hidden_stride + offsets, written.to(row.dtype), mask=inside)


def launch(hidden, other, tap, plan, ranks, ring, heads, ints, floats, vectors) -> None:
    """Record and steer rows of `hidden` and what stands beside it, both [tokens, d_model], as the plan says."""
    tokens, d_model = hidden.shape
    if not tokens:
        return
    if hidden.stride(1) != 1 or (other is not None and other.stride(1) != 1):
        raise ValueError("the tap needs rows that are contiguous in memory")
    block, ahead = triton.next_power_of_2(d_model), _launched_ahead()
    _tap[(tokens,)](
        hidden,
        hidden if other is None else other,
        tap,
        plan,
        ranks,
        ring,
        heads,
        ints,
        floats,
        vectors,
        hidden.stride(0),
        0 if other is None else other.stride(0),
        plan.shape[0],
        ranks.shape[1],
        heads.shape[1],
        d_model,
        HAS_OTHER=other is not None,
        STAGES=STAGES,
        BLOCK=block,
        AHEAD=ahead,
        num_warps=4 if block <= 2048 else 16,
        **({"launch_pdl": True} if ahead else {}),
    )


@functools.cache
def _launched_ahead() -> bool:
    """Whether a kernel may be launched before the one that it follows has ended (programmatic dependent launch)."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability() >= (9, 0)
