"""Hook points: the named places in a decoder block (TransformerLens's names) and their aliases."""

from __future__ import annotations

import difflib
import re
from typing import Literal, NamedTuple

from vllm_weir.errors import WeirError, brief
from vllm_weir.spec.scalars import is_int, plain

BLOCK_HOOKS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
"""Hook points of every block, in the order in which a token meets them."""
INNER_HOOKS = BLOCK_HOOKS[1:4]
"""Those inside a block: what its parts add, and the stream between them."""
MODEL_HOOKS = ("embed", "final_norm")
"""Hook points that a model has once; their layer is 0."""
HOOKS = ("embed", *BLOCK_HOOKS, "final_norm")

ALIASES = {
    "post_block": "resid_post",
    "pre_attn": "resid_pre",
    "post_attn": "resid_mid",
    "ln_final.hook_normalized": "final_norm",
}

_TRANSFORMER_LENS = re.compile(r"^blocks\.(\d{1,9})\.hook_(\w+)$")


class Site(NamedTuple):
    """One hook point of one block; `embed` and `final_norm` stand at layer 0."""

    hook: str
    layer: int

    def __str__(self) -> str:
        return self.hook if self.hook in MODEL_HOOKS else f"{self.hook}[{self.layer}]"


def place_of(site: Site) -> tuple[bool, int, int]:
    """Sorts sites in the order in which a token meets them."""
    return site.hook == "final_norm", site.layer, HOOKS.index(site.hook)


def normalise_hook(name: object, field: str = "hook") -> str:
    """The canonical hook point for `name`; raises WeirError for anything that is none."""
    if not isinstance(name, str):
        raise WeirError(f"a hook point is a string, got {type(name).__name__}; choose from {', '.join(HOOKS)}", field)
    hook = ALIASES.get(name, name).removeprefix("hook_")
    if hook not in HOOKS:
        near = difflib.get_close_matches(name, [*HOOKS, *ALIASES], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise WeirError(f"unknown hook point {name[:80]!r}; {hint}choose from {', '.join(HOOKS)}", field)
    return hook


def split_transformer_lens(name: object) -> Site | None:
    """``blocks.7.hook_resid_post`` as a Site, or None if `name` has another form."""
    match = _TRANSFORMER_LENS.match(name) if isinstance(name, str) else None
    return Site(normalise_hook(match[2]), int(match[1])) if match else None


def parse_site(key: object) -> Site:
    """A Site from ``("resid_post", 10)``, a Site, ``"blocks.10.hook_resid_post"``, ``"embed"`` or ``"final_norm"``."""
    if isinstance(key, str):
        once = ALIASES.get(key, key).removeprefix("hook_")
        site = Site(once, 0) if once in MODEL_HOOKS else split_transformer_lens(key)
        if site is None:
            raise WeirError(f"{key[:80]!r} is no site; use (hook, layer) or 'blocks.<layer>.hook_<hook>'", "site")
        return site
    if isinstance(key, tuple) and len(key) == 2 and is_int(layer := plain(key[1])):
        return Site(normalise_hook(key[0]), int(layer))
    raise WeirError(f"a site is a pair (hook, layer), got {brief(key, 80)}", "site")


def layers_of(hook: str, layers: Literal["all"] | tuple[int, ...], num_layers: int, field: str) -> tuple[int, ...]:
    """Layers of `hook` that are meant, for a model of `num_layers` blocks; raises WeirError if one does not exist."""
    last = 0 if hook in MODEL_HOOKS else num_layers - 1
    if layers == "all":
        return tuple(range(last + 1))
    for layer in layers:
        if layer > last:
            if hook in MODEL_HOOKS:
                raise WeirError(f"a model has one {hook}; leave layers out", field)
            raise WeirError(f"block {layer} does not exist: the model has blocks 0..{last}", field)
    return layers
