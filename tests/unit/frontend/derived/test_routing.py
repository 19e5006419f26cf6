"""Chosen experts against vLLM's own routers on a CPU, and against the formulas of its kernels for GPUs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

from tests.support.properties import examples
from vllm_weir.frontend.derived.formulas import choose_experts
from vllm_weir.schema.model_facts import RoutingFacts


def logits_of(rows: int, experts: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return (2 * torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))).to(dtype)


def bias_of(experts: int) -> tuple[float, ...]:
    return tuple(torch.randn(experts, generator=torch.Generator().manual_seed(9)).tolist())


def by_expert(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """[rows, experts]: each expert's weight, -1 where it is not chosen; whatever order they come in."""
    return torch.full((len(ids), experts), -1.0).scatter(1, ids.long(), weights.float())


ROUNDING = 16 * torch.finfo(torch.float32).eps
"""Of a weight, relative to the largest: a softmax or sigmoid, a sum of a few, a quotient and a product."""


def assert_same(facts: RoutingFacts, logits: torch.Tensor, weights, ids, tolerance: float = ROUNDING) -> None:
    own_ids, own_weights = choose_experts(logits, facts)
    assert own_ids.dtype == torch.int64 and own_weights.dtype == torch.float32
    assert own_ids.shape == own_weights.shape == (len(logits), facts.top_k)
    ours, theirs = by_expert(own_ids, own_weights, logits.shape[1]), by_expert(ids, weights, logits.shape[1])
    assert torch.equal(ours < 0, theirs < 0), "other experts were chosen"
    assert (ours - theirs).abs().max() <= tolerance * max(1.0, float(theirs.max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_equals_vllms_router_on_a_cpu(dtype, renormalize):
    """Many of the rows in bfloat16 have equal logits at the edge of the choice."""
    logits = logits_of(4000, 64, dtype)
    router = CPURouter(top_k=6, global_num_experts=64, renormalize=renormalize)
    weights, ids = router._compute_routing(logits, logits, None)
    facts = RoutingFacts(6, "softmax", renormalize, in_float32=False, lowest_first=False)
    assert_same(facts, logits, weights, ids, ROUNDING if dtype == torch.float32 else 2**-8)
    if dtype == torch.bfloat16:
        ranked = logits.sort(-1, descending=True).values
        assert int((ranked[:, 5] == ranked[:, 6]).sum()) > 20
        assert not torch.equal(
            choose_experts(logits, RoutingFacts(6))[0].sort(-1).values, ids.long().sort(-1).values
        ), "no tie was decided by vLLM otherwise than by number, so this does not test ties"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_groups_equal_vllms_router_on_a_cpu(dtype, scoring, bias, scale):
    logits, values = logits_of(500, 32, dtype), bias_of(32) if bias else ()
    router = CPURouter(
        top_k=5, global_num_experts=32, use_grouped_topk=True, num_expert_group=8, topk_group=3, scoring_func=scoring,
        routed_scaling_factor=scale, e_score_correction_bias=torch.tensor(values) if bias else None,
    )  # fmt: skip
    weights, ids = router._compute_routing(logits, logits, None)
    facts = RoutingFacts(5, scoring, True, 8, 3, values, scale, lowest_first=False)
    assert_same(facts, logits, weights, ids)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_groups_equal_vllms_function_for_gpus(scoring, renormalize, bias):
    logits, values = logits_of(300, 16), bias_of(16) if bias else ()
    with torch.compiler.set_stance("force_eager"):
        weights, ids = grouped_topk(
            logits, logits, 4, renormalize, 4, 2, scoring, 1.5, torch.tensor(values) if bias else None
        )
    assert_same(RoutingFacts(4, scoring, renormalize, 4, 2, values, 1.5), logits, weights, ids)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_bias_decides_and_does_not_weigh(scoring, renormalize, bias):
    """What vLLM's kernels do, in PyTorch."""
    logits, values = logits_of(300, 16), bias_of(16) if bias else ()
    scores = {
        "softmax": logits.softmax(-1),
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": (1 + logits.double().exp()).log().sqrt().float(),
    }[scoring]
    ids = (scores + torch.tensor(values or [0.0])).topk(4, -1).indices
    weights = scores.gather(1, ids)
    weights = 2.0 * (weights / weights.sum(-1, keepdim=True) if renormalize else weights)
    facts = RoutingFacts(4, scoring, renormalize, bias=values, scale=2.0)
    assert_same(facts, logits, weights, ids)
    own = choose_experts(logits, facts)[0]
    assert bias != torch.equal(own, choose_experts(logits, RoutingFacts(4, scoring))[0])


def test_equal_scores_go_to_the_lowest_numbers():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5])
    ids, weights = choose_experts(logits, RoutingFacts(3, renormalize=True))
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2]]
    assert weights[1].tolist() == pytest.approx([1 / 3] * 3)


@given(
    top_k=st.integers(1, 8),
    scoring=st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]),
    groups=st.sampled_from([(0, 0), (4, 2), (2, 1)]),
    bias=st.booleans(),
    in_float32=st.booleans(),
    lowest_first=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@examples(80)
def test_choices_are_distinct_and_best_first(top_k, scoring, groups, bias, in_float32, lowest_first, dtype, seed):
    values = bias_of(16) if bias else ()
    facts = RoutingFacts(top_k, scoring, True, *groups, values, in_float32=in_float32, lowest_first=lowest_first)
    logits = logits_of(7, 16, dtype, seed)
    ids, weights = choose_experts(logits, facts)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    if groups[0]:
        of_group = ids // (16 // groups[0])
        assert all(len(set(row)) <= groups[1] for row in of_group.tolist())
    assert (weights.sum(-1) - 1).abs().max() < (1e-5 if dtype == torch.float32 or in_float32 else 0.05)
    if not bias:
        assert bool((weights.diff(dim=-1) <= 0).all())


def test_no_rows():
    ids, weights = choose_experts(torch.empty(0, 8), RoutingFacts(2))
    assert ids.shape == weights.shape == (0, 2)
