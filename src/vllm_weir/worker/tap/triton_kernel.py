"""The tap on CUDA: one launch, one program a token, early exit where nothing is wanted."""

# Triton takes annotations of a kernel's parameters for their types on the device, so kernels have none.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from vllm_weir.schema import interventions as kinds
from vllm_weir.schema.reductions import GROUP, MAXIMUM, SEEDED, SPAN
from vllm_weir.schema.taps import STAGES
from vllm_weir.worker.steering import programs

_NORM = tl.constexpr(kinds.NORM)
_AFFINE = tl.constexpr(kinds.AFFINE)
_CLAMP = tl.constexpr(kinds.CLAMP)
_BLEND = tl.constexpr(kinds.BLEND)
_KEEP_NORM = tl.constexpr(kinds.KEEP_NORM)
_LAST = tl.constexpr(programs.LAST)
_AFTER_POST = tl.constexpr(programs.AFTER_POST)
_SPAN = tl.constexpr(SPAN)
_MAXIMUM = tl.constexpr(MAXIMUM)
_SEEDED = tl.constexpr(SEEDED)
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


@triton.jit
def _load(hidden, other, token, hidden_stride, other_stride, offsets, inside, HAS_OTHER: tl.constexpr):
    """What is at a token, and what stands beside it there."""
    row = tl.load(hidden + token * hidden_stride + offsets, mask=inside, other=0.0)
    beside = row
    if HAS_OTHER:
        beside = tl.load(other + token * other_stride + offsets, mask=inside, other=0.0)
    return row, beside


@triton.jit
def _stream(row, beside, scale, other_scale, HAS_OTHER: tl.constexpr):
    """The stream of both, in the model's dtype."""
    if HAS_OTHER:
        # As the model rounds: a sum is scaled, or terms of different scales are added.
        if scale == other_scale:
            row = (row.to(tl.float32) + beside.to(tl.float32)).to(row.dtype)
            if scale != 1.0:
                row = (row.to(tl.float32) * scale).to(row.dtype)
        else:
            one = (row.to(tl.float32) * scale).to(row.dtype).to(tl.float32)
            row = (one + (beside.to(tl.float32) * other_scale).to(row.dtype).to(tl.float32)).to(row.dtype)
    elif scale != 1.0:
        row = (row.to(tl.float32) * scale).to(row.dtype)
    return row


@triton.jit
def _write(hidden, other, token, hidden_stride, other_stride, tap, h, beside, offsets, inside, HAS_OTHER: tl.constexpr):
    """Make the stream at a token `h`."""
    written = h * (1.0 / tl.load(tap + 1).to(tl.float32, bitcast=True))
    if HAS_OTHER:
        free = tl.load(tap + 3) == 0
        written = tl.where(free, written, written - beside.to(tl.float32))
        nothing = (h * 0.0).to(beside.dtype)
        tl.store(other + token * other_stride + offsets, nothing, mask=inside & free)
    tl.store(hidden + token * hidden_stride + offsets, written.to(beside.dtype), mask=inside)


@triton.jit
def _follow(node, h, past_post, ints, floats, vectors, d_model, offsets, inside):
    """Follow a chain to its end, or to what comes after the post stage; returns where it stopped, and the row."""
    delta = tl.zeros_like(h)
    flags = tl.load(ints + node * _INTS + 4, mask=node >= 0, other=0)
    while (node >= 0) & (past_post | ((flags & _AFTER_POST) == 0)):
        delta += _term(node, h, ints, floats, vectors, d_model, offsets, inside)
        if (flags & _LAST) != 0:
            h = h + delta
            delta = delta * 0.0
        node = tl.load(ints + node * _INTS + 3).to(tl.int64)
        flags = tl.load(ints + node * _INTS + 4, mask=node >= 0, other=0)
    return node, h


@triton.jit
def _joined(so_far, row, counts, maximum):
    """A reduction with one row more, if that counts."""
    if counts:
        if maximum:
            so_far = tl.maximum(so_far, row.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        else:
            so_far += row.to(tl.float32)
    return so_far


@triton.jit
def _counts(plan, token, k, span, whole):
    """Whether the `k`-th token of a group's span is one of the group."""
    here = k < span
    mark = tl.load(plan + (token + k) * 4 + 3, mask=here & (whole == 0), other=0)
    return here & (whole | (k == 0) | (mark < 0))


@triton.jit
def _fold(
    hidden,
    other,
    hidden_stride,
    other_stride,
    tap,
    site,
    token,
    fold,
    cell,
    at,
    plan,
    heads,
    ints,
    floats,
    vectors,
    num_taps,
    d_model,
    HAS_OTHER: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Reduce the rows of a group's tokens, one after the other, into its cells, and steer them: nobody else does."""
    offsets = tl.arange(0, BLOCK)
    inside = offsets < d_model
    span = fold & _SPAN
    maximum, seeded = (fold & _MAXIMUM) != 0, (fold & _SEEDED) != 0
    lanes = tl.arange(0, GROUP)
    some = plan + (token + lanes) * 4
    member = (lanes < span) & ((lanes == 0) | (tl.load(some + 3, mask=lanes < span, other=0) < 0))
    whole = tl.sum(member.to(tl.int32), axis=0) == span
    programs = tl.load(some + 2, mask=member, other=-1).to(tl.int64)
    steered = tl.max(tl.load(heads + programs * num_taps + site, mask=programs >= 0, other=-1), axis=0) >= 0
    scale, other_scale = tl.load(tap + 1).to(tl.float32, bitcast=True), tl.load(tap + 2).to(tl.float32, bitcast=True)
    last = 0
    for stage in range(1, STAGES):
        last = tl.where(tl.load(at + stage) >= 0, stage, last)
    for stage in range(STAGES):
        rank = tl.load(at + stage)
        if rank >= 0:
            to = cell + rank.to(tl.int64) * d_model + offsets
            so_far = tl.load(to, mask=inside & seeded, other=0.0)
            if maximum & (seeded == 0):
                so_far += float("-inf")
            if steered:
                for k in range(span):
                    mine = plan + (token + k) * 4
                    counts = (k == 0) | (tl.load(mine + 3) < 0)
                    if counts:
                        program = tl.load(mine + 2).to(tl.int64)
                        node = tl.load(heads + program * num_taps + site, mask=program >= 0, other=-1).to(tl.int64)
                        row, beside = _load(
                            hidden, other, token + k, hidden_stride, other_stride, offsets, inside, HAS_OTHER
                        )
                        row = _stream(row, beside, scale, other_scale, HAS_OTHER)
                        first, h = node, row.to(tl.float32)
                        if stage > 0:
                            node, h = _follow(node, h, stage > 1, ints, floats, vectors, d_model, offsets, inside)
                        so_far = _joined(so_far, h.to(row.dtype), True, maximum)
                        if (stage == last) & (first >= 0):
                            node, h = _follow(node, h, True, ints, floats, vectors, d_model, offsets, inside)
                            _write(
                                hidden, other, token + k, hidden_stride, other_stride, tap, h, beside, offsets, inside,
                                HAS_OTHER,
                            )  # fmt: skip
            else:
                for k in range(0, span, 2):
                    # The loads of both rows are under way before the first of them is joined.
                    at_k = token + k
                    a, beside_a = _load(hidden, other, at_k, hidden_stride, other_stride, offsets, inside, HAS_OTHER)
                    b, beside_b = _load(
                        hidden,
                        other,
                        at_k + 1,
                        hidden_stride,
                        other_stride,
                        offsets,
                        inside & (k + 1 < span),
                        HAS_OTHER,
                    )
                    in_a, in_b = _counts(plan, token, k, span, whole), _counts(plan, token, k + 1, span, whole)
                    so_far = _joined(so_far, _stream(a, beside_a, scale, other_scale, HAS_OTHER), in_a, maximum)
                    so_far = _joined(so_far, _stream(b, beside_b, scale, other_scale, HAS_OTHER), in_b, maximum)
            tl.store(to, so_far, mask=inside)


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
    listed,
    hidden_stride,
    other_stride,
    plan_size,
    rank_width,
    num_taps,
    d_model,
    HAS_OTHER: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if LISTED:
        token = tl.load(listed + token).to(tl.int64)
    planned = token < plan_size
    slot = tl.load(plan + token * 4, mask=planned, other=-1).to(tl.int64)
    program = tl.load(plan + token * 4 + 2, mask=planned, other=-1).to(tl.int64)
    fold = tl.load(plan + token * 4 + 3, mask=planned, other=0)
    site = tl.load(tap).to(tl.int64)
    node = tl.load(heads + program * num_taps + site, mask=program >= 0, other=-1).to(tl.int64)
    profile = tl.load(plan + token * 4 + 1, mask=slot >= 0, other=0).to(tl.int64)
    at = ranks + profile * rank_width + site * STAGES
    r0 = tl.load(at, mask=slot >= 0, other=-1)
    r1 = tl.load(at + 1, mask=slot >= 0, other=-1)
    r2 = tl.load(at + 2, mask=slot >= 0, other=-1)
    if AHEAD:
        # Up to here only tables were read, which are complete before the kernel that this one follows starts. All
        # programs wait, also those with nothing to do: what comes after the tap takes its end for that kernel's end.
        gdc_wait()
    recorded = (r0 >= 0) | (r1 >= 0) | (r2 >= 0)
    if recorded & (fold != 0):
        if fold > 0:  # the others of a group leave all to its first
            words = 4 // (ring.dtype.element_ty.primitive_bitwidth // 8)
            cell = ring.to(tl.pointer_type(tl.float32)) + slot // words * d_model
            _fold(
                hidden, other, hidden_stride, other_stride, tap, site, token, fold, cell, at, plan, heads, ints, floats,
                vectors, num_taps, d_model, HAS_OTHER, STAGES, BLOCK, GROUP,
            )  # fmt: skip
    elif recorded | (node >= 0):
        offsets = tl.arange(0, BLOCK)
        inside = offsets < d_model
        row, beside = _load(hidden, other, token, hidden_stride, other_stride, offsets, inside, HAS_OTHER)
        scale = tl.load(tap + 1).to(tl.float32, bitcast=True)
        row = _stream(row, beside, scale, tl.load(tap + 2).to(tl.float32, bitcast=True), HAS_OTHER)
        tl.store(ring + (slot + r0) * d_model + offsets, row, mask=inside & (r0 >= 0))
        if node < 0:
            tl.store(ring + (slot + r1) * d_model + offsets, row, mask=inside & (r1 >= 0))
            tl.store(ring + (slot + r2) * d_model + offsets, row, mask=inside & (r2 >= 0))
        else:
            node, h = _follow(node, row.to(tl.float32), False, ints, floats, vectors, d_model, offsets, inside)
            tl.store(ring + (slot + r1) * d_model + offsets, h.to(row.dtype), mask=inside & (r1 >= 0))
            node, h = _follow(node, h, True, ints, floats, vectors, d_model, offsets, inside)
            tl.store(ring + (slot + r2) * d_model + offsets, h.to(row.dtype), mask=inside & (r2 >= 0))
            _write(hidden, other, token, hidden_stride, other_stride, tap, h, beside, offsets, inside, HAS_OTHER)


def launch(
    hidden: torch.Tensor,
    other: torch.Tensor | None,
    tap: torch.Tensor,
    plan: torch.Tensor,
    ranks: torch.Tensor,
    ring: torch.Tensor,
    heads: torch.Tensor,
    ints: torch.Tensor,
    floats: torch.Tensor,
    vectors: torch.Tensor,
    *,
    listed: torch.Tensor | None = None,
) -> None:
    """Record and steer rows of `hidden` and what stands beside it, both [tokens, d_model], as the plan says.

    `listed`: int32, the tokens that the plan has something for, those first that begin a group; None for all tokens, as
    in a CUDA graph, which is to serve any plan. Of thousands of programs that only find that they have nothing to do,
    each holds up one that has.
    """
    tokens, d_model = hidden.shape
    if listed is not None:
        tokens = len(listed)
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
        plan if listed is None else listed,
        hidden.stride(0),
        0 if other is None else other.stride(0),
        plan.shape[0],
        ranks.shape[1],
        heads.shape[1],
        d_model,
        HAS_OTHER=other is not None,
        STAGES=STAGES,
        BLOCK=block,
        GROUP=GROUP,
        LISTED=listed is not None,
        AHEAD=ahead,
        num_warps=4 if block <= 2048 else 16,
        # As many as plain tokens need: with more, only half as many programs have room on a processor.
        maxnreg=96 if block <= 2048 else 64 if block <= 4096 else 128,
        **({"launch_pdl": True} if ahead else {}),
    )


@functools.cache
def _launched_ahead() -> bool:
    """Whether a kernel may be launched before the one that it follows has ended (programmatic dependent launch)."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability() >= (9, 0)
