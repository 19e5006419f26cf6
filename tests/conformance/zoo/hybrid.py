"""State spaces, linear attention and mixtures of them with attention, that transformers runs too."""

from __future__ import annotations

from tests.conformance.zoo.dense import GRANITE, HEADS
from tests.conformance.zoo.entry import COARSE, DROP, LOOSE, Entry
from tests.conformance.zoo.moe import DENSE_FIRST, EXPERTS, LATENT, NATIVE_ROPE

MAMBA = dict(state_size=16, conv_kernel=4, expand=2, time_step_rank=8, use_conv_bias=True)
LINEAR = dict(
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention"] * 2,
)
NO_ATTENTION = dict(
    num_attention_heads=DROP, num_key_value_heads=DROP, max_position_embeddings=DROP, intermediate_size=DROP
)

# transformers keeps steps above `time_step_min`, vLLM does not: small enough to make no difference.
STEPS = dict(time_step_min=1e-9, time_step_floor=1e-3)
NEMOTRON_H = (
    HEADS
    | STEPS
    | dict(
        num_hidden_layers=DROP,
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"],
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=1,
        chunk_size=16,
        use_mamba_kernels=False,
    )
)
"""Without its routed experts: those have one matrix in, which vLLM's CPU kernels do not take."""

HYBRID = [
    Entry("MambaForCausalLM", "mamba", NO_ATTENTION | MAMBA),
    Entry("FalconMambaForCausalLM", "falcon_mamba", NO_ATTENTION | MAMBA),
    Entry(
        "Mamba2ForCausalLM",
        "mamba2",
        NO_ATTENTION | dict(num_heads=8, head_dim=32, state_size=16, n_groups=1, expand=2, chunk_size=16),
    ),
    Entry(
        "FalconH1ForCausalLM",
        "falcon_h1",
        HEADS
        | dict(
            mamba_d_ssm=256,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_chunk_size=16,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            lm_head_multiplier=0.6,
            embedding_multiplier=1.7,
            mlp_multipliers=[0.9, 1.6],
            key_multiplier=0.9,
            attention_out_multiplier=0.8,
            attention_in_multiplier=1.2,
            ssm_multipliers=[0.9, 0.8, 1.1, 1.2, 0.7],
            ssm_in_multiplier=1.1,
            ssm_out_multiplier=0.7,
        ),
    ),
    Entry(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        GRANITE
        | dict(
            num_local_experts=8,
            num_experts_per_tok=2,
            intermediate_size=64,
            shared_intermediate_size=64,
            layer_types=["linear_attention", "full_attention"] * 2,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_chunk_size=16,
        ),
        bound=LOOSE,
    ),
    Entry(
        "JambaForCausalLM",
        "jamba",
        dict(
            num_experts=4,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=16,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        ),
        bound=LOOSE,
    ),
    Entry(
        "KimiLinearForCausalLM",
        "kimi_linear",
        LATENT
        | EXPERTS
        | DENSE_FIRST
        | dict(
            num_experts_per_token=2,
            q_lora_rank=None,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_head_dim=32,
            linear_num_heads=4,
        ),
        bound=LOOSE,
    ),
    Entry(
        "Lfm2ForCausalLM",
        "lfm2",
        dict(
            conv_dim=128,
            block_dim=128,
            layer_types=["conv", "full_attention"] * 2,
            block_multiple_of=64,
            tie_word_embeddings=True,
        ),
        engine=NATIVE_ROPE,
    ),
    Entry(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        EXPERTS | dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=1, tie_word_embeddings=True),
        bound=LOOSE,
        engine=NATIVE_ROPE,
    ),
    Entry("NemotronHForCausalLM", "nemotron_h", NEMOTRON_H),
    Entry("NemotronHPuzzleForCausalLM", "nemotron_h", NEMOTRON_H),
    Entry(
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        LINEAR | dict(linear_num_value_heads=2, num_key_value_heads=4),
    ),
    Entry(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        HEADS
        | LINEAR
        | EXPERTS
        # The gated delta net's kernel on CPUs takes bfloat16 and heads of 128.
        | dict(shared_expert_intermediate_size=64, mlp_only_layers=[0])
        | dict(linear_key_head_dim=128, linear_value_head_dim=128),
        identities=True,
        dtype="bfloat16",
        bound=COARSE,
    ),
    Entry("Qwen3_5ForCausalLM", "qwen3_5_text", HEADS | LINEAR),
    Entry(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        HEADS | LINEAR | EXPERTS | dict(shared_expert_intermediate_size=64),
        bound=LOOSE,
    ),
    Entry(
        "Zamba2ForCausalLM",
        "zamba2",
        STEPS
        | dict(
            layers_block_type=["linear_attention", "hybrid"] * 2,
            mamba_d_state=16,
            n_mamba_heads=8,
            mamba_headdim=32,
            chunk_size=16,
            num_mem_blocks=1,
            adapter_rank=16,
            use_mem_rope=True,
            tie_word_embeddings=True,
            attention_hidden_size=256,
            attention_head_dim=64,
            num_key_value_heads=4,
            use_mamba_kernels=False,
        ),
    ),
]
