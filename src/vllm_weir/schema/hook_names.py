"""Other names of hook points: aliases, TransformerLens's, and those of its names that are refused."""

from __future__ import annotations

_STREAM = {f"hook_{hook}": hook for hook in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")}
_ATTENTION = {
    "attn.hook_in": "attn_in",
    "attn.hook_q": "q",
    "attn.hook_k": "k",
    "attn.hook_v": "v",
    "attn.hook_rot_q": "q_rot",
    "attn.hook_rot_k": "k_rot",
    "attn.hook_attn_scores": "attn_scores",
    "attn.hook_pattern": "pattern",
    "attn.hook_z": "z",
    # TransformerBridge's names of the projections.
    "attn.q.hook_out": "q",
    "attn.k.hook_out": "k",
    "attn.v.hook_out": "v",
    "attn.o.hook_in": "z",
}
_MLP = {
    # In TransformerLens it is the stream before the norm; published transcoders mean what the MLP is given.
    "hook_mlp_in": "mlp_in",
    "mlp.hook_in": "mlp_in",
    "mlp.hook_pre": "mlp_pre",
    "mlp.hook_pre_linear": "mlp_pre_linear",
    "mlp.hook_post": "mlp_post",
    "mlp.out.hook_in": "mlp_post",
    "mlp.hook_expert_indices": "expert_ids",
    "mlp.hook_expert_weights": "expert_weights",
}
_IN_PARTS = {**_ATTENTION, **_MLP}
IN_BLOCK = {**_STREAM, "hook_in": "resid_pre", "hook_out": "resid_post", **_IN_PARTS}
"""What TransformerLens calls the hook points of a block, after ``blocks.<layer>.``; its own name first."""
ALIASES = {
    "post_block": "resid_post",
    "pre_attn": "resid_pre",
    "post_attn": "resid_mid",
    "hook_embed": "embed",
    "ln_final.hook_out": "final_norm",
    **_STREAM,
    **_IN_PARTS,
    **{f"hook_{hook}": hook for hook in ("q", "k", "v", "attn_scores", "pattern", "z")},
    "hook_rot_q": "q_rot",
    "hook_rot_k": "k_rot",
    "hook_expert_indices": "expert_ids",
    "hook_expert_weights": "expert_weights",
    "rot_q": "q_rot",
    "rot_k": "k_rot",
}
"""Names without a block -> hook point."""

_ANY_BLOCK = r"(?:blocks\.[0-9]+\.)?"
UNSUPPORTED = (
    (
        r"ln_final\.hook_normalized",
        "TransformerLens's value is the final norm before its weight and bias, final_norm is after "
        "them: take (final_norm - bias) / weight, with 1 + weight in Gemma 1 to 3, or normalise "
        "resid_post of the last block",
    ),
    (
        r"ln_final\.hook_scale",
        "it is one number a row, what the final norm divides by; compute it from resid_post of the last block",
    ),
    (r"ln_final\.hook_in", "it is what leaves the last block; use resid_post there"),
    (
        r"embed\.hook_out",
        "it is what the embedding layer returns, which some models still normalise before the first block; use embed",
    ),
    (r"embed_ln\.hook_out", "it is what enters the first block; use resid_pre at layer 0"),
    (
        r"(hook_pos_embed|pos_embed\.hook_out)",
        "position embeddings are no hook point; where a model adds them to the stream they are resid_pre[0] - embed",
    ),
    (
        r"unembed\.hook_in",
        "it is what the unembedding is given, which some models multiply or project once more; "
        "final_norm is what the final norm returns",
    ),
    (r"(hook_unembed|unembed\.hook_out)", "it is the logits, which vLLM gives as logprobs"),
    (
        _ANY_BLOCK + r"attn\.hook_out",
        "it is what the attention module returns, before a post-norm or a multiplier; attn_out is "
        "what reaches the stream",
    ),
    (
        _ANY_BLOCK + r"mlp\.hook_out",
        "it is what the MLP module returns, before a post-norm or a multiplier; mlp_out is what reaches the stream",
    ),
    (
        _ANY_BLOCK + r"(hook_mixer_out|mixer\.hook_out)",
        "attn_out is what a state-space layer, too, adds to the stream",
    ),
    (
        _ANY_BLOCK + r"(attn\.)?hook_(attn_in|[qkv]_input)",
        "it is the stream before the norm, a copy for each head; use resid_pre, or attn_in for what "
        "attention is given after the norm",
    ),
    (
        _ANY_BLOCK + r"ln1\.hook_normalized",
        "TransformerLens's value is the norm before its weight and bias, attn_in is after them: take "
        "(attn_in - bias) / weight, with 1 + weight in Gemma 1 to 3",
    ),
    (
        _ANY_BLOCK + r"ln2\.hook_normalized",
        "TransformerLens's value is the norm before its weight and bias, mlp_in is after them: take "
        "(mlp_in - bias) / weight, with 1 + weight in Gemma 1 to 3",
    ),
    (
        _ANY_BLOCK + r"ln[12](_post)?\.hook_\w+",
        "norms inside a block are no hook points: attn_in (ln1) and mlp_in (ln2) are what they give to "
        "attention and the MLP, attn_out and mlp_out what a post-norm returns; compute the rest from "
        "resid_pre (ln1) or resid_mid (ln2)",
    ),
    (
        _ANY_BLOCK + r"(attn\.hook_result|attn\.o\.hook_out)",
        "multiply z with the output projection's weight, for each head; attn_out is what reaches the stream",
    ),
    (
        _ANY_BLOCK + r"mlp\.(hook_gate|(gate|in)\.hook_out)",
        "what it is depends on the model; mlp_pre is the gate projection (without a gate, the only one), "
        "mlp_pre_linear the other one, router_logits what a mixture's router returns",
    ),
    (
        _ANY_BLOCK + r"mlp\.hook_router_scores",
        "what it is depends on the model; use router_logits, or expert_weights for what experts are multiplied by",
    ),
    (
        _ANY_BLOCK + r"(attn|self_attn)\..+",
        "inside attention there are attn_in, q, k, v, q_rot, k_rot, attn_scores, pattern and z; attn_out "
        "is what it adds to the stream",
    ),
    (
        _ANY_BLOCK + r"mlp\..+",
        "inside an MLP there are mlp_in, mlp_pre, mlp_pre_linear and mlp_post, in a mixture of experts "
        "router_logits, expert_ids and expert_weights; mlp_out is what it adds to the stream",
    ),
    (
        _ANY_BLOCK + r"(mixer|linear_attn)\..+",
        "what lies inside a state-space layer or linear attention is no hook point; attn_out is what it "
        "adds to the stream",
    ),
)
"""TransformerLens's names that are no hook points here: (pattern, what to use instead)."""
