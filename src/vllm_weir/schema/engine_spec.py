"""What travels to the engine: `EngineRequest` in place of Weir's keys, and in it `EngineSpec`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import HOOK, ResolvedIntervention
from vllm_weir.schema.keys import WIRE_KEY
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.replay import ReplayRows
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

NOT_LOADED_IN_CORE = "it was not loaded there; the log says why"


class TableNeeds(msgspec.Struct, array_like=True, frozen=True):
    """Upper bounds on what a request's interventions and probes take of the device tables.

    Attributes:
        vectors: digests of the vectors that they use, sorted.
        programs: rows of the program table.
        instructions: rows of the instruction table.
        wide: digest -> rows of the table of vectors, for vectors that take more than one.
        probes: rows of the table of probes.
        gates: rows of the table of gates.
        states: numbers that its probes and gates keep.
    """

    vectors: list[str]
    programs: int
    instructions: int
    wide: dict[str, int] = {}
    probes: int = 0
    gates: int = 0
    states: int = 0


class EngineRequest(msgspec.Struct, array_like=True):
    """What one sequence's request asks of the scheduler and the workers.

    Attributes:
        spec: `EngineSpec.wire`: the captures and interventions.
        reader_endpoint: the address at which the request's reader listens.
        first_position: the first wanted position, or None if no position is known to be wanted.
        rows_per_token: the most rows that one token can give; 0 if the request captures nothing.
        rows_per_tap: the most rows that one token can give at one tap.
        max_row_tokens: how many tokens give rows that leave the device unreduced; None if that is
            not bounded.
        rows_per_group: ring rows of one group of tokens whose rows are reduced; 0 if none are.
        last_reduced: the last position whose row is reduced; None if none are.
        max_tokens: how many tokens the request can generate.
        table_needs: what interventions and probes need of the device tables, nothing for a replay alone; None if
            there are none of these.
        vectors: float32 bytes, by digest, of the vectors that travel with the request.
        cache_salt: see `RowStore.salt`; empty until a request of this caller has failed.
        core_refusal: why the engine core does not do its part; empty if it does. None until the
            engine core has taken the request, and for good where Weir is not loaded there.
        prompt_len: how many of the first tokens that the engine is given are the prompt; those after
            them count as generated. None: all are the prompt.
        calls: the users' functions that are called for it, `user_hooks.Call` by key.
        own_from: the first position whose keys and values may depend on what is done after its block,
            so that no other request can share them; None if there is none.
        replay: the experts that routers are made to choose for it; None if there are none.
    """

    spec: bytes
    reader_endpoint: str
    first_position: int | None = None
    rows_per_token: int = 0
    rows_per_tap: int = 0
    max_row_tokens: int | None = None
    rows_per_group: int = 0
    last_reduced: int | None = None
    max_tokens: int = 0
    table_needs: TableNeeds | None = None
    vectors: dict[str, bytes] = {}
    cache_salt: str = ""
    core_refusal: str | None = None
    prompt_len: int | None = None
    own_from: int | None = None
    calls: dict[str, bytes] = {}
    replay: ReplayRows | None = None

    @classmethod
    def carried_by(cls, extra_args: dict[str, Any] | None) -> EngineRequest | None:
        """Return the request in a ``SamplingParams.extra_args``, or None.

        What has arrived as an array is decoded once and replaced in `extra_args`.
        """
        carried = extra_args.get(WIRE_KEY) if extra_args else None
        if carried is None or type(carried) is cls:
            return carried
        assert extra_args is not None, "it carries something"
        decoded = extra_args[WIRE_KEY] = msgspec.convert(carried, cls)
        return decoded

    @property
    def refusal(self) -> str:
        """Why a worker must fail the request; empty if it can serve it.

        Without Weir in the engine core, other requests would hit cached blocks of a steered one,
        and rows of cached positions would be missing.
        """
        why = NOT_LOADED_IN_CORE if self.core_refusal is None else self.core_refusal
        return f"Weir does not work in the engine core: {why}" if why else ""


@dataclass(frozen=True)
class EngineSpec:
    """Captures and interventions of a request, resolved against a model.

    Attributes:
        captures: sites and postprocessing.
        moves: the interventions that change something, in order.
        probes: what scores its rows.
        gates: what decides on interventions, by the probes' scores.
        dose: whether the relative doses of the interventions are measured.
        replayed: the first position at which routers are made to choose experts, and the one after the last; empty if
            there is none.
    """

    captures: ResolvedSpec
    moves: tuple[ResolvedIntervention, ...] = ()
    probes: tuple[ResolvedProbe, ...] = ()
    gates: tuple[ResolvedGate, ...] = ()
    dose: bool = False
    replayed: tuple[int, ...] = ()

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
        """The smallest length of prompt for which no generated position can be selected, or replayed.

        It is compared with the prompt alone, not with the tokens computed so far: past the prompt,
        the scheduler's count of those may run ahead of the device's.
        """
        return max([0, *self.replayed, *(selector.end for selector in self.selectors)])

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
        more = measured if self.probes or self.dose or self.replayed else []
        replayed = [self.replayed] if self.replayed else []
        return msgspec.msgpack.encode([self.captures.wire, self.captures.postprocess_wire, moves, *more, *replayed])

    @classmethod
    def from_wire(cls, wire: bytes) -> EngineSpec:
        """Parse what `wire` is; while it is cached, equal bytes give the same object."""
        spec = _specs.get(wire)
        if spec is None:
            site_requests, postprocess, moves, *measured = msgspec.msgpack.decode(wire)
            captures = ResolvedSpec.from_wire(site_requests, postprocess)
            probes, gates, dose, *replayed = measured or ((), (), False)
            spec = cls(
                captures,
                tuple(map(ResolvedIntervention.from_wire, moves)),
                tuple(map(ResolvedProbe.from_wire, probes)),
                tuple(map(ResolvedGate.from_wire, gates)),
                dose,
                tuple(*replayed),
            )
            # About the bytes that the objects take.
            _specs.put(wire, spec, 2048 + 16 * len(wire) + 256 * len(captures.site_requests))
        return spec


_specs: LruCache[EngineSpec] = LruCache(64 << 20)
