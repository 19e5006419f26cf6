"""The hook points inside a block, on engines as they are used; which architectures have them is for conformance."""

from __future__ import annotations

import asyncio

import pytest
import torch

import vllm_weir as weir
from tests.conformance.oracle import Oracle as Points
from tests.engine.common import assert_nothing_is_held, directory, prompts, sampling
from tests.support.adapters import adapter
from tests.support.engines import async_llm, get_llm
from tests.support.machine import cpu, engine_processes, model_dtype, needs, op
from tests.support.measure import rel_err, rounding
from tests.support.quantised import gptq
from vllm_weir.schema.hooks import HOOKS, STREAM_HOOKS

pytestmark = pytest.mark.engine("small")
DENSE = [hook for hook in HOOKS if hook not in ("router_logits", "expert_ids", "expert_weights")]
"""The hook points of a model without experts."""
EVERY = [weir.Capture(hook) for hook in DENSE]


def off(whole, *parts):
    total = torch.stack([p.double() for p in parts]).sum(0)
    return float((total - whole.double()).abs().max() / whole.double().abs().max())


def check_identities(acts, layers, bound):
    for layer in range(layers):
        row = {hook: acts[hook, layer] for hook in STREAM_HOOKS}
        assert off(row["resid_mid"], row["resid_pre"], row["attn_out"]) <= bound
        assert off(row["resid_post"], row["resid_mid"], row["mlp_out"]) <= bound
        if layer:
            assert torch.equal(row["resid_pre"], acts["resid_post", layer - 1])
    assert torch.equal(acts["embed"], acts["resid_pre", 0])


def test_sites(llm):
    verdicts = weir.sites(llm)
    assert [v[:2] for v in verdicts] == [
        ("embed", 0),
        *((h, n) for n in range(4) for h in HOOKS[1:-1]),
        ("final_norm", 0),
    ]
    assert {v.hook for v in verdicts if v.supported} == set(DENSE)
    assert all(v.supported != bool(v.reason) for v in verdicts) and all(
        v.supported == (v.hook in DENSE) for v in verdicts
    )


def test_identities_hold_in_mixed_batches(llm):
    """Chunks of prompts, decoding, prefix hits and neighbours that ask for nothing."""
    asked = [weir.params(sampling(6), capture=EVERY), sampling(6)] * 5
    for _ in range(2):
        outs = llm.generate(prompts(), asked, use_tqdm=False)
        for out in outs[::2]:
            acts = out.activations
            assert len(acts.positions) == len(out.prompt_token_ids) + 5
            check_identities(acts, 4, 1e-5)
        assert all(out.activations is None for out in outs[1::2])
    del outs, out, acts
    assert_nothing_is_held(llm)


def test_what_is_added_is_seen_downstream_only(llm):
    """`before` and `after` at the point itself, and nothing upstream of it changes."""
    v = torch.randn(128, generator=torch.Generator().manual_seed(3))
    plain = llm.generate(prompts([9]), weir.params(sampling(1), capture=EVERY), use_tqdm=False)[0].activations
    order = [("embed", 0), *((h, layer) for layer in range(4) for h in DENSE[1:-1]), ("final_norm", 0)]
    for hook, layer in (("attn_out", 1), ("resid_mid", 1), ("mlp_out", 2), ("embed", 0), ("final_norm", 0)):
        steered = weir.params(sampling(1), capture=EVERY, interventions=weir.Add(v, layer, 2.0, hook=hook))
        acts = llm.generate(prompts([9]), steered, use_tqdm=False)[0].activations
        at = order.index((hook, layer))
        for place, site in enumerate(order):
            if place < at:
                assert torch.equal(acts[site], plain[site]), (hook, site)
        assert off(acts[hook, layer], plain[hook, layer], (2.0 * v).expand(9, -1)) <= 1e-6
        early = weir.Capture(hook, layer, before=True)
        before = weir.params(sampling(1), capture=early, interventions=weir.Add(v, layer, 2.0, hook=hook))
        (out,) = llm.generate(prompts([9]), before, use_tqdm=False)
        assert torch.equal(out.activations[hook, layer], plain[hook, layer])
    added = weir.params(sampling(1), capture=EVERY, interventions=weir.Add(v, 1, 2.0, hook="attn_out"))
    same = weir.params(sampling(1), capture=EVERY, interventions=weir.Add(v, 1, 2.0, hook="resid_mid"))
    one, other = (llm.generate(prompts([9]), p, use_tqdm=False)[0].activations for p in (added, same))
    for layer in (2, 3):
        assert off(one["resid_post", layer], other["resid_post", layer]) <= 1e-5


@needs(engine_processes)
def test_async_engine_lists_its_sites(root):
    async def run():
        engine = async_llm(directory(root), block_size=32)
        try:
            with pytest.raises(weir.WeirError, match="have not reported"):
                weir.sites(engine)
            return await weir.sites_async(engine)
        finally:
            engine.shutdown(0)

    assert {v.hook for v in asyncio.run(run()) if v.supported} == set(DENSE)


def test_descriptions_and_refusals(root):
    """A wrong description is refused by the proof; what remains is served, and the engine lives."""
    wrong = {"points": {"attn_out": "input_layernorm:out:0", "resid_mid": "post_attention_layernorm:in:0+1"}}
    llm = get_llm(directory(root), block_size=32, additional_config={"weir": {"describe": wrong}})
    with pytest.raises(weir.WeirError, match="refused") as e:
        llm.generate(prompts([4]), weir.params(sampling(), capture=weir.Capture("attn_out")), use_tqdm=False)
    assert e.value.field == "capture[0].hook"
    (out,) = llm.generate(prompts([4]), weir.params(sampling(), interventions=[]), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 8
    strict = {"describe": wrong, "refused": "start", "hooks": ["attn_out"]}
    with pytest.raises(weir.WeirError, match=r"attn_out\[0\] is refused"):
        get_llm(directory(root), block_size=32, additional_config={"weir": strict})


@needs(op("cpu_gemm_wna16"), model_dtype("bfloat16"), cpu("the weights are packed for the kernel of CPUs"))
def test_four_bit_weights(root, tmp_path):
    """GPTQ: rows against transformers with the same weights multiplied out."""
    from transformers import AutoModelForCausalLM

    gptq(directory(root), tmp_path / "packed", tmp_path / "plain")
    llm = get_llm(tmp_path / "packed", block_size=32, dtype="bfloat16")
    assert llm.llm_engine.model_config.quantization
    assert {v.hook for v in weir.sites(llm) if v.supported} == set(DENSE)
    (out,) = llm.generate(prompts([20]), weir.params(sampling(6), capture=EVERY), use_tqdm=False)
    check_identities(out.activations, 4, 2**-7)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    ids = [*out.prompt_token_ids, *out.outputs[0].token_ids][:-1]
    with torch.no_grad():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer in range(4):
        rows = out.activations["resid_pre", layer].double()
        cosine = torch.nn.functional.cosine_similarity(rows, states[layer][0].double(), dim=-1)
        assert float(1 - cosine.min()) <= 2e-3, layer


@needs(cpu("vLLM's LoRA kernels for GPUs take no float32"))
def test_an_adapter(root, tmp_path):
    """LoRA: rows against transformers with the adapter merged."""
    from vllm.lora.request import LoRARequest

    added = adapter(directory(root), tmp_path)
    reference = Points(directory(root))
    with torch.no_grad():
        weights = dict(reference.model.named_parameters())
        for name, delta in added.items():
            weights[name] += delta
    llm = get_llm(directory(root), block_size=32, enable_lora=True, max_lora_rank=8)
    assert {v.hook for v in weir.sites(llm) if v.supported} == set(DENSE)
    request = LoRARequest("tiny", 1, str(tmp_path))
    asked = weir.params(sampling(6), capture=EVERY)
    (out,) = llm.generate(prompts([20]), asked, lora_request=request, use_tqdm=False)
    rows, _ = reference.points([*out.prompt_token_ids, *out.outputs[0].token_ids][:-1])
    for site in out.activations.sites:
        assert rel_err(out.activations[site], rows[tuple(site)]) <= rounding(), site
