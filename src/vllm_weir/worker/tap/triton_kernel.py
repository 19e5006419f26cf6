"""The tap's kernel on CUDA: one launch per tap, with one Triton program per token.

1. `_tap` reads, from the plan and the tables, which rows of its token are recorded here and which
   node the token's steering program starts with. It exits if there is neither.
2. It loads the row of the stream, and goes through the stages of the tap: record, follow the chain
   of nodes up to the next stage, record, and so on.
3. It writes a changed row back, so that the model's own sum is the new stream.

The first token of a group that is reduced (`reductions`) does all this for the whole group, in
`_reduce_group`; the others exit.
"""

# Triton takes annotations of a kernel's parameters for device types, so kernels have none.
# mypy: disallow-untyped-defs=False
# An `if` of a constexpr stands alone: what it leaves out is never compiled.
# ruff: noqa: ANN001, ANN202, SIM102

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from vllm_weir.schema import instructions as kinds
from vllm_weir.schema.rows import GROUP, MAXIMUM, SEEDED, SPAN
from vllm_weir.schema.taps import STAGES
from vllm_weir.worker.steering import programs

_NORM = tl.constexpr(kinds.NORM)
_AFFINE = tl.constexpr(kinds.AFFINE)
_CLAMP = tl.constexpr(kinds.CLAMP)
_BLEND = tl.constexpr(kinds.BLEND)
_KEEP_NORM = tl.constexpr(kinds.KEEP_NORM)
_FEATURE = tl.constexpr(kinds.FEATURE)
_SCORE = tl.constexpr(kinds.SCORE)
_DOSE = tl.constexpr(kinds.DOSE)
_ACTIVATE = tl.constexpr(kinds.ACTIVATE)
_HELD = tl.constexpr(kinds.HELD)
_ENCODE = tl.constexpr(kinds.ENCODE)
_HOOK = tl.constexpr(kinds.HOOK)
_NO_NORM = tl.constexpr(kinds.NO_NORM)
_CELL_BIT = tl.constexpr(programs.CELL_BIT)
_LAST = tl.constexpr(programs.LAST)
_AFTER_POST = tl.constexpr(programs.AFTER_POST)
_SPAN = tl.constexpr(SPAN)
_MAXIMUM = tl.constexpr(MAXIMUM)
_SEEDED = tl.constexpr(SEEDED)
_INTS = tl.constexpr(len(programs.INT_FIELDS))
_FLOATS = tl.constexpr(len(programs.FLOAT_FIELDS))


@triton.jit
def _nothing(h):
    """Return -0.0 for each value: added to a value it changes nothing, not even the sign of a zero."""
    return tl.zeros_like(h) * -1.0


@triton.jit
def _elements(vectors, u, d_model, offsets, inside, shift, acts, whole):
    """Return the elements of vector `u` for the columns on which an instruction acts."""
    # Only the first form is known to be aligned, so that a thread loads several elements at once.
    if whole:
        elements = tl.load(vectors + u * d_model + offsets, mask=inside, other=0.0, eviction_policy="evict_last")
    else:
        elements = tl.load(vectors + u * d_model + shift + offsets, mask=acts, other=0.0, eviction_policy="evict_last")
    return elements


@triton.jit
def _table(table, mask=None, other=None):
    """Return a number of the step's tables.

    Between two taps a layer reads more weights than the L2 cache holds; what the next tap reads of the
    tables is to stay there nevertheless, because each of its loads waits for the one before.
    """
    return tl.load(table, mask=mask, other=other, eviction_policy="evict_last")


@triton.jit
def _term(node, row, cells, held, ints, floats, vectors, width, d_model, offsets, inside, CELLS: tl.constexpr):
    """Return what the instruction at `node` adds to the row; `cells` and `held` point to the token's."""
    kind = _table(ints + node * _INTS)
    u = tl.maximum(_table(ints + node * _INTS + 1), 0).to(tl.int64)  # a HOOK has none
    w = _table(ints + node * _INTS + 2).to(tl.int64)
    lo, hi = _table(ints + node * _INTS + 5), _table(ints + node * _INTS + 6)
    shift = _table(ints + node * _INTS + 7)
    a = _table(floats + node * _FLOATS)
    whole = (lo == 0) & (hi == width) & (shift == 0)
    acts = inside & (offsets >= lo) & (offsets < hi)
    h = tl.where(acts, row, 0.0)
    direction = _elements(vectors, u, d_model, offsets, inside, shift, acts, whole)
    factor = a
    if kind == _NORM:
        factor = a * tl.sqrt(tl.sum(h * h, axis=0))
    if CELLS:
        if kind == _HELD:
            number = tl.load(cells + _table(floats + node * _FLOATS + 2).to(tl.int32))
            factor = a * number + _table(floats + node * _FLOATS + 1)
    if w >= 0:
        along = tl.sum(h * _elements(vectors, w, d_model, offsets, inside, shift, acts, whole), axis=0)
        if kind == _AFFINE:
            factor = a * along + _table(floats + node * _FLOATS + 1)
        if kind == _CLAMP:
            low = _table(floats + node * _FLOATS + 2)
            high = _table(floats + node * _FLOATS + 3)
            factor = a * (tl.minimum(tl.maximum(along, low), high) - along)
        if kind == _FEATURE:
            along += _table(floats + node * _FLOATS + 2)
            active = along > _table(floats + node * _FLOATS + 3)
            factor = a * tl.where(active, along, 0.0) + _table(floats + node * _FLOATS + 1)
    out = factor * direction
    if kind == _BLEND:
        out = a * (direction - h)
    if CELLS:
        if kind == _HOOK:
            place = _table(floats + node * _FLOATS + 2).to(tl.int64) * width
            out = tl.load(held + place + offsets, mask=acts, other=0.0) - h
    if kind == _KEEP_NORM:
        norm = tl.sqrt(tl.sum(h * h, axis=0))
        turned = h + (a + _table(floats + node * _FLOATS + 1) * norm) * direction
        length = tl.sqrt(tl.sum(turned * turned, axis=0))
        out = tl.where(length > 0, turned * (norm / length) - h, 0.0)
    return tl.where(acts, out, _nothing(h))


@triton.jit
def _raw_number(node, row, ints, floats, vectors, width, d_model, offsets, inside):
    """Return the number that the SCORE or ACTIVATE instruction at `node` makes of the row."""
    w = _table(ints + node * _INTS + 2).to(tl.int64)
    lo, hi = _table(ints + node * _INTS + 5), _table(ints + node * _INTS + 6)
    shift = _table(ints + node * _INTS + 7)
    whole = (lo == 0) & (hi == width) & (shift == 0)
    acts = inside & (offsets >= lo) & (offsets < hi)
    direction = _elements(vectors, w, d_model, offsets, inside, shift, acts, whole)
    h = tl.where(acts, row, 0.0)
    raw = tl.sum(h * direction, axis=0)
    if _table(floats + node * _FLOATS) > 0.0:
        norm = tl.sqrt(tl.sum(h * h, axis=0))
        raw = tl.where(norm > 0.0, raw / norm, 0.0)
    return raw + _table(floats + node * _FLOATS + 1)


@triton.jit
def _relative_dose(change, row):
    """Return the norm of a change over that of the row, _NO_NORM where the latter is 0."""
    norm = tl.sqrt(tl.sum(row * row, axis=0))
    return tl.where(norm == 0.0, _NO_NORM, tl.sqrt(tl.sum(change * change, axis=0)) / norm)


@triton.jit
def _load(hidden, other, token, hidden_stride, other_stride, offsets, inside, HAS_OTHER: tl.constexpr):
    """Return the token's rows of `hidden` and `other`; twice the former if there is no other."""
    row = tl.load(hidden + token * hidden_stride + offsets, mask=inside, other=0.0)
    other_row = row
    if HAS_OTHER:
        other_row = tl.load(other + token * other_stride + offsets, mask=inside, other=0.0)
    return row, other_row


@triton.jit
def _stream(row, other_row, scale, other_scale, HAS_OTHER: tl.constexpr):
    """Return the token's row of the stream, in the model's dtype."""
    if HAS_OTHER:
        # As the model rounds: a sum is scaled, or terms of different scales are added.
        if scale == other_scale:
            row = (row.to(tl.float32) + other_row.to(tl.float32)).to(row.dtype)
            if scale != 1.0:
                row = (row.to(tl.float32) * scale).to(row.dtype)
        else:
            one = (row.to(tl.float32) * scale).to(row.dtype).to(tl.float32)
            row = (one + (other_row.to(tl.float32) * other_scale).to(row.dtype).to(tl.float32)).to(row.dtype)
    elif scale != 1.0:
        row = (row.to(tl.float32) * scale).to(row.dtype)
    return row


@triton.jit
def _write(
    hidden, other, token, hidden_stride, other_stride, tap, h, other_row, offsets, inside, HAS_OTHER: tl.constexpr
):
    """Write `h` as the stream's row of a token."""
    written = h * (1.0 / _table(tap + 1).to(tl.float32, bitcast=True))
    if HAS_OTHER:
        free = _table(tap + 3) == 0
        written = tl.where(free, written, written - other_row.to(tl.float32))
        nothing = (h * 0.0).to(other_row.dtype)
        tl.store(other + token * other_stride + offsets, nothing, mask=inside & free)
    tl.store(hidden + token * hidden_stride + offsets, written.to(other_row.dtype), mask=inside)


@triton.jit
def _follow(
    node,
    h,
    past_post,
    cells,
    held,
    ints,
    floats,
    vectors,
    width,
    d_model,
    offsets,
    inside,
    DTYPE: tl.constexpr,
    stop=-1,
    CELLS: tl.constexpr = True,
):
    """Follow a chain of nodes; return where it stopped, the new row, and whether something was added.

    Stop at the node `stop` and, unless `past_post`, at the first one that acts after resid_post was
    recorded. `cells` and `held` point to the token's; what an ENCODE writes is there already. Probes
    see the row as it is recorded, in DTYPE. Without CELLS no node writes or reads one, or is a HOOK.
    """
    delta = _nothing(h)
    changed = 0
    flags = _table(ints + node * _INTS + 4, mask=node >= 0, other=0)
    while (node >= 0) & (node != stop) & (past_post | ((flags & _AFTER_POST) == 0)):
        if CELLS:
            cell = flags >> _CELL_BIT
            kind = _table(ints + node * _INTS)
            if (kind == _SCORE) | (kind == _ACTIVATE):
                seen = h.to(DTYPE).to(tl.float32)
                raw = _raw_number(node, seen, ints, floats, vectors, width, d_model, offsets, inside)
                if kind == _ACTIVATE:
                    raw = tl.where(raw > _table(floats + node * _FLOATS + 3), raw, 0.0)
                tl.store(cells + cell - 1, raw)
            elif kind == _DOSE:
                tl.store(cells + cell - 1, _relative_dose(delta, h))
            elif kind != _ENCODE:
                share = tl.load(cells + cell - 1, mask=cell > 0, other=1.0)
                if share != 0.0:
                    delta += share * _term(
                        node, h, cells, held, ints, floats, vectors, width, d_model, offsets, inside, True
                    )
                    changed = 1
        else:
            delta += _term(node, h, cells, held, ints, floats, vectors, width, d_model, offsets, inside, False)
            changed = 1
        if (flags & _LAST) != 0:
            h = h + delta
            delta = _nothing(h)
        node = _table(ints + node * _INTS + 3).to(tl.int64)
        flags = _table(ints + node * _INTS + 4, mask=node >= 0, other=0)
    return node, h, changed


@triton.jit
def _combine(so_far, row, counts, maximum):
    """Return a reduction with one row more, if that counts."""
    if counts:
        if maximum:
            so_far = tl.maximum(so_far, row.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        else:
            so_far += row.to(tl.float32)
    return so_far


@triton.jit
def _counts(plan, token, k, span, whole):
    """Return whether the `k`-th token of a span is of the group; all are if it is `whole`."""
    in_span = k < span
    its_span = _table(plan + (token + k) * 4 + 3, mask=in_span & (whole == 0), other=0)
    return in_span & (whole | (k == 0) | (its_span < 0))


@triton.jit
def _reduce_group(
    hidden,
    other,
    hidden_stride,
    other_stride,
    tap,
    tap_index,
    token,
    flagged_span,
    cell,
    stage_ranks,
    plan,
    heads,
    ints,
    floats,
    vectors,
    cells,
    held,
    num_taps,
    num_cells,
    held_stride,
    width,
    d_model,
    HAS_OTHER: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CELLS: tl.constexpr,
):
    """Reduce the rows of a group's tokens, one after the other, into its cells, and steer them.

    `flagged_span` is the first token's entry in the plan: the span of the group, and flags.
    """
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    span = flagged_span & _SPAN
    maximum, seeded = (flagged_span & _MAXIMUM) != 0, (flagged_span & _SEEDED) != 0
    lanes = tl.arange(0, GROUP)
    entries = plan + (token + lanes) * 4
    member = (lanes < span) & ((lanes == 0) | (_table(entries + 3, mask=lanes < span, other=0) < 0))
    whole = tl.sum(member.to(tl.int32), axis=0) == span
    programs = _table(entries + 2, mask=member, other=-1).to(tl.int64)
    steered = tl.max(_table(heads + programs * num_taps + tap_index, mask=programs >= 0, other=-1), axis=0) >= 0
    scale, other_scale = _table(tap + 1).to(tl.float32, bitcast=True), _table(tap + 2).to(tl.float32, bitcast=True)
    last_stage = 0
    for stage in range(1, STAGES):
        last_stage = tl.where(_table(stage_ranks + stage) >= 0, stage, last_stage)
    for stage in range(STAGES):
        rank = _table(stage_ranks + stage)
        if rank >= 0:
            target = cell + rank.to(tl.int64) * d_model + offsets
            so_far = tl.load(target, mask=inside & seeded, other=0.0)
            if maximum & (seeded == 0):
                so_far += float("-inf")
            if steered:
                for k in range(span):
                    entry = plan + (token + k) * 4
                    counts = (k == 0) | (_table(entry + 3) < 0)
                    if counts:
                        program = _table(entry + 2).to(tl.int64)
                        node = _table(heads + program * num_taps + tap_index, mask=program >= 0, other=-1).to(tl.int64)
                        row, other_row = _load(
                            hidden, other, token + k, hidden_stride, other_stride, offsets, inside, HAS_OTHER
                        )
                        row = _stream(row, other_row, scale, other_scale, HAS_OTHER)
                        first_node, h = node, row.to(tl.float32)
                        own_cells = cells + (token + k) * num_cells
                        own_held = held + (token + k) * held_stride
                        changed = 0
                        if stage > 0:
                            node, h, changed = _follow(
                                node, h, stage > 1, own_cells, own_held, ints, floats, vectors, width, d_model,
                                offsets, inside, row.dtype, -1, CELLS,
                            )  # fmt: skip
                        so_far = _combine(so_far, h.to(row.dtype), True, maximum)
                        if (stage == last_stage) & (first_node >= 0):
                            node, h, changed_after = _follow(
                                node, h, True, own_cells, own_held, ints, floats, vectors, width, d_model, offsets,
                                inside, row.dtype, -1, CELLS,
                            )  # fmt: skip
                            if (changed | changed_after) != 0:
                                _write(
                                    hidden, other, token + k, hidden_stride, other_stride, tap, h, other_row, offsets,
                                    inside, HAS_OTHER,
                                )  # fmt: skip
            else:
                for k in range(0, span, 2):
                    # Two at a time: both loads are under way before the first row is joined.
                    at_k = token + k
                    a, other_row_a = _load(hidden, other, at_k, hidden_stride, other_stride, offsets, inside, HAS_OTHER)
                    b, other_row_b = _load(
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
                    so_far = _combine(so_far, _stream(a, other_row_a, scale, other_scale, HAS_OTHER), in_a, maximum)
                    so_far = _combine(so_far, _stream(b, other_row_b, scale, other_scale, HAS_OTHER), in_b, maximum)
            tl.store(target, so_far, mask=inside)


# Specialising on these would only compile more kernels.
@triton.jit(do_not_specialize=["plan_size", "rank_width", "num_taps", "num_cells", "held_stride"])
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
    cells,
    held,
    listed,
    hidden_stride,
    other_stride,
    plan_size,
    rank_width,
    num_taps,
    num_cells,
    held_stride,
    width,
    d_model,
    HAS_OTHER: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
    AHEAD: tl.constexpr,
    CELLS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if LISTED:
        token = _table(listed + token).to(tl.int64)
    planned = token < plan_size
    slot = _table(plan + token * 4, mask=planned, other=-1).to(tl.int64)
    program = _table(plan + token * 4 + 2, mask=planned, other=-1).to(tl.int64)
    flagged_span = _table(plan + token * 4 + 3, mask=planned, other=0)
    tap_index = _table(tap).to(tl.int64)
    node = _table(heads + program * num_taps + tap_index, mask=program >= 0, other=-1).to(tl.int64)
    site_set = _table(plan + token * 4 + 1, mask=slot >= 0, other=0).to(tl.int64)
    stage_ranks = ranks + site_set * rank_width + tap_index * STAGES
    rank_0 = _table(stage_ranks, mask=slot >= 0, other=-1)
    rank_1 = _table(stage_ranks + 1, mask=slot >= 0, other=-1)
    rank_2 = _table(stage_ranks + 2, mask=slot >= 0, other=-1)
    if AHEAD:
        # Only tables were read so far, which are complete before the kernel ahead starts. Programs
        # with nothing to do wait too: the kernel after the tap takes the tap's end to mean that the
        # kernel ahead has ended.
        gdc_wait()
    recorded = (rank_0 >= 0) | (rank_1 >= 0) | (rank_2 >= 0)
    grouped = recorded & (flagged_span != 0) & GROUPS
    if grouped & (flagged_span > 0):
        if GROUPS:  # the first token of a group does all the work
            words = 4 // (ring.dtype.element_ty.primitive_bitwidth // 8)
            cell = ring.to(tl.pointer_type(tl.float32)) + slot // words * d_model
            _reduce_group(
                hidden, other, hidden_stride, other_stride, tap, tap_index, token, flagged_span, cell, stage_ranks,
                plan, heads, ints, floats, vectors, cells, held, num_taps, num_cells, held_stride, width, d_model,
                HAS_OTHER, STAGES, BLOCK, GROUP, CELLS,
            )  # fmt: skip
    if (recorded | (node >= 0)) & (grouped == 0):
        offsets = tl.arange(0, BLOCK)
        inside = offsets < width
        row, other_row = _load(hidden, other, token, hidden_stride, other_stride, offsets, inside, HAS_OTHER)
        scale = _table(tap + 1).to(tl.float32, bitcast=True)
        row = _stream(row, other_row, scale, _table(tap + 2).to(tl.float32, bitcast=True), HAS_OTHER)
        tl.store(ring + (slot + rank_0) * d_model + offsets, row, mask=inside & (rank_0 >= 0))
        if node < 0:
            tl.store(ring + (slot + rank_1) * d_model + offsets, row, mask=inside & (rank_1 >= 0))
            tl.store(ring + (slot + rank_2) * d_model + offsets, row, mask=inside & (rank_2 >= 0))
        else:
            own_cells = cells + token * num_cells
            own_held = held + token * held_stride
            h, changed = row.to(tl.float32), 0
            for stage in tl.range(1, 3, loop_unroll_factor=1):  # unrolled, the kernel would be twice as large
                node, h, changed_now = _follow(
                    node, h, stage > 1, own_cells, own_held, ints, floats, vectors, width, d_model, offsets, inside,
                    row.dtype, -1, CELLS,
                )  # fmt: skip
                changed |= changed_now
                rank = tl.where(stage == 1, rank_1, rank_2)
                tl.store(ring + (slot + rank) * d_model + offsets, h.to(row.dtype), mask=inside & (rank >= 0))
            if changed != 0:
                _write(hidden, other, token, hidden_stride, other_stride, tap, h, other_row, offsets, inside, HAS_OTHER)


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
    cells: torch.Tensor | None = None,
    *,
    listed: torch.Tensor | None = None,
    held: torch.Tensor | None = None,
    groups: bool = True,
) -> None:
    """Record and steer rows of the stream at one tap, as the plan says.

    `hidden` and `other` are [tokens, width], and their weighted sum is the stream; `tap` is the
    tap's number tensor (`vllm_weir.worker.tap.op.numbered`). The other tensors are those of
    `vllm_weir.worker.tap.op.TapTensors`; `cells` may be left out if no node has one
    or is a HOOK. The width of the row need not be the ring's.

    `listed` is int32, the tokens that the plan has something for; those that begin a group come
    first, since they take longest. None means all tokens, as in a CUDA graph, which serves any
    plan. A list saves launching programs that have nothing to do and hold up the others.

    `held` is float32 [tokens, hooks, width], the rows that functions returned for HOOK nodes.
    `groups`: whether rows may be reduced. Without `cells` or groups the kernel is several times smaller.

    Raises:
        ValueError: if the rows are not contiguous.
    """
    num_programs, width = hidden.shape
    if listed is not None:
        num_programs = len(listed)
    if not num_programs:
        return
    if hidden.stride(1) != 1 or (other is not None and other.stride(1) != 1):
        raise ValueError("a tap needs rows that are contiguous in memory")
    block, ahead = triton.next_power_of_2(width), _can_launch_ahead()
    _tap[(num_programs,)](
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
        floats if cells is None else cells,
        floats if held is None else held,
        plan if listed is None else listed,
        hidden.stride(0),
        0 if other is None else other.stride(0),
        plan.shape[0],
        ranks.shape[1],
        heads.shape[1],
        0 if cells is None else cells.shape[1],
        0 if held is None else held.stride(0),
        width,
        ring.shape[1],
        HAS_OTHER=other is not None,
        STAGES=STAGES,
        BLOCK=block,
        GROUP=GROUP,
        LISTED=listed is not None,
        AHEAD=ahead,
        CELLS=cells is not None,
        GROUPS=groups,
        num_warps=4 if block <= 2048 else 16,
        # Enough registers for plain tokens; with more, half as many programs fit a multiprocessor.
        maxnreg=96 if block <= 2048 else 64 if block <= 4096 else 128,
        **({"launch_pdl": True} if ahead else {}),
    )


@functools.cache
def _can_launch_ahead() -> bool:
    """Return whether a kernel may start before the one ahead of it has ended.

    CUDA calls this programmatic dependent launch.
    """
    return torch.version.cuda is not None and torch.cuda.get_device_capability() >= (9, 0)
