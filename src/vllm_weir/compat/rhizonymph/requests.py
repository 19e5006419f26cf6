"""The fields ``steering`` and ``patch`` of the fork RhizoNymph/vllm, as probes and interventions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.compat.rhizonymph.tiers import additions
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import refuse_unknown_keys
from vllm_weir.schema.gates import When
from vllm_weir.schema.hooks import normalise_hook
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.intervention_kinds import Kept
from vllm_weir.schema.interventions import Add, Clamp, Replace
from vllm_weir.schema.probes import Probe
from vllm_weir.schema.request import MAX_INTERVENTIONS
from vllm_weir.schema.vectors import Vector, number

_SCOPES = ("this_token", "rest_of_request")
_REFUSED_SCOPES = {
    "next_step": 'the key weir has it for every token that a probe finds: "when": {"probe", "above", "delay": 1}',
    "rest_of_conversation": "no state is kept between requests; use rest_of_request, in each request",
}
_REFUSED_ACTIONS = {
    "attenuate": "give the vectors that are to be damped a smaller scale",
    "clamp": 'the key weir has gated clamps: {"op": "clamp", ..., "when": {...}}',
}
_ZEROS = "zeros"
"""The module that needs not be registered: a row of zeros."""
_SOURCES = ("source_run", "source_module", "source_inline")


class KnownNames(NamedTuple):
    """What a server knows that a request's fields refer to."""

    # returns the interventions under a name; raises WeirError naming the field that it is given
    module: Callable[[str, str], Sequence[Kept]]
    d_model: int  # width of the residual stream


def from_gates(gates: Any, names: KnownNames) -> tuple[list[Probe], list[Add]]:
    """Translate ``steering``, ``[{when, scope, apply}]``: additions at the generated tokens.

    A probe's scope ``this_token`` multiplies what is added by ``sigmoid(sharpness * (score -
    threshold))``; ``rest_of_request`` adds at all tokens after the first whose score is above.

    Returns the probes that the gates hold themselves, and an addition for each vector; its `path` is its gate.
    """
    probes: list[Probe] = []
    added: list[Add] = []
    for k, gate in enumerate(_entries(gates, "steering")):
        path = f"steering[{k}]"
        _keys(gate, ("when", "scope", "apply"), (), path)
        when, scope, action = gate["when"], gate["scope"], gate["apply"]
        if scope not in _SCOPES:
            why = _REFUSED_SCOPES.get(str(scope), f"choose from {', '.join(_SCOPES)}")
            raise WeirError(f"{brief(scope)} is not served: {why}", f"{path}.scope")
        gated = None
        if _kind(when, ("always", "probe"), f"{path}.when") == "probe":
            _keys(when, ("kind", "probe", "threshold"), ("sharpness",), f"{path}.when")
            sharpness = number(when.get("sharpness", 1.0), f"{path}.when.sharpness")
            name = _probe(when["probe"], f"steering.{k}", f"{path}.when.probe", probes)
            how: dict[str, Any] = {"sharpness": sharpness} if scope == "this_token" else {"latch": True, "delay": 1}
            gated = When(name, above=when["threshold"], path=f"{path}.when", **how)
        else:
            _keys(when, ("kind",), (), f"{path}.when")
        if (kind := _kind(action, ("add", *_REFUSED_ACTIONS), f"{path}.apply")) != "add":
            raise WeirError(f"{kind} is not served: {_REFUSED_ACTIONS[kind]}", f"{path}.apply.kind")
        _keys(action, ("kind", "steer"), ("strength",), f"{path}.apply")
        strength = number(action.get("strength", 1.0), f"{path}.apply.strength")
        for one in _vectors(action["steer"], f"{path}.apply.steer", names):
            more: dict[str, Any] = {"positions": "generated", "when": gated, "path": path}
            added.append(replace(one, scale=one.scale * strength, **more))
        if len(added) > MAX_INTERVENTIONS:
            raise WeirError(f"more than {MAX_INTERVENTIONS} vectors in one request", path)
    return probes, added


def _probe(source: Any, own_name: str, path: str, probes: list[Probe]) -> str:
    if _kind(source, ("name", "inline"), path) == "name":
        _keys(source, ("kind", "name"), (), path)
        return source["name"]
    probes.append(one_probe(source, own_name, path))
    return own_name


def one_probe(source: Mapping[str, Any], name: str, path: str) -> Probe:
    """Return the probe of ``{"packed": {hook: vectors}}``, which holds one vector; it reads generated tokens."""
    found = _packed(source, path)
    if len(found) != 1 or not isinstance(found[0].layers, tuple):
        raise WeirError(f"a probe is one vector at one block, got {len(found)}", f"{path}.packed")
    (one,) = found
    weight = np.float32(one.scale) * one.vector.array
    return Probe(name, weight, hook=one.hook, layer=one.layers[0], positions="generated", path=path)


def _vectors(source: Any, path: str, names: KnownNames) -> Sequence[Add]:
    """Return what a vector source adds; of a name, what is registered under it."""
    if _kind(source, ("name", "inline"), path) == "inline":
        return _packed(source, path)
    _keys(source, ("kind", "name"), (), path)
    found = []
    for one in names.module(_name(source["name"], f"{path}.name"), f"{path}.name"):
        if not isinstance(one, Add) or one.positions.kind not in ("all", "generated"):
            raise WeirError("names a module that does more than add at all, or at generated, tokens", f"{path}.name")
        found.append(one)
    return found


def _packed(source: Mapping[str, Any], path: str) -> list[Add]:
    refuse_unknown_keys(source, ("kind", "packed", "name"), path)
    found = list(additions(source.get("packed"), f"{path}.packed", "generated"))
    if not found or any(one.vector.array is None for one in found):
        raise WeirError("expected {hook: numbers}, at least for one", f"{path}.packed")
    return found


def parse_table(table: Any) -> np.ndarray | None:
    """Parse ``patch_vectors``: float32 [n, width], or None if there are none."""
    if table is None:
        return None
    _keys(table, ("dtype", "shape", "data"), (), "patch_vectors")
    content = {"b64": table["data"], "dtype": table["dtype"], "shape": table["shape"]}
    return Vector.parse(content, "patch_vectors", (2,)).array


def from_patch(
    entries: Any, table: np.ndarray | None, names: KnownNames, row: np.ndarray | None = None
) -> list[Intervention]:
    """Translate ``patch`` and ``patch_vectors``: rows that are replaced, or mixed with others, at single positions.

    Rows of several positions of a site are joined, and a mask becomes a `Clamp` for each value that it lets
    through. Each intervention's `path` is the first entry that it stands for.

    Args:
        entries: ``patch``.
        table: of `parse_table`.
        names: what entries refer to.
        row: what all entries put in, which then name no source; None if they do.
    """
    out: list[Intervention] = []
    joined: dict[tuple[str, int, float], tuple[str, dict[int, np.ndarray]]] = {}
    for k, entry in enumerate(_entries(entries, "patch")):
        path = f"patch[{k}]"
        _keys(entry, ("layer", "hook", "dest_position"), ("alpha", "mask", *_SOURCES, "source_position"), path)
        layer, position = (_index(entry[name], f"{path}.{name}") for name in ("layer", "dest_position"))
        hook = normalise_hook(entry["hook"], f"{path}.hook")
        alpha = number(entry.get("alpha", 1.0), f"{path}.alpha")
        values, alphas = row if row is not None else _source(entry, hook, layer, path, table, names), None
        if entry.get("mask") is not None:
            alphas = alpha * _mask(entry["mask"], len(values), f"{path}.mask", table)
        first, rows = joined.get((hook, layer, alpha), (path, {}))
        if alphas is not None or any(position in there for _, there in joined.values()):
            out += _replaced(joined)
            joined, first, rows = {}, path, {}
        if alphas is None:
            joined[hook, layer, alpha] = first, {**rows, position: values}
            continue
        dims = np.flatnonzero(alphas)
        if len(out) + len(dims) > MAX_INTERVENTIONS:
            raise WeirError(f"masks of more than {MAX_INTERVENTIONS} values in one request", f"{path}.mask")
        for dim in dims.tolist():
            unit = np.zeros(len(values), np.float32)
            unit[dim] = 1.0
            more: dict[str, Any] = {"value": float(values[dim]), "strength": float(alphas[dim])}
            out.append(Clamp(unit, layer, hook=hook, positions=[position], path=path, **more))
    return [*out, *_replaced(joined)]


def _replaced(joined: Mapping[tuple[str, int, float], tuple[str, dict[int, np.ndarray]]]) -> Iterator[Replace]:
    for (hook, layer, alpha), (path, rows) in joined.items():
        positions = sorted(rows)
        values = np.stack([rows[p] for p in positions]) if len(rows) > 1 else rows[positions[0]]
        yield Replace(values, layer, alpha, hook, positions, path=path)


def _source(
    entry: Mapping[str, Any], hook: str, layer: int, path: str, table: np.ndarray | None, names: KnownNames
) -> np.ndarray:
    """Return the row that an entry puts in, float32 [width]."""
    given = [name for name in _SOURCES if entry.get(name) is not None]
    if len(given) != 1:
        raise WeirError(f"give one of {', '.join(_SOURCES)}, got {', '.join(given) or 'none'}", f"{path}.source_module")
    if given == ["source_run"]:
        raise WeirError(
            "no runs are kept on the server; capture the rows of the run, and send them in patch_vectors or in "
            '{"op": "replace"} under the key weir',
            f"{path}.source_run",
        )
    if given == ["source_inline"]:
        return _row(table, entry["source_inline"], f"{path}.source_inline")
    name = _name(entry["source_module"], f"{path}.source_module")
    if name == _ZEROS:
        return np.zeros(names.d_model, np.float32)
    found = [
        one
        for one in names.module(name, f"{path}.source_module")
        if isinstance(one, Add) and one.positions.kind == "all" and one.hook == hook and layer in one.layers
    ]
    if len(found) != 1 or found[0].vector.array is None or found[0].vector.array.ndim != 1:
        raise WeirError(f"{brief(name)!r} has no vector of its own for {hook}.{layer}", f"{path}.source_module")
    return np.float32(found[0].scale) * found[0].vector.array


def _mask(mask: Any, width: int, path: str, table: np.ndarray | None) -> np.ndarray:
    """Return what share of each value a mask lets through, float64 [width]."""
    _keys(mask, (), ("indices", "inline"), path)
    if (mask.get("indices") is None) == (mask.get("inline") is None):
        raise WeirError("give indices or inline", path)
    if mask.get("inline") is not None:
        row = _row(table, mask["inline"], f"{path}.inline")
        if len(row) != width:
            raise WeirError(f"{len(row)} values for rows of {width}", f"{path}.inline")
        return row.astype(np.float64)
    shares = np.zeros(width)
    if not isinstance(mask["indices"], list) or len(mask["indices"]) > width:
        raise WeirError(f"expected a list of at most {width} ints", f"{path}.indices")
    for at, index in enumerate(mask["indices"]):
        if _index(index, f"{path}.indices[{at}]") >= width:
            raise WeirError(f"a row has {width} values", f"{path}.indices[{at}]")
        shares[index] = 1.0
    return shares


def _row(table: np.ndarray | None, index: Any, path: str) -> np.ndarray:
    rows = 0 if table is None else len(table)
    if _index(index, path) >= rows or table is None:
        raise WeirError(f"patch_vectors has {rows} rows", path)
    return table[index]


def _entries(values: Any, path: str) -> list[Any]:
    if not isinstance(values, list):
        raise WeirError(f"expected a list, got {type(values).__name__}", path)
    if len(values) > MAX_INTERVENTIONS:
        raise WeirError(f"{len(values)} entries, more than the limit of {MAX_INTERVENTIONS}", path)
    return values


def _kind(data: Any, known: Sequence[str], path: str) -> str:
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in known:
        raise WeirError(f"expected an object whose kind is one of {', '.join(known)}", f"{path}.kind")
    return kind


def _keys(data: Any, required: Sequence[str], optional: Sequence[str], path: str) -> None:
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", path)
    refuse_unknown_keys(data, (*required, *optional), path)
    for name in required:
        if name not in data:
            raise WeirError("missing", f"{path}.{name}")


def _index(value: Any, path: str) -> int:
    if type(value) is not int or value < 0:
        raise WeirError("expected an int, counted from 0", path)
    return value


def _name(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise WeirError("expected a name", path)
    return value
