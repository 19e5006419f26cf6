"""Architectures that transformers has no class for.

vLLM draws their weights itself, and identities stand in for a reference.
"""

from __future__ import annotations

from typing import Any

from tests.conformance.zoo.dense import HEADS, WINDOWS
from tests.conformance.zoo.entry import EXACT, LOOSE, Entry
from tests.conformance.zoo.moe import DENSE_FIRST, EXPERTS, GROUPS, LATENT, ROUTED

ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0), rope_theta=10000.0)
BASE = ROPE | dict(
    hidden_act="silu", rms_norm_eps=1e-6, attention_bias=False, mlp_bias=False, attention_dropout=0.0, rope_scaling=None
)
BAILING = (
    HEADS
    | EXPERTS
    | DENSE_FIRST
    | dict(
        num_shared_experts=1,
        moe_shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        n_group=2,
        topk_group=1,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        routed_scaling_factor=1.7,
        use_bias=False,
        use_qkv_bias=False,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        embedding_dropout=0.0,
        output_dropout=0.0,
        norm_head=False,
        use_rmsnorm=True,
    )
)
GLM = dict(
    num_layers=4,
    padded_vocab_size=512,
    ffn_hidden_size=192,
    kv_channels=32,
    multi_query_attention=True,
    multi_query_group_num=2,
    add_bias_linear=False,
    add_qkv_bias=True,
    apply_residual_connection_post_layernorm=False,
    layernorm_epsilon=1e-5,
    rmsnorm=True,
    post_layer_norm=True,
    fp32_residual_connection=False,
    hidden_dropout=0.0,
    original_rope=True,
    seq_length=512,
    rope_ratio=1.0,
)
PANGU = LATENT | ROUTED | DENSE_FIRST | dict(routed_scaling_factor=1.7, norm_topk_prob=True)
STEP = dict(num_attention_groups=2, moe_num_experts=8, moe_top_k=2, moe_intermediate_size=64, share_expert_dim=64)


def _own(architecture: str, model_type: str, config: dict[str, Any], bound: float = EXACT, **more: Any) -> Entry:
    return Entry(architecture, model_type, BASE | config, oracle=False, bound=bound, **more)


OWN = [
    _own(
        "BailingMoeForCausalLM",
        "bailing_moe",
        BAILING | dict(score_function=None, n_group=None, topk_group=None, moe_router_enable_expert_bias=False),
        LOOSE,
    ),
    _own("BailingMoeV2ForCausalLM", "bailing_moe_v2", BAILING, LOOSE),
    _own(
        "BailingMoeV2_5ForCausalLM",
        "bailing_hybrid",
        BAILING | LATENT | dict(layer_group_size=2, attention_type=0),
        LOOSE,
    ),
    _own(
        "BailingMoeV3ForCausalLM",
        "bailing_moe_v3",
        BAILING | LATENT | dict(head_dim=576, layer_group_size=2, short_conv_kernel_size=4, no_kda_lora=True),
        LOOSE,
    ),
    _own("ChatGLMModel", "chatglm", GLM),
    _own("ChatGLMForConditionalGeneration", "chatglm", GLM),
    _own(
        "DeciLMForCausalLM",
        "nemotron-nas",
        dict(
            block_configs=[
                dict(
                    attention=dict(n_heads_in_group=2, no_op=False, replace_with_linear=False),
                    ffn=dict(ffn_mult=1.5, no_op=False, replace_with_linear=False, hidden_act="silu"),
                ),
                dict(
                    attention=dict(n_heads_in_group=None, no_op=True, replace_with_linear=False),
                    ffn=dict(ffn_mult=1.5, no_op=False, replace_with_linear=False, hidden_act="silu"),
                ),
                dict(
                    attention=dict(n_heads_in_group=4, no_op=False, replace_with_linear=False),
                    ffn=dict(ffn_mult=None, no_op=True, replace_with_linear=False, hidden_act="silu"),
                ),
                dict(
                    attention=dict(n_heads_in_group=2, no_op=False, replace_with_linear=False),
                    ffn=dict(ffn_mult=2.0, no_op=False, replace_with_linear=False, hidden_act="silu"),
                ),
            ],
        ),
    ),
    _own(
        "DeepseekForCausalLM",
        "deepseek",
        ROUTED | dict(first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=True, scoring_func="softmax"),
        LOOSE,
    ),
    _own("ExaoneForCausalLM", "exaone", dict(num_layers=4, layer_norm_epsilon=1e-5, activation_function="silu")),
    _own(
        "Rnj1ForCausalLM",
        "gemma3_text",
        HEADS
        | WINDOWS
        | dict(query_pre_attn_scalar=48, hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=30.0),
    ),
    _own("HCXVisionV2ForCausalLM", "hyperclovax_vision_v2", {}),
    _own("InternLM2ForCausalLM", "internlm2", dict(bias=False)),
    _own("IQuestLoopCoderForCausalLM", "iquest_loopcoder", HEADS | dict(loop_num=2, loop_window_size=16)),
    _own(
        "K2HorizonForCausalLM",
        "k2_horizon",
        HEADS
        | EXPERTS
        | dict(
            num_shared_experts=1,
            decoder_sparse_step=1,
            mlp_only_layers=[0],
            norm_topk_prob=True,
            router_score_func="softmax",
            router_scaling_factor=1.7,
            moe_gate_bias=False,
            layernorm_num_groups=1,
            query_key_norm=True,
            rope_head_dim=32,
            mova_num_experts=0,
            mova_num_experts_per_tok=0,
            attention_gate_func=None,
        ),
        LOOSE,
    ),
    _own("LongcatFlashNgramForCausalLM", "longcat_flash_ngram", LATENT),
    _own("MiniCPMForCausalLM", "minicpm", dict(scale_emb=3, scale_depth=1.4, dim_model_base=64, num_experts=0)),
    _own("MistralLarge3ForCausalLM", "deepseek_v3", LATENT | ROUTED | GROUPS | dict(first_k_dense_replace=1), LOOSE),
    _own("MiMoForCausalLM", "mimo", HEADS | dict(num_nextn_predict_layers=0, attention_bias=True)),
    _own(
        "MiMoV2ForCausalLM",
        "mimo_v2",
        ROUTED
        | DENSE_FIRST
        | dict(
            head_dim=64,
            v_head_dim=64,
            n_shared_experts=None,
            hybrid_layer_pattern=[1, 0, 1, 0],
            moe_layer_freq=[0, 1, 1, 1],
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            swa_head_dim=64,
            swa_v_head_dim=64,
            swa_rope_theta=10000.0,
            sliding_window=16,
            sliding_window_size=16,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            layernorm_epsilon=1e-6,
            attention_value_scale=0.7,
            add_full_attention_sink_bias=False,
            add_swa_attention_sink_bias=True,
        ),
        LOOSE,
    ),
    _own(
        "MuseGlimmerForCausalLM",
        "muse_glimmer_text",
        HEADS
        | dict(
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
            no_rope_layers=[1, 0, 1, 0],
            hidden_activation="silu",
        ),
    ),
    _own("OrionForCausalLM", "orion", {}),
    _own("PanguEmbeddedForCausalLM", "PanguEmbedded", dict(bias=True)),
    _own(
        "PanguProMoEV2ForCausalLM",
        "pangu_pro_moe_v2",
        HEADS
        | ROUTED
        | DENSE_FIRST
        | dict(
            norm_topk_prob=True,
            routed_scaling_factor=1.7,
            qkv_bias=True,
            router_enable_expert_bias=True,
            sandwich_norm=True,
        ),
        LOOSE,
    ),
    _own("PanguUltraMoEForCausalLM", "pangu_ultra_moe", PANGU | dict(sandwich_norm=True), LOOSE),
    _own("Param2MoEForCausalLM", "param2moe", BAILING, LOOSE),
    _own(
        "PhiMoEForCausalLM",
        "phimoe",
        dict(
            num_local_experts=8,
            num_experts_per_tok=2,
            intermediate_size=64,
            lm_head_bias=True,
            router_jitter_noise=0.01,
        ),
        LOOSE,
    ),
    _own(
        "Plamo3ForCausalLM",
        "plamo3",
        HEADS
        | WINDOWS
        | dict(interleaved_sliding_window=[16, None, 16, None], window_size=16, rope_local_theta=10000.0),
    ),
    _own("SarvamMoEForCausalLM", "sarvam_moe", BAILING, LOOSE),
    _own(
        "SarvamMLAForCausalLM",
        "sarvam_mla",
        BAILING | LATENT | dict(head_dim=576, q_lora_rank=None, moe_layer_freq=1),
        LOOSE,
    ),
    _own("Step1ForCausalLM", "step1", dict(num_attention_groups=2)),
    _own(
        "Step3TextForCausalLM",
        "step3_text",
        HEADS
        | STEP
        | dict(share_q_dim=96, norm_expert_weight=True, moe_layers_enum="1,2,3", max_position_embedding=512),
        LOOSE,
    ),
    _own(
        "Step3p5ForCausalLM",
        "step3p5",
        HEADS
        | STEP
        | WINDOWS
        | dict(
            moe_layers_enum="1,2,3",
            norm_expert_weight=True,
            use_moe_router_bias=True,
            moe_router_activation="sigmoid",
            moe_router_scaling_factor=1.7,
            need_fp32_gate=True,
            att_impl_type="GQA",
            attention_other_setting=dict(
                attention_type="sliding_attention",
                num_attention_heads=4,
                num_attention_groups=2,
                head_dim=32,
                true_head_dim=32,
            ),
            swiglu_limits=[0.0] * 4,
            swiglu_limits_shared=[0.0] * 4,
            use_rope_layers=[True] * 4,
            partial_rotary_factors=[1.0, 0.5, 1.0, 0.5],
            yarn_only_types=[],
        ),
        LOOSE,
    ),
    _own("SolarForCausalLM", "solar", dict(bskcn_1=[1], bskcn_2=[2], bskcn_3=[2], bskcn_4=[3], bskcn_tv=[0.9, 0.8])),
    _own("TeleChat2ForCausalLM", "telechat", dict(n_head=4, ffn_hidden_size=192, n_layer=4, layer_norm_epsilon=1e-5)),
    _own("TeleFLMForCausalLM", "TeleFLM", dict(use_mup=True, mup_scale_factor=2.0, output_mult=1.5, input_mult=1.7)),
]
