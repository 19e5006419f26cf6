"""Probes and gates resolved against a model, and where their numbers stand among a token's cells.

A probe turns a row h(t) of its site, at the positions that its selector chooses, into k scores:

1. *Raw numbers*, all float32: ``raw_j(t) = w_j . h(t) + offsets_j``, or 0 where that is not above the
   probe's threshold; with `cosine` set, of ``h(t) / |h(t)|``, and ``offsets_j`` where
   ``|h(t)| = 0``. The tap of the site computes them with one SCORE or ACTIVATE instruction each.
2. *Outputs* s(t), [k]:
   LINEAR      ``s_i = raw_i``;
   MLP         ``s_i = w_out_i . f(raw) + b_out_i``, f being the activation of the hidden units;
   ATTENTION   raw is q [heads], then v [heads, k], and ``s_i(t) = b_out_i + sum over heads of
               (sum_u softmax_u(q(u)) v_i(u))``, u being the scored positions up to t.
3. The *activation*: none, the sigmoid of each output, or the softmax over the k outputs.
4. *Smoothing* over the scored positions in order: none; EMA ``y(t) = a s(t) + (1 - a) y(t-1)``, the
   first y being s; MAXIMUM, the largest so far; MEAN of the last `window` scores (of all there are,
   if fewer).

The result y(t) is the probe's score. A gate looks at one output y of a probe and gives a factor for
the terms of the interventions that it gates:

    fired(t)    y(t) > threshold, or y(t) < threshold
    delay 0     the factor at t follows from the scores up to t
    delay 1     it follows from the scores up to the token before t
    latch       the gate counts as fired from the first position on at which it has
    sharpness   if not 0, the factor is sigmoid(sharpness * (y - threshold)), or with the sign
                turned for "below"; otherwise it is 1 where the gate has fired and 0 elsewhere

Where the probe has no score, its last score counts; before the first one the factor is 0. The
factor of a gate with a controller is what this has answered after the pass of the token before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import ACTIVATE, ENCODE, HELD, SCORE, Instruction, ResolvedIntervention, Source
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.taps import column_of

LINEAR, MLP, ATTENTION = range(3)
NO_ACTIVATION, SIGMOID, SOFTMAX = range(3)
NO_SMOOTHING, EMA, MAXIMUM, MEAN = range(4)
RELU, GELU, SILU, TANH = range(4)
"""Activations of an MLP probe's hidden units; GELU is the exact one, with erf."""


@dataclass(frozen=True)
class ResolvedProbe:
    """A probe at a site of a model.

    Attributes:
        name: by which the request knows it.
        hook, layer: its site.
        positions: which rows are scored.
        kind: LINEAR, MLP or ATTENTION.
        outputs: k.
        rows: digests of the vectors w_j, float32 of the row's width (or of a head's).
        offsets: added to w_j . h, as many.
        start, stop: columns of the row that the w_j are for; 0, 0 for the whole row.
        hidden: RELU, ...; of MLP only.
        out_rows: digests of w_out, [hidden units] each, k of them; of MLP only.
        out_offsets: b_out, k of them; empty for LINEAR.
        heads: of ATTENTION; 0 for the others.
        activation: NO_ACTIVATION, SIGMOID or SOFTMAX.
        smoothing: NO_SMOOTHING, ...
        parameter: a of EMA, the window of MEAN; 0 for the others.
        before: whether it reads the site before the interventions there.
        threshold: raw numbers that are not above it count as 0; None: all count as they are.
        cosine: whether it measures rows of norm 1.
    """

    name: str
    hook: str
    layer: int
    positions: Positions
    kind: int
    outputs: int
    rows: tuple[str, ...]
    offsets: tuple[float, ...]
    start: int = 0
    stop: int = 0
    hidden: int = RELU
    out_rows: tuple[str, ...] = ()
    out_offsets: tuple[float, ...] = ()
    heads: int = 0
    activation: int = NO_ACTIVATION
    smoothing: int = NO_SMOOTHING
    parameter: float = 0.0
    before: bool = False
    threshold: float | None = None
    cosine: bool = False

    @property
    def site(self) -> Site:
        """The site that it reads."""
        return Site(self.hook, self.layer)

    @property
    def column(self) -> int:
        """The column of the site that it reads."""
        return column_of(self.site, self.before)

    @property
    def vectors(self) -> frozenset[str]:
        return frozenset((*self.rows, *self.out_rows))

    @property
    def state_size(self) -> int:
        """Numbers that a worker keeps for it from step to step.

        How many positions have been scored, the last scores [k]; of MEAN the last outputs [window,
        k]; of ATTENTION, for each head, the largest q, and, relative to it, the sum of weights and
        the weighted sums of v [k].
        """
        size = 1 + self.outputs
        if self.smoothing == MEAN:
            size += int(self.parameter) * self.outputs
        return size + self.heads * (2 + self.outputs)

    def to_wire(self) -> list[Any]:
        """Return the form that travels to the workers."""
        return [
            self.name, self.hook, self.layer, self.positions.to_json(), self.kind, self.outputs, self.rows,
            self.offsets, self.start, self.stop, self.hidden, self.out_rows, self.out_offsets, self.heads,
            self.activation, self.smoothing, self.parameter, self.before,
            self.threshold, self.cosine,
        ]  # fmt: skip

    @classmethod
    def from_wire(cls, data: Sequence[Any]) -> ResolvedProbe:
        values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in data]
        values[3] = Positions.parse(data[3])
        return cls(*values)


class ResolvedGate(NamedTuple):
    """What decides on interventions of a request.

    Attributes:
        probe: index of its probe among the request's.
        output: which of the probe's scores it looks at.
        threshold: of the score.
        above: whether scores above the threshold fire, or those below.
        latch: whether it stays open once it has fired.
        delay: 0 or 1, in tokens.
        sharpness: of the sigmoid; 0 for a switch.
        controller: name of the sync controller that gives the factor of a token after the pass of the
            one before, whatever the threshold; empty for none.
        reads: indices of the probes that the controller reads, in its order; `probe` is the first.
    """

    probe: int
    output: int
    threshold: float
    above: bool = True
    latch: bool = False
    delay: int = 0
    sharpness: float = 0.0
    controller: str = ""
    reads: tuple[int, ...] = ()

    @classmethod
    def from_wire(cls, data: Sequence[Any]) -> ResolvedGate:
        gate = cls(*data)
        return gate._replace(reads=tuple(gate.reads))


class Scoring(NamedTuple):
    """What a request's probes and gates ask of the workers.

    Attributes:
        probes: of the request.
        gates: likewise.
        steps: its interventions, and then what writes the probes' raw numbers (`scoring_steps`).
        doses: how many relative doses are measured of a token, see `CellLayout`.
    """

    probes: tuple[ResolvedProbe, ...]
    gates: tuple[ResolvedGate, ...]
    steps: tuple[ResolvedIntervention, ...]
    doses: int = 0


class CellLayout(NamedTuple):
    """Where a request's numbers stand among the cells of each of its tokens, which are float32.

    The scores of all probes come first, then the factors of all gates, then the relative doses of the interventions
    (these are *reported* to the caller's process), then the raw numbers, then the activations for HELD instructions.

    Attributes:
        scores: first cell of each probe's scores.
        factors: cell of each gate's factor.
        raws: first cell of each probe's raw numbers.
        reported: how many cells are reported.
        cells: how many cells there are.
        doses: first cell of the relative doses.
        activations: first cell of the activations.
    """

    scores: tuple[int, ...]
    factors: tuple[int, ...]
    raws: tuple[int, ...]
    reported: int
    cells: int
    doses: int
    activations: int

    def gate_of(self, instruction: Instruction) -> int:
        """Return the index of the gate whose factor an instruction with a cell is multiplied by."""
        return self.factors.index(instruction.cell - 1)

    def scores_by(self, step: ResolvedIntervention) -> bool:
        """Return whether a step writes a probe's raw numbers."""
        return step.only_writes and 0 < step.instructions[0].cell <= self.activations

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(
        cls,
        probes: tuple[ResolvedProbe, ...],
        gates: tuple[ResolvedGate, ...],
        doses: int = 0,
        activations: int = 0,
    ) -> CellLayout:
        """Lay out the cells of a request with so many relative doses and activations at each token."""
        scores, raws, cell = [], [], 0
        for probe in probes:
            scores.append(cell)
            cell += probe.outputs
        factors = tuple(range(cell, cell + len(gates)))
        first_dose = cell + len(gates)
        cell = reported = first_dose + doses
        for probe in probes:
            raws.append(cell)
            cell += len(probe.rows)
        return cls(tuple(scores), factors, tuple(raws), reported, cell + activations, first_dose, cell)


def count_doses(moves: Iterable[ResolvedIntervention]) -> int:
    """Return how many relative doses of interventions there are at a token: one at each of their blocks."""
    return sum(len(move.layers) for move in moves)


def with_doses(moves: Sequence[ResolvedIntervention], layout: CellLayout) -> tuple[ResolvedIntervention, ...]:
    """Return interventions whose relative doses are written into the cells that they have in `layout`."""
    sizes = [len(move.layers) for move in moves]
    firsts = [layout.doses + sum(sizes[:k]) for k in range(len(moves))]
    return tuple(replace(move, dose_cell=first + 1) for move, first in zip(moves, firsts, strict=True))


def count_activations(moves: Iterable[ResolvedIntervention]) -> int:
    """Return how many activations of a token stand in cells between their reading and their use."""
    moves = tuple(moves)
    read = {(move.source, move.positions) for move in moves if move.source is not None}
    return len(read) + sum(one.kind == ENCODE for move in moves for one in move.instructions)


def with_activations(
    moves: Sequence[ResolvedIntervention], first: int
) -> tuple[tuple[ResolvedIntervention, ...], tuple[ResolvedIntervention, ...]]:
    """Return interventions, in order, with the cells of their activations from `first` on, and steps for other sites.

    The steps come after all interventions: they read a row as the model goes on with it. What is read once, at the
    same positions, has one cell, however many blocks it changes.
    """
    placed, steps, cell = [], [], first
    cells: dict[tuple[Source, Positions], int] = {}
    for move in moves:
        own = cell
        if move.source is not None:
            key = (move.source, move.positions)
            own = cells.setdefault(key, cell)
            if own == cell:
                cell += 1
                hook, layer, instruction = move.source
                writes = instruction._replace(cell=own + 1)
                steps.append(ResolvedIntervention(hook, (layer,), move.positions, 0, (writes,)))
        instructions = []
        for one in move.instructions:
            if one.kind == ENCODE:  # for the HELD that follows it
                own, cell = cell, cell + 1
                instructions.append(one._replace(cell=own + 1))
            else:
                instructions.append(one._replace(lo=float(own)) if one.kind == HELD else one)
        placed.append(replace(move, instructions=tuple(instructions), source=None))
    return tuple(placed), tuple(steps)


def scoring_steps(probes: tuple[ResolvedProbe, ...], layout: CellLayout) -> tuple[ResolvedIntervention, ...]:
    """Return what writes the probes' raw numbers, as interventions that change no row."""
    steps = []
    for probe, first in zip(probes, layout.raws, strict=True):
        hook, layer = probe.site
        leads = probe.before and hook != "resid_pre"
        if probe.before and not leads:  # what leaves the block before: the same tap, nothing has acted at resid_pre yet
            hook, layer = "resid_post", layer - 1
        how: dict[str, Any] = {"kind": SCORE}
        if probe.threshold is not None:
            how = {"kind": ACTIVATE, "hi": probe.threshold}
        if probe.cosine:
            how["a"] = 1.0
        instructions = tuple(
            Instruction(u="", w=row, b=offset, start=probe.start, stop=probe.stop, cell=first + j + 1, **how)
            for j, (row, offset) in enumerate(zip(probe.rows, probe.offsets, strict=True))
        )
        steps.append(ResolvedIntervention(hook, (layer,), probe.positions, 0, instructions, leads=leads))
    return tuple(steps)
