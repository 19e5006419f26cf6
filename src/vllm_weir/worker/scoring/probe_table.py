"""Probes and gates of live requests as rows of device tables. Pure numpy.

A request's probes are linked by `next`, and so are a probe's gates. What a request's probes and
gates keep from step to step stands side by side in the table of states, which only the device reads
and writes; its first number is 0 for good.

Where drafts are verified, a token may turn out not to hold after its score has been added to what
is kept. So there are as many *copies* of a request's numbers as tokens that one step can take back,
and one more: what is kept after position p stands in copy ``p % copies``, from where the token at
p + 1 goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.resolved_probes import MEAN, ResolvedProbe
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.scoring.recipe import ScoringRecipe
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.steering.slots import HostTables

PROBE_FIELDS = (
    "kind", "outputs", "scores", "raws", "units", "hidden", "activation", "smoothing", "window", "state", "gate",
    "next", "tap", "stride", "stage",
)  # fmt: skip
"""Integer fields of a probe.

scores, raws: its first cells.
units: hidden units of an MLP, heads of an attention probe.
state: where its numbers begin in the table of states; also those of its outputs in `outs` and `biases`.
gate: its first gate, -1 for none.
next: the request's next probe, -1 for none.
stride: how far apart the copies of its numbers are in the table of states.
stage: of the tap, at which it reads.
"""
GATE_FIELDS = ("output", "factor", "state", "flags", "next")
"""Integer fields of a gate: `factor` is its cell."""
GATE_FLOATS = ("threshold", "sharpness")
ABOVE, LATCH, DELAYED, EARLY, CONTROLLED = 1, 2, 4, 8, 16
"""Flags of a gate.

EARLY: a token needs its factor before it reaches the probe.
CONTROLLED: its factor is what a controller has written into the table of states, whatever the score.
"""

OUTPUTS, SCORES, RAWS, STATE, GATE, NEXT, TAP, STRIDE, STAGE = (
    PROBE_FIELDS.index(name)
    for name in ("outputs", "scores", "raws", "state", "gate", "next", "tap", "stride", "stage")
)
OUTPUT, FACTOR, GATE_STATE, FLAGS, NEXT_GATE = range(len(GATE_FIELDS))
ZERO = 0
"""The state that is always 0."""


class ControlledGate(NamedTuple):
    """A gate that a controller decides on.

    Attributes:
        controller: its name.
        request_id, endpoint: the gate's request, and the address of its reader.
        probes: rows of the probes that the controller reads, in its order.
    """

    controller: str
    request_id: str
    endpoint: str
    probes: tuple[int, ...]


@dataclass(eq=False)
class HeldProbes:
    """The rows of one request.

    Attributes:
        probes, gates: their rows, in the request's order.
        start, size: their numbers in the table of states, all copies.
    """

    probes: list[int]
    gates: list[int]
    start: int
    size: int


class ProbeTable(HostTables):
    """The host's copy of the tables.

    Args:
        programs: holds the vectors of MLP probes' output layers.
        copies: of what is kept of a request.

    Attributes:
        probes: int32 [probes, 15], see PROBE_FIELDS.
        decays: float32 [probes], a of an EMA.
        gates: int32 [gates, 5], see GATE_FIELDS.
        bounds: float32 [gates, 2], see GATE_FLOATS.
        outs: int32 [states], row of the vector that gives an output of an MLP probe.
        biases: float32 [states], what is added to an output of an MLP or attention probe.
        controlled: the gates that controllers decide on, by row.
        moves: int64 arrays that came about since the writer took them: number k of the table of
            states is from now on what number ``move[k]`` was.
    """

    def __init__(self, sizes: TableSizes, programs: ProgramTable, copies: int = 1) -> None:
        super().__init__("probes", "decays", "gates", "bounds", "outs", "biases")
        self.copies = copies
        self.probes = np.full((sizes.probes, len(PROBE_FIELDS)), -1, np.int32)
        self.decays = np.zeros(sizes.probes, np.float32)
        self.gates = np.full((sizes.gates, len(GATE_FIELDS)), -1, np.int32)
        self.bounds = np.zeros((sizes.gates, len(GATE_FLOATS)), np.float32)
        self.outs = np.full(sizes.states * copies + 1, -1, np.int32)
        self.biases = np.zeros(sizes.states * copies + 1, np.float32)
        self.controlled: dict[int, ControlledGate] = {}
        self.moves: list[np.ndarray] = []
        self._programs = programs
        self._free_probes = list(range(sizes.probes - 1, -1, -1))
        self._free_gates = list(range(sizes.gates - 1, -1, -1))
        self._extents = Arena(sizes.states * copies)
        self._held: set[HeldProbes] = set()
        self.early = 0
        """Gates in use that are EARLY."""
        programs.followers.append(self._follow_vectors)

    def hold(self, recipe: ScoringRecipe) -> HeldProbes:
        """Give rows to a request's probes and gates; the vectors that they use are held already.

        Raises WeirError if a table is full, or a vector has a wrong length.
        """
        sizes = [probe.state_size for probe in recipe.probes]
        size = sum(sizes) + len(recipe.gates)
        outs = [[self._programs.vector_row(row, len(p.rows)) for row in p.out_rows] for p in recipe.probes]
        if len(recipe.probes) > len(self._free_probes) or len(recipe.gates) > len(self._free_gates):
            raise WeirError("the table of probes or of gates is full; raise max_probes", "probes")
        start = self._allocate(size * self.copies)
        probes = [self._free_probes.pop() for _ in recipe.probes]
        gates = [self._free_gates.pop() for _ in recipe.gates]
        held = HeldProbes(probes, gates, start, size * self.copies)
        self._held.add(held)
        next_row = -1
        at = start + sum(sizes)
        self._write_gates(recipe, gates, at)
        for k in reversed(range(len(probes))):
            at -= sizes[k]
            first_gate = next((gates[g] for g, gate in enumerate(recipe.gates) if gate.probe == k), -1)
            self._write_probe(recipe, k, probes[k], (at, size), first_gate, next_row, outs[k])
            next_row = probes[k]
        self.early += len(recipe.early)
        return held

    def release(self, held: HeldProbes) -> None:
        """Free a request's rows."""
        self._held.remove(held)
        for row in held.gates:
            self.controlled.pop(row, None)
        self._free_probes.extend(reversed(held.probes))
        self._free_gates.extend(reversed(held.gates))
        self.early -= int((self.gates[held.gates, FLAGS] & EARLY != 0).sum())
        for _ in range(2):  # a piece of an arena has two holders; here, both are this request
            self._extents.release(held.start - 1)

    def usage(self) -> dict[str, int]:
        probes, gates = len(self.probes) - len(self._free_probes), len(self.gates) - len(self._free_gates)
        return {"probes": probes, "gates": gates, "states": self._extents.used // self.copies}

    def _write_probe(
        self,
        recipe: ScoringRecipe,
        k: int,
        row: int,
        place: tuple[int, int],
        gate: int,
        next_row: int,
        outs: list[int],
    ) -> None:
        """Write the k-th probe's row; `place` is its state and stride."""
        probe, (state, stride) = recipe.probes[k], place
        window = int(probe.parameter) if probe.smoothing == MEAN else 0
        self.probes[row] = (
            probe.kind, probe.outputs, recipe.layout.scores[k], recipe.layout.raws[k], units_of(probe), probe.hidden,
            probe.activation, probe.smoothing, window, state, gate, next_row, recipe.taps[k],
            stride, recipe.stages[k],
        )  # fmt: skip
        self.decays[row] = probe.parameter
        self.changed["probes"].add(row)
        self.changed["decays"].add(row)
        for name, values in (("outs", outs), ("biases", probe.out_offsets)):
            if values:
                getattr(self, name)[state : state + len(values)] = values
                self.changed[name].update(range(state, state + len(values)))

    def _write_gates(self, recipe: ScoringRecipe, rows: list[int], state: int) -> None:
        next_of_probe: dict[int, int] = {}
        for g in reversed(range(len(rows))):
            gate, row = recipe.gates[g], rows[g]
            flags = (ABOVE if gate.above else 0) | (LATCH if gate.latch else 0) | (DELAYED if gate.delay else 0)
            flags |= (EARLY if g in recipe.early else 0) | (CONTROLLED if gate.controller else 0)
            next_row = next_of_probe.get(gate.probe, -1)
            self.gates[row] = gate.output, recipe.layout.factors[g], state + g, flags, next_row
            self.bounds[row] = gate.threshold, gate.sharpness
            next_of_probe[gate.probe] = row
        self.changed["gates"].update(rows)
        self.changed["bounds"].update(rows)

    def _allocate(self, size: int) -> int:
        """Return the first of `size` free numbers side by side; raises WeirError if too few are free."""
        start = self._extents.allocate(size)
        if start is None:
            if self._extents.capacity - self._extents.used < size:
                raise WeirError("the table of probes' states is full; raise max_probes", "probes")
            self._move_together()
            start = self._extents.allocate(size)
            assert start is not None, "all free numbers stand side by side"
        return start + 1

    def _move_together(self) -> None:
        """Move all states to the table's beginning, in their order."""
        self._extents = Arena(self._extents.capacity)
        sources = [np.zeros(1, np.int64)]
        for held in sorted(self._held, key=lambda one: one.start):
            start = self._extents.allocate(held.size)
            assert start is not None, "it had room before"
            shift = start + 1 - held.start
            sources.append(np.arange(held.start, held.start + held.size))
            held.start += shift
            self.probes[held.probes, STATE] += shift
            self.gates[held.gates, GATE_STATE] += shift
            self.changed["probes"].update(held.probes)
            self.changed["gates"].update(held.gates)
        move = np.concatenate(sources)
        self.outs[: len(move)], self.biases[: len(move)] = self.outs[move], self.biases[move]
        self.changed["outs"].update(range(len(move)))
        self.changed["biases"].update(range(len(move)))
        self.moves.append(move)

    def _follow_vectors(self, new_row: np.ndarray) -> None:
        for held in self._held:
            rows = self.outs[held.start : held.start + held.size]
            rows[:] = np.where(rows >= 0, new_row[rows], -1)
            self.changed["outs"].update(range(held.start, held.start + held.size))


def units_of(probe: ResolvedProbe) -> int:
    """Return the hidden units of an MLP probe, or the heads of an attention probe."""
    return len(probe.rows) if probe.out_rows else probe.heads
