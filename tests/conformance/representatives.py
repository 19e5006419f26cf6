"""The dozen that every test run checks; `make conformance` checks all."""

REPRESENTATIVES = (
    "LlamaForCausalLM",  # fused norms, (hidden, residual)
    "Qwen3ForCausalLM",  # heads wider than the stream
    "Gemma3ForCausalLM",  # norms before and after each part, a scaled embedding
    "CohereForCausalLM",  # parallel
    "GPT2LMHeadModel",  # learned positions, no fused residual
    "GraniteForCausalLM",  # multipliers
    "MixtralForCausalLM",  # routed experts
    "DeepseekV3ForCausalLM",  # latent attention, shared experts
    "DeepseekV3ForCausalLM:compiled",  # all its taps in what Inductor orders
    "NemotronHForCausalLM",  # blocks of one part each: state space, attention, MLP
    "GptOssForCausalLM",  # arguments in another order
    "Olmo2ForCausalLM",  # post-norms, through the Transformers backend
    "SolarForCausalLM",  # identities, for want of a reference
)
