"""TransformerLens's names of hook points, as files of SAELens have them, and the sites they mean."""

from __future__ import annotations

import re
from typing import NamedTuple

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hook_names import IN_BLOCK
from vllm_weir.schema.hooks import MODEL_HOOKS, Site, parse_site

_NORMALIZED = {"ln1.hook_normalized": "attn_in", "ln2.hook_normalized": "mlp_in"}
"""Names of what a norm returns before its weight and bias -> the hook point after them."""
_BEFORE_NORM = {"hook_attn_in": ("attn_in", "resid_pre"), "hook_mlp_in": ("mlp_in", "resid_mid")}
"""Names that lie before the norm in TransformerLens, while some files mean what follows it."""
_AFTER_NORM = re.compile(r".*(layernorm|norm|ln_\d)\.output|.*(mlp|self_attn|attn)\.input")
_BLOCK = re.compile(r"blocks\.(\d{1,9})\.(\w+(?:\.\w+)?)", re.ASCII)


class NamedSite(NamedTuple):
    """A site that a file names.

    Attributes:
        site: the hook point of Weir.
        before_weight: whether the file means the norm's output before its weight and bias, of which
            the site is what follows them.
    """

    site: Site
    before_weight: bool = False


def read_hook_name(name: object, hf_name: object, field: str, transcoder: bool = False) -> NamedSite:
    """Return the site of a hook name in a file.

    Args:
        name: e.g. ``blocks.7.hook_resid_post`` or ``blocks.7.attn.hook_z``.
        hf_name: the module of transformers that the file gives beside it, or None.
        field: named by errors.
        transcoder: whether it is the input of a transcoder; published ones mean what the norm
            returns by ``hook_mlp_in``.
    """
    block = _BLOCK.fullmatch(name) if isinstance(name, str) else None
    if block is None:
        return NamedSite(_other_site(name, field))
    layer, inner = int(block[1]), block[2]
    if inner in _NORMALIZED:
        return NamedSite(Site(_NORMALIZED[inner], layer), before_weight=True)
    if inner in _BEFORE_NORM:
        after, before = _BEFORE_NORM[inner]
        if transcoder or (isinstance(hf_name, str) and _AFTER_NORM.fullmatch(hf_name)):
            return NamedSite(Site(after, layer))
        raise WeirError(
            f"TransformerLens's {inner} is the stream before the norm ({before}), but some files mean "
            f"what the norm returns ({after}); pass site=({after!r}, {layer}) or site=({before!r}, {layer})",
            field,
        )
    return NamedSite(_other_site(name, field))


def _other_site(name: object, field: str) -> Site:
    try:
        return parse_site(name)
    except WeirError as e:
        raise WeirError(f"{brief(name, 80)!r} is no hook point ({e.message}); pass site=(hook, layer)", field) from None


def hook_name(site: Site) -> str:
    if site.hook in MODEL_HOOKS:
        return "hook_embed" if site.hook == "embed" else "ln_final.hook_out"
    names = (name for name, hook in IN_BLOCK.items() if hook == site.hook and name not in _BEFORE_NORM)
    return f"blocks.{site.layer}.{next(names, site.hook)}"
