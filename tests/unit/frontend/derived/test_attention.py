"""Scores and patterns against PyTorch's attention, and against a loop over single heads, queries and keys."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from vllm_weir.frontend.derived import formulas
from vllm_weir.frontend.derived.formulas import attention_pattern, attention_scores, first_keys, softmax_pattern
from vllm_weir.schema.model_facts import AttentionFacts

TOLERANCE = 2e-5
"""Of float32 sums over 16 or 32 products of some units each, in another order."""


def rows(queries: int, keys: int, heads: int, kv_heads: int, size: int = 16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, heads, size, generator=generator)
    return q, torch.randn(keys, kv_heads, size, generator=generator)


def naive_scores(q, k, positions, facts: AttentionFacts) -> torch.Tensor:
    queries, heads, _ = q.shape
    out = torch.full((queries, heads, len(k)), -math.inf, dtype=torch.float64)
    for i, at in enumerate(positions.tolist()):
        for head in range(heads):
            for key in range(at + 1):
                if facts.window is not None and at - key >= facts.window:
                    continue
                if facts.chunk is not None and at // facts.chunk != key // facts.chunk:
                    continue
                score = facts.scale * (q[i, head].double() @ k[key, head // (heads // k.shape[1])].double())
                if facts.soft_cap:
                    score = facts.soft_cap * torch.tanh(score / facts.soft_cap)
                if facts.alibi:
                    score = score + facts.alibi[head] * (key - at)
                out[i, head, key] = score
    return out


def naive_pattern(scores: torch.Tensor, sinks: tuple[float, ...]) -> torch.Tensor:
    if not sinks:
        return scores.softmax(-1)
    column = torch.tensor(sinks, dtype=torch.float64).expand(len(scores), -1)[..., None]
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


CASES = {
    "plain": AttentionFacts(scale=0.25),
    "window and soft cap": AttentionFacts(scale=0.5, window=4, soft_cap=5.0),
    "sinks and window": AttentionFacts(scale=0.25, window=2, sinks=(0.5, -1.0, 3.0, -20.0)),
    "alibi": AttentionFacts(scale=0.25, alibi=(0.5, 0.25, 0.125, 0.0625)),
    "chunks": AttentionFacts(scale=0.25, chunk=4),
}


@examples(60)
@given(
    positions=st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True).map(sorted),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 12),
    chunk=st.none() | st.integers(1, 8),
    soft_cap=st.sampled_from([0.0, 0.0, 2.0, 5.0]),
    sinks=st.just(()) | st.tuples(*[st.sampled_from([0.5, -1.0, 3.0, 20.0, -20.0])] * 4),
    alibi=st.just(()) | st.just((0.5, 0.25, 0.125, 0.0625)),
    seed=st.integers(0, 99),
)
def test_equals_a_loop_over_heads_queries_and_keys(positions, kv_heads, seed, **facts):
    facts, positions = AttentionFacts(scale=0.5, **facts), torch.tensor(positions)
    q, k = rows(len(positions), 12, 4, kv_heads, seed=seed)
    scores, pattern = attention_scores(q, k, positions, facts), attention_pattern(q, k, positions, facts)
    expected = naive_scores(q, k, positions, facts)
    assert scores.dtype == pattern.dtype == torch.float32
    assert torch.equal(scores.isinf(), expected.isinf()), "not the same keys are hidden"
    seen = torch.arange(12) >= first_keys(positions, facts)[:, None]
    assert torch.equal(seen & (torch.arange(12) <= positions[:, None]), ~expected.isinf()[:, 0])
    assert (scores.double() - expected)[~expected.isinf()].abs().max() < TOLERANCE
    assert (pattern.double() - naive_pattern(expected, facts.sinks)).abs().max() < TOLERANCE
    assert bool((pattern >= 0).all()) and bool((pattern[expected.isinf()] == 0).all())


def test_equals_pytorchs_attention():
    q, k = rows(9, 9, 4, 2, size=32, seed=1)
    pattern = attention_pattern(q, k, torch.arange(9), AttentionFacts(scale=32**-0.5))
    values = torch.randn(9, 2, 32, generator=torch.Generator().manual_seed(2))
    z = torch.einsum("qhk,khd->qhd", pattern, values.repeat_interleave(2, 1))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), values.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    assert (z - expected.transpose(0, 1)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_heads_are_picked_in_the_order_given(name):
    facts, positions = CASES[name], torch.arange(6)
    q, k = rows(6, 6, 4, 2)
    for compute in (attention_scores, attention_pattern):
        assert torch.equal(compute(q, k, positions, facts, (3, 0)), compute(q, k, positions, facts)[:, [3, 0]])


@pytest.mark.parametrize("name", CASES)
def test_chunks_of_queries_change_nothing(name, monkeypatch):
    facts, positions = CASES[name], torch.arange(8)
    q, k = rows(8, 8, 4, 2)
    whole = attention_pattern(q, k, positions, facts)
    monkeypatch.setattr(formulas, "CHUNK_VALUES", 3 * 4 * 8)
    assert len(formulas._chunks(whole)) == 3
    assert (attention_pattern(q, k, positions, facts) - whole).abs().max() < TOLERANCE


def test_rows_of_bfloat16_are_computed_in_float32():
    q, k = (tensor.bfloat16() for tensor in rows(4, 4, 2, 2))
    facts = AttentionFacts(scale=0.3)
    assert torch.equal(
        attention_scores(q, k, torch.arange(4), facts), attention_scores(q.float(), k.float(), torch.arange(4), facts)
    )


def test_softmax_of_scores_is_the_pattern_and_leaves_the_scores():
    facts = CASES["sinks and window"]
    q, k = rows(6, 6, 4, 2)
    scores = attention_scores(q, k, torch.arange(6), facts)
    kept = scores.clone()
    assert torch.equal(
        softmax_pattern(scores, torch.tensor(facts.sinks)), attention_pattern(q, k, torch.arange(6), facts)
    )
    assert torch.equal(scores, kept)
    assert not torch.equal(softmax_pattern(scores), attention_pattern(q, k, torch.arange(6), facts))
    without = attention_pattern(q, k, torch.arange(6), replace(facts, sinks=()))
    assert torch.equal(softmax_pattern(scores), without)


def test_huge_scores_do_not_overflow():
    q, k = rows(3, 3, 2, 2)
    pattern = attention_pattern(q * 1e4, k * 1e4, torch.arange(3), AttentionFacts(scale=1.0, sinks=(0.0, 1e9)))
    assert bool(pattern.isfinite().all()) and float(pattern[:, 1].sum()) == 0
