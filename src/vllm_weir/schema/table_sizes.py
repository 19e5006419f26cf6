"""`TableSizes`: sizes of the device tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableSizes:
    """Rows of the device tables.

    Attributes:
        vectors: of the table of vectors.
        programs: of the table of programs.
        nodes: of the table of instructions.
        probes: of the table of live requests' probes, which has a row for each.
        gates: of the table of their gates, likewise.
        states: numbers that probes and gates keep from step to step (`ResolvedProbe.state_size`; a gate has one).
        cells: of each token.
    """

    vectors: int
    programs: int
    nodes: int
    probes: int = 4096
    gates: int = 4096
    states: int = 1 << 18
    cells: int = 64
