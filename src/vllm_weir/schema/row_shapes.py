"""Shapes of rows: what one position has at a hook point, and which part of it a worker holds."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

RowShape: TypeAlias = tuple[int, ...]
"""Shape of a row: (d_model,), (heads, d_head), (d_mlp,), (experts,) or (top_k,)."""


class Shard(NamedTuple):
    """The part of a row that one tensor-parallel worker holds: columns `start` to `stop` (not included)."""

    start: int
    stop: int


def row_width(shape: RowShape) -> int:
    """Return how many values a row of this shape has."""
    return math.prod(shape)


def ring_rows(width: int, d_model: int) -> int:
    """Return how many rows of a worker's ring, [d_model] each, hold a row of `width` values.

    The row begins at the first value of its first ring row; what follows it in the last is undefined.
    """
    return -(-width // d_model)
