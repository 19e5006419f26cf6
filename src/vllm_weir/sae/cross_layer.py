"""Cross-layer transcoders: the weights of their blocks in one mapping, and what the blocks reconstruct together.

A feature is read at one block and written at that one and all later ones. So block l is a transcoder whose decoder,
[d_sae, writes, d_out], has a row for each of the blocks from l on. The weights of all blocks lie in one mapping,
``W_enc_3`` being that of block 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.sae.config import SAEConfig
from vllm_weir.sae.tensors import check_tensors
from vllm_weir.schema.fields import is_int, plain
from vllm_weir.schema.hooks import Site

Tensors = Mapping[str, torch.Tensor]


def named(name: str, layer: int) -> str:
    return f"{name}_{layer}"


def block_key(key: str, layer: int) -> str:
    return f"{key}/{layer}"


def split_key(key: str) -> tuple[str, int | None]:
    """Return the key under which workers hold an autoencoder, and the block that is meant, None for all of it."""
    name, mark, rest = key.rpartition("#")  # what follows the last one is Weir's
    token, slash, layer = rest.partition("/")
    return f"{name}{mark}{token}", int(layer) if slash else None


def joined(blocks: Iterable[tuple[int, Tensors]]) -> dict[str, torch.Tensor]:
    return {named(name, layer): tensor for layer, tensors in blocks for name, tensor in tensors.items()}


def block_config(config: SAEConfig, layer: object) -> SAEConfig:
    """Return what one block is beside its weights; raise WeirError if there is no such block."""
    layer = plain(layer)
    if not is_int(layer) or layer not in config.layers:
        first, last = config.layers[0], config.layers[-1]
        raise WeirError(f"its blocks are {first} to {last}, got {brief(layer)}", "layer")
    assert config.out_site is not None
    writes = config.layers[-1] - int(layer) + 1  # type: ignore[call-overload]
    site, out_site = (Site(one.hook, int(layer)) for one in (config.site, config.out_site))  # type: ignore[call-overload]
    return replace(config, site=site, out_site=out_site, layers=(), writes=writes)


def block_tensors(config: SAEConfig, tensors: Tensors, layer: int) -> dict[str, torch.Tensor]:
    return {name: tensors[named(name, layer)] for name in config.tensor_names}


def check(config: SAEConfig, tensors: Tensors) -> None:
    """Raise WeirError, naming a tensor, unless each block has the weights of its architecture, of one width."""
    expected = [named(name, layer) for layer in config.layers for name in config.tensor_names]
    if missing := sorted(set(expected) - set(tensors)):
        raise WeirError(f"missing; blocks of this transcoder have {', '.join(config.tensor_names)}", missing[0])
    if more := sorted(set(tensors) - set(expected)):
        raise WeirError("a cross-layer transcoder of these blocks has no such tensor", more[0])
    widths = None
    for layer in config.layers:
        own = block_tensors(config, tensors, layer)
        try:
            check_tensors(block_config(config, layer), own)
        except WeirError as e:
            raise WeirError(e.message, named(e.field, layer)) from None
        found = (*own["W_enc"].shape, own["W_dec"].shape[-1])
        widths = widths or found
        if found != widths:
            raise WeirError(f"blocks before it have d_in, d_sae, d_out {widths}, it has {found}", named("W_enc", layer))


def without_decoder(config: SAEConfig, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return weights of which only those are left that activations need: the rest has no columns.

    Decoders of all pairs of blocks are most of such a transcoder, and a feature that is set needs one row of them.
    """
    kept = dict(tensors)
    for layer in config.layers:
        for name, axis in (("W_dec", 2), ("b_dec", 0), ("W_skip", 0)):
            if name in config.tensor_names:
                kept[named(name, layer)] = tensors[named(name, layer)].narrow(axis, 0, 0).clone()
    return kept


def summed(parts: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return what is written at each block, float32 [n, d_out], given what each block writes at it and later ones.

    `parts`: {block: [n, writes, d_out]}.
    """
    out: dict[int, torch.Tensor] = {}
    for layer, written in sorted(parts.items()):
        for later, one in enumerate(written.unbind(1), layer):
            if later in out and len(out[later]) != len(one):
                raise WeirError(f"{len(one)} rows for block {layer}, and {len(out[later])} for others", "features")
            out[later] = out[later] + one if later in out else one
    return out
