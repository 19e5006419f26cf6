"""Sizes of the device tables, and what a request needs of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableSizes:
    """Rows of the vector, program and instruction tables."""

    vectors: int
    programs: int
    nodes: int
