"""`ScoringRecipe`: what requests with the same probes and gates have in common on a worker. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import WRITES, ResolvedIntervention
from vllm_weir.schema.resolved_probes import CellLayout, Scoring
from vllm_weir.schema.selectors import selector_bits
from vllm_weir.schema.taps import STAGES, reads_in_time, tap_of
from vllm_weir.worker.steering.programs import ProgramTable


class ScoringRecipe:
    """Probes and gates of requests with the same steps.

    Attributes:
        probes: those with a tap on this worker: all of them, or none.
        gates: likewise.
        layout: where their numbers stand.
        taps, stages: of the probes.
        vectors: digests of vectors that they use beside those of the steps.
        reads: whether this worker has anything to report: it has the probes, or interventions whose doses are
            measured.
        bits: selectors of the probes, of what they gate and of what is measured: nothing is to be
            known of other positions.
        early: indices of gates whose factor a token needs before it reaches their probe.
        early_bits: selectors of what these gate.
        controlled: whether a controller decides on any of the gates.

    Raises:
        WeirError: if this worker cannot do what is asked.
    """

    def __init__(self, scoring: Scoring, table: ProgramTable) -> None:
        probes, self.gates, steps, doses = scoring
        self.layout = CellLayout.of(probes, self.gates, doses)
        self.taps = tuple(probe.column // STAGES for probe in probes)
        self.stages = tuple(probe.column % STAGES for probe in probes)
        self._columns = tuple(probe.column for probe in probes)
        measured = [tap_of(Site(step.hook, layer)) for step in steps if step.dose_cell for layer in step.layers]
        self.reads = _reads((*self.taps, *measured), table)
        self.probes = probes if self.reads else ()
        self.vectors = frozenset(row for probe in self.probes for row in probe.out_rows)
        self.bits = self.early_bits = 0
        early: set[int] = set()
        bit_of = selector_bits(step.positions for step in steps)
        for step in steps:
            bit, gates = bit_of[step.positions], self._gates_of(step)
            if self.layout.scores_by(step) or gates or step.dose_cell:
                self.bits |= 1 << bit
            if gates and not self.probes and table.is_local(step):
                raise WeirError("a gate's probe has to be on the pipeline stage of what it gates", "interventions")
            if found := {gate for gate in gates if self._is_early(gate, step)}:
                if any(self.gates[gate].delay == 0 for gate in found):
                    raise WeirError(
                        "a gate without delay acts before its probe has read; use a later block, or delay=1",
                        "interventions",
                    )
                early |= found
                self.early_bits |= 1 << bit
        self.early = frozenset(early)
        self.controlled = bool(self.probes) and any(gate.controller for gate in self.gates)
        if not self.reads:
            self.gates, self.bits, self.early_bits, self.early = (), 0, 0, frozenset()

    def _gates_of(self, step: ResolvedIntervention) -> set[int]:
        return {self.layout.gate_of(one) for one in step.instructions if one.cell and one.kind not in WRITES}

    def _is_early(self, gate: int, step: ResolvedIntervention) -> bool:
        """Return whether a token can reach a step before the probe that decides on it."""
        if self.gates[gate].controller:
            return True
        column = self._columns[self.gates[gate].probe]
        return any(not reads_in_time(column, Site(step.hook, layer)) for layer in step.layers)


def _reads(taps: Sequence[int], table: ProgramTable) -> bool:
    """Return whether a worker has the taps that one request reads, that is, all of them or none.

    Raises WeirError if it has some of them, or parts of their rows.
    """
    rows = [table.row_at(tap) for tap in taps]
    if any(rows) and not all(rows):
        raise WeirError("the probes and the doses of one request have to be on one pipeline stage", "probes")
    for row in rows:
        if row is not None and row.stop - row.start < row.width:
            raise WeirError(
                "a probe reads, or a dose is measured of, a row of which this worker has a part only; use the "
                "residual stream",
                "probes",
            )
    return any(rows)
