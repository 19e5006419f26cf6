"""Three-tier steering (base, prefill, decode) as position selectors: the bodies of the fork RhizoNymph/vllm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hooks import normalise_hook
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.interventions import Add, Clamp
from vllm_weir.schema.scalars import plain
from vllm_weir.schema.vectors import Vector, number

TIERS = {"": "all", "prefill_": "prompt", "decode_": "generated"}
"""Prefix of a tier's fields -> the positions at which it acts."""
_FIELDS = tuple(f"{prefix}{kind}" for kind in ("vectors", "clamps") for prefix in TIERS)
_HOOKS = {"post_mlp": "resid_post"}
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
    """Interventions that do what the fork's request fields ask.

    Args:
        steering_vectors, prefill_steering_vectors, decode_steering_vectors: ``{hook: {layer: entry}}``, an entry being
            a list of floats or ``{"vector": [...], "scale": float}``; or ``{hook: packed}``, packed being
            ``{"dtype", "shape", "layer_indices", "data": base64, "scales"}``. The tiers add up: the first at all
            positions, the second at the prompt's, the third at the generated ones.
        steering_module_ref: a name in `modules`, or (name, scale).
        modules: name -> what `from_fields` takes, and nothing else.
        steering_clamps, prefill_steering_clamps, decode_steering_clamps: of the same tiers, as in `from_fields`; they
            come after the additions.

    Raises:
        WeirError: naming the field.
    """
    out: list[Intervention] = []
    if steering_module_ref is not None:
        name, scale = _reference(steering_module_ref)
        if not modules or name not in modules:
            raise WeirError(f"no module {brief(name)!r} in modules", "steering_module_ref")
        at = f"modules.{brief(name)}"
        if not isinstance(modules[name], Mapping):
            raise WeirError("expected {vectors, prefill_vectors, decode_vectors, clamps, ...}", at)
        _only(modules[name], _FIELDS, at)
        out += scaled(from_fields(modules[name], f"{at}."), scale, "steering_module_ref[1]")
    given = (steering_vectors, prefill_steering_vectors, decode_steering_vectors)
    for (prefix, positions), spec in zip(TIERS.items(), given, strict=True):
        out += _additions(spec, f"{prefix}steering_vectors", positions)
    given = (steering_clamps, prefill_steering_clamps, decode_steering_clamps)
    for (prefix, positions), spec in zip(TIERS.items(), given, strict=True):
        out += _clamps(spec, f"{prefix}steering_clamps", positions)
    return out


def _reference(reference: Any) -> tuple[str, Any]:
    """(name, scale) of a module reference."""
    if isinstance(reference, str):
        return reference, 1.0
    if not isinstance(reference, (list, tuple)) or len(reference) != 2 or not isinstance(reference[0], str):
        raise WeirError("expected a name, or (name, scale)", "steering_module_ref")
    return reference[0], reference[1]


def from_fields(fields: Mapping[str, Any], path: str = "") -> list[Intervention]:
    """Interventions that do what the fork's fields `vectors`, `prefill_vectors`, `decode_vectors`, `clamps`,
    `prefill_clamps` and `decode_clamps` ask: additions first, then clamps. Other fields are not looked at.

    Args:
        fields: the vectors' as in `from_tiers`; a clamp's value is ``{hook: {layer: [entry, ...]}}``, an entry being
            ``{"vector", "value" or "min" and / or "max", "strength"}``, or ``{hook: packed}`` with ``bounds``
            (``[[min, max], ...]``, null for none) and ``strengths`` in place of ``scales``.
        path: goes before the fields' names in errors.
    """
    out: list[Intervention] = []
    for prefix, positions in TIERS.items():
        out += _additions(fields.get(f"{prefix}vectors"), f"{path}{prefix}vectors", positions)
    for prefix, positions in TIERS.items():
        out += _clamps(fields.get(f"{prefix}clamps"), f"{path}{prefix}clamps", positions)
    return out


def scaled(interventions: Sequence[Intervention], scale: Any, path: str) -> list[Intervention]:
    """These with every addition's scale times `scale`, which is refused (naming `path`) if there are others."""
    factor = number(scale, path)
    if factor == 1.0:
        return list(interventions)
    out: list[Intervention] = []
    for one in interventions:
        if not isinstance(one, Add):
            raise WeirError(f"the module holds a {one.op}, which cannot be scaled; leave the scale out", path)
        out.append(replace(one, scale=one.scale * factor))
    return out


def _additions(spec: Mapping | None, path: str, positions: str) -> Iterator[Add]:
    for hook, layers, at in _hooks(spec, path):
        if "data" in layers:
            rows, indices = _unpack(layers, at, ("scales",))
            scales = _numbers(layers.get("scales"), len(indices), f"{at}.scales")
            for row, layer, factor in zip(rows, indices, scales, strict=True):
                yield Add(row, layer, factor, hook, positions, path=at)
            continue
        for layer, entry, place in _layers(layers, at):
            factor = 1.0
            if isinstance(entry, Mapping) and "vector" in entry:
                _only(entry, ("vector", "scale"), place)
                factor = number(entry.get("scale", 1.0), f"{place}.scale")
                entry = entry["vector"]
            yield Add(Vector.parse_one(entry, f"{place}.vector"), layer, factor, hook, positions, path=place)


def _clamps(spec: Mapping | None, path: str, positions: str) -> Iterator[Clamp]:
    for hook, layers, at in _hooks(spec, path):
        if "data" in layers:
            rows, indices = _unpack(layers, at, ("bounds", "strengths"))
            bounds = layers.get("bounds")
            if not isinstance(bounds, list) or len(bounds) != len(indices):
                raise WeirError(f"expected {len(indices)} pairs [min, max]", f"{at}.bounds")
            strengths = _numbers(layers.get("strengths"), len(indices), f"{at}.strengths")
            for k, (row, layer, strength) in enumerate(zip(rows, indices, strengths, strict=True)):
                if not isinstance(bounds[k], list) or len(bounds[k]) != 2:
                    raise WeirError("expected a pair [min, max], null for none", f"{at}.bounds[{k}]")
                low, high = bounds[k]
                yield Clamp(row, layer, min=low, max=high, strength=strength, hook=hook, positions=positions, path=at)
            continue
        for layer, entries, place in _layers(layers, at):
            if not isinstance(entries, list) or not entries:
                raise WeirError("expected a list of clamps, at least one", place)
            for k, entry in enumerate(entries):
                one = f"{place}[{k}]"
                if not isinstance(entry, Mapping) or "vector" not in entry:
                    raise WeirError("expected {vector, value or min and / or max, strength}", one)
                _only(entry, ("vector", "value", "min", "max", "strength"), one)
                how = {name: entry[name] for name in ("value", "min", "max", "strength") if entry.get(name) is not None}
                if "value" in how and ("min" in how or "max" in how):
                    raise WeirError("give value, or min and / or max", f"{one}.value")
                direction = Vector.parse_one(entry["vector"], f"{one}.vector")
                yield Clamp(direction, layer, **how, hook=hook, positions=positions, path=one)


def _hooks(spec: object, path: str) -> Iterator[tuple[str, Mapping, str]]:
    if spec is None:
        return
    if not isinstance(spec, Mapping):
        raise WeirError("expected {hook: {layer: vector}}", path)
    for hook, layers in spec.items():
        at = f"{path}.{brief(hook)}"
        if not isinstance(layers, Mapping):
            raise WeirError("expected {layer: vector}", at)
        if not layers:
            normalise_hook(_HOOKS.get(hook, hook), at)
            raise WeirError("it names no layer; give {layer: vector}, or leave the hook out", at)
        yield _HOOKS.get(hook, hook) if isinstance(hook, str) else hook, layers, at


def _layers(layers: Mapping, path: str) -> Iterator[tuple[int, Any, str]]:
    for key, entry in layers.items():
        layer = plain(key)
        at = f"{path}.{brief(layer)}"
        if isinstance(layer, bool) or not _LAYER.match(brief(layer)):
            raise WeirError("a layer is an int", at)
        yield int(layer), entry, at


def _unpack(packed: Mapping, path: str, more: Sequence[str]) -> tuple[Any, list[int]]:
    """(rows [n, d_model], their layers)."""
    _only(packed, (*_PACKED, *more), path)
    for key in _PACKED:
        if key not in packed:
            raise WeirError("missing", f"{path}.{key}")
    content = {"b64": packed["data"], "dtype": packed["dtype"], "shape": packed["shape"]}
    rows = Vector.parse(content, f"{path}.data", (2,)).array
    indices = packed["layer_indices"]
    assert rows is not None
    if not isinstance(indices, list) or len(indices) != len(rows) or not all(type(i) is int for i in indices):
        raise WeirError(f"expected {len(rows)} ints, one for each row", f"{path}.layer_indices")
    return rows, indices


def _numbers(values: object, count: int, path: str) -> list[float]:
    """`count` numbers; ones if there are none given."""
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise WeirError(f"expected {count} numbers, one for each row", path)
    return [number(value, f"{path}[{k}]") for k, value in enumerate(values)]


def _only(data: Mapping, known: Sequence[str], path: str) -> None:
    for key in data:
        if key not in known:
            raise WeirError(f"unknown key; known are {', '.join(known)}", f"{path}.{brief(key)}")
