"""Hook points: the named places in a decoder block (TransformerLens's names) and their aliases."""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from vllm_weir.errors import WeirError, brief

HOOKS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
"""Hook points in the order in which a token meets them inside a block."""

ALIASES = {"post_block": "resid_post", "pre_attn": "resid_pre", "post_attn": "resid_mid"}

_TRANSFORMER_LENS = re.compile(r"^blocks\.(\d{1,9})\.hook_(\w+)$")


class Site(NamedTuple):
    """One hook point of one block."""

    hook: str
    layer: int

    def __str__(self) -> str:
        return f"{self.hook}[{self.layer}]"


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
    """A Site from ``("resid_post", 10)``, a Site, or ``"blocks.10.hook_resid_post"``."""
    if isinstance(key, str):
        site = split_transformer_lens(key)
        if site is None:
            raise WeirError(f"{key[:80]!r} is no site; use (hook, layer) or 'blocks.<layer>.hook_<hook>'", "site")
        return site
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], int) and not isinstance(key[1], bool):
        return Site(normalise_hook(key[0]), key[1])
    raise WeirError(f"a site is a pair (hook, layer), got {brief(key, 80)}", "site")
