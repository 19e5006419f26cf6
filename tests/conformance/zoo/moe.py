"""Models of routed experts that transformers runs too, and those of latent attention."""

from __future__ import annotations

from tests.conformance.zoo.dense import GRANITE, HEADS, ONE_LESS, WINDOWS
from tests.conformance.zoo.entry import DROP, LOOSE, Entry

EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
LOCAL = dict(num_local_experts=8, num_experts_per_tok=2)
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1)
GROUPS = dict(n_group=2, topk_group=1, routed_scaling_factor=1.7)
DENSE_FIRST = dict(mlp_layer_types=["dense", "sparse", "sparse", "sparse"])
LATENT = dict(
    q_lora_rank=48, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, num_key_value_heads=4
)
INDEX = dict(index_topk=16, index_head_dim=64, index_n_heads=4)


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
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
    _moe(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        HEADS | WINDOWS | EXPERTS | dict(logit_scale=0.3, num_shared_experts=1, tie_word_embeddings=True)
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
    ),
    _moe("DeepseekV2ForCausalLM", "deepseek_v2", LATENT | ROUTED | dict(first_k_dense_replace=1, topk_method="greedy")),
    _moe("DeepseekV3ForCausalLM", "deepseek_v3", LATENT | ROUTED | GROUPS | dict(first_k_dense_replace=1)),
    _moe(
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        LATENT | ROUTED | GROUPS | INDEX | DENSE_FIRST | dict(layer_types=["indexed_attention"] * 4),
    ),
    _moe("AXK1ForCausalLM", "axk1", LATENT | ROUTED | GROUPS | dict(first_k_dense_replace=1)),
    _moe("Glm4MoeLiteForCausalLM", "glm4_moe_lite", LATENT | ROUTED | DENSE_FIRST | dict(routed_scaling_factor=1.7)),
    _moe(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        LATENT | ROUTED | INDEX | DENSE_FIRST
        | dict(layer_types=["indexed_attention"] * 4, indexer_types=["full"] * 4, routed_scaling_factor=1.7),
    ),
    Entry("MiniCPM3ForCausalLM", "minicpm3", LATENT | dict(scale_emb=3, scale_depth=1.4, dim_model_base=64), bound=LOOSE),
    _moe(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        dict(moe_k=2, moe_num_experts=8, moe_num_shared_experts=1, moe_intermediate_size=64, moe_layer_end_index=3),
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
        LOCAL | WINDOWS | dict(head_dim=64, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    ),
    _moe("GraniteMoeForCausalLM", "granitemoe", GRANITE | LOCAL),
    _moe("GraniteMoeSharedForCausalLM", "granitemoeshared", GRANITE | LOCAL | dict(shared_intermediate_size=64)),
    _moe(
        "GraniteMoeSWAForCausalLM",
        "granitemoe_swa",
        GRANITE | LOCAL | WINDOWS
        | dict(shared_intermediate_size=64, layer_rope_theta=[10000.0, 20000.0, 10000.0, 20000.0]),
    ),
    _moe(
        "HYV3ForCausalLM",
        "hy_v3",
        HEADS | EXPERTS | DENSE_FIRST | dict(num_shared_experts=1, router_scaling_factor=1.7),
    ),
    _moe(
        "LagunaForCausalLM",
        "laguna",
        HEADS | EXPERTS | WINDOWS | DENSE_FIRST
        | dict(shared_expert_intermediate_size=64, num_attention_heads_per_layer=[4] * 4, moe_routed_scaling_factor=1.7),
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
            attention_chunk_size=16,
            floor_scale=8,
        ),
    ),
    _moe(
        "LongcatFlashForCausalLM",
        "longcat_flash",
        LATENT
        | dict(
            num_layers=2,
            num_hidden_layers=4,
            ffn_hidden_size=192,
            moe_topk=2,
            n_routed_experts=8,
            zero_expert_num=4,
            expert_ffn_hidden_size=64,
            routed_scaling_factor=1.7,
        ),
    ),
    _moe("MiniMaxM2ForCausalLM", "minimax_m2", HEADS | LOCAL | dict(intermediate_size=64)),
    _moe("MixtralForCausalLM", "mixtral", LOCAL | dict(intermediate_size=64)),
    _moe(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        ROUTED | WINDOWS | DENSE_FIRST | dict(head_dim=64, v_head_dim=32, n_shared_experts=DROP),
    ),
    _moe("OlmoeForCausalLM", "olmoe", dict(num_experts=8, num_experts_per_tok=2, intermediate_size=64, clip_qkv=6.0)),
    _moe(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        EXPERTS | dict(shared_expert_intermediate_size=96, mlp_only_layers=[0], norm_topk_prob=True),
    ),
    _moe("Qwen3MoeForCausalLM", "qwen3_moe", HEADS | EXPERTS | dict(mlp_only_layers=[0], norm_topk_prob=True)),
]
