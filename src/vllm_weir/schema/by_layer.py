"""A vector for each of some blocks: ``{layer: vector}``, on the wire with strings for keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.vectors import Vector

_NUMBER = re.compile(r"-?\d+", re.ASCII)
_LONGEST = 9
"""Digits of a block's number."""


class VectorsByLayer:
    """A `Vector` for each of some blocks. No dataclass, for the same reason as `Vector`.

    Attributes:
        vectors: by block, ascending.
    """

    def __init__(self, vectors: Mapping[int, Vector]) -> None:
        self.vectors = dict(sorted(vectors.items()))

    def __repr__(self) -> str:
        return f"VectorsByLayer({self.vectors!r})"

    @property
    def layers(self) -> tuple[int, ...]:
        """The blocks, ascending."""
        return tuple(self.vectors)

    @classmethod
    def parse(cls, value: Any, field: str, ndim: tuple[int, ...]) -> VectorsByLayer:
        """From ``{layer: vector}``, each vector in any form that `Vector.parse` takes.

        Raises:
            WeirError: naming ``field.layer``.
        """
        if isinstance(value, VectorsByLayer):
            return value
        if not value:
            raise WeirError("names no layer; expected {layer: vector}, or the wire form of one vector", field)
        out: dict[int, Vector] = {}
        for key, vector in value.items():
            at = f"{field}.{brief(key)}"
            layer = _layer(key, at)
            if layer in out:
                raise WeirError(f"block {layer} is named twice", at)
            out[layer] = Vector.parse(vector, at, ndim)
        return cls(out)

    def to_json(self) -> dict[str, Any]:
        """The wire form."""
        return {str(layer): vector.to_json() for layer, vector in self.vectors.items()}

    def replaced(self, change: Callable[[Vector, str], Vector], field: str) -> VectorsByLayer:
        """The same with each vector replaced by ``change(vector, its field)``."""
        return VectorsByLayer({n: change(v, f"{field}.{n}") for n, v in self.vectors.items()})


def is_by_layer(value: object) -> bool:
    """Whether a value is ``{layer: vector}``, and not the wire form of one vector."""
    if isinstance(value, VectorsByLayer):
        return True
    return isinstance(value, Mapping) and (not value or any(map(_is_number, value)))


def _is_number(key: object) -> bool:
    if isinstance(key, str):
        return _NUMBER.fullmatch(key) is not None
    return isinstance(key, (int, np.integer)) and not isinstance(key, (bool, np.bool_))


def _layer(key: Any, field: str) -> int:
    if not _is_number(key):
        raise WeirError("a layer is an int, in {layer: vector}", field)
    text = brief(key)
    if text.startswith("-"):
        raise WeirError(f"block {text} does not exist: blocks count from 0", field)
    if len(text) > _LONGEST:  # also what stands for a number too large to write out
        raise WeirError(f"block {text} does not exist", field)
    return int(text)
