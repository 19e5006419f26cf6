"""Hook points: named places in a decoder block (TransformerLens's names). Sites."""

from __future__ import annotations

import difflib
import re
from typing import Literal, NamedTuple, get_args

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hook_names import ALIASES, IN_BLOCK, UNSUPPORTED
from vllm_weir.schema.scalars import is_int, plain

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
