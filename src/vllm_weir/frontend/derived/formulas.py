"""The formulas of derived hook points: attention from queries and keys, experts from router logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_weir.schema.model_facts import AttentionFacts, RoutingFacts
from vllm_weir.worker.tap.expert_weights import expert_weights, scores_of

CHUNK_VALUES = 1 << 22
"""Scores that are worked on at a time (16 MiB)."""


def first_keys(query_positions: torch.Tensor, facts: AttentionFacts) -> torch.Tensor:
    """Return the first position that each query sees, int64 [queries]; it sees all from there to itself."""
    first = torch.zeros_like(query_positions)
    if facts.window is not None:
        first = torch.maximum(first, query_positions - facts.window + 1)
    if facts.chunk is not None:
        first = torch.maximum(first, query_positions // facts.chunk * facts.chunk)
    return first


def attention_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    query_positions: torch.Tensor,
    facts: AttentionFacts,
    heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the scores that enter the softmax: scaled, soft-capped, with ALiBi, masked by -inf.

    Args:
        q: queries, [queries, heads, head size].
        k: keys at positions 0, 1, ..., [keys, key-value heads, head size].
        query_positions: int64 [queries], each below `keys`.
        facts: of the layer.
        heads: which query heads, in this order; None for all.

    Returns:
        float32 [queries, heads, keys].
    """
    chosen = _heads_of(q, heads)
    scores = torch.empty(len(q), len(chosen), len(k), dtype=torch.float32)
    for part in _chunks(scores):
        _write_scores(scores[part], q[part], k, query_positions[part], facts, chosen)
    return scores


def attention_pattern(
    q: torch.Tensor,
    k: torch.Tensor,
    query_positions: torch.Tensor,
    facts: AttentionFacts,
    heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the softmax of `attention_scores`, 0 at keys that a query does not see.

    A row sums to 1, or with sinks to less: their share has no column.

    Args and returns: as of `attention_scores`.
    """
    chosen = _heads_of(q, heads)
    pattern = torch.empty(len(q), len(chosen), len(k), dtype=torch.float32)
    sinks = torch.tensor(facts.sinks)[chosen] if facts.sinks else None
    for part in _chunks(pattern):
        _write_scores(pattern[part], q[part], k, query_positions[part], facts, chosen)
        _softmax(pattern[part], sinks)
    return pattern


def softmax_pattern(scores: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return the softmax of scores float32 [queries, heads, keys]; `sinks` [heads] take part without a column."""
    return _softmax(scores.clone(), sinks)


def _heads_of(q: torch.Tensor, heads: Sequence[int] | None) -> torch.Tensor:
    return torch.arange(q.shape[1]) if heads is None else torch.tensor(list(heads), dtype=torch.int64)


def _chunks(scores: torch.Tensor) -> list[slice]:
    queries, heads, keys = scores.shape
    size = max(1, CHUNK_VALUES // max(1, heads * keys))
    return [slice(start, start + size) for start in range(0, queries, size)]


def _write_scores(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    query_positions: torch.Tensor,
    facts: AttentionFacts,
    chosen: torch.Tensor,
) -> None:
    """Write the scores of some queries into `out`, [queries, chosen heads, keys]."""
    queries, heads, size = q.shape
    if len(chosen) == heads and k.numel() <= CHUNK_VALUES and torch.equal(chosen, torch.arange(heads)):
        by_group = q.float().view(queries, k.shape[1], -1, size).transpose(0, 1)  # [groups, queries, heads, size]
        keys = k.float().permute(1, 2, 0)  # [groups, size, keys]
        products = by_group.flatten(1, 2) @ keys
        torch.mul(products.view(*by_group.shape[:3], -1).transpose(0, 1).flatten(1, 2), facts.scale, out=out)
    else:
        group_of = chosen // (heads // k.shape[1])
        for group in group_of.unique():
            members = (group_of == group).nonzero()[:, 0]
            keys = k[:, group].float()  # one key-value head at a time, so that no copy of all keys is needed
            out[:, members] = q[:, chosen[members]].float() @ keys.T
        out *= facts.scale
    if facts.soft_cap:
        out.div_(facts.soft_cap).tanh_().mul_(facts.soft_cap)
    key_positions = torch.arange(len(k))
    if facts.alibi:
        distances = key_positions - query_positions[:, None]
        out += torch.tensor(facts.alibi)[chosen][:, None] * distances[:, None]
    first = first_keys(query_positions, facts)
    hidden = (key_positions > query_positions[:, None]) | (key_positions < first[:, None])
    out.masked_fill_(hidden[:, None], -torch.inf)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Turn scores into their softmax, in place."""
    largest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks[:, None])
    scores.sub_(largest).exp_()
    total = scores.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks[:, None] - largest).exp()
    return scores.div_(total)


def choose_experts(logits: torch.Tensor, facts: RoutingFacts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's experts and their weights, best first.

    "Best" is by the score that decided: with the bias that a model adds for the choice alone.

    Args:
        logits: [rows, experts].

    Returns:
        (ids int64 [rows, top_k], weights float32 [rows, top_k]).
    """
    if facts.in_float32:
        logits = logits.float()
    if facts.chosen_by_logits:
        ids = _top(logits, facts.top_k, facts.lowest_first)
        return ids, expert_weights(logits, ids, facts)
    scores = scores_of(logits, facts.scoring)
    deciding = scores + torch.tensor(facts.bias) if facts.bias else scores
    if facts.groups:
        deciding = _in_best_groups(deciding, facts)
    ids = _top(deciding, facts.top_k, facts.lowest_first)
    return ids, expert_weights(logits, ids, facts)


def _in_best_groups(scores: torch.Tensor, facts: RoutingFacts) -> torch.Tensor:
    """Return the scores, -inf outside the best groups.

    A group is as good as its best expert, or, where a bias takes part, as the sum of its best two.
    """
    by_group = scores.unflatten(-1, (facts.groups, -1))
    merit = by_group.topk(2, -1).values.sum(-1) if facts.bias else by_group.amax(-1)
    best = _top(merit, facts.top_groups, facts.lowest_first)
    outside = torch.ones_like(merit, dtype=torch.bool).scatter_(-1, best, False)
    return by_group.masked_fill(outside[..., None], -torch.inf).flatten(-2)


def _top(scores: torch.Tensor, count: int, lowest_first: bool) -> torch.Tensor:
    """Return the places of the `count` largest scores of each row, largest first, equal ones by their number."""
    if lowest_first:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    chosen = scores.topk(count, -1, sorted=False).indices.sort(-1).values
    order = scores.gather(-1, chosen).sort(dim=-1, descending=True, stable=True).indices
    return chosen.gather(-1, order)
