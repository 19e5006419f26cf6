"""Models of routed experts that transformers runs too, and those of latent attention."""

from __future__ import annotations

from tests.conformance.zoo.dense import GRANITE, HEADS, ONE_LESS, WINDOWS
from tests.conformance.zoo.entry import DROP, LOOSE, Entry

EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
LOCAL = dict(num_local_experts=8, num_experts_per_tok=2)
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1)
GROUPS = dict(
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.7,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
)
DENSE_FIRST = dict(mlp_layer_types=["dense", "sparse", "sparse", "sparse"], first_k_dense_replace=1)
# vLLM's kernels take latents of this width only.
LATENT = dict(
    q_lora_rank=48, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, num_key_value_heads=4
)
# vLLM's router on CPUs leaves the balancing bias of ungrouped softmax routing out.
UNSEEN_BIAS = ("e_score_correction_bias",)
INDEX = dict(index_topk=16, index_head_dim=64, index_n_heads=4)


# vLLM's rotary kernel for CPUs is wrong where queries come as [tokens, heads, width].
NATIVE_ROPE = dict(compilation_config=dict(custom_ops=["all", "-rotary_embedding"]))


def _mla(architecture: str, model_type: str, config: dict) -> Entry:
    return Entry(architecture, model_type, LATENT | config, bound=LOOSE, engine=NATIVE_ROPE)


def _moe(architecture: str, model_type: str, config: dict, **more) -> Entry:
    return Entry(architecture, model_type, config, bound=LOOSE, **more)


MOE = [
    _moe(
        "AfmoeForCausalLM",
        "afmoe",
        HEADS
        | EXPERTS
        | dict(
            num_shared_experts=1,
            num_dense_layers=1,
            route_scale=1.7,
            sliding_window=16,
            global_attn_every_n_layers=2,
            mup_enabled=True,
            score_func="sigmoid",
            route_norm=True,
            qk_norm=True,
            n_group=1,
            topk_group=1,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
    _moe(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        HEADS
        | WINDOWS
        | EXPERTS
        | dict(logit_scale=0.3, num_shared_experts=1, tie_word_embeddings=True)
        | dict(mlp_layer_types=["dense", "sparse", "sparse", "sparse"], prefix_dense_intermediate_size=192),
        engine=ONE_LESS,
    ),
    _moe(
        "DbrxForCausalLM",
        "dbrx",
        dict(
            d_model=128,
            n_heads=4,
            n_layers=4,
            max_seq_len=512,
            hidden_size=DROP,
            num_attention_heads=DROP,
            num_hidden_layers=DROP,
            num_key_value_heads=DROP,
            max_position_embeddings=DROP,
            attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
            ffn_config=dict(ffn_hidden_size=64, hidden_size=128, moe_num_experts=8, moe_top_k=2),
        ),
        oracle=False,
    ),
    _mla(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        ROUTED | dict(first_k_dense_replace=1, topk_method="greedy", n_group=1, topk_group=1),
    ),
    _mla("DeepseekV3ForCausalLM", "deepseek_v3", ROUTED | GROUPS | dict(first_k_dense_replace=1)),
    _moe(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        dict(
            head_dim=512,
            q_lora_rank=48,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            o_groups=2,
            o_lora_rank=32,
            index_n_heads=4,
            index_head_dim=128,
            index_topk=16,
            sliding_window=16,
            qk_rope_head_dim=64,
            layer_types=["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
            mlp_layer_types=DROP,
            num_nextn_predict_layers=0,
            hc_mult=2,
            hc_eps=1e-6,
            hc_sinkhorn_iters=4,
            compress_ratios=[128, 4, 128, 4],
            compress_rope_theta=10000.0,
            swiglu_limit=10.0,
            scoring_func="sqrtsoftplus",
            topk_method="noaux_tc",
            norm_topk_prob=True,
            routed_scaling_factor=1.5,
            num_hash_layers=1,
            n_shared_experts=1,
            rms_norm_eps=1e-6,
            hidden_act="silu",
            kv_lora_rank=64,
            rope_scaling=None,
        ),
        oracle=False,
    ),
    _mla(
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        ROUTED | GROUPS | INDEX | DENSE_FIRST | dict(layer_types=["indexed_attention"] * 4),
    ),
    _mla("AXK1ForCausalLM", "axk1", ROUTED | GROUPS | dict(first_k_dense_replace=0)),
    _mla("Glm4MoeLiteForCausalLM", "glm4_moe_lite", ROUTED | DENSE_FIRST | dict(routed_scaling_factor=1.7)),
    _mla(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        ROUTED
        | INDEX
        | DENSE_FIRST
        | dict(layer_types=["indexed_attention"] * 4, indexer_types=["full"] * 4, routed_scaling_factor=1.7),
    ),
    Entry(
        "MiniCPM3ForCausalLM", "minicpm3", LATENT | dict(scale_emb=3, scale_depth=1.4, dim_model_base=64), bound=LOOSE
    ),
    _moe(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        dict(moe_k=2, moe_num_experts=8, moe_num_shared_experts=1, moe_intermediate_size=64, moe_layer_end_index=3),
        zero=UNSEEN_BIAS,
    ),
    _moe(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        HEADS | WINDOWS | EXPERTS | DENSE_FIRST | dict(sliding_window_pattern=2, routed_scaling_factor=1.7),
    ),
    _moe(
        "ExaoneMoEForCausalLM",
        "exaone_moe",
        HEADS | WINDOWS | EXPERTS | DENSE_FIRST | dict(sliding_window_pattern=2, routed_scaling_factor=1.7),
    ),
    _moe("Glm4MoeForCausalLM", "glm4_moe", HEADS | ROUTED | dict(first_k_dense_replace=1, use_qk_norm=True)),
    _moe(
        "GptOssForCausalLM",
        "gpt_oss",
        LOCAL
        | WINDOWS
        | dict(
            head_dim=64,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10000.0,
                factor=4.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=128,
            ),
        ),
    ),
    _moe("GraniteMoeForCausalLM", "granitemoe", GRANITE | LOCAL),
    _moe("GraniteMoeSharedForCausalLM", "granitemoeshared", GRANITE | LOCAL | dict(shared_intermediate_size=64)),
    _moe(
        "GraniteMoeSWAForCausalLM",
        "granitemoe_swa",
        GRANITE
        | LOCAL
        | WINDOWS
        | dict(shared_intermediate_size=64, layer_rope_theta=[10000.0, 20000.0, 10000.0, 20000.0]),
    ),
    _moe(
        "HYV3ForCausalLM",
        "hy_v3",
        HEADS
        | EXPERTS
        | DENSE_FIRST
        | dict(num_shared_experts=1, router_scaling_factor=1.7, expert_hidden_dim=64, route_norm=True, qk_norm=True),
    ),
    _moe(
        "LagunaForCausalLM",
        "laguna",
        HEADS
        | EXPERTS
        | WINDOWS
        | DENSE_FIRST
        | dict(
            shared_expert_intermediate_size=64, num_attention_heads_per_layer=[4] * 4, moe_routed_scaling_factor=1.7
        ),
    ),
    _moe(
        "Llama4ForCausalLM",
        "llama4_text",
        HEADS
        | dict(
            intermediate_size_mlp=192,
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=32,
        ),
    ),
    _moe(
        "LongcatFlashForCausalLM",
        "longcat_flash",
        LATENT
        | dict(
            num_layers=2,
            num_hidden_layers=4,
            head_dim=64,
            mla_scale_q_lora=True,
            mla_scale_kv_lora=True,
            zero_expert_type="identity",
            ffn_hidden_size=192,
            moe_topk=2,
            n_routed_experts=8,
            zero_expert_num=4,
            expert_ffn_hidden_size=64,
            routed_scaling_factor=1.7,
        ),
        oracle=False,
    ),
    _moe(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        HEADS | LOCAL | dict(intermediate_size=64, rotary_dim=16, use_qk_norm=True, scoring_func="sigmoid"),
        oracle=False,
    ),
    _moe("MixtralForCausalLM", "mixtral", LOCAL | dict(intermediate_size=64)),
    _moe(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        ROUTED
        | WINDOWS
        | DENSE_FIRST
        | dict(
            head_dim=64,
            v_head_dim=64,
            n_shared_experts=DROP,
            hybrid_layer_pattern=[1, 0, 1, 0],
            moe_layer_freq=[0, 1, 1, 1],
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_head_dim=64,
            swa_v_head_dim=64,
            rope_theta=20000.0,
            swa_rope_theta=10000.0,
            partial_rotary_factor=0.5,
            rope_parameters=dict(
                full_attention=dict(rope_type="default", rope_theta=20000.0, partial_rotary_factor=0.5),
                sliding_attention=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
            ),
            sliding_window_size=16,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            layernorm_epsilon=1e-5,
            rms_norm_eps=1e-5,
            attention_value_scale=0.7,
            add_full_attention_sink_bias=False,
            add_swa_attention_sink_bias=True,
        ),
    ),
    _moe("OlmoeForCausalLM", "olmoe", dict(num_experts=8, num_experts_per_tok=2, intermediate_size=64)),
    _moe(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        EXPERTS | dict(shared_expert_intermediate_size=96, mlp_only_layers=[0], norm_topk_prob=True),
    ),
    _moe("Qwen3MoeForCausalLM", "qwen3_moe", HEADS | EXPERTS | dict(mlp_only_layers=[0], norm_topk_prob=True)),
]
