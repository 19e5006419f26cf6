"""Hook points: named places in a decoder block (TransformerLens's names). Sites."""

from __future__ import annotations

import difflib
import re
from typing import Literal, NamedTuple, get_args

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import is_int, plain

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


SOURCE_HOOKS = {
    "attn_scores": ("q_rot", "k_rot"),
    "pattern": ("q_rot", "k_rot"),
    "expert_ids": ("router_logits",),
    "expert_weights": ("router_logits",),
}
"""Derived hook point -> the hook points whose rows its values are computed from."""


STREAM_HOOKS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
"""Hook points of the residual stream and of what is added to it; rows are [d_model]."""
INNER_HOOKS = STREAM_HOOKS[1:4]
"""Those of them inside a block: what its parts add, and the stream between them."""
ATTENTION_HOOKS = ("attn_in", "q", "k", "v", "q_rot", "k_rot", "z")
"""Hook points inside attention, where a tap reads them."""
MLP_HOOKS = ("mlp_in", "router_logits", "mlp_pre", "mlp_pre_linear", "mlp_post")
"""Hook points inside an MLP, where a tap reads them."""
PART_HOOKS = (*ATTENTION_HOOKS, *MLP_HOOKS)
"""Hook points inside the parts of a block, where a tap reads them."""
DERIVED_HOOKS = ("attn_scores", "pattern", "expert_ids", "expert_weights")
"""Hook points without a tap: computed from the rows of others when an output is read."""
HEAD_HOOKS = ("q", "k", "v", "q_rot", "k_rot", "attn_scores", "pattern", "z")
"""Hook points with a row for each head, [heads, ...]."""
NEURON_HOOKS = ("mlp_pre", "mlp_pre_linear", "mlp_post")
"""Hook points whose rows are [d_mlp]."""
READ_ONLY_HOOKS = (
    "q_rot",
    "k_rot",
    "attn_scores",
    "pattern",
    "mlp_pre",
    "mlp_pre_linear",
    "expert_ids",
    "expert_weights",
)
"""Hook points that no intervention may name."""
BlockHook = Literal[
    "resid_pre", "attn_in", "q", "k", "v", "q_rot", "k_rot", "attn_scores", "pattern", "z", "attn_out", "resid_mid",
    "mlp_in", "router_logits", "expert_ids", "expert_weights", "mlp_pre", "mlp_pre_linear", "mlp_post", "mlp_out",
    "resid_post",
]  # fmt: skip
BLOCK_HOOKS: tuple[str, ...] = get_args(BlockHook)
"""Hook points of every block, in the order in which a token meets them."""
MODEL_HOOKS = ("embed", "final_norm")
"""Hook points that a model has once; their layer is 0."""
HOOKS = ("embed", *BLOCK_HOOKS, "final_norm")
ROUTING = "routing"
"""Hook point of the row that all routers of a worker write (`schema.routing`); no request names it."""
HookPoint = Literal["embed", BlockHook, "final_norm"] | str
"""A hook point, which editors complete; an alias, or a name of TransformerLens's."""

_BLOCK = re.compile(r"blocks\.([0-9]{1,9})\.(.+)")
_SITE_TEXT = re.compile(r"(\w+)(?:\.([0-9]{1,9})|\[([0-9]{1,9})\])")


class Site(NamedTuple):
    """One hook point of one block; `embed` and `final_norm` stand at layer 0."""

    hook: str
    layer: int

    def __str__(self) -> str:
        return self.hook if self.hook in MODEL_HOOKS else f"{self.hook}[{self.layer}]"


def place_of(site: Site) -> tuple[bool, int, int]:
    """Return a sort key that puts sites in the order in which a token meets them."""
    place = HOOKS.index("router_logits") if site.hook == ROUTING else HOOKS.index(site.hook)
    return site.hook == "final_norm", site.layer, place


def normalise_hook(name: object, field: str = "hook") -> str:
    """Return the hook point of that name or alias; raise WeirError if there is none."""
    if not isinstance(name, str):
        raise WeirError(f"a hook point is a string, got {type(name).__name__}; choose from {', '.join(HOOKS)}", field)
    hook = ALIASES.get(name, name)
    if hook not in HOOKS:
        raise _unknown_hook(name, field)
    return hook


def _unknown_hook(name: str, field: str) -> WeirError:
    """Return the error that says why `name` is no hook point."""
    short = brief(name, 80)
    for pattern, why in UNSUPPORTED:
        if re.fullmatch(pattern, name):
            return WeirError(f"{short!r} is no hook point: {why}", field)
    near = difflib.get_close_matches(name, [*HOOKS, *ALIASES], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return WeirError(f"unknown hook point {short!r}; {hint}choose from {', '.join(HOOKS)}", field)


def split_transformer_lens(name: object, field: str = "hook") -> Site | None:
    """Parse a name like ``blocks.7.hook_resid_post``; return None for a name of another form.

    Raises:
        WeirError: for a name of that form that is no hook point, saying what to use instead.
    """
    match = _BLOCK.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return None
    if match[2] not in IN_BLOCK:
        raise _unknown_hook(match[0], field)
    return Site(IN_BLOCK[match[2]], int(match[1]))


def parse_site(key: object) -> Site:
    """Parse a site.

    Args:
        key: a Site; ``("resid_post", 10)``, also as a list; ``"resid_post.10"``, as in receipts and
            files; ``"resid_post[10]"``, as ``str(site)`` writes it;
            ``"blocks.10.hook_resid_post"``; or the name alone of a hook point that a model has
            once. Aliases are accepted.

    Raises:
        WeirError: for anything else.
    """
    if isinstance(key, str):
        hook = ALIASES.get(key, key)
        if hook in MODEL_HOOKS:
            return Site(hook, 0)
        if (site := split_transformer_lens(key, "site")) is not None:
            return site
        if (match := _SITE_TEXT.fullmatch(key)) is not None:
            return Site(normalise_hook(match[1], "site"), int(match[2] or match[3]))
        if hook in HOOKS:
            raise WeirError(f"{key!r} says no layer; use ({key!r}, layer) or '{hook}.<layer>'", "site")
        if any(re.fullmatch(pattern, key) for pattern, _ in UNSUPPORTED):
            raise _unknown_hook(key, "site")
        raise WeirError(f"{key[:80]!r} is no site; use (hook, layer), say ('resid_post', 3) or 'resid_post.3'", "site")
    if isinstance(key, (tuple, list)) and len(key) == 2 and is_int(layer := plain(key[1])):
        return Site(normalise_hook(key[0], "site"), int(layer))
    raise WeirError(f"a site is a pair (hook, layer), got {brief(key, 80)}", "site")


_CHANGE_INSTEAD = {
    "q_rot": "change q",
    "k_rot": "change k",
    "attn_scores": "they are computed from q_rot and k_rot when they are read; change q, k or z",
    "pattern": "it is computed from q_rot and k_rot when it is read; change z, what the heads give, or q and k",
    "mlp_pre": "change mlp_post, the neurons",
    "mlp_pre_linear": "change mlp_post, the neurons",
    "expert_ids": "they follow from router_logits; change these, or mlp_out",
    "expert_weights": "they follow from router_logits; change these, or mlp_out",
}
"""What to change instead of `READ_ONLY_HOOKS`."""


def refuse_read_only(hook: str, field: str) -> None:
    """Raise WeirError for a hook point that no intervention may name."""
    if hook in READ_ONLY_HOOKS:
        raise WeirError(f"{hook} can be captured but not changed: {_CHANGE_INSTEAD[hook]}", field)


def layers_of(hook: str, layers: Literal["all"] | tuple[int, ...], num_layers: int, field: str) -> tuple[int, ...]:
    """Return the layers as block indices; raise WeirError if one does not exist.

    Args:
        hook: hook point; `MODEL_HOOKS` have layer 0 only.
        layers: as `parse_layers` returns them.
        num_layers: blocks of the model.
        field: named by errors.
    """
    last = 0 if hook in MODEL_HOOKS else num_layers - 1
    if layers == "all":
        return tuple(range(last + 1))
    for layer in layers:
        if layer > last:
            if hook in MODEL_HOOKS:
                raise WeirError(f"a model has one {hook}, at layer 0; leave layers out", field)
            raise WeirError(f"block {layer} does not exist: the model has blocks 0..{last}", field)
    return layers
