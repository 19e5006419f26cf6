"""Folders of pyreft (pyvene): low-rank interventions, as `LowRank` has them, and those that add one vector."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.vectors.codec import Found, Given
from vllm_weir.experiments.vectors.named import load
from vllm_weir.schema.fields import is_int, loads, plain
from vllm_weir.schema.interventions import LowRank
from vllm_weir.schema.vectors import Vector
from vllm_weir.util.foreign_files import read_regular

CONFIG = "config.json"
_MODULE = re.compile(r"(?:.*\.)?(?:layers|h)\[(\d{1,9})\](?:\.(self_attn|attn|mlp))?\.(input|output)", re.ASCII)
_HOOKS = {
    "block_input": "resid_pre",
    "block_output": "resid_post",
    "attention_output": "attn_out",
    "mlp_output": "mlp_out",
}
_MODULES = {
    (None, "input"): "block_input",
    (None, "output"): "block_output",
    ("self_attn", "output"): "attention_output",
    ("attn", "output"): "attention_output",
    ("mlp", "output"): "mlp_output",
}
_KINDS = ("Loreft", "Noreft", "Consreft", "Direft", "Nodireft", "Lobireft")
_CLASS = re.compile(r"(\w+?)Intervention\b")


class Entry(NamedTuple):
    """One intervention of a folder: its kind, place, and tensors."""

    kind: str
    hook: str
    layer: int
    tensors: Mapping[str, Any]
    field: str


def is_folder(path: Path) -> bool:
    return any(path.glob("intkey_*.bin"))


def load_reft(path: str | Path, positions: Any = "all") -> list[LowRank]:
    """Read the interventions of a folder that pyreft saved.

    pyreft's low-rank interventions are functions of the row that `LowRank` has, with R and W the
    projection and the source's weight: LoReFT and NoReFT as they are, ConsReFT with W = 0, and
    DiReFT and NodiReFT, ``h + R^T (W h + b)``, with W + R for W. The folder does not say an
    activation function, nor at which positions it was trained: it is read as linear.

    Args:
        path: the folder, with ``config.json`` and a file ``intkey_....bin`` for each intervention.
        positions: selector of the rows that are changed, which pyreft takes from each example's
            data; or a list of selectors, one for each intervention in the order of ``config.json``
            (a list of ints alone is one selector). Two interventions at one place need the list.

    Raises:
        WeirError: for interventions of other kinds, naming the entry; StoreError if a file cannot
            be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise WeirError(f"expected the path of a folder, got {type(path).__name__}", "path")
    entries, out = _entries(Path(path)), []
    for entry, selector in zip(entries, _selectors(positions, entries), strict=True):
        if entry.kind == "Lobireft":
            raise WeirError("LobiReFT adds one vector; read it with weir.load_vector", entry.field)
        R, W, b = _low_rank(entry)
        out.append(LowRank(R, W, b, layers=entry.layer, hook=entry.hook, positions=selector))
    return out


def _selectors(positions: Any, entries: Sequence[Entry]) -> list[Any]:
    """Return the selector of each intervention; raise WeirError if one would be for two of the same place."""
    if isinstance(positions, (list, tuple)) and not all(is_int(plain(item)) for item in positions):
        if len(positions) != len(entries):
            raise WeirError(f"{len(positions)} selectors for {len(entries)} interventions", "positions")
        return list(positions)
    first: dict[tuple[str, int], Entry] = {}
    for entry in entries:
        other = first.setdefault((entry.hook, entry.layer), entry)
        if other is not entry:
            raise WeirError(
                f"{other.field} and {entry.field} are both at {entry.hook}[{entry.layer}], each trained at positions "
                f"of its own; give a list of {len(entries)} selectors, one for each intervention (of ints: [[0], [3]])",
                "positions",
            )
    return [positions] * len(entries)


def read_vectors(path: Path, given: Given) -> Found:
    """Return the vectors of a folder all of whose interventions add one: LobiReFT's ``h + R^T b``."""
    given.refuse_layers("pyreft")
    vectors: dict[int, np.ndarray] = {}
    hooks = set()
    for entry in _entries(path):
        if entry.kind != "Lobireft":
            raise WeirError(
                f"{entry.kind} changes rows by a low-rank function, not by one vector; read it with weir.load_reft",
                entry.field,
            )
        rotation, b = _rotation(entry), _array(entry, "learned_source", 1)
        hooks.add(entry.hook)
        if entry.layer in vectors or len(hooks) > 1:
            raise WeirError("there are two vectors of that block", entry.field)
        vectors[entry.layer] = (rotation.astype(np.float64).T @ b.astype(np.float64)).astype(np.float32)
    hook = given.hook_or(hooks.pop(), "resid_post", "the file")
    text = f"pyreft: layer N is block N, counted from 0; LobiReFT adds R^T b, which is the vector: {hook}[N]."
    return Found(hook, vectors, "pyreft", text)


def _entries(path: Path) -> list[Entry]:
    """Read the interventions of a folder, in the order of its configuration."""
    config = _config(path)
    names = {file.name for file in path.glob("intkey_*.bin")}
    representations = _list(config, "representations", len(names))
    kinds = _list(config, "intervention_types", len(names))
    out = []
    for i, (entry, kind) in enumerate(zip(representations, kinds, strict=True)):
        place = _Place.parse(entry, f"{CONFIG}.representations[{i}]")
        files = [name for name in sorted(names) if place.is_of(name)]
        if not files:
            raise WeirError("there is no file intkey_....bin of it", f"{CONFIG}.representations[{i}]")
        name = files[0]
        names.remove(name)
        hook, layer = place.site(name)
        tensors = load(path / name, name)
        if not isinstance(tensors, Mapping):
            raise WeirError("expected the tensors of an intervention", name)
        out.append(Entry(_kind(kind, f"{CONFIG}.intervention_types"), hook, layer, tensors, name))
    return out


def _list(config: Mapping[str, Any], name: str, count: int) -> list[Any]:
    value = config.get(name)
    if not isinstance(value, list) or len(value) != count:
        raise WeirError(f"expected {count} entries, one for each file intkey_....bin", f"{CONFIG}.{name}")
    return value


class _Place(NamedTuple):
    """Where an intervention acts, as pyvene's configuration says it."""

    layer: Any
    component: str
    unit: str
    units: Any

    @classmethod
    def parse(cls, entry: Any, field: str) -> _Place:
        """Parse an entry: a list, or an object in later versions."""
        if isinstance(entry, dict):
            entry = [entry.get(name) for name in ("layer", "component", "unit", "max_number_of_units")]
        if not isinstance(entry, list) or len(entry) < 4 or not all(isinstance(text, str) for text in entry[1:3]):
            raise WeirError("expected [layer, component, unit, number of units]", field)
        return cls(*entry[:4])

    def is_of(self, name: str) -> bool:
        """Return whether that file is of an intervention there; versions of pyvene join with other characters."""
        key = name.removeprefix("intkey_").rpartition("#")[0]
        start = "" if "." in self.component else f"layer.{self.layer}."
        end = f"{self.component}.unit.{self.unit}.nunit.{self.units}"
        return _joined(key) in (_joined(f"{start}comp.{end}"), _joined(f"{start}repr.{end}"))

    def site(self, field: str) -> tuple[str, int]:
        """Return its hook point and block."""
        layer, component = self.layer, self.component
        module = _MODULE.fullmatch(component)
        if module:
            layer, component = int(module[1]), _MODULES.get((module[2], module[3]), component)
        if component not in _HOOKS or not is_int(layer):
            raise WeirError(f"{brief(component)!r} is not supported; known are {', '.join(_HOOKS)}", field)
        if self.unit != "pos":
            raise WeirError(f"units are positions, pos, not {brief(self.unit)!r}", field)
        return _HOOKS[component], int(layer)


def _joined(key: str) -> str:
    return key.replace(".", "_")


def _kind(text: Any, field: str) -> str:
    match = _CLASS.search(text) if isinstance(text, str) else None
    if match is None or match[1] not in _KINDS:
        raise WeirError(f"{brief(text, 80)} is not supported; known are {', '.join(_KINDS)}", field)
    return match[1]


def _low_rank(entry: Entry) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return R [r, d], W [r, d] and b [r] of ``h + R^T (W h + b - R h)``."""
    if entry.kind == "Consreft":
        R, b = _rotation(entry), _array(entry, "learned_source", 1)
        W = np.zeros_like(R)
    else:
        prefix = "" if entry.kind == "Loreft" else "learned_source."
        W, b = _array(entry, f"{prefix}weight", 2), _array(entry, f"{prefix}bias", 1)
        projects = entry.kind in ("Noreft", "Nodireft")
        R = _array(entry, "proj_layer.weight", 2) if projects else _rotation(entry)
        if entry.kind == "Noreft" and "proj_layer.bias" in entry.tensors:
            b = b - _array(entry, "proj_layer.bias", 1)
    if R.shape != W.shape or len(b) != len(R):
        raise WeirError(f"R {list(R.shape)}, W {list(W.shape)} and b {list(b.shape)} do not fit together", entry.field)
    return R, W + R if entry.kind in ("Direft", "Nodireft") else W, b


def _rotation(entry: Entry) -> np.ndarray:
    """Return R [r, d], whose rows are orthonormal: the weight [d, r] transposed."""
    if "rotate_layer" in entry.tensors:
        return np.ascontiguousarray(_array(entry, "rotate_layer", 2).T)
    import torch

    prefix = "rotate_layer.parametrizations."
    name = f"{prefix}weight.original"
    if name not in entry.tensors:
        raise WeirError("missing", f"{entry.field}.rotate_layer")
    module = torch.nn.Module()  # with no more than the weight of pyreft's class
    module.register_parameter("weight", torch.nn.Parameter(torch.from_numpy(_array(entry, name, 2).copy())))
    layer: Any = torch.nn.utils.parametrizations.orthogonal(module)
    state = {key.removeprefix("rotate_layer."): value for key, value in entry.tensors.items() if key.startswith(prefix)}
    try:
        layer.load_state_dict(state)
    except RuntimeError as e:
        raise WeirError(str(e).splitlines()[-1].strip()[:120], f"{entry.field}.rotate_layer") from None
    return np.ascontiguousarray(layer.weight.detach().numpy().T)


def _array(entry: Entry, name: str, ndim: int) -> np.ndarray:
    field = f"{entry.field}.{name}"
    if name not in entry.tensors:
        raise WeirError("missing", field)
    array = Vector.parse(entry.tensors[name], field, (ndim,)).array
    if array is None:
        raise WeirError("expected numbers", field)
    return array


def _config(path: Path) -> dict[str, Any]:
    out = loads(read_regular(path / CONFIG), CONFIG)
    if not isinstance(out, dict):
        raise WeirError("expected an object", CONFIG)
    return out
