"""SAE features as places of their own: what a feature's activation of one run would do to the metric in the other.

A row is what its features decode to, and an error: ``x = decode(encode(x)) + error``. With the error kept, the metric's
gradient with respect to feature i is decoder row i times its gradient with respect to the row, so the estimate is
``(activation put in - activation there) * (W_dec[i] @ gradient)``. Decoders are affine: the estimates of all features,
and that of the error as a place of its own, add up to the estimate of the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.attribute.result import FeatureEffect, FeatureEffects, first_order
from vllm_weir.experiments.attribute.twin import Twin
from vllm_weir.sae import activations
from vllm_weir.sae.autoencoder import SAE


def parse_saes(saes: Any) -> dict[str, SAE]:
    """Return autoencoders by name; raise WeirError for what has no features of the rows that it reconstructs."""
    listed = [saes] if isinstance(saes, SAE) else saes
    if not isinstance(listed, (Mapping, list, tuple)):
        raise WeirError(f"expected a weir.SAE, a list of them or {{name: SAE}}, got {brief(saes)}", "saes")
    pairs = list(listed.items()) if isinstance(listed, Mapping) else [(getattr(one, "name", ""), one) for one in listed]
    named: dict[str, SAE] = {}
    for k, (name, sae) in enumerate(pairs):
        field = f"saes[{name if isinstance(listed, Mapping) else k}]"
        if not isinstance(sae, SAE):
            raise WeirError(f"expected a weir.SAE, got {brief(sae)}; weir.SAE.load(path) reads one", field)
        if sae.config.is_transcoder or sae.layers:
            raise WeirError(f"{sae.name!r} is a transcoder, whose features do not reconstruct the row they read", field)
        if sae.config.normalize_activations != "none":
            raise WeirError(
                f"{sae.name!r} scales each row by its own length, so that its features have no decoder in common", field
            )
        if sae.head is not None:
            raise WeirError(f"{sae.name!r} reads one head; attribution takes those of whole rows", field)
        if not isinstance(name, str) or name in named:
            raise WeirError(f"two autoencoders are named {brief(name)}; give {{name: SAE}}", field)
        named[name] = sae
    return named


def check_saes(saes: Mapping[str, SAE], twin: Twin) -> None:
    """Raise WeirError where the twin does not have an autoencoder's hook point, or has rows of another width there."""
    for name, sae in saes.items():
        twin.require(sae.site, "saes")
        width = torch.Size(twin.shape(sae.site)).numel()
        if sae.d_in != width:
            raise WeirError(f"{name!r} encodes rows of {sae.d_in} numbers, and {sae.site} has {width}", "saes")


def feature_effects(
    sae: SAE, positions: Sequence[int], tokens: Sequence[str],
    rows: torch.Tensor, gradient: torch.Tensor, put_in: torch.Tensor, count: int,
) -> FeatureEffects:  # fmt: skip
    """Estimate all features of a site's rows [positions, ...], and keep the `count` largest.

    `rows` are of the run that is patched, `gradient` is the metric's with respect to them, `put_in` are of the other
    run; `tokens` are texts of the whole prompt.
    """
    there, other, slope = (one.flatten(1).to(sae.device, torch.float32) for one in (rows, put_in, gradient))
    features, of_other = sae.encode(there), sae.encode(other)
    with torch.enable_grad():
        live = features.detach().requires_grad_(True)
        decoded = activations.decode(sae.config, sae.tensors, live, there)
        (by_feature,) = torch.autograd.grad((decoded * slope).sum(), live)
    estimates = (of_other.double() - features.double()) * by_feature.double()
    error, error_put_in = there - decoded.detach(), other - sae.decode(of_other, other)
    flat = estimates.flatten()
    order = flat.abs().topk(min(count, len(flat))).indices
    top = []
    for index in order[flat[order] != 0].tolist():
        at, feature = divmod(index, sae.d_sae)
        there_is, put, estimate = (float(one[at, feature]) for one in (features, of_other, estimates))
        position, label = positions[at], sae.labels.get(feature, "")
        top.append(FeatureEffect(feature, position, tokens[position], there_is, put, estimate, label))
    errors = first_order(error_put_in, error, slope, by_head=False)
    return FeatureEffects(
        sae.site, tuple(top), tuple(positions), tuple(estimates.sum(1).tolist()), tuple(errors.tolist())
    )
