"""Three-tier steering (base, prefill, decode) of the fork RhizoNymph/vllm, as interventions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import plain, refuse_unknown_keys
from vllm_weir.schema.hooks import normalise_hook
from vllm_weir.schema.intervention_base import Intervention, at_most
from vllm_weir.schema.interventions import Add, Clamp, scaled
from vllm_weir.schema.vectors import Vector, number

TIERS = {"": "all", "prefill_": "prompt", "decode_": "generated"}
"""Prefix of a tier's fields -> the positions at which it acts."""
_FIELDS = tuple(f"{prefix}{kind}" for kind in ("vectors", "clamps") for prefix in TIERS)
_HOOKS = {"post_mlp": "resid_post"}
FORK_HOOKS = {"resid_pre": "pre_attn", "resid_mid": "post_attn", "resid_post": "post_block"}
"""Hook points that the fork names otherwise -> its names."""
_LAYER = re.compile(r"^-?\d{1,9}$", re.ASCII)
_PACKED = ("dtype", "shape", "layer_indices", "data")


def from_tiers(
    steering_vectors: Mapping | None = None,
    prefill_steering_vectors: Mapping | None = None,
    decode_steering_vectors: Mapping | None = None,
    steering_module_ref: Sequence[Any] | str | None = None,
    modules: Mapping[str, Mapping] | None = None,
    *,
    steering_clamps: Mapping | None = None,
    prefill_steering_clamps: Mapping | None = None,
    decode_steering_clamps: Mapping | None = None,
) -> list[Intervention]:
    """Translate the fork's request fields to interventions.

    The fields come in three tiers, which add up: without a prefix they act at all positions, with
    ``prefill_`` at the prompt's, with ``decode_`` at the generated ones. Clamps come after
    additions.

    Args:
        steering_vectors: ``{hook: {layer: entry}}``, an entry being a list of floats or
            ``{"vector": [...], "scale": float}``; or ``{hook: packed}``, packed being
            ``{"dtype", "shape", "layer_indices", "data": base64, "scales"}``.
        prefill_steering_vectors: of the same form.
        decode_steering_vectors: of the same form.
        steering_module_ref: a name in `modules`, or (name, scale).
        modules: name -> the fields that `from_fields` takes, and no others.
        steering_clamps: as ``clamps`` in `from_fields`.
        prefill_steering_clamps: of the same form.
        decode_steering_clamps: of the same form.

    Raises:
        WeirError: naming the field.
    """
    out: list[Intervention] = []
    if steering_module_ref is not None:
        name, scale = _reference(steering_module_ref)
        if not modules or name not in modules:
            raise WeirError(f"no module {brief(name)!r} in modules", "steering_module_ref")
        module_path = f"modules.{brief(name)}"
        if not isinstance(modules[name], Mapping):
            raise WeirError("expected {vectors, prefill_vectors, decode_vectors, clamps, ...}", module_path)
        refuse_unknown_keys(modules[name], _FIELDS, module_path)
        out += scaled(from_fields(modules[name], f"{module_path}."), scale, "steering_module_ref[1]")
    vectors = (steering_vectors, prefill_steering_vectors, decode_steering_vectors)
    clamps = (steering_clamps, prefill_steering_clamps, decode_steering_clamps)
    return at_most(itertools.chain(out, _in_tiers(vectors, clamps, "", "steering_")))


def _in_tiers(vectors: Sequence[Any], clamps: Sequence[Any], path: str, name: str = "") -> Iterator[Intervention]:
    """Yield the additions of all tiers, then their clamps; `path` and `name` stand around a tier's prefix in errors."""
    for make, kind, specs in ((additions, "vectors", vectors), (_clamps, "clamps", clamps)):
        for (prefix, positions), spec in zip(TIERS.items(), specs, strict=True):
            yield from make(spec, f"{path}{prefix}{name}{kind}", positions)


def _reference(reference: Any) -> tuple[str, Any]:
    if isinstance(reference, str):
        return reference, 1.0
    if not isinstance(reference, (list, tuple)) or len(reference) != 2 or not isinstance(reference[0], str):
        raise WeirError("expected a name, or (name, scale)", "steering_module_ref")
    return reference[0], reference[1]


def from_fields(fields: Mapping[str, Any], path: str = "") -> list[Intervention]:
    """Translate a module of the fork to interventions, additions first, then clamps.

    `fields`: ``vectors``, ``prefill_vectors`` and ``decode_vectors`` have the form of `from_tiers`'s
    `steering_vectors`; ``clamps``, ``prefill_clamps`` and ``decode_clamps`` are ``{hook: {layer: [entry, ...]}}``, an
    entry being ``{"vector", "value" or "min" and / or "max", "strength"}``, or ``{hook: packed}`` with ``bounds``
    (``[[min, max], ...]``, null for none) and ``strengths`` in place of ``scales``. Other fields are ignored. `path`:
    prefix of the fields' names in errors.
    """
    vectors, clamps = ([fields.get(f"{prefix}{kind}") for prefix in TIERS] for kind in ("vectors", "clamps"))
    return at_most(_in_tiers(vectors, clamps, path))


def additions(spec: Mapping | None, path: str, positions: str) -> Iterator[Add]:
    """Yield the additions of one tier, ``{hook: layers}``, at `positions`."""
    for hook, layers, hook_path in _hooks(spec, path):
        if "data" in layers:
            yield from _packed_additions(layers, hook, positions, hook_path)
            continue
        for layer, entry, layer_path in _layers(layers, hook_path):
            scale = 1.0
            if isinstance(entry, Mapping) and "vector" in entry:
                refuse_unknown_keys(entry, ("vector", "scale"), layer_path)
                scale = number(entry.get("scale", 1.0), f"{layer_path}.scale")
                entry = entry["vector"]
            vector = Vector.parse_one(entry, f"{layer_path}.vector")
            yield Add(vector, layer, scale, hook, positions, path=layer_path)


def _packed_additions(packed: Mapping, hook: str, positions: str, path: str) -> Iterator[Add]:
    rows, layers = _unpack(packed, path, ("scales",))
    scales = _numbers(packed.get("scales"), len(layers), f"{path}.scales")
    for row, layer, scale in zip(rows, layers, scales, strict=True):
        yield Add(row, layer, scale, hook, positions, path=path)


def _clamps(spec: Mapping | None, path: str, positions: str) -> Iterator[Clamp]:
    """Yield the clamps of one tier."""
    for hook, layers, hook_path in _hooks(spec, path):
        if "data" in layers:
            yield from _packed_clamps(layers, hook, positions, hook_path)
            continue
        for layer, entries, layer_path in _layers(layers, hook_path):
            if not isinstance(entries, list) or not entries:
                raise WeirError("expected a list of clamps, at least one", layer_path)
            for k, entry in enumerate(entries):
                yield _clamp(entry, layer, hook, positions, f"{layer_path}[{k}]")


def _clamp(entry: Any, layer: int, hook: str, positions: str, path: str) -> Clamp:
    if not isinstance(entry, Mapping) or "vector" not in entry:
        raise WeirError("expected {vector, value or min and / or max, strength}", path)
    refuse_unknown_keys(entry, ("vector", "value", "min", "max", "strength"), path)
    numbers = {name: entry[name] for name in ("value", "min", "max", "strength") if entry.get(name) is not None}
    if "value" in numbers and ("min" in numbers or "max" in numbers):
        raise WeirError("give value, or min and / or max", f"{path}.value")
    direction = Vector.parse_one(entry["vector"], f"{path}.vector")
    return Clamp(direction, layer, **numbers, hook=hook, positions=positions, path=path)


def _packed_clamps(packed: Mapping, hook: str, positions: str, path: str) -> Iterator[Clamp]:
    rows, layers = _unpack(packed, path, ("bounds", "strengths"))
    bounds = packed.get("bounds")
    if not isinstance(bounds, list) or len(bounds) != len(layers):
        raise WeirError(f"expected {len(layers)} pairs [min, max]", f"{path}.bounds")
    strengths = _numbers(packed.get("strengths"), len(layers), f"{path}.strengths")
    for k, (row, layer, strength) in enumerate(zip(rows, layers, strengths, strict=True)):
        if not isinstance(bounds[k], list) or len(bounds[k]) != 2:
            raise WeirError("expected a pair [min, max], null for none", f"{path}.bounds[{k}]")
        low, high = bounds[k]
        yield Clamp(row, layer, min=low, max=high, strength=strength, hook=hook, positions=positions, path=path)


def _hooks(spec: object, path: str) -> Iterator[tuple[str, Mapping, str]]:
    """Yield (hook, its layers, path) of the fork's ``{hook: layers}``."""
    if spec is None:
        return
    if not isinstance(spec, Mapping):
        raise WeirError("expected {hook: {layer: vector}}", path)
    for hook, layers in spec.items():
        hook_path = f"{path}.{brief(hook)}"
        if not isinstance(layers, Mapping):
            raise WeirError("expected {layer: vector}", hook_path)
        if not layers:  # asks for nothing, as in the fork
            normalise_hook(_HOOKS.get(hook, hook), hook_path)
            continue
        yield _HOOKS.get(hook, hook) if isinstance(hook, str) else hook, layers, hook_path


def _layers(layers: Mapping, path: str) -> Iterator[tuple[int, Any, str]]:
    for key, entry in layers.items():
        layer = plain(key)
        layer_path = f"{path}.{brief(layer)}"
        if isinstance(layer, bool) or not _LAYER.match(brief(layer)):
            raise WeirError("a layer is an int", layer_path)
        yield int(layer), entry, layer_path


def _unpack(packed: Mapping, path: str, optional: Sequence[str]) -> tuple[Any, list[int]]:
    """Return (rows [n, d_model], their layers) of a packed form, which may have `optional` keys."""
    refuse_unknown_keys(packed, (*_PACKED, *optional), path)
    for key in _PACKED:
        if key not in packed:
            raise WeirError("missing", f"{path}.{key}")
    content = {"b64": packed["data"], "dtype": packed["dtype"], "shape": packed["shape"]}
    rows = Vector.parse(content, f"{path}.data", (2,)).array
    layers = packed["layer_indices"]
    assert rows is not None
    if not isinstance(layers, list) or len(layers) != len(rows) or not all(type(layer) is int for layer in layers):
        raise WeirError(f"expected {len(rows)} ints, one for each row", f"{path}.layer_indices")
    return rows, layers


def _numbers(values: object, count: int, path: str) -> list[float]:
    """Parse `count` numbers; None stands for ones."""
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise WeirError(f"expected {count} numbers, one for each row", path)
    return [number(value, f"{path}[{k}]") for k, value in enumerate(values)]
