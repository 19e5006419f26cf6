"""What workers report of attention and routing, held against what vLLM's layers return while they run."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import vllm_weir as weir
from tests.conformance.engine import on_cpu
from tests.conformance.zoo import ZOO
from tests.conformance.zoo.build import build
from tests.engine.common import directory, sampling, tokens
from tests.support.engines import get_llm
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.derived.formulas import attention_pattern, choose_experts
from vllm_weir.schema.model_facts import AttentionFacts

pytestmark = pytest.mark.engine
THOROUGH = pytest.mark.thorough
PROMPT, GENERATED = 40, 4
BOUND = 2e-5
ROWS = PROMPT + GENERATED - 1


def engine(where, **more):
    options = dict(block_size=32, enable_prefix_caching=False, max_model_len=128, skip_tokenizer_init=True)
    return get_llm(where, **options | more)


def built(root, architecture):
    return build(ZOO[architecture], root / architecture)


def facts_of(llm):
    return EngineCapabilities.merge(llm.collective_rpc("weir_report")).facts


def watched(llm) -> tuple[dict[int, list], dict[int, list]]:
    """Run one request: by block, the (q, k, v, result) of attention and (logits, weights, ids) of routing."""
    attention: dict[int, list] = {}
    routing: dict[int, list] = {}

    def watch(model):
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        undo = []
        for index, block in enumerate(model.model.layers):
            for module in block.modules():
                if isinstance(module, Attention):
                    hook = partial(note_attention, attention.setdefault(index, []))
                    undo.append(module.register_forward_hook(hook).remove)
                if isinstance(router := getattr(module, "router", None), BaseRouter):
                    compute = router._compute_routing
                    router._compute_routing = partial(note_routing, compute, routing.setdefault(index, []))
                    undo.append(partial(setattr, router, "_compute_routing", compute))
        return undo

    (undo,) = llm.apply_model(watch)
    try:
        params = sampling(GENERATED, detokenize=False)
        llm.generate({"prompt_token_ids": tokens(PROMPT, 1)}, params, use_tqdm=False)
    finally:
        for one in undo:
            one()
    return attention, routing


def note_attention(calls, module, arguments, result):
    q, k, v = (tensor.reshape(len(tensor), -1, module.head_size).clone() for tensor in arguments[:3])
    calls.append((q, k, v, result.reshape(q.shape).clone()))


def note_routing(compute, calls, hidden, logits, *arguments, **options):
    weights, ids = compute(hidden, logits, *arguments, **options)
    calls.append((logits.clone(), weights.clone(), ids.clone()))
    return weights, ids


def joined(calls):
    return [torch.cat(parts) for parts in zip(*calls, strict=True)]


def check_attention(facts, calls) -> None:
    """The pattern's mean of values is what vLLM's attention kernel returned, at every position and head."""
    for layer, one in facts.attention.items():
        assert not one.refused
        q, k, v, z = joined(calls[layer])
        at = torch.arange(ROWS)
        pattern = attention_pattern(q, k, at, one)
        mixed = torch.einsum("qhk,khd->qhd", pattern, v.repeat_interleave(q.shape[1] // v.shape[1], 1))
        assert (mixed - z).abs().max() / z.abs().max() < BOUND, layer
        assert one.heads == q.shape[1] and one.head_size == q.shape[2]


def check_routing(facts, calls) -> None:
    for layer, one in facts.routing.items():
        logits, weights, ids = joined(calls[layer])
        own_ids, own_weights = choose_experts(logits, one)
        assert len(logits) == ROWS
        theirs = torch.zeros(logits.shape).scatter(1, ids.long(), weights.float())
        assert (torch.zeros(logits.shape).scatter(1, own_ids, own_weights) - theirs).abs().max() < 1e-6


@THOROUGH
def test_llama(root):
    llm = engine(directory(root))
    facts = facts_of(llm)
    expected = AttentionFacts(heads=4, head_size=32, scale=32**-0.5)
    assert [one.heads for one in facts.attention.values()] == [4] * 4 and not facts.routing
    assert facts.attention[0] == expected and facts.attention[3].keys_layer == 3
    check_attention(facts, watched(llm)[0])


@THOROUGH
def test_gemma_2_has_windows_and_a_soft_cap(root):
    llm = engine(directory(root, "gemma2"))
    facts = facts_of(llm)
    assert [one.window for one in facts.attention.values()] == [16, None, 16, None]
    assert {one.soft_cap for one in facts.attention.values()} == {50.0}
    check_attention(facts, watched(llm)[0])


def test_gpt_oss_has_sinks(root):
    llm = engine(built(root, "GptOssForCausalLM"))
    facts = facts_of(llm)
    assert all(len(one.sinks) == one.heads and any(one.sinks) for one in facts.attention.values())
    attention, routing = watched(llm)
    check_attention(facts, attention)
    check_routing(facts, routing)


@THOROUGH
def test_gpt_oss_with_new_sinks(root):
    """Patterns follow weights that were replaced in place."""
    llm = engine(built(root, "GptOssForCausalLM"))
    asked = weir.params(sampling(1), capture=weir.Capture("pattern"))

    def shares():
        """What each query gives to keys; sinks have the rest."""
        (out,) = llm.generate({"prompt_token_ids": tokens(PROMPT)}, asked, use_tqdm=False)
        return torch.stack([out.activations[site].sum(-1) for site in out.activations.sites])

    def add_to_sinks(amount, model):
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.data += amount

    before = shares()
    assert (before < 1 - 1e-3).any()
    try:
        llm.apply_model(partial(add_to_sinks, -100.0))
        assert (shares() - 1).abs().max() < 1e-5, "without sinks keys get everything"
    finally:
        llm.apply_model(partial(add_to_sinks, 100.0))
    assert (shares() - before).abs().max() < 1e-4
    check_attention(facts_of(llm), watched(llm)[0])


@THOROUGH
def test_mixtral_routes(root):
    llm = engine(built(root, "MixtralForCausalLM"))
    facts = facts_of(llm)
    assert set(facts.routing) == set(facts.attention) and {one.top_k for one in facts.routing.values()} == {2}
    attention, routing = watched(llm)
    check_attention(facts, attention)
    check_routing(facts, routing)


@THOROUGH
def test_deepseek_v3_chooses_among_groups_with_a_bias(root):
    llm = engine(built(root, "DeepseekV3ForCausalLM"), **on_cpu(ZOO["DeepseekV3ForCausalLM"]))
    facts = facts_of(llm)
    assert set(facts.routing) == {1, 2, 3}, "the first block is dense"
    assert {(one.groups, one.top_groups, len(one.bias)) for one in facts.routing.values()} == {(2, 1, 8)}
    assert {one.refused for one in facts.attention.values()} == {
        "its MLAAttention has no queries and keys for each head"
    }
    check_routing(facts, watched(llm)[1])
