"""How the vectors of one field are given: by layer, by position, by head."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hooks import HEAD_HOOKS, PART_HOOKS
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.rows import RowPart, RowShape, row_width
from vllm_weir.schema.vectors import Vector

_NUMBER = re.compile(r"-?\d+", re.ASCII)
_MAX_DIGITS = 9
"""Most digits of a block's number."""


class VectorsByLayer:
    """A `Vector` for each of some blocks. Not a dataclass, for the reason that `Vector` gives.

    Attributes:
        vectors: by block, ascending.
    """

    def __init__(self, vectors: Mapping[int, Vector]) -> None:
        self.vectors = dict(sorted(vectors.items()))

    def __repr__(self) -> str:
        return f"VectorsByLayer({self.vectors!r})"

    def shown(self, name: str) -> str:
        """Return a short text for the repr of what holds it in the field `name`."""
        first, *others = [f"{layer}: {vector.shown(name)}" for layer, vector in self.vectors.items()]
        if len(others) > 2:
            others = [f"... {len(others) - 1} more", others[-1]]
        return f"{{{', '.join([first, *others])}}}"

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.vectors)

    @classmethod
    def parse(cls, value: Any, field: str, ndim: tuple[int, ...]) -> VectorsByLayer:
        """Parse ``{layer: vector}``, each vector in any form that `Vector.parse` takes.

        Raises:
            WeirError: naming ``field.layer``.
        """
        if isinstance(value, VectorsByLayer):
            return value
        if not value:
            raise WeirError("names no layer; expected {layer: vector}, or the wire form of one vector", field)
        vectors: dict[int, Vector] = {}
        for key, vector in value.items():
            vector_field = f"{field}.{brief(key)}"
            layer = _parse_layer(key, vector_field)
            if layer in vectors:
                raise WeirError(f"block {layer} is named twice", vector_field)
            vectors[layer] = Vector.parse(vector, vector_field, ndim)
        return cls(vectors)

    def to_json(self) -> dict[str, Any]:
        return {str(layer): vector.to_json() for layer, vector in self.vectors.items()}

    def replaced(self, change: Callable[[Vector, str], Vector], field: str) -> VectorsByLayer:
        """Return a copy of which each vector is ``change(vector, its field)``."""
        changed = {layer: change(vector, f"{field}.{layer}") for layer, vector in self.vectors.items()}
        return VectorsByLayer(changed)


def is_by_layer(value: object) -> bool:
    """Return whether a value is ``{layer: vector}``, and not the wire form of one vector."""
    if isinstance(value, VectorsByLayer):
        return True
    return isinstance(value, Mapping) and (not value or any(map(_is_number, value)))


def _is_number(key: object) -> bool:
    if isinstance(key, str):
        return _NUMBER.fullmatch(key) is not None
    return isinstance(key, (int, np.integer)) and not isinstance(key, (bool, np.bool_))


def _parse_layer(key: Any, field: str) -> int:
    if not _is_number(key):
        raise WeirError("a layer is an int, in {layer: vector}", field)
    text = brief(key)
    if text.startswith("-"):
        raise WeirError(f"block {text} does not exist: blocks count from 0", field)
    if len(text) > _MAX_DIGITS:  # `brief` writes words for an int too large to show
        raise WeirError(f"block {text} does not exist", field)
    return int(text)


PER_LAYER = "one vector for each layer is per_layer=True or {layer: vector}"


def check_row_each(rows: int, positions: Positions, path: str, prompt_len: int | None = None) -> None:
    """Raise WeirError unless a selector names exactly as many positions as an intervention has rows, one for each.

    Positions before the prompt's start do not count; those that the request may never reach do. Without
    `prompt_len` it checks only what is known without it. `path`: of the intervention.
    """
    field = f"{path}.positions"
    if positions.is_open:
        raise WeirError(
            f"{rows} rows, but {brief(positions.to_json())!r} is open-ended: how many positions it selects is not "
            "known beforehand; give one row ([d] or [1, d]) for all of them, list "
            f"{rows} positions, or give a slice with an end; {PER_LAYER}",
            field,
        )
    count = positions.count(prompt_len)
    if count is None and prompt_len is None:
        return
    if count != rows:
        with_prompt = "" if prompt_len is None else f" with a prompt of {prompt_len} tokens"
        raise WeirError(
            f"{rows} rows for {count or 0} positions{with_prompt}; give one row for each, or one for all; {PER_LAYER}",
            field,
        )


def check_row_each_for_everyone(rows: int, positions: Positions, path: str) -> None:
    """Raise WeirError unless it names as many positions whatever the prompt's length, for every request."""
    check_row_each(rows, positions, path)
    if any(value < 0 for value in positions.numbers) or positions.count() is None:
        raise WeirError(
            f"{rows} rows, but how many positions {brief(positions.to_json())!r} selects depends on the prompt, and "
            "every request undergoes this intervention; count positions from 0, or give one row for all",
            f"{path}.positions",
        )


ONE, EACH, TOGETHER = range(3)
"""What several rows of a field mean: they are refused; each is for one selected position; all make
one change."""


class VectorAxes(NamedTuple):
    """How the vectors of one field are read.

    A vector is [width], or of a row's shape, [heads, d_head]. With heads picked it is [d_head], the
    same for every one of them, or [heads picked, d_head]; with neurons, [neurons picked]. Rows are
    an axis before that. [m, d_head] with m heads picked could be either; it is one vector for each
    head where m rows are impossible, and refused elsewhere.

    Attributes:
        hook: the hook point.
        part: what is picked of a row.
        meaning: of several rows, `ONE`, `EACH` or `TOGETHER`.
        positions: selector of the intervention.
        field: named by errors.
    """

    hook: str
    part: RowPart
    meaning: int
    positions: Positions
    field: str

    def count_rows(self, array: np.ndarray) -> int | None:
        """Return how many rows there are; None if that depends on the row's shape."""
        if array.ndim == 1:
            return 1
        if self.part.heads is None:
            return None if array.ndim == 2 and self.hook in HEAD_HOOKS else len(array)
        if array.ndim == 2:
            return 1 if self._is_one_for_each_head(array) else len(array)
        if array.shape[1] not in (1, len(self.part.heads)):
            raise WeirError(
                f"shape {list(array.shape)} has vectors for {array.shape[1]} heads, and {len(self.part.heads)} are "
                "picked",
                self.field,
            )
        return len(array)

    def split(self, array: np.ndarray, shape: RowShape) -> list[np.ndarray]:
        """Return what each picked head gets, or the one array for the whole row, or for the neurons.

        Args:
            array: checked by `count_rows`.
            shape: of a row of the model.

        Returns:
            Arrays [values], or [n, values] if they have several rows; the very same array where
            heads get the same.

        Raises:
            WeirError: for a width that does not match.
        """
        if self.part.heads is None:
            return [self._flat(array, shape)]
        if array.shape[-1] != shape[-1]:
            raise WeirError(
                f"width {array.shape[-1]} does not match the {shape[-1]} values of a head of {self.hook}", self.field
            )
        count = len(self.part.heads)
        if array.ndim == 3:
            if array.shape[1] == 1:
                return [self._rows(array[:, 0])] * count
            return [self._rows(array[:, k]) for k in range(count)]
        if array.ndim == 2 and self._is_one_for_each_head(array):
            return list(array)
        return [self._rows(array)] * count

    def _flat(self, array: np.ndarray, shape: RowShape) -> np.ndarray:
        """Return [values] or [n, values] for a row, or for the neurons that are picked of it."""
        if self.part.neurons is not None:
            if array.shape[-1] != len(self.part.neurons):
                raise WeirError(f"{array.shape[-1]} values for {len(self.part.neurons)} neurons", self.field)
            return array
        if len(shape) == 2 and array.shape[-2:] == shape:
            return self._rows(array.reshape(*array.shape[:-2], row_width(shape)))
        if array.ndim == 3 or array.shape[-1] != row_width(shape):
            raise WeirError(self._mismatch(array, shape), self.field)
        return self._rows(array)

    def _mismatch(self, array: np.ndarray, shape: RowShape) -> str:
        if len(shape) == 1:
            what = (
                f"the {shape[0]} values of a row of {self.hook}"
                if self.hook in PART_HOOKS
                else f"the model's {shape[0]}"
            )
            return f"width {array.shape[-1]} does not match {what}"
        heads, width = shape
        hint = "; say which heads= a vector of one head is for" if array.shape[-1] == width else ""
        return (
            f"shape {list(array.shape)} does not match a row of {self.hook}, [{heads}, {width}] or "
            f"[{heads * width}]{hint}"
        )

    def _rows(self, array: np.ndarray) -> np.ndarray:
        """Return [1, values] as [values] where that means the same."""
        return array[0] if array.ndim == 2 and len(array) == 1 and self.meaning != TOGETHER else array

    def _is_one_for_each_head(self, array: np.ndarray) -> bool:
        """Return whether [m, d_head] is a vector for each picked head, and not m rows."""
        count = len(array)
        if self.part.heads is None or count == 1 or count != len(self.part.heads):
            return False
        if self.meaning == ONE:
            return True
        if self.meaning == EACH and (self.positions.is_open or self.positions.count() not in (None, count)):
            return True
        rows = "one for each position" if self.meaning == EACH else "that make one change"
        raise WeirError(
            f"[{count}, d_head] for {count} heads can be a vector for each head, or {count} vectors {rows}; give "
            f"[1, {count}, d_head] or [{count}, 1, d_head]",
            self.field,
        )
