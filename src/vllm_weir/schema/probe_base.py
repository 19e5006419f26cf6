"""`ProbeBase`: what all probes share, from parsing their fields to resolving them against a row."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from vllm_weir.errors import StoreError, WeirError, brief
from vllm_weir.schema.fields import is_int, plain, refuse_unknown_keys, set_fields, with_fields
from vllm_weir.schema.hooks import DERIVED_HOOKS, HEAD_HOOKS, MODEL_HOOKS, Site, normalise_hook, split_transformer_lens
from vllm_weir.schema.instructions import VectorCollector
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.probe_codec import encode
from vllm_weir.schema.resolved_probes import (
    EMA,
    MAXIMUM,
    MEAN,
    NO_ACTIVATION,
    NO_SMOOTHING,
    SIGMOID,
    SOFTMAX,
    ResolvedProbe,
)
from vllm_weir.schema.rows import RowShape, row_width
from vllm_weir.schema.vectors import Vector, number
from vllm_weir.util.atomic_write import atomic_write

MAX_NAME, MAX_WINDOW = 256, 65_536
ACTIVATIONS = {"none": NO_ACTIVATION, "sigmoid": SIGMOID, "softmax": SOFTMAX}
Activation = Literal["none", "sigmoid", "softmax"]
SMOOTHINGS = {None: NO_SMOOTHING, "ema": EMA, "max": MAXIMUM, "mean": MEAN}
_LARGEST = 2**31 - 1
_RESERVED = "<>=[]"
"""What rules of ``stop_when`` are written with."""
Smooth = tuple[str] | tuple[str, float] | None
"""None, ``("ema", a)``, ``("max",)`` or ``("mean", window)``."""


class Layout(NamedTuple):
    """The fields of a `ResolvedProbe` that the kind of probe determines."""

    outputs: int
    rows: tuple[str, ...]
    offsets: tuple[float, ...]
    hidden: int = 0
    out_rows: tuple[str, ...] = ()
    out_offsets: tuple[float, ...] = ()
    heads: int = 0


class ProbeBase:
    """What every probe has.

    Args:
        name: under which the scores come back, and by which gates and ``stop_when`` know the probe.
        hook: hook point whose rows it reads, after the interventions there.
        layer: its block; left out where the hook point's name says it.
        activation: ``"none"``, ``"sigmoid"`` of each output, or ``"softmax"`` over the outputs.
        smooth: None; ``("ema", a)``, an exponential moving average ``y = a * score + (1 - a) * y``;
            ``("max",)``, the largest score so far; ``("mean", window)``, of the last scores.
        positions: selector of the rows that are scored, as for `Capture`.
        head: at hook points with a row for each head, the head that it reads; its vectors are
            [d_head] then.
    """

    kind: ClassVar[str]
    """Its name in the wire form."""
    vectors: ClassVar[dict[str, tuple[int, ...]]]
    """The fields that hold vectors, and how many dimensions each may have."""
    biases: ClassVar[tuple[str, ...]]
    """The fields that hold a number, or one for each row of another field; the last has one for each output."""
    code: ClassVar[int]
    """Its `ResolvedProbe.kind`."""
    name: str
    hook: str
    layer: Any
    activation: str
    smooth: Any
    positions: Any
    head: Any
    path: str

    def __post_init__(self) -> None:
        parse_name(self.name, f"{self.path}.name")
        site = parse_probe_site(self.hook, self.layer, self.path)
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            raise WeirError(
                f"unknown activation {brief(self.activation)!r}; choose from {', '.join(ACTIVATIONS)}",
                f"{self.path}.activation",
            )
        set_fields(
            self,
            hook=site.hook,
            layer=site.layer,
            head=_parse_head(self.head, site.hook, f"{self.path}.head"),
            smooth=parse_smooth(self.smooth, f"{self.path}.smooth"),
            positions=Positions.parse(self.positions, f"{self.path}.positions"),
        )
        for name, ndim in self.vectors.items():
            set_fields(self, **{name: Vector.parse(getattr(self, name), f"{self.path}.{name}", ndim)})
        for name in self.biases:
            set_fields(self, **{name: _parse_bias(getattr(self, name), f"{self.path}.{name}")})
        self._parse_own()
        if all(vector.array is not None for vector in self.given):
            self._read(_no_lookup)  # checks the shapes

    def _parse_own(self) -> None:
        """Normalise and check the fields of one kind of probe that hold no vectors."""

    @property
    def site(self) -> Site:
        """The site that it reads."""
        return Site(self.hook, self.layer)

    @property
    def given(self) -> list[Vector]:
        """All its vectors."""
        return [getattr(self, name) for name in self.vectors]

    @property
    def outputs(self) -> int | None:
        """How many scores it gives each row; None if that depends on a registered vector."""
        if any(vector.array is None for vector in self.given):
            return None
        return len(self._read(_no_lookup)[self.biases[-1]])

    def with_vectors(self, change: Callable[[Vector, str], Vector]) -> Any:
        """Return a copy of which each vector is ``change(vector, its field)``."""
        changed = {name: change(getattr(self, name), f"{self.path}.{name}") for name in self.vectors}
        return with_fields(self, **changed)

    def with_arrays(self, lookup: Callable[[str, str], np.ndarray]) -> Any:
        """Return a copy in which `lookup` has replaced references by arrays; check their shapes."""
        out = self.with_vectors(
            lambda vector, field: vector if vector.array is not None else Vector(array=lookup(vector.ref, field))
        )
        out._read(lookup)
        return out

    def at(self, path: str) -> Any:
        """Return it under another path, which errors name."""
        return self if self.path == path else with_fields(self, path=path)

    def resolve(self, shape: RowShape, lookup: Callable[[str, str], np.ndarray]) -> tuple[ResolvedProbe, dict]:
        """Return the probe for rows of a shape, and the vectors that it uses by digest.

        Args:
            shape: of a row of its site.
            lookup: (reference, field) -> array, or raises WeirError.

        Raises:
            WeirError: if its vectors do not fit the row, or the row has no such head.
        """
        start, stop = self._columns(shape)
        arrays, collector = self._read(lookup), VectorCollector()
        width, wanted = self._width(arrays), stop - start if stop else row_width(shape)
        if width != wanted:
            row = f"a head of {self.hook}" if stop else f"a row of {self.hook}"
            hint = "; say which head= it reads" if not stop and len(shape) == 2 and width == shape[1] else ""
            raise WeirError(
                f"its vectors have {width} values, and {row} has {wanted}{hint}",
                f"{self.path}.{next(iter(self.vectors))}",
            )
        layout = self._layout(collector, arrays)
        kind, *parameter = self.smooth or (None,)
        resolved = ResolvedProbe(
            self.name,
            self.hook,
            self.layer,
            self.positions,
            self.code,
            start=start,
            stop=stop,
            activation=ACTIVATIONS[self.activation],
            smoothing=SMOOTHINGS[kind],
            parameter=float(parameter[0]) if parameter else 0.0,
            **layout._asdict(),
        )
        return resolved, collector.rows

    def _columns(self, shape: RowShape) -> tuple[int, int]:
        """Return the columns that it reads; (0, 0) for the whole row."""
        if self.head is None:
            return 0, 0
        if self.head >= shape[0]:
            raise WeirError(
                f"head {self.head} does not exist: {self.hook} has heads 0..{shape[0] - 1}", f"{self.path}.head"
            )
        return self.head * shape[1], (self.head + 1) * shape[1]

    def _read(self, lookup: Callable[[str, str], np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of `vectors` and `biases`, of full shape; check that they fit together."""
        arrays = {}
        for name, ndim in self.vectors.items():
            vector, field = getattr(self, name), f"{self.path}.{name}"
            array = vector.array if vector.array is not None else lookup(vector.ref, field)
            if array.ndim not in ndim:
                wanted = " or ".join(map(str, ndim))
                raise WeirError(f"expected {wanted} dimensions, got shape {list(array.shape)}", field)
            arrays[name] = array
        return self._fitted(arrays)

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays in full shape, with those of `biases`; raise WeirError if they do not fit together."""
        raise NotImplementedError

    def _width(self, arrays: Mapping[str, np.ndarray]) -> int:
        """Return how many values of a row it reads."""
        return arrays[next(iter(self.vectors))].shape[-1]

    def _layout(self, collector: VectorCollector, arrays: Mapping[str, np.ndarray]) -> Layout:
        """Return its raw numbers and outputs; vectors go to `collector`."""
        raise NotImplementedError

    def _bias(self, name: str, count: int) -> np.ndarray:
        """Return a bias as float32 [count]."""
        value = getattr(self, name)
        if isinstance(value, float):
            return np.full(count, value, np.float32)
        if len(value) != count:
            raise WeirError(f"{len(value)} numbers for {count} rows", f"{self.path}.{name}")
        return np.array(value, np.float32)

    def _check_outputs(self, outputs: int) -> None:
        """Raise WeirError if its activation is not for so many outputs."""
        if outputs == 1 and self.activation == "softmax":
            raise WeirError("the softmax of one output is always 1; use sigmoid", f"{self.path}.activation")

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, defaults left out."""
        return {
            "kind": self.kind,
            **self.plain_fields(),
            **{name: getattr(self, name).to_json() for name in self.vectors},
        }

    def plain_fields(self) -> dict[str, Any]:
        """Return the fields of the wire form that hold no vectors, defaults left out."""
        out: dict[str, Any] = {"name": self.name, "hook": self.hook, "layer": self.layer}
        for name in self.biases:
            value = getattr(self, name)
            out[name] = list(value) if isinstance(value, tuple) else value
        if self.activation != "none":
            out["activation"] = self.activation
        if self.smooth is not None:
            out["smooth"] = list(self.smooth)
        if self.positions.kind != "all":
            out["positions"] = self.positions.to_json()
        if self.head is not None:
            out["head"] = self.head
        return out

    @classmethod
    def from_json(cls, data: object, path: str = "probe") -> Any:
        """Parse the wire form of this kind of probe; raise WeirError for unknown keys."""
        if isinstance(data, cls):
            return data.at(path)
        if not isinstance(data, Mapping):
            raise WeirError(f"a probe is an object, got {type(data).__name__}", path)
        if data.get("kind") != cls.kind:
            raise WeirError(f"expected {cls.kind!r}, got {brief(data.get('kind'))!r}", f"{path}.kind")
        values = {key: value for key, value in data.items() if key != "kind"}
        known = cls.wire_fields()
        refuse_unknown_keys(values, known, path, f"a {cls.kind} probe knows {', '.join(known)}")
        for name in cls.required_fields():
            if name not in values:
                raise WeirError("missing", f"{path}.{name}")
        return cls(**values, path=path)  # type: ignore[call-arg]

    @classmethod
    def wire_fields(cls) -> list[str]:
        """Return the fields of the wire form besides ``kind``."""
        return [f.name for f in fields(cls) if f.name != "path"]  # type: ignore[arg-type]

    @classmethod
    def required_fields(cls) -> list[str]:
        """Return the fields that have no default."""
        return [f.name for f in fields(cls) if f.default is MISSING]  # type: ignore[arg-type]

    def to_bytes(self, form: str = "safetensors") -> bytes:
        """Return the contents of the file that `save` writes.

        Args:
            form: ``"safetensors"`` or ``"json"``.

        Raises:
            WeirError: if a vector is only a name.
        """
        vectors = {name: getattr(self, name) for name in self.vectors}
        return encode({"kind": self.kind, **self.plain_fields()}, vectors, self.path, form)

    def save(self, path: str | os.PathLike) -> None:
        """Write the probe to a safetensors file, or to a JSON file if the name ends in ``.json``.

        `vllm_weir.load_probe` reads it back, and a server takes it with ``PUT /v1/probes/NAME``.

        Raises:
            WeirError: if a vector is only a name.
            StoreError: if the file cannot be written.
        """
        data = self.to_bytes("json" if Path(path).suffix.lower() == ".json" else "safetensors")
        try:
            with atomic_write(path) as file:
                file.write(data)
        except (OSError, ValueError) as e:
            raise StoreError(f"cannot write {brief(path, 200)}: {str(e)[:80]}", "path") from None


def _no_lookup(ref: str, field: str) -> np.ndarray:
    raise AssertionError("none of its vectors is a reference")


def parse_name(name: object, field: str) -> str:
    """Return the name of a probe; raise WeirError if it cannot be one."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        hint = "; give the probe's name, and the probe itself in probes=" if isinstance(name, ProbeBase) else ""
        raise WeirError(f"the name of a probe is a text of 1 to {MAX_NAME} characters{hint}", field)
    if name != name.strip() or not name.isprintable() or any(c in _RESERVED for c in name):
        raise WeirError(
            f"{brief(name)!r}: the name of a probe has no {' '.join(_RESERVED)}, control characters, or blanks around "
            "it",
            field,
        )
    return name


def parse_probe_site(hook: object, layer: object, path: str) -> Site:
    """Return the site that a probe reads; raise WeirError naming ``path.hook`` or ``path.layer``."""
    named = split_transformer_lens(hook, f"{path}.hook")
    name = named.hook if named is not None else normalise_hook(hook, f"{path}.hook")
    if name in DERIVED_HOOKS:
        raise WeirError(
            f"{name} is computed when an output is read, so nothing can be scored there while the model runs; probe "
            f"{'z, what the heads give' if name in HEAD_HOOKS else 'router_logits or mlp_out'}",
            f"{path}.hook",
        )
    field, layer = f"{path}.layer", plain(layer)
    if layer is None:
        if named is not None:
            return named
        if name in MODEL_HOOKS:
            return Site(name, 0)
        raise WeirError("missing: say which block it reads", field)
    if not is_int(layer):
        raise WeirError(f"a probe reads one block, an int; got {type(layer).__name__}", field)
    if not 0 <= layer <= _LARGEST:  # type: ignore[operator]
        raise WeirError(f"block {brief(layer)} does not exist: blocks count from 0", field)
    if named is not None and named.layer != layer:
        raise WeirError(f"the hook's name says block {named.layer} already; leave layer out", field)
    return Site(name, int(layer))  # type: ignore[call-overload]


def parse_smooth(smooth: object, field: str) -> Smooth:
    """Parse the smoothing of a probe's scores."""
    if smooth is None:
        return None
    parts = [smooth] if isinstance(smooth, str) else list(smooth) if isinstance(smooth, (list, tuple)) else []
    kind = parts[0] if parts and isinstance(parts[0], str) else ""
    if kind == "max" and len(parts) == 1:
        return ("max",)
    if kind == "ema" and len(parts) == 2:
        factor = number(parts[1], f"{field}[1]")
        if not 0 < factor <= 1:
            raise WeirError(f"the weight of the newest score is above 0 and at most 1, got {factor:g}", f"{field}[1]")
        return "ema", factor
    if kind == "mean" and len(parts) == 2:
        window = plain(parts[1])
        if not is_int(window) or not 1 <= window <= MAX_WINDOW:
            raise WeirError(f"the window is an int from 1 to {MAX_WINDOW}, got {brief(window)}", f"{field}[1]")
        return "mean", int(window)
    raise WeirError(f'choose from None, ("ema", a), ("max",) and ("mean", window), got {brief(smooth)}', field)


def _parse_head(head: object, hook: str, field: str) -> int | None:
    head = plain(head)
    if head is None:
        return None
    if hook not in HEAD_HOOKS:
        raise WeirError(f"{hook} has no heads: leave head out", field)
    if not is_int(head) or not 0 <= head <= _LARGEST:  # type: ignore[operator]
        raise WeirError(f"a probe reads one head, an int from 0; got {brief(head)}", field)
    return int(head)  # type: ignore[call-overload]


def _parse_bias(value: object, field: str) -> float | tuple[float, ...]:
    """Return a number, or a tuple of float32 numbers."""
    value = plain(value)
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        return number(value, field)
    vector = Vector.parse(value, field, (1,))
    if vector.array is None:
        raise WeirError("expected a number or a list of numbers, got a name", field)
    return tuple(vector.array.tolist())
