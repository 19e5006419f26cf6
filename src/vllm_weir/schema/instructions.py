"""Instructions: what a tap does to a row. Every intervention is lowered to instructions.

An instruction adds ``c(h) * u`` to a row h (float32), where every c of one intervention sees the
same h:

    CONST      c = a
    NORM       c = a * |h|
    AFFINE     c = a * (w . h) + b
    CLAMP      c = a * (min(max(w . h, lo), hi) - w . h)
    BLEND      adds a * (u - h)
    KEEP_NORM  adds s * |h| / |s| - h, where s = h + (a + b * |h|) * u; adds nothing if s = 0
    FEATURE    c = a * act + b, where act = p if p > hi, else 0, and p = w . h + lo
    SCORE      adds nothing; writes w . h + b into a cell of the token (`resolved_probes`); with a above 0
               w . h / |h| + b, b where |h| = 0
    ACTIVATE   likewise, and writes 0 unless that is above hi: act, as of FEATURE, for a HELD elsewhere, or a gate
    ENCODE     likewise, and writes the activation of feature `a` of the autoencoder `key`, given the whole row
    HELD       c = a * act + b, act being the number in the cell `lo` of the token, counted from 0
    HOOK       replaces h by what the function `key` returns, given the whole row; b is 0 if requests share the function
    RECONSTRUCT replaces h by the reconstruction of the autoencoder `key`, given the whole row
    DOSE       adds nothing; writes |d| / |h| into a cell, d being the sum of the terms before it, which is the
               whole change of its intervention; NO_NORM if |h| = 0

An instruction with `start` and `stop` is about the columns from `start` to `stop` (not included)
alone: h is that part of the row (a head, say), u and w have as many values, and nothing else of the
row changes. What an instruction with a cell adds is multiplied by the number in that cell, the
factor of a gate; where that is 0 the row keeps its bits.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm_weir.schema.positions import Positions
from vllm_weir.schema.vectors import digest_of

CONST, NORM, AFFINE, CLAMP, BLEND, KEEP_NORM, FEATURE, SCORE, DOSE, ACTIVATE, HELD, ENCODE, HOOK, RECONSTRUCT = range(
    14
)
NO_NORM = -1.0
"""What a DOSE writes for a row of zeros."""
WRITES = (SCORE, ACTIVATE, ENCODE)
"""Instructions that change nothing, but write a number of the row into a cell."""
BY_COLUMN = (CONST, BLEND, HELD)
"""Instructions that need none of a row's other columns to change one."""
INFINITE = float(np.float32(3.4e38))
"""The bound of a CLAMP that has none on that side."""


class Instruction(NamedTuple):
    """One term; `u` and `w` are digests of float32 vectors of the row's width, empty where there is none."""

    kind: int
    u: str
    w: str = ""
    a: float = 0.0
    b: float = 0.0
    lo: float = -INFINITE
    hi: float = INFINITE
    start: int = 0
    stop: int = 0
    """0 for the whole row."""
    cell: int = 0
    """One more than the number of the cell that is written (WRITES, DOSE) or holds the factor; 0 for none."""
    key: str = ""
    """Of an autoencoder or a function on the workers."""


IN_GRAPHS = ":"
"""Stands in the key of a function that can be called inside CUDA graphs, after the identity of its calls."""

_WHOLE_ROW = Instruction._fields.index("start")
"""Fields of the wire form of an instruction for the whole row without a cell."""
NOTHING = Instruction(CONST, "")
"""Takes the place of a position, or of a part of its row, that is kept as it is."""


class Source(NamedTuple):
    """The hook point whose row gives the number that a HELD instruction uses.

    Attributes:
        hook: its name.
        layer: its block.
        instruction: writes the number into a cell, which a worker chooses.
    """

    hook: str
    layer: int
    instruction: Instruction

    @classmethod
    def from_wire(cls, data: Sequence[Any]) -> Source:
        hook, layer, instruction = data
        return cls(hook, layer, Instruction(*instruction))


class LoweredIntervention(NamedTuple):
    """The instructions of one intervention.

    Attributes:
        instructions: in order.
        rows: the vectors that they use, float32 [width], by digest.
        by_position: how many selected positions have instructions of their own, one as many as every other, those
            of the first position first; 0: every instruction is for all positions.
        source: where the number of a HELD instruction comes from.
        calls: what workers are told of the functions of HOOK instructions, by key.
    """

    instructions: tuple[Instruction, ...]
    rows: dict[str, np.ndarray]
    by_position: int = 0
    source: Source | None = None
    calls: Mapping[str, bytes] = MappingProxyType({})

    @property
    def per_position(self) -> int:
        """How many instructions each position has of its own; 0 if all are for every position."""
        return len(self.instructions) // self.by_position if self.by_position else 0


class VectorCollector:
    """The vectors of an intervention's instructions, each kept once.

    Attributes:
        rows: float32 [width] by digest.
    """

    def __init__(self) -> None:
        self.rows: dict[str, np.ndarray] = {}

    def add(self, row: np.ndarray, digest: str = "") -> str:
        """Keep a vector [width] and return its digest, which is computed unless it is given."""
        row = np.ascontiguousarray(row, np.float32)
        digest = digest or digest_of(row)
        self.rows[digest] = row
        return digest


def couples(instruction: Instruction) -> bool:
    """Return whether what an instruction does to one column depends on the others that it is about.

    Workers that hold different columns of a row cannot do such an instruction each for itself.
    """
    return instruction.kind not in BY_COLUMN


def reach(instruction: Instruction, rows: Mapping[str, np.ndarray]) -> float:
    """Return the largest value that an instruction sets or adds, whatever the row is.

    For NORM it is in units of the row's own norm.
    """
    if instruction.kind in (AFFINE, FEATURE, HELD):
        factor = abs(instruction.b)
    elif instruction.kind == CLAMP:
        bounds = [abs(bound) for bound in (instruction.lo, instruction.hi) if abs(bound) < INFINITE]
        factor = abs(instruction.a) * max(bounds, default=0.0)
    elif instruction.kind == KEEP_NORM:
        factor = 0.0  # no value exceeds the norm that the row has anyway
    else:
        factor = abs(instruction.a)
    return factor * float(np.abs(rows[instruction.u]).max()) if instruction.u else 0.0


@dataclass(frozen=True)
class ResolvedIntervention:
    """An intervention resolved against a model: the instructions, and where they are applied.

    Attributes:
        hook: the hook point.
        layers: its blocks.
        positions: selector.
        per_position: how many instructions each selected position has of its own, see
            `of_position`; 0 if all instructions are for every position.
        instructions: in order.
        dose_cell: one more than the number of the cell of a token into which its relative dose at the first of
            `layers` is written, those at the others into the following cells; 0 if its dose is not measured.
        source: where the number of its HELD instruction comes from, at the same positions.
        leads: whether it comes before all others at its tap, in whatever order they are given.
        joins: whether its terms are added together with those of the next one, so that both see the same row.
    """

    hook: str
    layers: tuple[int, ...]
    positions: Positions
    per_position: int
    instructions: tuple[Instruction, ...]
    dose_cell: int = 0
    source: Source | None = None
    leads: bool = False
    joins: bool = False

    def of_position(self, rank: int) -> tuple[Instruction, ...]:
        """Return what is done at the selected position that `rank` others come before.

        Empty if nothing is. Only where `per_position` is not 0.
        """
        first = rank * self.per_position
        return tuple(one for one in self.instructions[first : first + self.per_position] if one.u)

    @property
    def is_gated(self) -> bool:
        """Whether a gate decides how much of it is done."""
        return bool(self.instructions) and self.instructions[0].cell > 0 and not self.only_writes

    @property
    def only_writes(self) -> bool:
        """Whether it changes nothing, but writes numbers into cells."""
        return bool(self.instructions) and all(one.kind in WRITES for one in self.instructions)

    @property
    def encoders(self) -> list[str]:
        """Keys of the autoencoders that encode rows for it."""
        instructions = self.instructions if self.source is None else (*self.instructions, self.source.instruction)
        return [one.key for one in instructions if one.kind in (ENCODE, RECONSTRUCT)]

    @property
    def functions(self) -> list[str]:
        return [one.key for one in self.instructions if one.kind == HOOK]

    @functools.cached_property
    def digest(self) -> str:
        """Content address of what is done to a row at these sites, whatever the positions."""
        content: list[Any] = [self.hook, self.layers, self.instructions]
        if self.per_position > 1:
            content.append(self.per_position)
        if self.dose_cell:
            content.append({"dose_cell": self.dose_cell})
        if self.source is not None:
            content.append({"source": self.source})
        if self.leads:
            content.append({"leads": True})
        if self.joins:
            content.append({"joins": True})
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()[:32]

    @functools.cached_property
    def vectors(self) -> frozenset[str]:
        """Digests of the vectors that it uses."""
        instructions = self.instructions if self.source is None else (*self.instructions, self.source.instruction)
        return frozenset(digest for one in instructions for digest in (one.u, one.w) if digest)

    def to_wire(self) -> list[Any]:
        """Return the form that travels to the scheduler and the workers, which work out `dose_cell` themselves."""
        instructions = [one if one.stop or one.cell or one.key else one[:_WHOLE_ROW] for one in self.instructions]
        more = [self.source, True] if self.joins else [] if self.source is None else [self.source]
        return [self.hook, list(self.layers), self.positions.to_json(), self.per_position, instructions, *more]

    @classmethod
    def from_wire(cls, data: list[Any]) -> ResolvedIntervention:
        """Parse what `to_wire` returns."""
        hook, layers, positions, per_position, instructions, *more = data
        return cls(
            hook,
            tuple(layers),
            Positions.parse(positions),
            per_position,
            tuple(Instruction(*one) for one in instructions),
            source=Source.from_wire(more[0]) if more and more[0] else None,
            joins=len(more) > 1,
        )


def on_heads(
    lowered: Sequence[LoweredIntervention], heads: Sequence[int], d_head: int, positions: int
) -> LoweredIntervention:
    """Return the instructions of several heads, each for [d_head], as those of one intervention.

    `positions` is how many positions have instructions of their own; 0 if none have.
    """
    rows: dict[str, np.ndarray] = {}
    by_head: list[list[Instruction]] = []
    for one, head in zip(lowered, heads, strict=True):
        rows.update(one.rows)
        start, stop = head * d_head, (head + 1) * d_head
        by_head.append(
            [term._replace(start=start, stop=stop) if term.u or term.key else term for term in one.instructions]
        )
    if not any(by_head):
        return LoweredIntervention((), {})
    if not positions:
        return LoweredIntervention(tuple(itertools.chain.from_iterable(by_head)), rows)
    filled = [terms or [NOTHING] * positions for terms in by_head]
    return LoweredIntervention(tuple(itertools.chain.from_iterable(zip(*filled, strict=True))), rows)


def on_neurons(lowered: LoweredIntervention, neurons: Sequence[int], width: int) -> LoweredIntervention:
    """Return the instructions for some neurons, [neurons picked], as instructions for a row of `width` values.

    What is added is a vector with zeros for the other neurons. A BLEND is done to each run of
    neighbouring neurons.
    """
    collector, places = VectorCollector(), np.array(neurons)

    def spread(digest: str) -> str:
        if not digest:
            return ""
        row = np.zeros(width, np.float32)
        row[places] = lowered.rows[digest]
        return collector.add(row)

    def placed(term: Instruction) -> Iterator[Instruction]:
        assert term.kind not in (NORM, KEEP_NORM), "refused when the intervention is made"
        if term.kind != BLEND:
            yield term._replace(u=spread(term.u), w=spread(term.w))
            return
        values = lowered.rows[term.u]
        for run in runs:
            start = int(places[run[0]])
            yield term._replace(u=collector.add(values[run]), start=start, stop=start + len(run))

    order = np.argsort(places)
    runs = np.split(order, np.flatnonzero(np.diff(places[order]) > 1) + 1)
    instructions = tuple(itertools.chain.from_iterable(map(placed, lowered.instructions)))
    return LoweredIntervention(instructions, collector.rows)
