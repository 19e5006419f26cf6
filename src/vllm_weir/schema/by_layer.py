"""Vectors by layer: ``{layer: vector}``, on the wire with strings for keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
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
