"""Interventions: what a request does to the stream. Each is lowered to instructions over single vectors.

An instruction adds ``c(h) * u`` to a row h (float32), where every c of one intervention sees the same h:

    CONST   c = a
    NORM    c = a * |h|
    AFFINE  c = a * (w . h) + b
    CLAMP   c = a * (min(max(w . h, lo), hi) - w . h)
    BLEND   adds a * (u - h)
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.spec.capture import parse_place
from vllm_weir.spec.hooks import layers_of
from vllm_weir.spec.positions import Positions
from vllm_weir.spec.vectors import Vector, digest_of, number

CONST, NORM, AFFINE, CLAMP, BLEND = range(5)
INFINITE = float(np.float32(3.4e38))


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


class Lowered(NamedTuple):
    """Instructions of one intervention and the rows they use, by digest.

    `per_position`: instruction k is for the k-th selected position alone, instead of all of them for every position.
    """

    instructions: tuple[Instruction, ...]
    rows: dict[str, np.ndarray]
    per_position: bool = False


def reach(term: Instruction, rows: Mapping[str, np.ndarray]) -> float:
    """What an instruction sets a value to, or adds to it whatever the row is, at most."""
    if term.kind == AFFINE:
        factor = abs(term.b)
    elif term.kind == CLAMP:
        factor = abs(term.a) * max((abs(v) for v in (term.lo, term.hi) if abs(v) < INFINITE), default=0.0)
    else:
        factor = abs(term.a)  # of NORM: a unit vector's, in units of the row's own norm
    return factor * float(np.abs(rows[term.u]).max()) if term.u else 0.0


class _Rows:
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
    """

    op: ClassVar[str]
    vectors: ClassVar[dict[str, tuple[int, ...]]]
    factor: ClassVar[str]
    """The field that says how much is changed."""
    layers: Any
    hook: str
    positions: Any
    path: str

    def __post_init__(self) -> None:
        at = self.path
        hook, layers = parse_place(self.hook, self.layers, at)
        object.__setattr__(self, "hook", hook)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "positions", Positions.parse(self.positions, f"{at}.positions"))
        for name, ndim in self.vectors.items():
            object.__setattr__(self, name, Vector.parse(getattr(self, name), f"{at}.{name}", ndim))
        self._check()

    def _check(self) -> None:
        """Check the numbers of a kind."""

    def _number(self, name: str, minimum: float | None = None) -> None:
        object.__setattr__(self, name, number(getattr(self, name), f"{self.path}.{name}", minimum))

    def to_json(self) -> dict[str, Any]:
        """The wire form."""
        out: dict[str, Any] = {"op": self.op, "hook": self.hook, "positions": self.positions.to_json()}
        out["layers"] = "all" if self.layers == "all" else list(self.layers)
        for name in self._own_fields():
            value = getattr(self, name)
            if value is not None:
                out[name] = value.to_json() if isinstance(value, Vector) else value
        return out

    @property
    def given(self) -> dict[str, Vector]:
        """Its vectors, by field."""
        return {name: getattr(self, name) for name in self.vectors}

    @classmethod
    @functools.cache
    def _own_fields(cls) -> list[str]:
        shared = {"layers", "hook", "positions", "path"}
        return [f.name for f in fields(cls) if f.name not in shared]  # type: ignore[arg-type]

    def resolve_layers(self, num_layers: int) -> tuple[int, ...]:
        """Block indices; raises WeirError if one is out of range."""
        return layers_of(self.hook, self.layers, num_layers, f"{self.path}.layers")

    def with_arrays(self, lookup: Callable[[str, str], np.ndarray]) -> Intervention:
        """A copy whose references are resolved. `lookup`: as for `lower`."""
        out = copy.copy(self)
        for name in self.vectors:
            vector: Vector = getattr(self, name)
            if vector.array is None:
                object.__setattr__(out, name, Vector(array=lookup(vector.ref, f"{self.path}.{name}")))
        return out

    def lower(self, d_model: int, lookup: Callable[[str, str], np.ndarray]) -> Lowered:
        """Instructions for a model; none if the intervention changes nothing.

        Args:
            d_model: width of the stream.
            lookup: (reference, field) -> array, or raises WeirError.
        """
        arrays = {}
        for name in self.vectors:
            vector: Vector = getattr(self, name)
            at = f"{self.path}.{name}"
            array = vector.array if vector.array is not None else lookup(vector.ref, at)
            if array.ndim not in self.vectors[name]:
                raise WeirError(f"expected {self.vectors[name]} dimensions, got shape {list(array.shape)}", at)
            if name != "b" and array.shape[-1] != d_model:
                raise WeirError(f"width {array.shape[-1]} does not match the model's {d_model}", at)
            arrays[name] = array
        lowered = self._lower(*arrays.values())
        if lowered.per_position and self.positions.needs_token_ids:
            raise WeirError(
                "rows by position need positions that are known beforehand; give one row, or list the positions",
                f"{self.path}.positions",
            )
        return lowered

    def _lower(self, *arrays: Any) -> Lowered:
        """Instructions from the arrays of `vectors`, in that order."""
        raise NotImplementedError


@dataclass(frozen=True)
class Add(Intervention):
    """Add ``scale * vector`` to every selected row (activation addition, Turner et al. 2023, arXiv:2308.10248).

    Args:
        vector: [d_model], or [n, d_model] to add the k-th row at the k-th selected position in ascending order.
        scale: factor.
        norm_match: rescale the vector to each row's own L2 norm first: h + scale * |h| * v / |v|.
    """

    op: ClassVar[str] = "add"
    factor: ClassVar[str] = "scale"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"vector": (1, 2)}
    vector: Any
    layers: Any = "all"
    scale: float = 1.0
    hook: str = "resid_post"
    positions: Any = "all"
    norm_match: bool = False
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _check(self) -> None:
        self._number("scale")
        if not isinstance(self.norm_match, bool):
            raise WeirError("norm_match is true or false", f"{self.path}.norm_match")

    def _lower(self, *arrays: np.ndarray) -> Lowered:
        (vector,) = arrays
        if not vector.any() or self.scale == 0:
            return Lowered((), {})
        rows = _Rows()
        if vector.ndim == 1 and not self.norm_match:
            digest = rows.add(vector, self.vector.digest if self.vector.array is vector else "")
            return Lowered((Instruction(CONST, digest, a=self.scale),), rows.rows)
        terms = []
        for row in np.atleast_2d(vector).astype(np.float64):
            norm = float(np.linalg.norm(row))
            if norm == 0:
                terms.append(NOTHING)
            elif self.norm_match:
                terms.append(Instruction(NORM, rows.add(row / norm), a=self.scale))
            else:
                terms.append(Instruction(CONST, rows.add(row), a=self.scale))
        return Lowered(tuple(terms), rows.rows, per_position=vector.ndim == 2)


@dataclass(frozen=True)
class Ablate(Intervention):
    """Project a subspace out of every selected row (directional ablation, Arditi et al. 2024, arXiv:2406.11717).

    Args:
        directions: [d_model] or [k, d_model]; their span is removed (they need not be orthogonal).
    """

    op: ClassVar[str] = "ablate"
    factor: ClassVar[str] = "directions"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"directions": (1, 2)}
    directions: Any
    layers: Any = "all"
    hook: str = "resid_post"
    positions: Any = "all"
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _lower(self, *arrays: np.ndarray) -> Lowered:
        (directions,) = arrays
        matrix = np.atleast_2d(directions).astype(np.float64)
        lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
        if not lengths.all():
            raise WeirError("a direction of length zero spans nothing", f"{self.path}.directions")
        _, singular, basis = np.linalg.svd(matrix / lengths, full_matrices=False)
        rows = _Rows()
        names = [rows.add(row) for row in basis[singular > 1e-6 * singular[0]]]
        return Lowered(tuple(Instruction(AFFINE, n, n, a=-1.0) for n in names), rows.rows)


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
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"direction": (1,)}
    direction: Any
    layers: Any = "all"
    value: float | None = field(default=None, kw_only=True)
    min: float | None = field(default=None, kw_only=True)
    max: float | None = field(default=None, kw_only=True)
    strength: float = field(default=1.0, kw_only=True)
    hook: str = "resid_post"
    positions: Any = "all"
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

    def _lower(self, *arrays: np.ndarray) -> Lowered:
        (direction,) = arrays
        length = float(np.linalg.norm(direction.astype(np.float64)))
        if length == 0:
            raise WeirError("a direction of length zero has no component", f"{self.path}.direction")
        if self.strength == 0:
            return Lowered((), {})
        rows = _Rows()
        unit = rows.add(direction.astype(np.float64) / length)
        lo = self.value if self.value is not None else (-INFINITE if self.min is None else self.min)
        hi = self.value if self.value is not None else (INFINITE if self.max is None else self.max)
        return Lowered((Instruction(CLAMP, unit, unit, a=self.strength, lo=lo, hi=hi),), rows.rows)


@dataclass(frozen=True)
class Replace(Intervention):
    """Put given rows in place of the selected ones (activation patching, Vig et al. 2020, arXiv:2004.12265).

    Args:
        values: [d_model], one row for all selected positions, or [n, d_model], the k-th row for the k-th selected
            position in ascending order; positions beyond the n-th keep their own.
        alpha: 1 replaces, 0.5 mixes half and half.
    """

    op: ClassVar[str] = "replace"
    factor: ClassVar[str] = "values"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"values": (1, 2)}
    values: Any
    layers: Any = "all"
    alpha: float = 1.0
    hook: str = "resid_post"
    positions: Any = "all"
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _check(self) -> None:
        self._number("alpha")

    def _lower(self, *arrays: np.ndarray) -> Lowered:
        (values,) = arrays
        if self.alpha == 0:
            return Lowered((), {})
        rows = _Rows()
        terms = tuple(Instruction(BLEND, rows.add(row), a=self.alpha) for row in np.atleast_2d(values))
        return Lowered(terms, rows.rows, per_position=values.ndim == 2)


@dataclass(frozen=True)
class LowRank(Intervention):
    """h + R^T (W h + b - R h): LoReFT (Wu et al. 2024, arXiv:2404.03592).

    Args:
        R, W: [r, d_model]; pyreft keeps R with orthonormal rows, which is not required here.
        b: [r].
    """

    op: ClassVar[str] = "low_rank"
    factor: ClassVar[str] = "b"
    vectors: ClassVar[dict[str, tuple[int, ...]]] = {"R": (1, 2), "W": (1, 2), "b": (1,)}
    R: Any
    W: Any
    b: Any
    layers: Any = "all"
    hook: str = "resid_post"
    positions: Any = "all"
    path: str = field(default="intervention", repr=False, compare=False, kw_only=True)

    def _lower(self, *arrays: np.ndarray) -> Lowered:
        right, left, b = np.atleast_2d(arrays[0]), np.atleast_2d(arrays[1]), arrays[2]
        if right.shape != left.shape or len(b) != len(right):
            raise WeirError(
                f"R {list(right.shape)}, W {list(left.shape)} and b [{len(b)}] do not fit", f"{self.path}.W"
            )
        rows = _Rows()
        difference = left.astype(np.float64) - right.astype(np.float64)
        terms = tuple(
            Instruction(AFFINE, rows.add(r), rows.add(d), a=1.0, b=float(bias))
            for r, d, bias in zip(right, difference, b, strict=True)
            if r.any()
        )
        return Lowered(terms, rows.rows)


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
class Move:
    """An intervention resolved against a model, in the engine's terms. `digest` is of what it does, not of where."""

    hook: str
    layers: tuple[int, ...]
    positions: Positions
    per_position: bool
    instructions: tuple[Instruction, ...]
    path: str = field(default="interventions", repr=False, compare=False)

    def check_rows(self, prompt_len: int | None = None, end: int | None = None) -> None:
        """Raise WeirError if there are more rows than positions for them (`prompt_len` None: with any prompt); `end`:
        first position that the request cannot reach.

        Rows that are left over would be ignored, and rows after a position before the prompt's start land elsewhere.
        """
        most = self.positions.count(prompt_len, end) if self.per_position else None
        if most is not None and len(self.instructions) > most:
            there = "" if prompt_len is None else f" with a prompt of {prompt_len} tokens"
            raise WeirError(
                f"{len(self.instructions)} rows for {most} positions{there}; give one row for each, or one for all",
                f"{self.path}.positions",
            )

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
    def from_wire(cls, data: list[Any]) -> Move:
        """The inverse of `to_wire`."""
        hook, layers, positions, per_position, ins = data
        return cls(hook, tuple(layers), Positions.parse(positions), per_position, tuple(Instruction(*i) for i in ins))
