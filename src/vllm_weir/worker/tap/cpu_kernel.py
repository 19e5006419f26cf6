"""The tap's kernel on CPU: what `triton_kernel` does, in torch, for the tokens that want anything.

1. Look up, in the plan, which rows of each token are recorded at this tap and which node its
   program starts with. Keep the tokens that have either.
2. Compute their rows of the stream, and go through the stages of the tap: record, follow the chains
   of nodes up to the next stage, record, and so on.
3. Write changed rows back, so that the model's own sum is the new stream.

Rows of groups that are reduced are joined into cells of the ring instead of being recorded one by
one (`reductions`).
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_weir.schema.instructions import ACTIVATE, HOOK, SCORE
from vllm_weir.schema.rows import MAXIMUM, SEEDED, ring_rows
from vllm_weir.schema.taps import STAGES
from vllm_weir.worker.tap.cpu_chains import Cells, Chains, as_index, read_rows


def launch(
    hidden: torch.Tensor,
    other: torch.Tensor | None,
    number: torch.Tensor,
    plan: torch.Tensor,
    ranks: torch.Tensor,
    ring: torch.Tensor,
    heads: torch.Tensor,
    ints: torch.Tensor,
    floats: torch.Tensor,
    vectors: torch.Tensor,
    cells: torch.Tensor | None = None,
    *,
    held: torch.Tensor | None = None,
    groups: bool = True,
) -> None:
    """Record and steer rows of the stream at one tap, as the plan says.

    `hidden` and `other` are [tokens, width], and their weighted sum is the stream; `number` is the
    tap's number tensor (`vllm_weir.worker.tap.op.numbered`). The other tensors are those of
    `vllm_weir.worker.tap.op.TapTensors`; `cells` may be left out if no node has one. The width of
    the row need not be the ring's. `held` is float32 [tokens, hooks, width], the rows that functions returned for
    HOOK nodes. `groups` is for the CUDA kernel.
    """
    del groups
    fields = number.numpy()  # in small tables numpy looks things up faster than torch
    tap, keep_other = int(fields[0]), bool(fields[3])
    scale, other_scale = fields[1:3].view(np.float32).tolist()
    slots, site_sets, programs, spans = plan.numpy()[: hidden.shape[0]].T
    nodes = np.where(programs >= 0, heads.numpy()[programs, tap], -1)
    stage_ranks = ranks.numpy()[:, tap * STAGES : (tap + 1) * STAGES][site_sets]
    stage_ranks = np.where((slots >= 0)[:, None], stage_ranks, -1)
    active = ((nodes >= 0) | (stage_ranks >= 0).any(1)).nonzero()[0]
    if not len(active):
        return
    tokens = torch.from_numpy(active)
    nodes, stage_ranks, slots, spans = nodes[active], stage_ranks[active], slots[active], spans[active]
    rows = _stream_rows(hidden, other, tokens, scale, other_scale).float()
    chains = Chains(ints.numpy(), floats, vectors, Cells(cells, tokens, hidden.dtype, held), len(active))
    for stage in range(STAGES):
        if stage and (nodes >= 0).any():
            nodes, rows = chains.follow(nodes, rows, stage == STAGES - 1)
        recorded = (stage_ranks[:, stage] >= 0).nonzero()[0]
        if len(recorded):
            values = (rows if len(recorded) == len(rows) else rows[torch.from_numpy(recorded)]).to(ring.dtype)
            if spans[recorded].any():
                joined = slots[recorded], stage_ranks[recorded, stage], spans[recorded]
                recorded, values = _reduce_groups(ring, *joined, values, recorded)
            _write_rows(ring, slots[recorded] + stage_ranks[recorded, stage], values)
    steered = chains.changed.nonzero()[0]
    if len(steered):
        steered_tokens, written = tokens[torch.from_numpy(steered)], rows[torch.from_numpy(steered)] / scale
        if keep_other:
            assert other is not None
            written -= other[steered_tokens]
        hidden[steered_tokens] = written.to(hidden.dtype)
        if other is not None and not keep_other:
            other[steered_tokens] = 0


def rows_at(
    hidden: torch.Tensor,
    other: torch.Tensor | None,
    number: torch.Tensor,
    tokens: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    ints: torch.Tensor,
    floats: torch.Tensor,
    vectors: torch.Tensor,
    cells: torch.Tensor,
    held: torch.Tensor,
) -> torch.Tensor:
    """Return rows of the stream as they are where their chains reach some node, in the dtype of `hidden`.

    `tokens`, int64 [n], say whose rows, `starts` the first node of each one's chain, and `stops` the
    node that it reaches, before which its intervention has added nothing. The other arguments are as
    of `launch`.
    """
    scale, other_scale = number.numpy()[1:3].view(np.float32).tolist()
    indices = torch.from_numpy(tokens)
    rows = _stream_rows(hidden, other, indices, scale, other_scale).float()
    chains = Chains(ints.numpy(), floats, vectors, Cells(cells, indices, hidden.dtype, held), len(tokens))
    for start, stop in sorted({*zip(starts.tolist(), stops.tolist(), strict=True)}):
        members = ((starts == start) & (stops == stop)).nonzero()[0]
        at = torch.from_numpy(members)
        rows[at] = chains.rows_at(start, stop, members, rows[at])
    return rows.to(hidden.dtype)


def read_early(
    hidden: torch.Tensor,
    other: torch.Tensor | None,
    number: torch.Tensor,
    plan: torch.Tensor,
    heads: torch.Tensor,
    ints: torch.Tensor,
    floats: torch.Tensor,
    vectors: torch.Tensor,
    cells: torch.Tensor,
    held: torch.Tensor | None,
    stage: int,
) -> None:
    """Write the raw numbers of probes that read at the first stage of a tap, or (1) at the second; nothing else.

    The arguments are as of `launch`.
    """
    programs = plan.numpy()[: len(hidden), 2]
    nodes = np.where(programs >= 0, heads.numpy()[programs, int(number[0])], -1)
    active = (nodes >= 0).nonzero()[0]
    if not len(active):
        return
    scale, other_scale = number.numpy()[1:3].view(np.float32).tolist()
    tokens, nodes = torch.from_numpy(active), nodes[active]
    rows = _stream_rows(hidden, other, tokens, scale, other_scale).float()
    chains = Chains(ints.numpy(), floats, vectors, Cells(cells, tokens, hidden.dtype, held), len(active))
    if stage:
        chains.follow(nodes, rows, False)
        return
    for start in np.unique(nodes).tolist():
        members, stop = (nodes == start).nonzero()[0], start
        while stop >= 0 and int(ints[stop, 0]) in (SCORE, ACTIVATE):
            stop = int(ints[stop, 3])
        chains.rows_at(start, stop, members, rows[torch.from_numpy(members)])


def rows_at_hook(
    hidden: torch.Tensor,
    other: torch.Tensor | None,
    number: torch.Tensor,
    plan: torch.Tensor,
    heads: torch.Tensor,
    ints: torch.Tensor,
    floats: torch.Tensor,
    vectors: torch.Tensor,
    cells: torch.Tensor,
    held: torch.Tensor,
    place: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every token's row as it is where its chain reaches the HOOK node with this place, and that node.

    Rows [tokens, width] in the dtype of `hidden`, and int32 [tokens], -1 with an undefined row where there is none.
    """
    programs = plan.numpy()[: len(hidden), 2]
    starts = np.where(programs >= 0, heads.numpy()[programs, int(number[0])], -1)
    nodes = np.full(len(hidden), -1, np.int32)
    for start in np.unique(starts[starts >= 0]).tolist():
        node = start
        while node >= 0 and not (ints[node, 0] == HOOK and floats[node, 2] == place):
            node = int(ints[node, 3])
        nodes[starts == start] = node
    rows, tokens = torch.zeros_like(hidden), (nodes >= 0).nonzero()[0]
    if len(tokens):
        own = starts[tokens], nodes[tokens]
        rows[torch.from_numpy(tokens)] = rows_at(
            hidden, other, number, tokens, *own, ints, floats, vectors, cells, held
        )
    return rows, torch.from_numpy(nodes)


def _stream_rows(
    hidden: torch.Tensor, other: torch.Tensor | None, tokens: torch.Tensor, scale: float, other_scale: float
) -> torch.Tensor:
    """Return the stream's rows of these tokens, rounded as models do.

    A sum is scaled as a whole, and terms with different scales are scaled and then added.
    """
    stream = hidden[tokens]
    if other is not None and scale == other_scale:
        stream = stream + other[tokens]
    if scale != 1:
        stream = stream * scale
    if other is not None and scale != other_scale:
        stream = stream + other[tokens] * other_scale
    return stream


def _reduce_groups(
    ring: torch.Tensor,
    slots: np.ndarray,
    ranks: np.ndarray,
    spans: np.ndarray,
    values: torch.Tensor,
    recorded: np.ndarray,
) -> tuple[np.ndarray, torch.Tensor]:
    """Join the rows of groups into their cells; return what is left of `recorded` and `values`."""
    words = 4 // ring.element_size()
    cells = ring[: len(ring) // words * words].view(-1).view(torch.float32).view(-1, ring.shape[1])
    members = (spans != 0).nonzero()[0]
    heads = (spans[members] > 0).nonzero()[0]
    counts = np.diff(heads, append=len(members))
    first = members[heads]
    cell_rows = slots[first] // words + ranks[first]
    maximum, seeded = spans[first] & MAXIMUM != 0, spans[first] & SEEDED != 0
    joined = read_rows(cells, cell_rows, values.shape[1])
    joined[torch.from_numpy(~seeded)] = 0.0
    joined[torch.from_numpy(~seeded & maximum)] = float("-inf")
    for k in range(counts.max()):
        groups = torch.from_numpy((counts > k).nonzero()[0])
        kth_rows = values[torch.from_numpy(members[heads[counts > k] + k])].float()
        so_far = joined[groups]
        take_maximum = torch.from_numpy(maximum[counts > k])[:, None]
        joined[groups] = torch.where(take_maximum, torch.maximum(so_far, kth_rows), so_far + kth_rows)
    _write_rows(cells, cell_rows, joined)
    not_grouped = (spans == 0).nonzero()[0]
    return recorded[not_grouped], values[torch.from_numpy(not_grouped)]


def _write_rows(table: torch.Tensor, first: np.ndarray, values: torch.Tensor) -> None:
    """Write what `read_rows` reads."""
    d_model, width = table.shape[1], values.shape[1]
    if width == d_model:
        table[as_index(first)] = values
        return
    for k in range(ring_rows(width, d_model)):
        part = values[:, k * d_model : (k + 1) * d_model]
        table[as_index(first + k), : part.shape[1]] = part
