"""What is run on a GPU (vLLM 0.26): what no CPU runs, and one of each kind of tap.

In fp32 where the kernels take it, against transformers where it has the model. Latent attention and sparse attention
take bfloat16 alone: there the identities are checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.conformance.zoo import ZOO
from tests.conformance.zoo.entry import COARSE, DROP, LOOSE, Entry

# FlashAttention's kernels for latent attention take heads of these widths only, the index of sparse attention 128.
_WIDE = dict(qk_nope_head_dim=128, v_head_dim=128)
_SPARSE = _WIDE | dict(index_head_dim=128, index_n_heads=32, index_topk=2048, layer_types=DROP)
_ROPE = dict(rope_type="default", rope_theta=10000.0)
_NO_FLASHINFER = dict(gdn_prefill_backend="triton")
# What transformers writes and reads, and what vLLM 0.26 reads.
_OLMO_NORMS = dict(attention_layer_norm="input_layernorm", feedforward_layer_norm="post_attention_layernorm")
_COARSE_KERNELS = "vLLM's kernels here are further from fp32 than 1e-4"


def _float32(
    architecture: str, config: dict[str, Any] | None = None, *, engine: dict[str, Any] | None = None, **more: Any
) -> Entry:
    entry = ZOO[architecture]
    return replace(
        entry,
        config=entry.config | (config or {}),
        # What the CPU's kernels need is not wanted, what makes the two models one is.
        engine={name: value for name, value in entry.engine.items() if name == "hf_overrides"} | (engine or {}),
        dtype="float32",
        identities=False,
        bound=LOOSE,
        apart=entry.apart or _COARSE_KERNELS,
        apart_bound=COARSE,
        **more,
    )


def in_bfloat16(entry: Entry) -> Entry:
    """The same in bfloat16, by its identities."""
    return replace(entry, dtype="bfloat16", identities=True, bound=COARSE)


def _bfloat16(architecture: str, config: dict[str, Any], **more: Any) -> Entry:
    return in_bfloat16(_float32(architecture, config, oracle=False, **more))


GPU = [
    _float32("GraniteMoeSharedForCausalLM"),  # two tensors, one factor
    _float32("FalconH1ForCausalLM"),  # two tensors, two factors
    _float32("FalconForCausalLM"),  # a tensor and a bias
    _float32("LlamaForCausalLM"),
    _float32("Qwen3NextForCausalLM", engine=dict(additional_config=_NO_FLASHINFER)),
    _float32("JambaForCausalLM"),
    _float32("MambaForCausalLM"),
    _float32("MiniMaxM2ForCausalLM"),
    _float32("OlmoHybridForCausalLM", rename=_OLMO_NORMS),
    _bfloat16(
        "KimiLinearForCausalLM",
        _WIDE
        | dict(
            num_shared_experts=1,  # with none vLLM divides by their width
            mla_use_nope=True,
            hidden_act="silu",
            rms_norm_eps=1e-6,
            linear_attn_config=dict(
                kda_layers=[1, 3], full_attn_layers=[2, 4], num_heads=4, head_dim=32, short_conv_kernel_size=4
            ),
        ),
    ),
    _bfloat16("DeepseekV32ForCausalLM", _SPARSE),
    _bfloat16("GlmMoeDsaForCausalLM", _SPARSE),
    _bfloat16("BailingMoeV2_5ForCausalLM", _WIDE | dict(head_dim=64)),
    _float32("FalconMambaForCausalLM"),
    _float32("LagunaForCausalLM", dict(rope_parameters=_ROPE), oracle=False),
    _float32("Step3p5ForCausalLM"),
    _float32("Step1ForCausalLM"),
    _float32("Rnj1ForCausalLM", dict(rope_parameters=dict(sliding_attention=_ROPE, full_attention=_ROPE))),
    _float32("Zamba2ForCausalLM"),
    _float32("Mamba2ForCausalLM"),
    _float32("NemotronHForCausalLM"),
    _bfloat16("LongcatFlashForCausalLM", _WIDE),
    _bfloat16(
        "LongcatFlashNgramForCausalLM",
        ZOO["LongcatFlashForCausalLM"].config
        | _WIDE
        | dict(ngram_vocab_size_ratio=4, emb_split_num=2, emb_neighbor_num=3),
    ),
    _bfloat16("DeepseekV4ForCausalLM", {}, engine=dict(kv_cache_dtype="fp8")),
]
"""The likeliest to tell something first: the time on such a machine is short."""

_NOT_YET = "vLLM 0.26 does not have it"
_WITH_EYES = "vLLM 0.26 has it only as a part of a model with vision"
_DEEPGEMM = "its kernels come from DeepGEMM's sources, which are compiled when they are first used"
_CUTLASS = "its attention is compiled by CUTLASS's and Quack's Python packages, which that machine lacks"

NOT_THERE = {
    "BailingMoeV3ForCausalLM": _NOT_YET,
    "DeepseekV32ForCausalLM": _DEEPGEMM,
    "Glm5NextForCausalLM": _NOT_YET,
    "GlmMoeDsaForCausalLM": _DEEPGEMM,
    "HCXVisionV2ForCausalLM": "a model with vision",
    "HYV4ForCausalLM": _NOT_YET,
    "InklingForCausalLM": _CUTLASS,
    "InklingForConditionalGeneration": _CUTLASS,
    "MiniMaxM3SparseForCausalLM": "its norms are FlashInfer's, which that machine lacks",
    "MuseGlimmerForCausalLM": _NOT_YET,
    "NanbeigeForCausalLM": "no transformers that was at hand has it",
    "Qwen3_5ForCausalLM": _WITH_EYES,
    "Qwen3_5MoeForCausalLM": _WITH_EYES,
    "Qwen4ExpForCausalLM": _NOT_YET,
}
"""What is not run there either, and why."""
