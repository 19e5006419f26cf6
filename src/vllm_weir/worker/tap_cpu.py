"""The tap on CPU: the same as `tap_triton` does, with torch, for the tokens that are wanted."""

from __future__ import annotations

import torch

from vllm_weir.spec.interventions import AFFINE, BLEND, CLAMP, CONST, NORM
from vllm_weir.worker.programs import AFTER_POST, LAST
from vllm_weir.worker.select import STAGES

FEW = 6
"""Different chains that are followed one after the other."""


def launch(hidden, other, tap, plan, ranks, ring, heads, ints, floats, vectors) -> None:
    """Record and steer rows of `hidden` and what stands beside it, both [tokens, d_model], as the plan says."""
    n, (scale, other_scale), fixed = hidden.shape[0], tap[1:3].view(torch.float32).tolist(), bool(tap[3])
    tap = int(tap[0])
    slots, profiles, programs = plan[:n].unbind(1)
    nodes = torch.where(programs >= 0, heads[programs.clamp(min=0).long(), tap], -1)
    ranked = ranks[profiles.clamp(min=0).long(), tap * STAGES : (tap + 1) * STAGES]
    ranked = torch.where((slots >= 0)[:, None], ranked, -1)
    tokens = ((nodes >= 0) | (ranked >= 0).any(1)).nonzero().squeeze(1)
    if not len(tokens):
        return
    stream = hidden[tokens]
    # In the order in which models round: a sum is scaled, or terms of different scales are added.
    if other is not None and scale == other_scale:
        stream = stream + other[tokens]
    if scale != 1:
        stream = stream * scale
    if other is not None and scale != other_scale:
        stream = stream + other[tokens] * other_scale
    nodes, ranked, slots = nodes[tokens], ranked[tokens], slots[tokens]
    h = stream.float()
    for stage in range(STAGES):
        if stage:
            nodes, h = _run(nodes, h, stage == STAGES - 1, ints, floats, vectors)
        at = ranked[:, stage] >= 0
        if at.any():
            ring[(slots[at] + ranked[at, stage]).long()] = h[at].to(ring.dtype)
    steered = programs[tokens] >= 0
    steered &= heads[programs[tokens].clamp(min=0).long(), tap] >= 0
    if steered.any():
        rows, written = tokens[steered], h[steered] / scale
        if fixed:
            written -= other[rows]
        hidden[rows] = written.to(hidden.dtype)
        if other is not None and not fixed:
            other[rows] = 0


def _run(nodes, h, past_post: bool, ints, floats, vectors):
    """Follow each row's chain as far as the stage goes; returns where it stopped, and the new rows (float32)."""
    nodes, h = nodes.clone(), h.clone()
    starts = nodes[nodes >= 0].unique().tolist()
    if len(starts) > FEW:
        _together(nodes, h, past_post, ints, floats, vectors)
        return nodes, h
    for start in starts:
        at = (nodes == start).nonzero().squeeze(1)
        rows, delta, node = h[at], torch.zeros_like(h[at]), start
        while node >= 0:
            kind, u, w, following, flags = ints[node].tolist()
            if flags & AFTER_POST and not past_post:
                break
            delta += _change(kind, rows, vectors[u], vectors[w] if w >= 0 else None, *floats[node].tolist())
            if flags & LAST:
                rows, delta = rows + delta, torch.zeros_like(delta)
            node = following
        h[at], nodes[at] = rows, node
    return nodes, h


def _together(nodes, h, past_post: bool, ints, floats, vectors) -> None:
    """All rows take a step of their chains at once, in place; the same to the bit."""
    delta = torch.zeros_like(h)
    going = (nodes >= 0).nonzero().squeeze(1)
    while len(going):
        at = nodes[going].long()
        if not past_post:
            now = ints[at, 4] & AFTER_POST == 0
            going, at = going[now], at[now]
        kinds, u, w, following, flags = ints[at].unbind(1)
        for kind in kinds.unique().tolist():
            of = (kinds == kind).nonzero().squeeze(1)
            numbers = floats[at[of], :, None].unbind(1)
            delta[going[of]] += _change(kind, h[going[of]], vectors[u[of].long()], vectors[w[of].long()], *numbers)
        ends = going[flags & LAST != 0]
        h[ends] += delta[ends]
        delta[ends] = 0
        nodes[going] = following
        going = going[following >= 0]


def _change(kind: int, rows, into, w, a, b, lo, hi):
    """What an instruction adds to rows [n, d]; vectors are [d] or [n, d], coefficients are floats or [n, 1]."""
    if kind == BLEND:
        return a * (into - rows)
    if kind == CONST:
        return a * into
    if kind == NORM:
        return a * rows.norm(dim=1, keepdim=True) * into
    along = (rows * w).sum(1, keepdim=True)
    if kind == AFFINE:
        return (a * along + b) * into
    if kind == CLAMP:
        return a * (along.clamp(lo, hi) - along) * into
    raise AssertionError(f"unknown instruction {kind}")
