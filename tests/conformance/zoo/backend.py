"""Architectures that vLLM runs through its Transformers backend, not by a model file of its own."""

from __future__ import annotations

from tests.conformance.zoo.dense import GEMMA, HEADS, LLAMA3_ROPE, WINDOWS
from tests.conformance.zoo.entry import DROP, LOOSE, Entry

BACKEND = [
    Entry("ArceeForCausalLM", "arcee", HEADS),
    Entry("CwmForCausalLM", "cwm", HEADS | WINDOWS | dict(rope_parameters=LLAMA3_ROPE)),
    Entry(
        "FlexOlmoForCausalLM",
        "flex_olmo",
        dict(num_experts=8, num_experts_per_tok=2, intermediate_size=64),
        bound=LOOSE,
    ),
    Entry("GlmForCausalLM", "glm", HEADS),
    Entry(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        dict(n_embd=128, n_layer=4, n_head=4, n_positions=512, num_key_value_heads=DROP),
    ),
    Entry("GPTNeoXForCausalLM", "gpt_neox", dict(use_parallel_residual=True, num_key_value_heads=DROP)),
    Entry("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", HEADS),
    Entry(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        HEADS | dict(num_experts=8, moe_topk=2, intermediate_size=64),
        bound=LOOSE,
    ),
    Entry("Jais2ForCausalLM", "jais2", HEADS),
    Entry(
        "MellumForCausalLM",
        "mellum",
        HEADS
        | WINDOWS
        | dict(num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, mlp_layer_types=["sparse"] * 4),
        bound=LOOSE,
    ),
    Entry(
        "NanbeigeForCausalLM",
        oracle=False,
        verdict="cannot run",
        reason="vLLM leaves it to transformers, which does not have it (5.19)",
        tried=False,
    ),
    Entry("OlmoForCausalLM", "olmo", dict(clip_qkv=6.0)),
    Entry("Olmo2ForCausalLM", "olmo2"),
    Entry("Olmo3ForCausalLM", "olmo3", WINDOWS),
    Entry("PhiForCausalLM", "phi"),
    Entry("SeedOssForCausalLM", "seed_oss", HEADS),
    Entry("SmolLM3ForCausalLM", "smollm3", dict(no_rope_layer_interval=2)),
    Entry("Starcoder2ForCausalLM", "starcoder2"),
    Entry("VaultGemmaForCausalLM", "vaultgemma", GEMMA),
]
"""All of `_TRANSFORMERS_SUPPORTED_MODELS` that generate text from text."""
