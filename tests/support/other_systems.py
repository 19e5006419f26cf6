"""Every key, route, variable and name of the four systems whose place Weir takes, and what becomes of it.

`tests/unit/test_other_systems.py` holds Weir to it, and `python -m tests.other_systems` compares it
with their newest sources.
"""

from __future__ import annotations

SERVED, REFUSED, NEEDLESS = "served", "refused", "needless"
"""The last is for what says how another system is to do what Weir does anyway."""

LENS_KEYS = {
    "output_residual_stream": SERVED,
    "apply_steering_vectors": SERVED,
    "apply_hooks": REFUSED,  # over HTTP; offline it is served
    "output_qk": SERVED,
    "activations_transport": SERVED,
    "skip_reading_prefix_cache": NEEDLESS,  # rows that are asked for are never read from the cache
}
"""Keys of ``extra_args`` and ``vllm_xargs`` of vllm-lens."""
LENS_ROUTES = {
    ("get", "/v1/activations/{handle}"): SERVED,
    **{
        ("post", f"/v1/hooks/{call}"): REFUSED  # code never comes over HTTP
        for call in ("register", "collect", "clear", "clear_results", "prefetch", "clear_prefetched")
    },
}
"""Its routes, but for the one that sends files of the folder in which its server was started."""
LENS_ANSWERS = {
    "activations": {"residual_stream", "attn_q", "attn_k", "qk_layers", "qk_meta"},
    "tensor": {"data", "dtype", "original_dtype", "shape", "compression"},
    "fetched": {"handle", "nbytes", "transport", "dtype", "original_dtype", "shape", "compression"},
    "qk_meta": {
        "layer_name", "scale", "logits_soft_cap", "sliding_window", "alibi_slopes", "sinks", "use_alibi_sqrt",
        "num_heads_local", "num_kv_heads_local", "head_size", "num_kv_heads_total",
    },
    "headers": {
        "Content-Length", "Cache-Control", "X-Content-Type-Options", "X-VLLM-Lens-Dtype", "X-VLLM-Lens-Original-Dtype",
        "X-VLLM-Lens-Shape", "X-VLLM-Lens-Compression",
    },
}  # fmt: skip
"""Keys of its answers, by place; of those to hooks there are none."""
LENS_NAMES = {
    "SteeringVector": SERVED,
    "decode_activations": SERVED,
    "deserialize_tensor": SERVED,
    "serialize_activations": SERVED,
    "serialize_tensor": SERVED,
    "Hook": SERVED,  # with arguments of its own, too
    "HookContext": SERVED,
    "attention_patterns": SERVED,
    "compute_attention_weights": SERVED,
    "deserialize_hook_results": REFUSED,
    "serialize_hook_results": REFUSED,
    "__version__": SERVED,
}
"""What ``vllm_lens`` exports, and ``vllm_weir`` then has."""
PROBE_HOOK = (
    "model", "layers", "dtype", "include_prefill", "include_decode", "last_prefill_token", "last_decode_token",
)  # fmt: skip
"""Arguments of the classes of vllm-probe-hook, by place."""
MI_PATCH = {
    "CAPTURE": SERVED,
    "MODE": SERVED,
    "RP_K": SERVED,
    "RP_SEED": SERVED,
    "TOPK_K": SERVED,
    "OUTDIR": SERVED,
    "RETURN": SERVED,
    "PER_DIM": NEEDLESS,
    "BITS": NEEDLESS,
    "ATTNM": NEEDLESS,
    "HIDDEN_SIZE": NEEDLESS,
    "RETURN_MODE": REFUSED,  # a name that its own code does not read; a warning says so
}
"""Variables ``VLLM_ACT_*`` of Vllm_mi_patch."""
MI_PATCH_NAMES = (
    "ActivationLoader", "compare_tokens", "load_activation_file", "load_activation_manifest",
    "load_sequence_activations", "quick_load", "reconstruct_activations",
)  # fmt: skip
"""What its module for analysis defines."""
FORK_FIELDS = {
    "steering_name": SERVED,
    "steering_vectors": SERVED,
    "prefill_steering_vectors": SERVED,
    "decode_steering_vectors": SERVED,
    "steering_clamps": SERVED,
    "prefill_steering_clamps": SERVED,
    "decode_steering_clamps": SERVED,
    "steering": SERVED,
    "patch": SERVED,
    "patch_vectors": SERVED,
    "capture": REFUSED,
    "capture_wait": REFUSED,
    "conversation_id": REFUSED,
}
"""Fields of bodies of RhizoNymph's fork that vLLM has not."""
FORK_ROUTES = {
    ("post", "/v1/steering/set"): SERVED,
    ("post", "/v1/steering/clear"): SERVED,
    ("get", "/v1/steering"): SERVED,
    ("get", "/v1/steering/layers"): SERVED,
    ("get", "/v1/steering/dynamic"): SERVED,
    ("post", "/v1/steering/modules/register"): SERVED,
    ("post", "/v1/steering/modules/unregister"): SERVED,
    ("get", "/v1/steering/modules"): SERVED,
    ("post", "/v1/steering/vectors/register"): SERVED,
    ("post", "/v1/steering/vectors/unregister"): SERVED,
    ("get", "/v1/steering/vectors"): SERVED,
    ("post", "/v1/patch_sweep"): SERVED,
    ("delete", "/v1/patch_source/{run_id}"): REFUSED,
}
"""Its routes."""
