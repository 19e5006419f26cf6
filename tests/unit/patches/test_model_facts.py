"""Facts read from stand-ins for vLLM's attention layers, and from its own routers, which are asked to route."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers import attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

from vllm_weir.frontend.derived.formulas import choose_experts
from vllm_weir.patches.model.facts import read_facts
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.model_facts import AttentionFacts, RoutingFacts
from vllm_weir.schema.rows import Shard


class Impl:
    """What vLLM's attention backends keep of their arguments."""

    scale, logits_soft_cap, alibi_slopes, sinks = 0.125, None, None, None

    def __init__(self, **options):
        vars(self).update(options)


class Attention(attention.Attention):
    """Has the attributes of vLLM's layer of this name."""

    num_heads, num_kv_heads, head_size = 4, 2, 32
    sliding_window, kv_sharing_target_layer_name, attn_type = None, None, "decoder"
    kv_cache_dtype, kv_cache_torch_dtype, has_sink = "auto", torch.float32, False

    def __init__(self, name="model.layers.0.attn", impl=None, **options):
        torch.nn.Module.__init__(self)  # vLLM's own wants an engine's configuration
        self.layer_name, self.impl = name, impl or Impl()
        for key, value in options.items():
            setattr(self, key, value)


ChunkedLocalAttention = type("ChunkedLocalAttention", (Attention,), {"attention_chunk_size": 16})
EncoderOnlyAttention = type("EncoderOnlyAttention", (Attention,), {"attn_type": "encoder_only"})


class StateSpace(torch.nn.Module, AttentionLayerBase):
    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


class Experts(torch.nn.Module):
    def __init__(self, router):
        super().__init__()
        self.router = router


def facts_of(*blocks, on_cpu=False, shards=None, model=None, dtype=torch.float32):
    modules = {n: torch.nn.Sequential(*parts) for n, parts in enumerate(blocks)}
    return read_facts(model or torch.nn.Module(), modules, dtype, on_cpu, shards or {})


def attention_of(*parts, **options) -> AttentionFacts:
    return facts_of(parts, **options).attention[0]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Attention(), {}),
        (Attention(sliding_window=7), {"window": 7}),
        (Attention(sliding_window=-1), {}),
        (Attention(impl=Impl(logits_soft_cap=0)), {}),
        (Attention(impl=Impl(logits_soft_cap=50.0, scale=0.25)), {"soft_cap": 50.0, "scale": 0.25}),
        (
            Attention(impl=Impl(sinks=torch.nn.Parameter(torch.tensor([0.5, 1, 2, 3]).bfloat16())), has_sink=True),
            {"sinks": (0.5, 1.0, 2.0, 3.0)},
        ),
        (Attention(impl=Impl(alibi_slopes=[0.5, 0.25, 0.125, 0.0625])), {"alibi": (0.5, 0.25, 0.125, 0.0625)}),
        (Attention(impl=Impl(alibi_slopes=torch.tensor([0.5] * 4))), {"alibi": (0.5,) * 4}),
        (ChunkedLocalAttention(), {"chunk": 16}),
        (Attention(use_mm_prefix=True), {"media": True}),
    ],
)
def test_attention(layer, expected):
    plain = {"heads": 4, "head_size": 32, "scale": 0.125}
    assert attention_of(layer) == AttentionFacts(**plain | expected)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (EncoderOnlyAttention(), "EncoderOnlyAttention hides other keys"),
        (Attention(attn_type="encoder_decoder"), "it is encoder_decoder attention"),
        (Attention(kv_cache_dtype="fp8", kv_cache_torch_dtype=torch.uint8), "the KV cache keeps keys as fp8"),
        (Attention(has_sink=True), "its attention sinks cannot be read"),
        (Attention(impl=Impl(use_alibi_sqrt=True)), "ALiBi as a square root"),
        (Attention(impl=Impl(chunk_lookback=1)), "look back"),
        (StateSpace(), "its StateSpace has no queries and keys"),
        (Attention("a", kv_sharing_target_layer_name="gone"), "it uses the keys of gone"),
    ],
)
def test_attention_from_whose_rows_scores_do_not_follow(layer, words):
    assert words in attention_of(layer).refused


def test_an_attribute_that_a_version_lacks_refuses_the_layer_alone():
    odd = Attention("b", impl=SimpleNamespace(scale=1.0))
    first, second = facts_of((Attention("a"),), (odd,)).attention.values()
    assert not first.refused and "logits_soft_cap" in second.refused


def test_a_block_with_two_attention_layers_or_none():
    assert "2 attention layers" in attention_of(Attention("a"), Attention("b")).refused
    assert not attention_of(StateSpace(), Attention("a")).refused
    layer = Attention("a")
    assert not attention_of(layer, torch.nn.Sequential(layer)).refused, "one layer in two places is one"
    assert facts_of((torch.nn.Identity(),)).attention == {}


def test_keys_of_another_layer():
    facts = facts_of((Attention("a"),), (Attention("b", kv_sharing_target_layer_name="a"),))
    assert [one.keys_layer for one in facts.attention.values()] == [0, 0]
    assert [one.keys_layer for one in facts_of((Attention("a"),), (Attention("b"),)).attention.values()] == [0, 1]


def test_layers_that_the_model_keeps_apart():
    model = torch.nn.Module()
    model.attention_instances = {1: Attention("b", sliding_window=3)}
    facts = facts_of((torch.nn.Identity(),), (torch.nn.Identity(),), model=model)
    assert list(facts.attention) == [1] and facts.attention[1].window == 3


def test_the_first_head_of_a_worker():
    facts = facts_of((Attention("a"),), (Attention("b"),), shards={Site("q_rot", 1): Shard(128, 256)})
    assert facts.first_head == {1: 4}


def bias() -> torch.Tensor:
    return torch.randn(16, generator=torch.Generator().manual_seed(1))


def softmax_first(hidden_states, gating_output, topk, renormalize):
    raise NotImplementedError


CPU_ROUTERS = [
    CPURouter(3, 16, renormalize=True),
    CPURouter(3, 16, renormalize=False),
    CPURouter(3, 16, e_score_correction_bias=bias(), routed_scaling_factor=2.0),
    *(
        CPURouter(
            3, 16, use_grouped_topk=True, num_expert_group=4, topk_group=2, renormalize=renormalize,
            scoring_func=scoring, routed_scaling_factor=1.5, e_score_correction_bias=bias() if biased else None,
        )
        for scoring in ("softmax", "sigmoid")
        for renormalize in (True, False)
        for biased in (True, False)
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CPU_ROUTERS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_from_facts_are_those_of_vllms_router_on_a_cpu(number, dtype):
    router = CPU_ROUTERS[number]
    logits = torch.randn(400, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected_weights, expected_ids = router._compute_routing(logits, logits, None)
    facts = facts_of((Experts(router),), on_cpu=True).routing[0]
    assert not facts.refused
    ids, weights = choose_experts(logits, facts)
    theirs = torch.zeros(400, 16).scatter(1, expected_ids.long(), expected_weights.float())
    assert (torch.zeros(400, 16).scatter(1, ids, weights) - theirs).abs().max() <= 1e-6


@pytest.mark.thorough
def test_cohere_and_llama_4_route_by_functions_that_are_known():
    from vllm.model_executor.models.cohere2_moe import token_choice_with_bias
    from vllm.model_executor.models.llama4 import Llama4MoE

    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(3))
    for function in (token_choice_with_bias, Llama4MoE.custom_routing_function):
        for router, on_cpu in (
            (CPURouter(2, 16, custom_routing_function=function, renormalize=False), True),
            (CustomRoutingRouter(2, 16, function, renormalize=False), False),
        ):
            facts = facts_of((Experts(router),), on_cpu=on_cpu).routing[0]
            weights, ids = function(logits, logits, 2, False)
            order = weights.argsort(-1, descending=True)
            own_ids, own_weights = choose_experts(logits, facts)
            assert torch.equal(own_ids, ids.long().gather(1, order))
            assert (own_weights - weights.gather(1, order)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        (FusedTopKRouter(2, 16, "sigmoid", False), RoutingFacts(2, "sigmoid", False)),
        (
            FusedTopKBiasRouter(2, 16, torch.tensor([0.5, 1.0]), True, 2.5, scoring_func="sqrtsoftplus"),
            RoutingFacts(2, "sqrtsoftplus", True, bias=(0.5, 1.0), scale=2.5),
        ),
        (
            GroupedTopKRouter(2, 16, 4, 2, True, "sigmoid", 1.5, torch.zeros(2)),
            RoutingFacts(2, "sigmoid", True, 4, 2, (0.0, 0.0), 1.5),
        ),
        (GroupedTopKRouter(2, 16, 4, 2), RoutingFacts(2, "softmax", True, 4, 2, in_float32=False)),
        (
            GroupedTopKRouter(2, 16, 3, 2, False, "sigmoid", 1.5, torch.zeros(2)),
            RoutingFacts(2, "sigmoid", False, bias=(0.0, 0.0), scale=1.5),
        ),
        (GroupedTopKRouter(2, 16, 3, 2, False, "sigmoid", 1.5), RoutingFacts(2, "softmax", False)),
    ],
)
def test_routers_of_gpus(router, expected):
    assert facts_of((Experts(router), Experts(router))).routing[0] == expected


class ZeroExpertRouter(BaseRouter):
    routing_method_type = None

    def _compute_routing(self, *args, **options):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("routers", "words"),
    [
        ([ZeroExpertRouter(2, 16)], "vLLM's ZeroExpertRouter does not choose by the logits alone"),
        ([CustomRoutingRouter(2, 16, softmax_first)], "a function of its own, softmax_first"),
        ([FusedTopKBiasRouter(2, 16, hash_indices_table=torch.zeros(4, 2))], "by the token"),
        ([FusedTopKBiasRouter(2, 16, bias_vl=torch.zeros(16))], "image tokens"),
        ([FusedTopKBiasRouter(2, 16, num_fused_shared_experts=1)], "appends the shared experts"),
        ([FusedTopKRouter(2, 16, "tanh")], "a tanh of the logits"),
        ([FusedTopKRouter(2, 16), FusedTopKRouter(2, 16)], "2 routers"),
    ],
)
def test_routers_whose_choice_does_not_follow(routers, words):
    assert words in facts_of(tuple(map(Experts, routers))).routing[0].refused


def test_a_block_without_experts_has_no_facts_of_routing():
    assert facts_of((Attention(),)).routing == {}
