"""`TableSizes`: sizes of the device tables of vectors, programs and instructions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableSizes:
    """Rows of the device tables.

    Attributes:
        vectors: of the table of vectors.
        programs: of the table of programs.
        nodes: of the table of instructions.
    """

    vectors: int
    programs: int
    nodes: int
