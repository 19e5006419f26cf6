"""The tap on CPU: the same as `tap_triton` does, with torch, for the tokens that are wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_weir.schema.instructions import AFFINE, BLEND, CLAMP, CONST, KEEP_NORM, NORM
from vllm_weir.schema.reductions import MAXIMUM, SEEDED
from vllm_weir.schema.taps import STAGES
from vllm_weir.worker.steering.programs import AFTER_POST, LAST

FEW = 6
"""Different chains that are followed one after the other."""


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
) -> None:
    """Record and steer rows of `hidden` and what stands beside it, both [tokens, d_model], as the plan says."""
    number = tap.numpy()  # the tables are small: numpy looks things up in a fifth of torch's time
    index, fixed = int(number[0]), bool(number[3])
    scale, other_scale = number[1:3].view(np.float32).tolist()
    slots, profiles, programs, spans = plan.numpy()[: hidden.shape[0]].T
    nodes = np.where(programs >= 0, heads.numpy()[programs, index], -1)
    ranked = ranks.numpy()[:, index * STAGES : (index + 1) * STAGES][profiles]
    ranked = np.where((slots >= 0)[:, None], ranked, -1)
    wanted = ((nodes >= 0) | (ranked >= 0).any(1)).nonzero()[0]
    if not len(wanted):
        return
    tokens = torch.from_numpy(wanted)
    stream = hidden[tokens]
    # In the order in which models round: a sum is scaled, or terms of different scales are added.
    if other is not None and scale == other_scale:
        stream = stream + other[tokens]
    if scale != 1:
        stream = stream * scale
    if other is not None and scale != other_scale:
        stream = stream + other[tokens] * other_scale
    nodes, ranked, slots, spans = nodes[wanted], ranked[wanted], slots[wanted], spans[wanted]
    steered = (nodes >= 0).nonzero()[0]
    h = stream.float()
    for stage in range(STAGES):
        if stage and (nodes >= 0).any():
            nodes, h = _run(nodes, h, stage == STAGES - 1, ints.numpy(), floats, vectors)
        at = (ranked[:, stage] >= 0).nonzero()[0]
        if len(at):
            rows = (h if len(at) == len(h) else h[torch.from_numpy(at)]).to(ring.dtype)
            if spans[at].any():
                at, rows = _fold(ring, slots[at], ranked[at, stage], spans[at], rows, at)
            ring[_index(slots[at] + ranked[at, stage])] = rows
    if len(steered):
        tokens, written = tokens[torch.from_numpy(steered)], h[torch.from_numpy(steered)] / scale
        if fixed:
            assert other is not None
            written -= other[tokens]
        hidden[tokens] = written.to(hidden.dtype)
        if other is not None and not fixed:
            other[tokens] = 0


def _fold(
    ring: torch.Tensor, slots: np.ndarray, ranks: np.ndarray, spans: np.ndarray, rows: torch.Tensor, at: np.ndarray
) -> tuple[np.ndarray, torch.Tensor]:
    """Join the rows of groups of tokens into their cells; returns what is left of `at` and `rows`."""
    words = 4 // ring.element_size()
    cells = ring[: len(ring) // words * words].view(-1).view(torch.float32).view(-1, ring.shape[1])
    folded = (spans != 0).nonzero()[0]
    head = (spans[folded] > 0).nonzero()[0]
    counts = np.diff(head, append=len(folded))
    first = folded[head]
    to = slots[first] // words + ranks[first]
    largest, seeded = spans[first] & MAXIMUM != 0, spans[first] & SEEDED != 0
    joined = cells[_index(to)]
    joined[torch.from_numpy(~seeded)] = 0.0
    joined[torch.from_numpy(~seeded & largest)] = float("-inf")
    for k in range(counts.max()):
        groups = torch.from_numpy((counts > k).nonzero()[0])
        some = rows[torch.from_numpy(folded[head[counts > k] + k])].float()
        so_far = joined[groups]
        joined[groups] = torch.where(
            torch.from_numpy(largest[counts > k])[:, None], torch.maximum(so_far, some), so_far + some
        )
    cells[_index(to)] = joined
    plain = (spans == 0).nonzero()[0]
    return at[plain], rows[torch.from_numpy(plain)]


def _index(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.int64))


def _run(
    nodes: np.ndarray, h: torch.Tensor, past_post: bool, ints: np.ndarray, floats: torch.Tensor, vectors: torch.Tensor
) -> tuple[np.ndarray, torch.Tensor]:
    """Follow each row's chain as far as the stage goes; returns where it stopped, and the new rows (float32)."""
    nodes, h = nodes.copy(), h.clone()
    starts = np.unique(nodes[nodes >= 0]).tolist()
    if len(starts) > FEW:
        _together(nodes, h, past_post, ints, floats, vectors)
        return nodes, h
    for start in starts:
        at = (nodes == start).nonzero()[0]
        rows = h[torch.from_numpy(at)]
        delta, node = torch.zeros_like(rows), start
        while node >= 0:
            kind, u, w, following, flags = ints[node].tolist()
            if flags & AFTER_POST and not past_post:
                break
            delta += _change(kind, rows, vectors[u], vectors[w] if w >= 0 else None, *floats[node].tolist())
            if flags & LAST:
                rows, delta = rows + delta, torch.zeros_like(delta)
            node = following
        h[torch.from_numpy(at)] = rows
        nodes[at] = node
    return nodes, h


def _together(
    nodes: np.ndarray, h: torch.Tensor, past_post: bool, ints: np.ndarray, floats: torch.Tensor, vectors: torch.Tensor
) -> None:
    """All rows take a step of their chains at once, in place; the same to the bit."""
    delta = torch.zeros_like(h)
    going = (nodes >= 0).nonzero()[0]
    while len(going):
        at = nodes[going]
        if not past_post:
            now = ints[at, 4] & AFTER_POST == 0
            going, at = going[now], at[now]
        kinds, u, w, following, flags = ints[at].T
        for kind in np.unique(kinds).tolist():
            of = kinds == kind
            rows = torch.from_numpy(going[of])
            numbers = floats[_index(at[of]), :, None].unbind(1)
            delta[rows] += _change(kind, h[rows], vectors[_index(u[of])], vectors[_index(w[of])], *numbers)
        ends = torch.from_numpy(going[flags & LAST != 0])
        h[ends] += delta[ends]
        delta[ends] = 0
        nodes[going] = following
        going = going[following >= 0]


def _change(
    kind: int,
    rows: torch.Tensor,
    into: torch.Tensor,
    w: torch.Tensor | None,
    a: float | torch.Tensor,
    b: float | torch.Tensor,
    lo: Any,
    hi: Any,
) -> torch.Tensor:
    """What an instruction adds to rows [n, d]; vectors are [d] or [n, d], coefficients are floats or [n, 1]."""
    if kind == BLEND:
        return a * (into - rows)
    if kind == CONST:
        return a * into
    if kind == NORM:
        return a * rows.norm(dim=1, keepdim=True) * into
    if kind == KEEP_NORM:
        norm = rows.norm(dim=1, keepdim=True)
        turned = rows + (a + b * norm) * into
        length = turned.norm(dim=1, keepdim=True)
        return torch.where(length > 0, turned * (norm / length) - rows, 0.0)
    assert w is not None
    along = (rows * w).sum(1, keepdim=True)
    if kind == AFFINE:
        return (a * along + b) * into
    if kind == CLAMP:
        return a * (along.clamp(lo, hi) - along) * into
    raise AssertionError(f"unknown instruction {kind}")
