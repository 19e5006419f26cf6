"""Three-tier steering (base, prefill, decode) as position selectors: the RhizoNymph fork's request fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.spec.interventions import Add
from vllm_weir.spec.vectors import number

_POSITIONS = {"steering_vectors": "all", "prefill_steering_vectors": "prompt", "decode_steering_vectors": "generated"}
_HOOKS = {"post_mlp": "resid_post"}


def from_tiers(
    steering_vectors: Mapping | None = None,
    prefill_steering_vectors: Mapping | None = None,
    decode_steering_vectors: Mapping | None = None,
    steering_module_ref: Sequence[Any] | str | None = None,
    modules: Mapping[str, Mapping] | None = None,
) -> list[Add]:
    """Interventions that do what the fork's fields ask.

    Args:
        steering_vectors, prefill_steering_vectors, decode_steering_vectors: ``{hook: {layer: entry}}``, an entry being
            a list of floats or ``{"vector": [...], "scale": float}``. The tiers add up: the first at all positions,
            the second at the prompt's, the third at the generated ones.
        steering_module_ref: a name in `modules`, or (name, scale).
        modules: name -> ``{"vectors", "prefill_vectors", "decode_vectors"}`` as the fork registers them.

    Raises:
        WeirError: naming the field.
    """
    tiers = {
        "steering_vectors": steering_vectors,
        "prefill_steering_vectors": prefill_steering_vectors,
        "decode_steering_vectors": decode_steering_vectors,
    }
    out: list[Add] = []
    if steering_module_ref is not None:
        reference = steering_module_ref
        name, scale = (reference, 1.0) if isinstance(reference, str) else (reference[0], reference[1])
        if not modules or name not in modules:
            raise WeirError(f"no module {brief(name)!r} in modules", "steering_module_ref")
        scale = number(scale, "steering_module_ref[1]")
        for tier, key in zip(tiers, ("vectors", "prefill_vectors", "decode_vectors"), strict=True):
            out += _tier(modules[name].get(key), f"modules.{name}.{key}", _POSITIONS[tier], scale)
    for tier, spec in tiers.items():
        out += _tier(spec, tier, _POSITIONS[tier], 1.0)
    return out


def _tier(spec: Mapping | None, path: str, positions: str, scale: float) -> list[Add]:
    out = []
    for hook, layers in (spec or {}).items():
        if not isinstance(layers, Mapping):
            raise WeirError("expected {layer: vector}", f"{path}.{brief(hook)}")
        for layer, entry in layers.items():
            at = f"{path}.{brief(hook)}.{brief(layer)}"
            factor = scale
            if isinstance(entry, Mapping) and "vector" in entry:
                factor *= number(entry.get("scale", 1.0), f"{at}.scale")
                entry = entry["vector"]
            try:
                index = int(layer)
            except (TypeError, ValueError):
                raise WeirError("a layer is an int", at) from None
            out.append(Add(entry, index, factor, _HOOKS.get(hook, hook), positions, path=at))
    return out
