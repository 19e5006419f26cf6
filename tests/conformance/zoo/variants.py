"""Other configurations: those that take another way through vLLM's model file, through transformers, or through Weir.

What an architecture's first entry does is not repeated; every entry here changes one thing, or few that go together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tests.conformance.zoo.backend import BACKEND
from tests.conformance.zoo.dense import DENSE
from tests.conformance.zoo.entry import COARSE, LOOSE, Entry
from tests.conformance.zoo.hybrid import HYBRID
from tests.conformance.zoo.moe import MOE
from tests.conformance.zoo.vllm_only import OWN

_FIRST = {entry.architecture: entry for entry in [*DENSE, *MOE, *HYBRID, *BACKEND, *OWN]}


def _other(architecture: str, variant: str, config: dict[str, Any] | None = None, **more: Any) -> Entry:
    first, config = _FIRST[architecture], config or {}
    changed = {**config, **more.get("engine", {})} | {k: v for k, v in more.items() if k == "dtype"}
    more["engine"] = first.engine | more.get("engine", {})
    differs = ", ".join(f"{name} {_brief(value)}" for name, value in changed.items())
    return replace(first, config=first.config | config, variant=variant, differs=differs, **more)


def _brief(value: Any) -> str:
    if isinstance(value, list) and len(value) > 1 and all(v == value[0] for v in value):
        return f"{len(value)} x {value[0]}"
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _each(architectures: Iterable[str], variant: str, **more: Any) -> list[Entry]:
    return [_other(architecture, variant, **more) for architecture in architectures]


_WIDE = dict(intermediate_size=128)
"""As wide as the stream: width alone tells nothing then."""
_FULL = dict(layer_types=["full_attention"] * 4)
_PER_LAYER = dict(hidden_size_per_layer_input=32, vocab_size_per_layer_input=512)
_GEMMA_EXPERTS = dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=64)
_ONES = dict(embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0)
_ALIBI = dict(alibi=True, multi_query=False, parallel_attn=False)
_GROUPED = dict(new_decoder_architecture=True, num_kv_heads=2)

_DENSE = [
    _other("BloomForCausalLM", "stream-of-norms", dict(apply_residual_connection_post_layernorm=True)),
    _other("ChatGLMModel", "stream-of-norms", dict(apply_residual_connection_post_layernorm=True)),
    _other("ChatGLMModel", "no-final-norm", dict(post_layer_norm=False, rmsnorm=False, add_bias_linear=True)),
    _other("Cohere2ForCausalLM", "no-windows", _FULL),
    _other("CohereForCausalLM", "plain-heads", dict(use_qk_norm=False, num_key_value_heads=4)),
    _other("Ernie4_5ForCausalLM", "one-block", dict(num_hidden_layers=1)),
    _other("Exaone4ForCausalLM", "no-windows", _FULL | dict(sliding_window=None, sliding_window_pattern=None)),
    _other("Exaone4ForCausalLM", "one-block", dict(num_hidden_layers=1, layer_types=["sliding_attention"])),
    _other("FalconForCausalLM", "alibi", _ALIBI, apart="transformers makes ALiBi's slopes in bf16"),
    _other("FalconForCausalLM", "sequential", dict(parallel_attn=False)),
    _other("FalconForCausalLM", "two-norms", _GROUPED),
    _other("FalconForCausalLM", "one-norm", _GROUPED | dict(num_ln_in_parallel_attn=1, bias=False)),
    _other("GPT2LMHeadModel", "untied", dict(n_inner=128, tie_word_embeddings=False)),
    _other("GPTBigCodeForCausalLM", "all-heads", dict(multi_query=False)),
    _other("GPTNeoXForCausalLM", "sequential", dict(use_parallel_residual=False)),
    _other("Gemma2ForCausalLM", "no-caps", dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
    _other("Gemma3ForCausalLM", "windows", dict(layer_types=["sliding_attention"] * 4, tie_word_embeddings=False)),
    _other("Gemma3nForCausalLM", "eight-streams", dict(altup_num_inputs=8)),
    _other("Gemma4ForCausalLM", "per-layer-inputs", _PER_LAYER),
    _other("Gemma4ForCausalLM", "experts", _GEMMA_EXPERTS, bound=LOOSE),
    _other("Gemma4ForCausalLM", "shared-keys", dict(num_kv_shared_layers=2, use_double_wide_mlp=True)),
    _other(
        "Gemma4ForCausalLM", "all-of-these", _PER_LAYER | _GEMMA_EXPERTS | dict(num_kv_shared_layers=2), bound=LOOSE
    ),
    _other("GraniteForCausalLM", "no-multipliers", _ONES),
    _other("HyperCLOVAXForCausalLM", "no-post-norms", dict(use_post_norm=False)),
    _other("HyperCLOVAXForCausalLM", "one-block", dict(num_hidden_layers=1)),
    _other("LlamaForCausalLM", "one-width", _WIDE | dict(num_key_value_heads=4)),
    _other("LlamaForCausalLM", "two-heads", dict(num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)),
    _other("LlamaForCausalLM", "odd-vocabulary", dict(vocab_size=530)),
    _other("LlamaForCausalLM", "one-block", dict(num_hidden_layers=1)),
    _other("MiniCPMForCausalLM", "no-multipliers", dict(scale_emb=1, scale_depth=1.0)),
    _other("NemotronForCausalLM", "biased", _WIDE | dict(attention_bias=True, mlp_bias=True)),
    _other("OPTForCausalLM", "post-norm", dict(do_layer_norm_before=False)),
    _other("OPTForCausalLM", "no-final-norm", dict(_remove_final_layer_norm=True)),
    _other("OPTForCausalLM", "no-projections", dict(word_embed_proj_dim=128, enable_bias=False, ffn_dim=128)),
    _other("PhiForCausalLM", "normed-heads", dict(qk_layernorm=True)),
    _other("Qwen2ForCausalLM", "tied", _WIDE | dict(tie_word_embeddings=True)),
    _other(
        "SolarForCausalLM",
        "eight-blocks",
        dict(num_hidden_layers=8, bskcn_1=[2], bskcn_2=[4], bskcn_3=[5], bskcn_4=[7]),
    ),
    _other("Starcoder2ForCausalLM", "unbiased", dict(use_bias=False, tie_word_embeddings=True)),
]
_MOE = [
    _other("AXK1ForCausalLM", "half", dtype="float16", identities=True, bound=COARSE),
    _other("AfmoeForCausalLM", "dense", dict(num_dense_layers=4)),
    _other("BailingMoeV2ForCausalLM", "sparse", dict(num_shared_experts=0, use_qk_norm=False, first_k_dense_replace=0)),
    _other("Cohere2MoeForCausalLM", "sparse", dict(num_shared_experts=0, mlp_layer_types=["sparse"] * 4)),
    _other("DeepseekV2ForCausalLM", "sparse", dict(q_lora_rank=None, first_k_dense_replace=0, n_shared_experts=2)),
    _other(
        "DeepseekV2ForCausalLM", "half", dict(routed_scaling_factor=4.0), dtype="float16", identities=True, bound=COARSE
    ),
    _other("DeepseekV2ForCausalLM", "one-width", dict(hidden_size=512, q_lora_rank=None)),
    _other("DeepseekV3ForCausalLM", "dense", dict(q_lora_rank=None, first_k_dense_replace=4)),
    _other(
        "Ernie4_5_MoeForCausalLM",
        "every-other",
        dict(moe_layer_interval=2, moe_num_shared_experts=2, moe_layer_start_index=0),
    ),
    _other("Glm4MoeForCausalLM", "sparse", dict(first_k_dense_replace=0, use_qk_norm=False, n_shared_experts=2)),
    _other("GraniteMoeSharedForCausalLM", "no-shared-expert", dict(shared_intermediate_size=0)),
    _other("K2HorizonForCausalLM", "grouped-norms", dict(layernorm_num_groups=2, num_shared_experts=0)),
    _other(
        "Llama4ForCausalLM", "sparse", dict(interleave_moe_layer_step=1, use_qk_norm=False, no_rope_layers=[1, 1, 1, 0])
    ),
    _other("MixtralForCausalLM", "windows", dict(sliding_window=16, num_experts_per_tok=1, intermediate_size=128)),
    _other("PanguProMoEV2ForCausalLM", "no-post-norms", dict(sandwich_norm=False)),
    _other("PhiMoEForCausalLM", "one-block", dict(num_hidden_layers=1)),
    _other("Qwen2MoeForCausalLM", "every-other", dict(decoder_sparse_step=2, mlp_only_layers=[], norm_topk_prob=False)),
    _other("Qwen3MoeForCausalLM", "one-width", dict(num_experts=128, moe_intermediate_size=32)),
]
_ALL_MAMBA = dict(layers_block_type=["linear_attention"] * 4, mamba_num_heads=4)
_ATTENTION_FIRST = dict(layers_block_type=["full_attention", "mlp", "linear_attention", "linear_attention"], n_groups=2)
_HYBRID = [
    _other("FalconH1ForCausalLM", "one-width", _WIDE | dict(mamba_d_ssm=128, mamba_n_heads=4)),
    _other("GraniteMoeHybridForCausalLM", "dense", dict(num_local_experts=0, num_experts_per_tok=0)),
    _other("GraniteMoeHybridForCausalLM", "attention", _FULL | dict(position_embedding_type="rope")),
    _other("GraniteMoeHybridForCausalLM", "one-block", dict(num_hidden_layers=1, layer_types=["linear_attention"])),
    _other("Lfm2ForCausalLM", "convolutions", dict(layer_types=["conv"] * 3 + ["full_attention"], conv_bias=True)),
    _other("Mamba2ForCausalLM", "one-width", dict(num_heads=4, expand=1, use_bias=True)),
    _other(
        "Mamba2ForCausalLM", "groups", dict(n_groups=2), apart="vLLM norms the groups one by one, transformers does not"
    ),
    _other("NemotronHForCausalLM", "attention-first", _ATTENTION_FIRST),
    _other("NemotronHForCausalLM", "state-spaces", _ALL_MAMBA),
    _other("Qwen3NextForCausalLM", "layer-scale", dict(layer_scale=True), oracle=False),
    _other(
        "Zamba2ForCausalLM",
        "two-memories",
        dict(num_mem_blocks=2, layers_block_type=["hybrid", "linear_attention", "hybrid", "hybrid"]),
    ),
]
_PARTLY = [
    _other("JambaForCausalLM", "attention", dict(attn_layer_period=1, attn_layer_offset=0)),
    _other("LagunaForCausalLM", "dense", dict(mlp_layer_types=["dense"] * 4)),
    _other("MiniMaxM2ForCausalLM", "softmax", dict(scoring_func="softmax")),
    _other("Step3p5ForCausalLM", "softmax", dict(moe_router_activation="softmax")),
]
"""What runs on a CPU of those that do not as they are: the rest of their blocks."""
_LLAMA_LIKE = (
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "CohereForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV3ForCausalLM",
)
_MODES = [
    *_each((*_LLAMA_LIKE, "GptOssForCausalLM", "Gemma4ForCausalLM"), "backend", engine=dict(model_impl="transformers")),
    _other(
        "GraniteForCausalLM",
        "backend",
        engine=dict(model_impl="transformers"),
        apart="vLLM's backend leaves logits_scaling out",
    ),
    _other("StableLmForCausalLM", "backend", dict(use_parallel_residual=True), engine=dict(model_impl="transformers")),
    *_each(
        ("Gemma3ForCausalLM", "FalconForCausalLM", "DeepseekV3ForCausalLM", "NemotronHForCausalLM", "Olmo2ForCausalLM"),
        "compiled",
        engine=dict(enforce_eager=False),
    ),
    *_each(
        (
            "LlamaForCausalLM",
            "FalconForCausalLM",
            "MixtralForCausalLM",
            "NemotronHForCausalLM",
            "GPTNeoXForCausalLM",
            "Gemma4ForCausalLM",
        ),
        "bf16",
        dtype="bfloat16",
        identities=True,
        bound=COARSE,
    ),
    *_each(("CohereForCausalLM", "NemotronHForCausalLM"), "adapters", engine=dict(enable_lora=True, max_lora_rank=8)),
]

OTHERS = [*_DENSE, *_MOE, *_HYBRID, *_PARTLY, *_MODES]
