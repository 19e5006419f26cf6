"""The score kernel on CUDA: one Triton program per request's run of tokens and probe.

`vllm_weir.schema.resolved_probes` says what scores and factors are. A program walks its tokens one
after the other, so that results do not depend on how a request was cut into steps; the numbers of
one token (outputs, hidden units, heads' values) are lanes. The grid is the same for every step,
since CUDA graphs hold it: programs go on with further runs until none is left.
"""

# Triton takes annotations of a kernel's parameters for device types, so kernels have none.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl

from vllm_weir.schema import instructions
from vllm_weir.schema import resolved_probes as kinds
from vllm_weir.schema.taps import ALL_STAGES
from vllm_weir.worker.scoring import probe_table
from vllm_weir.worker.scoring.tensors import RUN_FIELDS, ScoreTensors
from vllm_weir.worker.steering import programs

PROGRAMS = 128
"""Programs of a launch: about as many as an H100 has multiprocessors."""

_MLP, _ATTENTION = tl.constexpr(kinds.MLP), tl.constexpr(kinds.ATTENTION)
_SIGMOID, _SOFTMAX = tl.constexpr(kinds.SIGMOID), tl.constexpr(kinds.SOFTMAX)
_EMA, _MAXIMUM, _MEAN = tl.constexpr(kinds.EMA), tl.constexpr(kinds.MAXIMUM), tl.constexpr(kinds.MEAN)
_RELU, _GELU, _SILU = tl.constexpr(kinds.RELU), tl.constexpr(kinds.GELU), tl.constexpr(kinds.SILU)
_SCORE, _ACTIVATE = tl.constexpr(instructions.SCORE), tl.constexpr(instructions.ACTIVATE)
_ABOVE, _LATCH = tl.constexpr(probe_table.ABOVE), tl.constexpr(probe_table.LATCH)
_DELAYED, _CONTROLLED = tl.constexpr(probe_table.DELAYED), tl.constexpr(probe_table.CONTROLLED)
_CELL_BIT = tl.constexpr(programs.CELL_BIT)
_NODE = tl.constexpr(len(programs.INT_FIELDS))
_RUN = tl.constexpr(len(RUN_FIELDS))
_PROBE = tl.constexpr(len(probe_table.PROBE_FIELDS))
_GATE = tl.constexpr(len(probe_table.GATE_FIELDS))
_OF_GATE, _STRIDE = tl.constexpr(probe_table.GATE), tl.constexpr(probe_table.STRIDE)
_STAGE, _ALL_STAGES = tl.constexpr(probe_table.STAGE), tl.constexpr(ALL_STAGES)


@triton.jit
def _is_scored(plan, heads, ints, token, tap, num_taps, cell):
    """Return whether the program of a token writes the probe's raw numbers at a tap."""
    program = tl.load(plan + token * 4 + 2).to(tl.int64)
    node = tl.load(heads + program * num_taps + tap, mask=program >= 0, other=-1).to(tl.int64)
    found = 0
    while (node >= 0) & (found == 0):
        kind, flags = tl.load(ints + node * _NODE), tl.load(ints + node * _NODE + 4)
        found = (((kind == _SCORE) | (kind == _ACTIVATE)) & ((flags >> _CELL_BIT) == cell)).to(tl.int32)
        node = tl.load(ints + node * _NODE + 3).to(tl.int64)
    return found != 0


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _hidden_units(kind, x):
    """Return the activations of an MLP probe's hidden units."""
    out = 2.0 * _sigmoid(2.0 * x) - 1.0
    if kind == _RELU:
        out = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if kind == _GELU:
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if kind == _SILU:
        out = x * _sigmoid(x)
    return out


@triton.jit
def _mlp(raw, units, hidden, outputs, outs, vectors, d_model, lanes):
    """Return the products of an MLP probe's hidden units with the vectors of its outputs."""
    act = _hidden_units(hidden, raw)
    out = raw * 0.0
    for i in range(outputs):
        row = tl.load(outs + i).to(tl.int64)
        w = tl.load(vectors + row * d_model + lanes, mask=lanes < units, other=0.0)
        product = tl.sum(tl.where(lanes < units, act * w, 0.0), axis=0)
        out = tl.where(lanes == i, product, out)
    return out


@triton.jit
def _attend(raw, heads, outputs, number, state, lanes):
    """Add a token to the weighted means of an attention probe; return their sum over heads.

    `raw` points to the token's raw numbers, `state` to what is kept of the first head.
    """
    out = tl.zeros_like(lanes).to(tl.float32)
    for head in range(heads):
        query = tl.load(raw + head)
        values = tl.load(raw + heads + head * outputs + lanes, mask=lanes < outputs, other=0.0)
        kept = state + head * (2 + outputs)
        before = tl.load(kept)
        before = tl.where(number > 0, before, float("-inf"))
        largest = tl.maximum(before, query, propagate_nan=tl.PropagateNan.ALL)
        keep, weight = tl.exp(before - largest), tl.exp(query - largest)
        total = tl.load(kept + 1) * keep + weight
        sums = tl.load(kept + 2 + lanes, mask=lanes < outputs, other=0.0) * keep + values * weight
        tl.debug_barrier()
        tl.store(kept, largest)
        tl.store(kept + 1, total)
        tl.store(kept + 2 + lanes, sums, mask=lanes < outputs)
        out += sums / total
    return out


@triton.jit
def _activated(activation, out, inside):
    if activation == _SIGMOID:
        out = _sigmoid(out)
    if activation == _SOFTMAX:
        out = tl.where(inside, out, float("-inf"))
        out = tl.exp(out - tl.max(out, axis=0))
        out = out / tl.sum(out, axis=0)
    return out


@triton.jit
def _smoothed(smoothing, out, score, number, decay, window, outputs, kept, lanes):
    """Return the new score that follows from outputs and the score before; `kept`: outputs of a MEAN."""
    inside = lanes < outputs
    if smoothing == _MEAN:
        tl.store(kept + (number % window) * outputs + lanes, out, mask=inside)
        tl.debug_barrier()
        used = tl.minimum(number + 1, window)
        total = out * 0.0
        for k in range(used):
            total += tl.load(kept + k * outputs + lanes, mask=inside, other=0.0)
        out = total / used.to(tl.float32)
    if number > 0:
        if smoothing == _EMA:
            out = decay * out + (1.0 - decay) * score
        if smoothing == _MAXIMUM:
            out = tl.maximum(score, out, propagate_nan=tl.PropagateNan.ALL)
    return out


@triton.jit
def _factor(gate, gates, bounds, score, before, lanes):
    """Return what a score says to a gate whose factor was `before`."""
    output, flags = tl.load(gates + gate * _GATE), tl.load(gates + gate * _GATE + 3)
    threshold, sharpness = tl.load(bounds + gate * 2), tl.load(bounds + gate * 2 + 1)
    value = tl.sum(tl.where(lanes == output, score, 0.0), axis=0)
    above = (flags & _ABOVE) != 0
    over = tl.where(above, value - threshold, threshold - value)
    fired = tl.where(above, value > threshold, value < threshold).to(tl.float32)
    factor = tl.where(sharpness != 0.0, _sigmoid(sharpness * over), fired)
    return tl.where((flags & _LATCH) != 0, tl.maximum(before, factor), factor)


@triton.jit
def _decide(gate, gates, bounds, states, here, there, score, scored, row, lanes):
    """Write the factors of a probe's gates, from `gate` on, for a token with cells at `row`.

    `here` and `there` are the copies of what is kept before and after the token.
    """
    while gate >= 0:
        factor_cell = tl.load(gates + gate * _GATE + 1)
        state = states + tl.load(gates + gate * _GATE + 2)
        flags = tl.load(gates + gate * _GATE + 3)
        before = tl.load(state + here)
        after = before
        if scored:
            after = _factor(gate, gates, bounds, score, before, lanes)
            after = tl.where((flags & _CONTROLLED) != 0, before, after)
        tl.debug_barrier()
        tl.store(state + there, after)
        tl.store(row + factor_cell, tl.where((flags & _DELAYED) != 0, before, after))
        gate = tl.load(gates + gate * _GATE + 4).to(tl.int64)


@triton.jit
def _forget(gate, gates, states):
    """Let gates begin anew, from `gate` on."""
    while gate >= 0:
        tl.store(states + tl.load(gates + gate * _GATE + 2), 0.0)
        gate = tl.load(gates + gate * _GATE + 4).to(tl.int64)


@triton.jit
def _walk(
    run,
    tap,
    plan,
    heads,
    ints,
    vectors,
    cells,
    probes,
    decays,
    gates,
    bounds,
    outs,
    biases,
    states,
    positions,
    num_taps,
    num_cells,
    d_model,
    BLOCK: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Score the tokens of one run."""
    lanes = tl.arange(0, BLOCK)
    probe = tl.load(run).to(tl.int64)
    first, count, fresh = tl.load(run + 1).to(tl.int64), tl.load(run + 2), tl.load(run + 3) != 0
    fields = probes + probe * _PROBE
    kind, outputs, score_cell, raw_cell = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    units, hidden, activation, smoothing = (
        tl.load(fields + 4),
        tl.load(fields + 5),
        tl.load(fields + 6),
        tl.load(fields + 7),
    )
    window, at = tl.load(fields + 8), tl.load(fields + 9)
    gate = tl.load(fields + _OF_GATE).to(tl.int64)
    decay = tl.load(decays + probe)
    inside = lanes < outputs
    bias = tl.load(biases + at + lanes, mask=inside & (kind != 0), other=0.0)
    size = 1 + outputs * (1 + window) + tl.where(kind == _ATTENTION, units * (2 + outputs), 0)
    here = at.to(tl.int64) * 0
    position, stride = here, here
    if COPIES > 1:
        position, stride = tl.load(positions + first).to(tl.int64), tl.load(fields + _STRIDE).to(tl.int64)
        here = (position + COPIES - 1) % COPIES * stride
    state = states + at + here
    number = tl.load(state).to(tl.int32)
    score = tl.load(state + 1 + lanes, mask=inside, other=0.0)
    if fresh:
        number = 0
        score = tl.zeros_like(score)
        for k in range(0, size, BLOCK):
            tl.store(state + k + lanes, 0.0, mask=k + lanes < size)
        _forget(gate, gates, states + here)
        tl.debug_barrier()
    for k in range(count):
        there = here
        if COPIES > 1:  # noqa: SIM102 - known when the kernel is compiled
            if k >= count - COPIES:  # the next step goes on after one of these tokens
                there = (position + k) % COPIES * stride
                for i in range(0, size, BLOCK):
                    own = i + lanes < size
                    tl.store(states + at + there + i + lanes, tl.load(state + i + lanes, mask=own), mask=own)
                tl.debug_barrier()
                state = states + at + there
        kept = state + 1 + outputs
        row = cells + (first + k) * num_cells
        scored = _is_scored(plan, heads, ints, first + k, tap, num_taps, raw_cell + 1)
        shown = tl.zeros_like(score) + float("nan")
        if scored:
            raw = tl.load(row + raw_cell + lanes, mask=lanes < tl.where(kind == _MLP, units, outputs), other=0.0)
            if kind == _MLP:
                raw = _mlp(raw, units, hidden, outputs, outs + at, vectors, d_model, lanes)
            if kind == _ATTENTION:
                raw = _attend(row + raw_cell, units, outputs, number, kept + window * outputs, lanes)
            out = _activated(activation, raw + bias, inside)
            score = _smoothed(smoothing, out, score, number, decay, window, outputs, kept, lanes)
            number += 1
            shown = score
        tl.store(row + score_cell + lanes, shown, mask=inside)
        _decide(gate, gates, bounds, states, here, there, score, scored, row, lanes)
        if COPIES > 1:
            tl.store(state, number.to(tl.float32))
            tl.store(state + 1 + lanes, score, mask=inside)
            here = there
        tl.debug_barrier()  # what was kept in memory is read by other threads at the next token
    tl.store(state, number.to(tl.float32))
    tl.store(state + 1 + lanes, score, mask=inside)


# Specialising on these would only compile more kernels.
@triton.jit(do_not_specialize=["tap", "num_taps", "num_cells"])
def _score(
    tap,
    offsets,
    runs,
    plan,
    heads,
    ints,
    vectors,
    cells,
    probes,
    decays,
    gates,
    bounds,
    outs,
    biases,
    states,
    positions,
    num_taps,
    num_cells,
    d_model,
    BLOCK: tl.constexpr,
    COPIES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr = _ALL_STAGES,
):
    first, end = tl.load(offsets + tap), tl.load(offsets + tap + 1)
    for k in range(first + tl.program_id(0), end, PROGRAMS):
        chosen = True
        if STAGES != _ALL_STAGES:
            chosen = ((STAGES >> tl.load(probes + tl.load(runs + k * _RUN) * _PROBE + _STAGE)) & 1) != 0
        if chosen:
            _walk(
                runs + k * _RUN, tap, plan, heads, ints, vectors, cells, probes, decays, gates, bounds, outs, biases,
                states, positions, num_taps, num_cells, d_model, BLOCK, COPIES,
            )  # fmt: skip


def launch(tap: int, tensors: ScoreTensors, stages: int = ALL_STAGES) -> None:
    """Compute scores and factors of the tokens of the step's runs at a tap, which has written their raw numbers.

    `stages` are bits of those of its stages whose probes score.
    """
    t = tensors
    _score[(PROGRAMS,)](
        tap,
        t.offsets,
        t.runs,
        t.plan,
        t.heads,
        t.ints,
        t.vectors,
        t.cells,
        t.probes,
        t.decays,
        t.gates,
        t.bounds,
        t.outs,
        t.biases,
        t.states,
        t.positions,
        t.heads.shape[1],
        t.cells.shape[1],
        t.vectors.shape[1],
        BLOCK=max(16, triton.next_power_of_2(t.cells.shape[1])),
        COPIES=t.copies,
        PROGRAMS=PROGRAMS,
        STAGES=stages,
        num_warps=1,
    )
