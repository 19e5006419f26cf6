"""Interventions: what a request does to the stream. Each is lowered to instructions over single vectors.

An instruction adds ``c(h) * u`` to a row h (float32), where every c of one intervention sees the same h:

    CONST      c = a
    NORM       c = a * |h|
    AFFINE     c = a * (w . h) + b
    CLAMP      c = a * (min(max(w . h, lo), hi) - w . h)
    BLEND      adds a * (u - h)
    KEEP_NORM  turns h towards c * u, c = a + b * |h|: adds s * |h| / |s| - h, s = h + c * u; nothing if s = 0
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.by_layer import VectorsByLayer, is_by_layer
from vllm_weir.schema.by_position import PER_LAYER, ByPosition
from vllm_weir.schema.capture import parse_place
from vllm_weir.schema.hooks import layers_of
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.vectors import MAX_ROWS, Vector, digest_of, number

CONST, NORM, AFFINE, CLAMP, BLEND, KEEP_NORM = range(6)
INFINITE = float(np.float32(3.4e38))
MOST_TURNED, MOST_RATIO = 1e16, 1e9
"""Length of what KEEP_NORM adds before it restores the norm, and its ratio to the row's. With more of it the row would
be the same in float32, and the sum of squares would overflow."""


class Instruction(NamedTuple):
    """One term; `u` and `w` are digests of float32 rows [d_model], empty where there is none."""

    kind: int
    u: str
    w: str = ""
    a: float = 0.0
    b: float = 0.0
    lo: float = -INFINITE
    hi: float = INFINITE


NOTHING = Instruction(CONST, "")
"""Stands at the number of a position that keeps its row."""


class LoweredIntervention(NamedTuple):
    """Instructions of one intervention and the rows they use, by digest.

    `by_position`: instruction k is for the k-th selected position alone; None: all are for every position.
    """

    instructions: tuple[Instruction, ...]
    rows: dict[str, np.ndarray]
    by_position: ByPosition | None = None

    @property
    def per_position(self) -> bool:
        """Whether each instruction is for one position."""
        return self.by_position is not None


def reach(term: Instruction, rows: Mapping[str, np.ndarray]) -> float:
    """What an instruction sets a value to, or adds to it whatever the row is, at most."""
    if term.kind == AFFINE:
        factor = abs(term.b)
    elif term.kind == CLAMP:
        factor = abs(term.a) * max((abs(v) for v in (term.lo, term.hi) if abs(v) < INFINITE), default=0.0)
    elif term.kind == KEEP_NORM:
        factor = 0.0  # no value exceeds the norm that the row has anyway
    else:
        factor = abs(term.a)  # of NORM: a unit vector's, in units of the row's own norm
    return factor * float(np.abs(rows[term.u]).max()) if term.u else 0.0


class _VectorCollector:
    """Collects rows by content."""

    def __init__(self) -> None:
        self.rows: dict[str, np.ndarray] = {}

    def add(self, row: np.ndarray, digest: str = "") -> str:
        """`digest`: the row's, if that is known."""
        row = np.ascontiguousarray(row, np.float32)
        digest = digest or digest_of(row)
        self.rows[digest] = row
        return digest


class Intervention:
    """What every intervention has.

    Args:
        layers: ``"all"``, a block index, or a list of them.
        hook: hook point; everything downstream of it sees the change.
        positions: selector, as for `Capture`.
        per_layer: whether the vectors have a leading axis, one entry for each of `layers` in the order given.

    Wherever one vector is expected, [1, d_model] is the same as [d_model]. A vector may also be given for each layer,
    as ``{layer: vector}``; then `layers` is left out.
    """

    op: ClassVar[str]
    vectors: ClassVar[dict[str, tuple[int, ...]]]
    """The fields that hold vectors, and how many dimensions they may have."""
    factor: ClassVar[str]
    """The field that says how much is changed."""
    by_position: ClassVar[str] = ""
    """The field of which several rows go by position."""
    single: ClassVar[str] = ""
    """The field that holds one vector."""
    layers: Any
    hook: str
    positions: Any
    per_layer: bool
    path: str
    where = ""
    """Follows the vectors' fields in errors, for an intervention that is a part of another, see `by_layer`."""

    def __post_init__(self) -> None:
        at = self.path
        if not isinstance(self.per_layer, bool):
            raise WeirError("per_layer is true or false", f"{at}.per_layer")
        hook, layers = parse_place(self.hook, self.layers, at, ordered=self.per_layer)
        object.__setattr__(self, "hook", hook)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "positions", Positions.parse(self.positions, f"{at}.positions"))
        for name, ndim in self.vectors.items():
            object.__setattr__(self, name, self._parse(name, ndim))
        self._check()

    def _parse(self, name: str, ndim: tuple[int, ...]) -> Vector | VectorsByLayer:
        """A field's vectors, their shapes checked as far as they are known."""
        value, at = getattr(self, name), f"{self.path}.{name}"
        stacked = (*ndim, max(ndim) + 1)  # one dimension more is refused below, with a word about layers
        if is_by_layer(value):
            return self._parse_by_layer(VectorsByLayer.parse(value, at, stacked), name)
        if self.per_layer:
            vector = Vector.parse(value, at, tuple(n + 1 for n in ndim))
            if vector.array is not None:
                self._check_stack(name, vector.array, None if self.layers == "all" else len(self.layers))
            return vector
        return self._checked(Vector.parse(value, at, stacked), name, at)

    def _parse_by_layer(self, value: VectorsByLayer, name: str) -> VectorsByLayer:
        at = f"{self.path}.{name}"
        if self.per_layer:
            raise WeirError("{layer: vector} says which layer each vector is for; leave per_layer out", at)
        if self.layers not in ("all", value.layers):
            raise WeirError(f"vectors for layers {list(value.layers)}, but layers is {list(self.layers)}", at)
        object.__setattr__(self, "layers", value.layers)
        return value.replaced(lambda vector, field: self._checked(vector, name, field), at)

    def _check_stack(self, name: str, array: np.ndarray, layers: int | None) -> None:
        """Raise WeirError unless `array` has an entry for each of so many layers, and each fits the positions."""
        at = f"{self.path}.{name}"
        if layers is not None and len(array) != layers:
            raise WeirError(f"per_layer: {len(array)} vectors for {layers} layers", at)
        if array.ndim == 3 and array.shape[1] > MAX_ROWS:
            raise WeirError(f"{array.shape[1]} rows, more than the limit of {MAX_ROWS}", at)
        self._check_rows(name, array.shape[1] if array.ndim == 3 else 1, at)

    def _checked(self, vector: Vector, name: str, at: str) -> Vector:
        """A vector of which [1, d] has become [d], where that means the same."""
        if vector.array is None or vector.array.ndim == 1:
            return vector
        if vector.array.ndim not in self.vectors[name]:
            raise WeirError(_wrong_shape(vector.array, self.vectors[name]), at)
        self._check_rows(name, len(vector.array), at)
        row = self._row(name, vector.array)
        return vector if row is vector.array else Vector(row)

    def _row(self, name: str, array: np.ndarray) -> np.ndarray:
        """[1, d] as [d] where it is one vector; anything else as it is."""
        return array[0] if array.ndim == 2 and len(array) == 1 and name in (self.by_position, self.single) else array

    def _check_rows(self, name: str, rows: int, at: str) -> None:
        """Raise WeirError if a vector of so many rows cannot be meant."""
        if rows > 1 and name == self.single:
            raise WeirError(f"expected one vector, got {rows} rows; {PER_LAYER}", at)
        if rows > 1 and name == self.by_position:
            ByPosition(rows, self.positions, self.path).check()

    def _check(self) -> None:
        """Check the numbers of a kind."""

    def _number(self, name: str, minimum: float | None = None) -> None:
        object.__setattr__(self, name, number(getattr(self, name), f"{self.path}.{name}", minimum))

    def _flag(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise WeirError(f"{name} is true or false", f"{self.path}.{name}")

    def to_json(self) -> dict[str, Any]:
        """The wire form."""
        out: dict[str, Any] = {"op": self.op, "hook": self.hook, "positions": self.positions.to_json()}
        out["layers"] = "all" if self.layers == "all" else list(self.layers)
        for name in self._own_fields():
            value = getattr(self, name)
            if name in _LATER and not value:
                continue
            if value is not None:
                out[name] = value.to_json() if isinstance(value, (Vector, VectorsByLayer)) else value
        return out

    @property
    def given(self) -> list[Vector]:
        """Its vectors."""
        out: list[Vector] = []
        for name in self.vectors:
            value = getattr(self, name)
            out += value.vectors.values() if isinstance(value, VectorsByLayer) else [value]
        return out

    @classmethod
    @functools.cache
    def _own_fields(cls) -> list[str]:
        shared = {"layers", "hook", "positions", "path"}
        return [f.name for f in fields(cls) if f.name not in shared]  # type: ignore[arg-type]

    def resolve_layers(self, num_layers: int) -> tuple[int, ...]:
        """Block indices; raises WeirError if one is out of range."""
        return layers_of(self.hook, self.layers, num_layers, self.layers_field)

    @property
    def layers_field(self) -> str:
        """The field that says the layers: that of ``{layer: vector}``, or `layers`."""
        by_layer = (name for name in self.vectors if isinstance(getattr(self, name), VectorsByLayer))
        return f"{self.path}.{next(by_layer, 'layers')}"

    def with_vectors(self, change: Callable[[Vector, str], Vector]) -> Intervention:
        """A copy of which each vector is ``change(vector, its field)``."""
        out = copy.copy(self)
        for name in self.vectors:
            value, at = getattr(self, name), f"{self.path}.{name}"
            new = value.replaced(change, at) if isinstance(value, VectorsByLayer) else change(value, at)
            object.__setattr__(out, name, new)
        return out

    def with_arrays(self, lookup: Callable[[str, str], np.ndarray]) -> Intervention:
        """A copy whose references are resolved. `lookup`: as for `lower`."""
        return self.with_vectors(lambda v, at: v if v.array is not None else Vector(array=lookup(v.ref, at)))

    def by_layer(self, num_layers: int, lookup: Callable[[str, str], np.ndarray]) -> list[Intervention]:
        """Interventions that do the same together, none of which has vectors by layer: this one alone if it has none.

        Args:
            num_layers: of the model.
            lookup: as for `lower`.
        """
        values = {name: getattr(self, name) for name in self.vectors}
        if not self.per_layer and not any(isinstance(v, VectorsByLayer) for v in values.values()):
            return [self]
        layers = self.resolve_layers(num_layers)
        if self.per_layer:
            for name, vector in values.items():
                values[name] = array = _array(vector, f"{self.path}.{name}", lookup)
                if array.ndim - 1 not in self.vectors[name]:
                    raise WeirError(_wrong_shape(array, [n + 1 for n in self.vectors[name]]), f"{self.path}.{name}")
                self._check_stack(name, array, len(layers))
        out = []
        for k, layer in sorted(enumerate(layers), key=lambda entry: entry[1]):
            one = copy.copy(self)
            object.__setattr__(one, "layers", (layer,))
            object.__setattr__(one, "per_layer", False)
            object.__setattr__(one, "where", f"[{k}]" if self.per_layer else f".{layer}")
            for name, value in values.items():
                if self.per_layer:
                    value = Vector(array=value[k])
                elif isinstance(value, VectorsByLayer):
                    value = value.vectors[layer]
                object.__setattr__(one, name, value)
            out.append(one)
        return out

    def lower(self, d_model: int, lookup: Callable[[str, str], np.ndarray]) -> LoweredIntervention:
        """Instructions for a model; none if the intervention changes nothing. Not for vectors by layer.

        Args:
            d_model: width of the stream.
            lookup: (reference, field) -> array, or raises WeirError.
        """
        arrays, by_position = {}, None
        for name, ndim in self.vectors.items():
            at = f"{self.path}.{name}{self.where}"
            array = self._row(name, _array(getattr(self, name), at, lookup))
            if array.ndim not in ndim:
                raise WeirError(_wrong_shape(array, ndim), at)
            if name != "b" and array.shape[-1] != d_model:
                raise WeirError(f"width {array.shape[-1]} does not match the model's {d_model}", at)
            if array.ndim == 2:
                self._check_rows(name, len(array), at)
                if name == self.by_position:
                    by_position = ByPosition(len(array), self.positions, self.path)
            arrays[name] = array
        return self._lower(*arrays.values())._replace(by_position=by_position)

    def _lower(self, *arrays: Any) -> LoweredIntervention:
        """Instructions from the arrays of `vectors`, in that order."""
        raise NotImplementedError


_LATER = ("per_layer", "keep_norm")
"""Fields that are written only where they are set: an older server does not know them."""


def _array(vector: Vector, at: str, lookup: Callable[[str, str], np.ndarray]) -> np.ndarray:
    return vector.array if vector.array is not None else lookup(vector.ref, at)


def _wrong_shape(array: np.ndarray, ndim: Sequence[int]) -> str:
    wanted = " or ".join(map(str, ndim))
    hint = f"; {PER_LAYER}" if array.ndim > max(ndim) else ""
    return f"expected {wanted} dimensions, got shape {list(array.shape)}{hint}"


@dataclass(frozen=True)
class Add(Intervention):
    """Add ``scale * vector`` to every selected row (activation addition, Turner et al. 2023, arXiv:2308.10248).

    Args:
        vector: [d_model]; or [n, d_model], n > 1, to add the k-th row at the k-th selected position in ascending order,
            for `positions` that select exactly n.
        scale: factor.
        norm_match: rescale the vector to each row's own L2 norm first: h + scale * |h| * v / |v|.
        keep_norm: rescale the sum to the L2 norm that the row had; a sum of length zero leaves the row as it is.
    """

    op: ClassVar[str] = "add"
    factor: ClassVar[str] = "scale"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"vector": (1, 2)}
    by_position: ClassVar[str] = "vector"
    vector: Any
    layers: Any = "all"
    scale: float = 1.0
    hook: str = "resid_post"
    positions: Any = "all"
    norm_match: bool = False
    keep_norm: bool = False
    per_layer: bool = False
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _check(self) -> None:
        self._number("scale")
        self._flag("norm_match")
        self._flag("keep_norm")

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        (vector,) = arrays
        if not vector.any() or self.scale == 0:
            return LoweredIntervention((), {})
        rows = _VectorCollector()
        known = self.vector.digest if self.vector.array is vector and vector.ndim == 1 else ""
        return LoweredIntervention(tuple(self._term(rows, row, known) for row in np.atleast_2d(vector)), rows.rows)

    def _term(self, rows: _VectorCollector, vector: np.ndarray, digest: str) -> Instruction:
        """What is added where `vector` [d_model] is. `digest`: the vector's, if that is known."""
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        if norm == 0:
            return NOTHING
        u = rows.add(vector.astype(np.float64) / norm) if self.norm_match else rows.add(vector, digest)
        if not self.keep_norm:
            return Instruction(NORM if self.norm_match else CONST, u, a=self.scale)
        if self.norm_match:
            return Instruction(KEEP_NORM, u, b=max(-MOST_RATIO, min(self.scale, MOST_RATIO)))
        most = MOST_TURNED / norm
        return Instruction(KEEP_NORM, u, a=max(-most, min(self.scale, most)))


@dataclass(frozen=True)
class Ablate(Intervention):
    """Project a subspace out of every selected row (directional ablation, Arditi et al. 2024, arXiv:2406.11717).

    Args:
        directions: [d_model] or [k, d_model]; their span is removed at every selected position (they need not be
            orthogonal).
    """

    op: ClassVar[str] = "ablate"
    factor: ClassVar[str] = "directions"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"directions": (1, 2)}
    directions: Any
    layers: Any = "all"
    hook: str = "resid_post"
    positions: Any = "all"
    per_layer: bool = False
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        (directions,) = arrays
        matrix = np.atleast_2d(directions).astype(np.float64)
        lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
        if not lengths.all():
            raise WeirError("a direction of length zero spans nothing", f"{self.path}.directions{self.where}")
        _, singular, basis = np.linalg.svd(matrix / lengths, full_matrices=False)
        rows = _VectorCollector()
        names = [rows.add(row) for row in basis[singular > 1e-6 * singular[0]]]
        return LoweredIntervention(tuple(Instruction(AFFINE, n, n, a=-1.0) for n in names), rows.rows)


@dataclass(frozen=True)
class Clamp(Intervention):
    """Set or bound the component along a direction (feature clamping, Templeton et al. 2024).

    Args:
        direction: [d_model]; used as a unit vector, so `value`, `min` and `max` are lengths along it.
        value: the component's new value; or else
        min, max: bounds, either may be left out.
        strength: 1 clamps fully, 0.5 goes half the way.
    """

    op: ClassVar[str] = "clamp"
    factor: ClassVar[str] = "value"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"direction": (1, 2)}
    single: ClassVar[str] = "direction"
    direction: Any
    layers: Any = "all"
    value: float | None = field(default=None, kw_only=True)
    min: float | None = field(default=None, kw_only=True)
    max: float | None = field(default=None, kw_only=True)
    strength: float = field(default=1.0, kw_only=True)
    hook: str = "resid_post"
    positions: Any = "all"
    per_layer: bool = False
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _check(self) -> None:
        for name in ("value", "min", "max"):
            if getattr(self, name) is not None:
                self._number(name)
        self._number("strength")
        if (self.value is None) == (self.min is None and self.max is None):
            raise WeirError("give value, or min and / or max", f"{self.path}.value")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise WeirError(f"min {self.min:g} is above max {self.max:g}", f"{self.path}.min")

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        (direction,) = arrays
        length = float(np.linalg.norm(direction.astype(np.float64)))
        if length == 0:
            raise WeirError("a direction of length zero has no component", f"{self.path}.direction{self.where}")
        if self.strength == 0:
            return LoweredIntervention((), {})
        rows = _VectorCollector()
        unit = rows.add(direction.astype(np.float64) / length)
        lo = self.value if self.value is not None else (-INFINITE if self.min is None else self.min)
        hi = self.value if self.value is not None else (INFINITE if self.max is None else self.max)
        return LoweredIntervention((Instruction(CLAMP, unit, unit, a=self.strength, lo=lo, hi=hi),), rows.rows)


@dataclass(frozen=True)
class Replace(Intervention):
    """Put given rows in place of the selected ones (activation patching, Vig et al. 2020, arXiv:2004.12265).

    Args:
        values: [d_model], one row for all selected positions; or [n, d_model], n > 1, the k-th row for the k-th
            selected position in ascending order, for `positions` that select exactly n.
        alpha: 1 replaces, 0.5 mixes half and half.
    """

    op: ClassVar[str] = "replace"
    factor: ClassVar[str] = "values"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"values": (1, 2)}
    by_position: ClassVar[str] = "values"
    values: Any
    layers: Any = "all"
    alpha: float = 1.0
    hook: str = "resid_post"
    positions: Any = "all"
    per_layer: bool = False
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _check(self) -> None:
        self._number("alpha")

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        (values,) = arrays
        if self.alpha == 0:
            return LoweredIntervention((), {})
        rows = _VectorCollector()
        terms = tuple(Instruction(BLEND, rows.add(row), a=self.alpha) for row in np.atleast_2d(values))
        return LoweredIntervention(terms, rows.rows)


@dataclass(frozen=True)
class LowRank(Intervention):
    """h + R^T (W h + b - R h): LoReFT (Wu et al. 2024, arXiv:2404.03592).

    Args:
        R, W: [r, d_model]; pyreft keeps R with orthonormal rows, which is not required here.
        b: [r] or [1, r].
    """

    op: ClassVar[str] = "low_rank"
    factor: ClassVar[str] = "b"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"R": (1, 2), "W": (1, 2), "b": (1, 2)}
    single: ClassVar[str] = "b"
    R: Any
    W: Any
    b: Any
    layers: Any = "all"
    hook: str = "resid_post"
    positions: Any = "all"
    per_layer: bool = False
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _lower(self, *arrays: np.ndarray) -> LoweredIntervention:
        right, left, b = np.atleast_2d(arrays[0]), np.atleast_2d(arrays[1]), arrays[2]
        if right.shape != left.shape or len(b) != len(right):
            raise WeirError(
                f"R {list(right.shape)}, W {list(left.shape)} and b [{len(b)}] do not fit", f"{self.path}.W{self.where}"
            )
        rows = _VectorCollector()
        difference = left.astype(np.float64) - right.astype(np.float64)
        terms = tuple(
            Instruction(AFFINE, rows.add(r), rows.add(d), a=1.0, b=float(bias))
            for r, d, bias in zip(right, difference, b, strict=True)
            if r.any()
        )
        return LoweredIntervention(terms, rows.rows)


KINDS: dict[str, type[Intervention]] = {c.op: c for c in (Add, Ablate, Clamp, Replace, LowRank)}


def parse_intervention(data: object, path: str) -> Intervention:
    """An Intervention from itself or its wire form; unknown keys are refused."""
    if isinstance(data, Intervention):
        return data
    if not isinstance(data, Mapping):
        raise WeirError(f"an intervention is an object, got {type(data).__name__}", path)
    kind = KINDS.get(data["op"]) if isinstance(data.get("op"), str) else None
    if kind is None:
        raise WeirError(f"unknown op {brief(data.get('op'))!r}; choose from {', '.join(KINDS)}", f"{path}.op")
    known = {*kind._own_fields(), "layers", "hook", "positions"}
    for key in data:
        if key != "op" and key not in known:
            raise WeirError(f"unknown key; {kind.op} knows {', '.join(sorted(known))}", f"{path}.{brief(key)}")
    for name in kind.vectors:
        if name not in data:
            raise WeirError("missing", f"{path}.{name}")
    return kind(**{k: v for k, v in data.items() if k != "op"}, path=path)  # type: ignore[call-arg]


@dataclass(frozen=True)
class ResolvedIntervention:
    """An intervention resolved against a model, in the engine's terms. `digest` is of what it does, not of where."""

    hook: str
    layers: tuple[int, ...]
    positions: Positions
    per_position: bool
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Content address of what this move does to a row at its sites."""
        content = msgspec.msgpack.encode([self.hook, self.layers, self.instructions])
        return hashlib.sha256(content).hexdigest()[:32]

    @functools.cached_property
    def vectors(self) -> frozenset[str]:
        """Digests of the rows that it uses."""
        return frozenset(d for i in self.instructions for d in (i.u, i.w) if d)

    def to_wire(self) -> list[Any]:
        """For scheduler and workers."""
        ins = [list(i) for i in self.instructions]
        return [self.hook, list(self.layers), self.positions.to_json(), self.per_position, ins]

    @classmethod
    def from_wire(cls, data: list[Any]) -> ResolvedIntervention:
        """The inverse of `to_wire`."""
        hook, layers, positions, per_position, ins = data
        return cls(hook, tuple(layers), Positions.parse(positions), per_position, tuple(Instruction(*i) for i in ins))
