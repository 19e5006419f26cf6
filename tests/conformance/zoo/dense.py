"""Dense models that transformers runs too."""

from __future__ import annotations

from tests.conformance.zoo.entry import DROP, Entry

HEADS = dict(head_dim=32)
WINDOWS = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2)
# vLLM widens Cohere's window by one position, transformers does not.
ONE_LESS = dict(hf_overrides=dict(sliding_window=15))
GRANITE = dict(embedding_multiplier=1.7, logits_scaling=0.6, residual_multiplier=0.8, attention_multiplier=0.21)
GEMMA = HEADS | WINDOWS | dict(query_pre_attn_scalar=48, tie_word_embeddings=True)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    original_max_position_embeddings=64,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)

DENSE = [
    Entry("LlamaForCausalLM", "llama", HEADS | dict(attention_bias=True, mlp_bias=True)),
    Entry("LLaMAForCausalLM", "llama", HEADS),
    Entry("InternLM3ForCausalLM", "llama", HEADS),
    Entry("IQuestCoderForCausalLM", "llama", HEADS | dict(tie_word_embeddings=True)),
    Entry("TeleChat3ForCausalLM", "llama", HEADS | dict(attention_bias=True)),
    Entry("MistralForCausalLM", "mistral", HEADS | dict(sliding_window=16)),
    Entry(
        "Ministral3ForCausalLM",
        "ministral3",
        HEADS
        | dict(
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10000.0,
                factor=4.0,
                original_max_position_embeddings=128,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.1,
            )
        ),
    ),
    Entry("Qwen2ForCausalLM", "qwen2"),
    Entry("Qwen3ForCausalLM", "qwen3", dict(head_dim=64)),
    Entry("GemmaForCausalLM", "gemma", HEADS | dict(tie_word_embeddings=True)),
    Entry("Gemma2ForCausalLM", "gemma2", GEMMA),
    Entry("Gemma3ForCausalLM", "gemma3_text", GEMMA),
    Entry("Gemma4ForCausalLM", "gemma4_text", GEMMA | dict(global_head_dim=64, hidden_size_per_layer_input=0)),
    Entry(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        GEMMA
        | dict(
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=512,
            num_kv_shared_layers=0,
            laurel_rank=16,
            activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
            altup_num_inputs=2,
        ),
    ),
    Entry("ApertusForCausalLM", "apertus", dict(rope_parameters=LLAMA3_ROPE)),
    Entry(
        "BloomForCausalLM",
        "bloom",
        dict(n_layer=4, n_head=4, num_key_value_heads=DROP, tie_word_embeddings=True),
        apart="vLLM's GELU is exact, transformers' is Bloom's own approximation",
    ),
    Entry("CohereForCausalLM", "cohere", dict(logit_scale=0.3, use_qk_norm=True, tie_word_embeddings=True)),
    Entry(
        "Cohere2ForCausalLM",
        "cohere2",
        HEADS | WINDOWS | dict(logit_scale=0.3, tie_word_embeddings=True),
        engine=ONE_LESS,
    ),
    Entry("Ernie4_5ForCausalLM", "ernie4_5", HEADS),
    Entry("Exaone4ForCausalLM", "exaone4", HEADS | WINDOWS | dict(sliding_window_pattern=2)),
    Entry("FalconForCausalLM", "falcon", dict(multi_query=True, parallel_attn=True, bias=True, alibi=False)),
    Entry("Glm4ForCausalLM", "glm4", HEADS),
    Entry("GPT2LMHeadModel", "gpt2", dict(n_embd=128, n_layer=4, n_head=4, n_positions=512, tie_word_embeddings=True)),
    Entry("GPTJForCausalLM", "gptj", dict(n_embd=128, n_layer=4, n_head=4, n_positions=512, rotary_dim=16)),
    Entry("GraniteForCausalLM", "granite", GRANITE),
    Entry(
        "GraniteSWAForCausalLM",
        "granite_swa",
        GRANITE | WINDOWS | dict(layer_rope_theta=[10000.0, 20000.0, 10000.0, 20000.0]),
    ),
    Entry("HyperCLOVAXForCausalLM", "hyperclovax", HEADS | GRANITE | dict(use_post_norm=True)),
    Entry(
        "HrmTextForCausalLM", "hrm_text", HEADS | dict(prefix_lm=False, H_cycles=2, L_cycles=2, num_layers_per_stack=2)
    ),
    Entry("NemotronForCausalLM", "nemotron", HEADS),
    Entry("OPTForCausalLM", "opt", dict(ffn_dim=192, word_embed_proj_dim=64, tie_word_embeddings=True)),
    Entry("Phi3ForCausalLM", "phi3", dict(sliding_window=None)),
    Entry("StableLmForCausalLM", "stablelm", dict(use_qkv_bias=True)),
]
