"""`EngineSpec`: what a request asks of the engine, and its wire form for scheduler and workers.

The wire form is one bytes object, equal for equal requests. vLLM passes it on as it is, and each
process decodes it once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import msgspec

from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import HOOK, ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import ResolvedSpec
from vllm_weir.schema.resolved_probes import (
    CellLayout,
    ResolvedGate,
    ResolvedProbe,
    Scoring,
    count_activations,
    count_doses,
    scoring_steps,
    with_activations,
    with_doses,
)
from vllm_weir.schema.taps import STAGES, reads_in_time, tap_of
from vllm_weir.util.lru import LruCache


@dataclass(frozen=True)
class EngineSpec:
    """Captures and interventions of a request, resolved against a model.

    Attributes:
        captures: sites and postprocessing.
        moves: the interventions that change something, in order.
        probes: what scores its rows.
        gates: what decides on interventions, by the probes' scores.
        dose: whether the relative doses of the interventions are measured.
    """

    captures: ResolvedSpec
    moves: tuple[ResolvedIntervention, ...] = ()
    probes: tuple[ResolvedProbe, ...] = ()
    gates: tuple[ResolvedGate, ...] = ()
    dose: bool = False

    @functools.cached_property
    def selectors(self) -> tuple[Positions, ...]:
        """The distinct selectors of captures, interventions and probes."""
        moved, scored = (move.positions for move in self.moves), (probe.positions for probe in self.probes)
        return tuple(dict.fromkeys([*self.captures.positions, *moved, *scored]))

    def gated_from(self, prompt_len: int) -> int | None:
        """Return the first position at which a gated intervention may act; None if there is none.

        Before its probe's first score a gate is shut. A selector by token counts as if it could
        select any token.
        """
        if not self.gates:
            return None
        layout = self.layout
        firsts = []
        for move in self.moves:
            if not move.is_gated:
                continue
            gate = self.gates[layout.gate_of(move.instructions[0])]
            acts = move.positions.first(prompt_len)
            if gate.controller and acts is not None:
                firsts.append(acts)
                continue
            scored = self.probes[gate.probe].positions.first(prompt_len)
            if acts is not None and scored is not None:
                firsts.append(max(acts, scored + gate.delay))
        return min(firsts, default=None)

    def called_from(self, prompt_len: int) -> int | None:
        """Return the first position whose row is given to a function that no other request shares; None if none is."""
        own = [move for move in self.moves if any(one.kind == HOOK and one.b for one in move.instructions)]
        firsts = [move.positions.first(prompt_len) for move in own]
        return min((first for first in firsts if first is not None), default=None)

    @functools.cached_property
    def end(self) -> int:
        """The smallest length of prompt for which no generated position can be selected.

        It is compared with the prompt alone, not with the tokens computed so far: past the prompt,
        the scheduler's count of those may run ahead of the device's.
        """
        return max([0, *(selector.end for selector in self.selectors)])

    @functools.cached_property
    def places(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(hook, layers) of the captures, then of each intervention and its source, then of each probe."""
        captured: dict[str, list[int]] = {}
        for hook, layer in self.captures.sites:
            captured.setdefault(hook, []).append(layer)
        places = [(hook, tuple(layers)) for hook, layers in captured.items()]
        for move in self.moves:
            places.append((move.hook, move.layers))
            if move.source is not None:
                places.append((move.source.hook, (move.source.layer,)))
        return (*places, *((probe.hook, (probe.layer,)) for probe in self.probes))

    @functools.cached_property
    def encoders(self) -> tuple[str, ...]:
        """Keys of the autoencoders that encode rows whole inside taps, each once."""
        return tuple(dict.fromkeys(key for move in self.moves for key in move.encoders))

    @functools.cached_property
    def functions(self) -> tuple[str, ...]:
        """Keys of the users' functions that are called inside taps, each once."""
        return tuple(dict.fromkeys(key for move in self.moves for key in move.functions))

    @functools.cached_property
    def early_columns(self) -> frozenset[int]:
        """Columns at which probes read for gates of interventions at the same tap."""
        found = set()
        for move in self.moves if self.gates else ():
            gate = self.gates[self.layout.gate_of(move.instructions[0])] if move.is_gated else None
            if gate is None or gate.controller:
                continue
            column, sites = self.probes[gate.probe].column, [Site(move.hook, layer) for layer in move.layers]
            if any(tap_of(site) == column // STAGES and reads_in_time(column, site) for site in sites):
                found.add(column)
        return frozenset(found)

    @functools.cached_property
    def layout(self) -> CellLayout:
        """Where its numbers stand among the cells of a token."""
        doses = count_doses(self.moves) if self.dose else 0
        return CellLayout.of(self.probes, self.gates, doses, self._activations)

    @functools.cached_property
    def _activations(self) -> int:
        return count_activations(self.moves)

    @functools.cached_property
    def steps(self) -> tuple[ResolvedIntervention, ...]:
        """What has instructions in the device tables: interventions, and what scores or reads for them."""
        moves = with_doses(self.moves, self.layout) if self.dose else self.moves
        if self._activations:
            placed, reading = with_activations(moves, self.layout.activations)
            moves = (*placed, *reading)
        return (*moves, *scoring_steps(self.probes, self.layout)) if self.probes else moves

    @functools.cached_property
    def scoring(self) -> Scoring | None:
        """What probes, gates and doses ask of the workers; None if there are neither probes nor doses."""
        doses = count_doses(self.moves) if self.dose else 0
        if not self.probes and not doses:
            return None
        return Scoring(self.probes, self.gates, self.steps, doses)

    @functools.cached_property
    def wire(self) -> bytes:
        moves = [move.to_wire() for move in self.moves]
        measured = [[probe.to_wire() for probe in self.probes], self.gates, self.dose]
        more = measured if self.probes or self.dose else []
        return msgspec.msgpack.encode([self.captures.wire, self.captures.postprocess_wire, moves, *more])

    @classmethod
    def from_wire(cls, wire: bytes) -> EngineSpec:
        """Parse what `wire` is; while it is cached, equal bytes give the same object."""
        spec = _specs.get(wire)
        if spec is None:
            site_requests, postprocess, moves, *measured = msgspec.msgpack.decode(wire)
            captures = ResolvedSpec.from_wire(site_requests, postprocess)
            probes, gates, dose = measured or ((), (), False)
            spec = cls(
                captures,
                tuple(map(ResolvedIntervention.from_wire, moves)),
                tuple(map(ResolvedProbe.from_wire, probes)),
                tuple(map(ResolvedGate.from_wire, gates)),
                dose,
            )
            # About the bytes that the objects take.
            _specs.put(wire, spec, 2048 + 16 * len(wire) + 256 * len(captures.site_requests))
        return spec


_specs: LruCache[EngineSpec] = LruCache(64 << 20)
