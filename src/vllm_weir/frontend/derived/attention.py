"""Attention scores and patterns, from queries and keys after rotary.

Both are computed in float32 from rows of the model's dtype, for the chosen queries only, a few of
them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_weir.schema.model_facts import AttentionFacts

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
