"""Proof that a gradient is the whole derivative with respect to a hook point's rows.

A tensor's gradient counts what is computed from that tensor object. A model that keeps two tensors
over one memory, or adds up the stream from another copy, would give a part of the derivative.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.transformers_points import ModuleTree

BOUND = 1e-4
"""Largest relative difference between gradients that have to be equal."""


@contextlib.contextmanager
def check_complete(tree: ModuleTree, live: Mapping[Site, torch.Tensor]) -> Iterator[None]:
    """Refuse modules that are given the memory of a recorded tensor, but neither that tensor nor a view of it."""

    def before(_module: Any, args: tuple) -> None:
        given = args[0] if args else None
        if not isinstance(given, torch.Tensor) or not given.is_floating_point():
            return
        for site, tensor in live.items():
            if given is tensor or given._base is tensor:
                continue
            if given.data_ptr() == tensor.data_ptr() and given.numel() == tensor.numel():
                raise WeirError(f"the twin reads {site} through two tensors, so its gradient is not known", "hooks")

    leaves = [module for path, module in tree.modules.items() if path and next(module.children(), None) is None]
    handles = [module.register_forward_pre_hook(before) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_stream(rows: Mapping[Site, torch.Tensor], gradients: Mapping[Site, torch.Tensor], num_layers: int) -> None:
    """Check gradients along the stream by the sums that make it.

    A term of a sum has the gradient of the sum: ``resid_mid = resid_pre + attn_out`` and
    ``resid_post = c * (resid_mid + mlp_out)``, with c = 1 but for Gemma 4; a parallel block makes
    one sum. A block is given what the one before it returned. Rows and gradients are [tokens, d];
    WeirError says which sum or gradient is off.
    """
    for layer in sorted({site.layer for site in rows}):
        pre, mid, post = (Site(hook, layer) for hook in ("resid_pre", "resid_mid", "resid_post"))
        attn, mlp, after = Site("attn_out", layer), Site("mlp_out", layer), Site("resid_pre", layer + 1)
        sums = [(mid, (pre, attn)), (post, (mid, mlp))] if mid in rows else [(post, (pre, attn, mlp))]
        for whole, terms in sums:
            found = [term for term in terms if term in rows]
            if whole in rows and len(found) > 1:
                _check_sum(rows, gradients, whole, found)
        if post in rows and after in rows and layer + 1 < num_layers:
            _require(gradients[after], gradients[post], post, "has another gradient than the next block's resid_pre")


def _check_sum(
    rows: Mapping[Site, torch.Tensor], gradients: Mapping[Site, torch.Tensor], whole: Site, terms: list[Site]
) -> None:
    """Check that a site is a multiple of a sum, and that its terms have the gradient that follows."""
    total = torch.stack([rows[term] for term in terms]).sum(0)
    factor = float((total.double() * rows[whole]).sum() / total.double().pow(2).sum())
    names = " and ".join(term.hook for term in terms)
    _require(factor * total, rows[whole], whole, f"is not the sum of {names}")
    for term in terms:
        if term.hook in ("attn_out", "mlp_out"):  # the stream's own gradient has more terms
            why = f"has another gradient than {term.hook}, which is a term of it"
            _require(gradients[term], factor * gradients[whole], whole, why)


def _require(value: torch.Tensor, expected: torch.Tensor, site: Site, why: str) -> None:
    off, scale = float((value - expected).abs().max()), float(expected.abs().max())
    if not off <= BOUND * max(scale, 1e-30):
        raise WeirError(f"{site} of the twin {why} (off by {off:.1e} of {scale:.1e})", "hooks")
