"""`Intervention`: what all interventions share, from parsing vectors to lowering them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.capture import parse_place
from vllm_weir.schema.fields import parse_flag, set_fields, with_fields
from vllm_weir.schema.gates import When
from vllm_weir.schema.hooks import HEAD_HOOKS, layers_of, refuse_read_only
from vllm_weir.schema.instructions import LoweredIntervention, on_heads, on_neurons
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.rows import RowPart, RowShape
from vllm_weir.schema.vector_axes import (
    EACH,
    ONE,
    PER_LAYER,
    TOGETHER,
    VectorAxes,
    VectorsByLayer,
    check_row_each,
    is_by_layer,
)
from vllm_weir.schema.vectors import MAX_ROWS, Vector, number

Lookup = Callable[[str, str], np.ndarray]
"""(reference, field) -> the float32 array; raises WeirError naming the field if there is none."""

MAX_INTERVENTIONS = 1024
"""Interventions in one request, in one module, and in what steers every request."""
_ONLY_IF_SET = ("per_layer", "keep_norm", "read_back", "joins", "error")
"""Fields that are written only where they are set, since older servers do not know them."""


T = TypeVar("T", bound="Intervention")


def at_most(interventions: Iterable[T], path: str = "") -> list[T]:
    """Return interventions, of which no more are made than a request may have.

    Args:
        interventions: made one by one.
        path: named if there are too many; else that of the first one too many.
    """
    made = list(itertools.islice(interventions, MAX_INTERVENTIONS + 1))
    if len(made) > MAX_INTERVENTIONS:
        raise WeirError(
            f"more than {MAX_INTERVENTIONS} interventions in one request; send separate requests", path or made[-1].path
        )
    return made


class Intervention:
    """What every intervention has.

    Args:
        layers: ``"all"``, a block index, or a list of them.
        hook: hook point; everything downstream of it sees the change.
        positions: selector, as for `Capture`.
        per_layer: whether the vectors have a leading axis, one entry for each of `layers` in the
            order given.
        heads: heads to change, at hook points with a row for each head: an int, or several in a
            list, range, array or tensor; None: the whole row. Vectors are [d_head] then.
        neurons: likewise entries of the rows of `mlp_post`; vectors are [neurons picked].
        when: a `When`, the condition under which it acts; None: always.

    Wherever one vector is expected, [1, d_model] is the same as [d_model]. A vector may also be
    given for each layer, as ``{layer: vector}``; then `layers` is left out. For a whole row with
    heads, it is [heads, d_head] or [heads * d_head]; `VectorAxes` says what is read with `heads`.
    """

    op: ClassVar[str]
    """Its name in the wire form."""
    vectors: ClassVar[dict[str, tuple[int, ...]]]
    """The fields that hold vectors, and how many dimensions each may have."""
    factor: ClassVar[str]
    """The field that errors name if the change is too large for the model's dtype."""
    rows_by_position: ClassVar[str] = ""
    """The field whose rows, if it has several, are for one selected position each."""
    single_vector: ClassVar[str] = ""
    """The field that holds one vector, never several."""
    numbers: ClassVar[str] = ""
    """The field whose vector has a number for each row of the others."""
    layers: Any
    hook: str
    positions: Any
    per_layer: bool
    heads: Any
    neurons: Any
    when: Any
    path: str
    where = ""
    """The layer, appended to the vectors' fields in errors; set by `by_layer`."""
    by_layer_field = ""
    """The first field that has a vector for each layer, if any."""

    def __post_init__(self) -> None:
        parse_flag(self.per_layer, "per_layer", self.path)
        hook, layers = parse_place(self.hook, self.layers, self.path, ordered=self.per_layer)
        refuse_read_only(hook, f"{self.path}.hook")
        part = RowPart.parse(hook, self.heads, self.neurons, self.path)
        positions = Positions.parse(self.positions, f"{self.path}.positions")
        when = When.parse(self.when, f"{self.path}.when")
        set_fields(
            self, hook=hook, layers=layers, positions=positions, heads=part.heads, neurons=part.neurons, when=when
        )
        for name in self.vectors:
            set_fields(self, **{name: self._parse_vectors(name, self._ndim(name))})
        self._parse_numbers()

    def _parse_numbers(self) -> None:
        """Normalise and check the fields of one kind of intervention that hold no vectors."""

    def _parse_number(self, name: str) -> None:
        set_fields(self, **{name: number(getattr(self, name), f"{self.path}.{name}")})

    def _ndim(self, name: str) -> tuple[int, ...]:
        """Return how many dimensions a field's vectors may have."""
        ndim = self.vectors[name]
        return (*ndim, max(ndim) + 1) if self.hook in HEAD_HOOKS and name != self.numbers else ndim

    def _axes(self, name: str, field: str) -> VectorAxes:
        """Return how a field's vectors are read; `field` is named by errors."""
        meaning = ONE if name == self.single_vector else EACH if name == self.rows_by_position else TOGETHER
        return VectorAxes(self.hook, self.part, meaning, self.positions, field)

    @property
    def part(self) -> RowPart:
        """The heads or neurons that are picked."""
        return RowPart(self.heads, self.neurons)

    def _parse_vectors(self, name: str, ndim: tuple[int, ...]) -> Vector | VectorsByLayer:
        """Parse a field's vectors and check their shapes, unless they are references."""
        value, field = getattr(self, name), f"{self.path}.{name}"
        # One dimension too many is refused in `_checked`, which says how to give layers.
        parsed_ndim = (*ndim, max(ndim) + 1)
        if is_by_layer(value):
            return self._parse_by_layer(VectorsByLayer.parse(value, field, parsed_ndim), name)
        if self.per_layer:
            vector = Vector.parse(value, field, tuple(n + 1 for n in ndim))
            if vector.array is not None:
                self._check_stack(name, vector.array, None if self.layers == "all" else len(self.layers))
            return vector
        return self._checked(Vector.parse(value, field, parsed_ndim), name, field)

    def _parse_by_layer(self, vectors: VectorsByLayer, name: str) -> VectorsByLayer:
        """Take the layers from ``{layer: vector}``, and check each vector."""
        field = f"{self.path}.{name}"
        if self.per_layer:
            raise WeirError("{layer: vector} says which layer each vector is for; leave per_layer out", field)
        if self.layers not in ("all", vectors.layers):
            raise WeirError(f"vectors for layers {list(vectors.layers)}, but layers is {list(self.layers)}", field)
        set_fields(self, layers=vectors.layers, by_layer_field=self.by_layer_field or name)
        return vectors.replaced(lambda vector, vector_field: self._checked(vector, name, vector_field), field)

    def _check_stack(self, name: str, array: np.ndarray, num_layers: int | None) -> None:
        """Raise WeirError unless `array` has an entry for each layer that fits the positions.

        `num_layers` is None where it depends on the model.
        """
        field = f"{self.path}.{name}"
        if num_layers is not None and len(array) != num_layers:
            raise WeirError(f"per_layer: {len(array)} vectors for {num_layers} layers", field)
        self._check_rows(name, array[0], field)

    def _checked(self, vector: Vector, name: str, field: str) -> Vector:
        """Check a vector's shape, and turn [1, d] into [d] where that means the same."""
        if vector.array is None or vector.array.ndim == 1:
            return vector
        if vector.array.ndim not in self._ndim(name):
            raise WeirError(_wrong_shape(vector.array, self._ndim(name)), field)
        self._check_rows(name, vector.array, field)
        squeezed = self._squeezed(name, vector.array)
        return vector if squeezed is vector.array else Vector(squeezed)

    def _squeezed(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return [1, d] as [d] where the field takes one vector; anything else as it is."""
        if array.ndim == 2 and len(array) == 1 and name in (self.rows_by_position, self.single_vector):
            return array[0]
        return array

    def _check_rows(self, name: str, array: np.ndarray, field: str) -> None:
        """Raise WeirError if the field cannot have as many rows as `array` has."""
        rows = len(array) if array.ndim > 1 else 1
        if name != self.numbers and self.hook in HEAD_HOOKS:
            known = self._axes(name, field).count_rows(array)
            if known is None:  # `lower` knows the row's shape
                return
            rows = known
        self._check_count(name, rows, field)

    def _check_count(self, name: str, rows: int, field: str) -> None:
        """Raise WeirError if the field cannot have so many rows."""
        if rows > MAX_ROWS:
            raise WeirError(f"{rows} rows, more than the limit of {MAX_ROWS}", field)
        if rows > 1 and name == self.single_vector:
            raise WeirError(f"expected one vector, got {rows} rows; {PER_LAYER}", field)
        if rows > 1 and name == self.rows_by_position:
            check_row_each(rows, self.positions, self.path)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        out: dict[str, Any] = {"op": self.op, "hook": self.hook, "positions": self.positions.to_json()}
        out["layers"] = "all" if self.layers == "all" else list(self.layers)
        for name in self.own_fields():
            value = getattr(self, name)
            if value is None or (name in _ONLY_IF_SET and not value):
                continue
            if isinstance(value, (Vector, VectorsByLayer, When)):
                value = value.to_json()
            out[name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    @functools.cache
    def own_fields(cls) -> list[str]:
        """Return the fields of the wire form besides `layers`, `hook` and `positions`."""
        shared = {"layers", "hook", "positions", "path"}
        return [f.name for f in fields(cls) if f.name not in shared]  # type: ignore[arg-type]

    @property
    def given(self) -> list[Vector]:
        """All its vectors, those by layer included."""
        out: list[Vector] = []
        for name in self.vectors:
            value = getattr(self, name)
            out += value.vectors.values() if isinstance(value, VectorsByLayer) else [value]
        return out

    def resolve_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the block indices for `num_layers` blocks; raise WeirError if one is missing."""
        return layers_of(self.hook, self.layers, num_layers, self.layers_field)

    @property
    def layers_field(self) -> str:
        """The field that says the layers: that of ``{layer: vector}``, or `layers`."""
        return f"{self.path}.{self.by_layer_field or 'layers'}"

    def with_vectors(self, change: Callable[[Vector, str], Vector]) -> Intervention:
        """Return a copy of which each vector is ``change(vector, its field)``."""
        changed: dict[str, Vector | VectorsByLayer] = {}
        for name in self.vectors:
            value, field = getattr(self, name), f"{self.path}.{name}"
            by_layer = isinstance(value, VectorsByLayer)
            changed[name] = value.replaced(change, field) if by_layer else change(value, field)
        return with_fields(self, **changed)

    def with_arrays(self, lookup: Lookup) -> Intervention:
        """Return a copy in which `lookup` has replaced references by arrays."""
        return self.with_vectors(
            lambda vector, field: vector if vector.array is not None else Vector(array=lookup(vector.ref, field))
        )

    def by_layer(self, num_layers: int, lookup: Lookup) -> list[Intervention]:
        """Split into interventions of one layer each if the vectors differ by layer.

        Args:
            num_layers: of the model.
            lookup: resolves references.

        Returns:
            Interventions that together do the same; ``[self]`` if the vectors are those of all
            layers.
        """
        if not self.per_layer and not self.by_layer_field:
            return [self]
        values = {name: getattr(self, name) for name in self.vectors}
        if self.per_layer:
            layers = self.resolve_layers(num_layers)
            stacks = {name: self._stack(name, value, len(layers), lookup) for name, value in values.items()}
            parts = [
                (layer, f"[{k}]", {name: Vector(array=stack[k]) for name, stack in stacks.items()})
                for k, layer in enumerate(layers)
            ]
        else:
            parts = [
                (layer, f".{layer}", {name: _at_layer(value, layer) for name, value in values.items()})
                for layer in self.resolve_layers(num_layers)
            ]
        parts.sort(key=lambda part: part[0])
        return [
            with_fields(self, layers=(layer,), per_layer=False, where=where, by_layer_field="", **vectors)
            for layer, where, vectors in parts
        ]

    def _stack(self, name: str, vector: Vector, num_layers: int, lookup: Lookup) -> np.ndarray:
        """Return the checked array of a `per_layer` field, say [layers, d] or [layers, n, d]."""
        field = f"{self.path}.{name}"
        array = _array(vector, field, lookup)
        if array.ndim - 1 not in self._ndim(name):
            raise WeirError(_wrong_shape(array, [n + 1 for n in self._ndim(name)]), field)
        self._check_stack(name, array, num_layers)
        return array

    def lower(self, shape: RowShape, lookup: Lookup) -> LoweredIntervention:
        """Return the instructions for a model; none if the intervention changes nothing.

        An intervention whose vectors differ by layer is split by `by_layer` first.

        Args:
            shape: of a row at the hook point.
            lookup: resolves references.

        Raises:
            WeirError: if a vector does not fit the row or the positions, or the row has no such
                head or neuron.
        """
        if self.heads is not None or self.neurons is not None:
            self.part.check(shape, self.hook, self.path)
        split, by_position = [], 0
        for name in self.vectors:
            field = f"{self.path}.{name}{self.where}"
            arrays = self._read(name, _array(getattr(self, name), field, lookup), shape, field)
            if arrays[0].ndim == 2 and name == self.rows_by_position:
                by_position = len(arrays[0])
            split.append(arrays)
        if self.heads is None:
            lowered = self._lower(*(arrays[0] for arrays in split))
            if self.neurons is not None:
                lowered = on_neurons(lowered, self.neurons, shape[0])
        else:
            lowered = on_heads(self._lower_heads(split), self.heads, shape[1], by_position)
        return lowered._replace(by_position=by_position)

    def _read(self, name: str, array: np.ndarray, shape: RowShape, field: str) -> list[np.ndarray]:
        """Return a field's array for the row, or those for the heads that are picked; check them."""
        array = self._squeezed(name, array)
        if array.ndim not in self._ndim(name):
            raise WeirError(_wrong_shape(array, self._ndim(name)), field)
        if name == self.numbers:
            self._check_count(name, len(array) if array.ndim == 2 else 1, field)
            return [array] * len(self.heads or (0,))
        if len(shape) == 1 and self.neurons is None and array.shape[-1] == shape[0]:
            arrays = [array]  # as nearly always
        else:
            axes = self._axes(name, field)
            axes.count_rows(array)
            arrays = axes.split(array, shape)
        if arrays[0].ndim == 2:
            self._check_count(name, len(arrays[0]), field)
        return arrays

    def _lower_heads(self, split: list[list[np.ndarray]]) -> list[LoweredIntervention]:
        """Return what is done to each head that is picked; `split` has a list of arrays for each field."""
        out: list[LoweredIntervention] = []
        for k, arrays in enumerate(zip(*split, strict=True)):
            same = k and all(arrays[n] is split[n][k - 1] for n in range(len(arrays)))
            out.append(out[-1] if same else self._lower(*arrays))
        return out

    def _lower(self, *arrays: Any) -> LoweredIntervention:
        """Return the instructions, given the arrays of `vectors` in that order."""
        raise NotImplementedError


def _array(vector: Vector, field: str, lookup: Lookup) -> np.ndarray:
    return vector.array if vector.array is not None else lookup(vector.ref, field)


def _at_layer(value: Vector | VectorsByLayer, layer: int) -> Vector:
    return value.vectors[layer] if isinstance(value, VectorsByLayer) else value


def _wrong_shape(array: np.ndarray, ndim: Sequence[int]) -> str:
    wanted = " or ".join(map(str, ndim))
    hint = f"; {PER_LAYER}" if array.ndim > max(ndim) else ""
    return f"expected {wanted} dimensions, got shape {list(array.shape)}{hint}"
