"""Admission: a request's wish is checked against the engine before it enters, and put into the engine's wire form."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.facts import EngineFacts
from vllm_weir.frontend.parts import Part, make_parts, treatments_of
from vllm_weir.frontend.reachable import UNKNOWN, Asked, Vocabulary, asked_of, placed
from vllm_weir.spec.capture import Capture
from vllm_weir.spec.engine import EngineSpec
from vllm_weir.spec.hooks import Site
from vllm_weir.spec.interventions import Intervention, Lowered, Move, reach
from vllm_weir.spec.lens import (
    LENS_CAPTURE_KEY,
    LENS_KEYS,
    LENS_STEER_KEY,
    in_lens_words,
    lens_capture,
    lens_interventions,
    refuse_lens,
)
from vllm_weir.spec.request import WIRE_KEY, RequestSpec, ResolvedSpec
from vllm_weir.spec.sizes import Sizes
from vllm_weir.spec.tiers import scaled
from vllm_weir.worker.select import Selectors, column_of

MAX_TOKEN_SELECTORS = 4
KEYS = (WIRE_KEY, *LENS_KEYS)
"""Keys of ``SamplingParams.extra_args`` that are Weir's to honour or refuse."""


@dataclass(frozen=True)
class Admitted:
    """A request that may enter.

    Attributes:
        spec: its captures, resolved.
        parts: these by where their rows go; the first is what comes back on the output.
        dtype: the model's.
        moves: its interventions, resolved; None stands for one that changes nothing (a zero vector, a scale of 0).
        rows: the vectors they use, and the directions that captures project on, by digest.
        asked: the request's own selectors, as far as it depends on the prompt and on `max_tokens` whether they select
            anything.
    """

    spec: ResolvedSpec
    parts: tuple[Part, ...]
    dtype: str
    moves: tuple[Move | None, ...] = ()
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    asked: Asked = ()

    @functools.cached_property
    def columns(self) -> dict[Site, int]:
        """Where workers record each site."""
        return {w.site: column_of(w.site, w.before) for w in self.spec.wishes}

    @functools.cached_property
    def _grouped(self) -> dict[int, tuple[int, ...]]:
        groups = [sites for part in self.parts for sites, _ in part.spec.by_positions]
        return {id(sites): tuple(map(self.columns.__getitem__, sites)) for sites in groups}

    def columns_of(self, sites: Sequence[Site]) -> tuple[int, ...]:
        """The sites' columns; quick for the groups of a part's ``spec.by_positions``."""
        return self._grouped.get(id(sites)) or tuple(map(self.columns.__getitem__, sites))

    @functools.cached_property
    def effective(self) -> list[Move]:
        """The interventions that change something, in order."""
        return [m for m in self.moves if m is not None]

    @functools.cached_property
    def shared(self) -> frozenset[Site]:
        """Sites whose rows come back on the output and go elsewhere as well."""
        memory, *others = (part.spec.sites for part in self.parts)
        return frozenset(memory).intersection(itertools.chain.from_iterable(others))

    @functools.cached_property
    def wire(self) -> bytes:
        """What of it travels to the engine."""
        return EngineSpec(self.spec, tuple(self.effective)).wire

    @functools.cached_property
    def simple_needs(self) -> tuple[int, int] | None:
        """(programs, instructions) if one program serves every position that is steered at all, else None."""
        moves = self.effective
        if any(m.per_position or m.positions.needs_token_ids for m in moves):
            return None
        if any(m.positions != moves[0].positions for m in moves):
            return None
        return 1, sum(len(m.layers) * len(m.instructions) for m in moves)

    @functools.cached_property
    def digests(self) -> list[str]:
        """Of the vectors that its interventions use, sorted; directions of captures have no place in the table."""
        return sorted(frozenset().union(*(move.vectors for move in self.effective)))


def carries_keys(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request asks anything of Weir."""
    if extra_args:
        for key in KEYS:
            if extra_args.get(key) is not None:
                return True
    return False


def unknown_reference(ref: str, field: str) -> np.ndarray:
    """The lookup of an engine that keeps no vectors."""
    raise WeirError(f"no vector is registered under {ref!r}", field)


def unknown_module(name: str, field: str) -> Sequence[Intervention]:
    """The lookup of an engine that keeps no modules."""
    raise WeirError(f"no module is registered under {name!r}", field)


def admit(
    extra_args: Mapping[str, Any],
    facts: EngineFacts,
    has_token_ids: bool = True,
    lookup: Callable[[str, str], np.ndarray] = unknown_reference,
    always: Sequence[Intervention] = (),
    everyone: Sequence[Capture] = (),
    sinks: Collection[str] = (),
    module: Callable[[str, str], Sequence[Intervention]] = unknown_module,
    vocabulary: Vocabulary = UNKNOWN,
) -> Admitted:
    """Check and resolve a request's keys.

    Args:
        extra_args: ``SamplingParams.extra_args``; not changed.
        facts: the engine.
        has_token_ids: False for prompts given as embeddings.
        lookup: (reference, field) -> array, or raises WeirError.
        always: interventions that every request undergoes, before its own.
        everyone: what sinks get of every request.
        sinks: names of the engine's sinks.
        module: (name, field) -> the interventions kept under a name, or raises WeirError.
        vocabulary: the engine's.

    Raises:
        WeirError: naming the field, for anything that cannot be done exactly as asked.
    """
    try:
        return _admit(extra_args, facts, has_token_ids, lookup, always, everyone, sinks, module, vocabulary)
    except WeirError as e:
        raise in_lens_words(e) from None


def _admit(
    extra_args, facts: EngineFacts, has_token_ids: bool, lookup, always, everyone, sinks, module, vocabulary
) -> Admitted:
    refuse_lens(extra_args)
    spec = RequestSpec.parse(extra_args[WIRE_KEY]) if extra_args.get(WIRE_KEY) is not None else RequestSpec()
    lens_layers: tuple[int, ...] = ()
    captures = spec.capture
    if extra_args.get(LENS_CAPTURE_KEY) is not None:
        lens = lens_capture(extra_args[LENS_CAPTURE_KEY])
        if lens is not None:
            lens_layers = lens.resolve_layers(facts.num_layers)
            captures = (*captures, lens)
    named = [one for m in spec.modules for one in scaled(module(m.name, m.path), m.scale, f"{m.path}.scale")]
    own = spec.interventions
    if extra_args.get(LENS_STEER_KEY) is not None:
        own += lens_interventions(extra_args[LENS_STEER_KEY])
    asked = asked_of((*captures, *own))
    interventions = tuple(placed(one, vocabulary) for one in (*always, *named, *own))
    moves, rows = _lower(interventions, facts, lookup, has_token_ids)
    captures = tuple(placed(one, vocabulary) for one in (*captures, *everyone))
    for capture in captures:
        if not capture.sink.memory and capture.sink.own is None and capture.sink.name not in sinks:
            have = ", ".join(["memory", *sinks])
            raise WeirError(
                f"unknown sink {capture.sink.name!r}; this engine has {have}; offline {{consumer: options}} makes one",
                f"{capture.path}.sink",
            )
    treatments = treatments_of(captures, facts.d_model, lookup)
    if treatments.device is not None:
        rows.update(treatments.directions)
    parts = make_parts(
        captures,
        facts.num_layers,
        facts.dtype,
        treatments,
        has_token_ids,
        lambda site, path: _check_tapped(site, facts, path),
        lens_layers,
    )
    wishes = tuple(wish for part in parts for wish in part.spec.wishes)
    resolved = ResolvedSpec(wishes, treatments.device)
    return Admitted(resolved, treatments.assign(parts), facts.dtype, moves, rows, asked)


def _lower(interventions, facts: EngineFacts, lookup, has_token_ids: bool):
    moves: list[Move | None] = []
    rows: dict[str, np.ndarray] = {}
    for intervention in interventions:
        if intervention.positions.needs_token_ids and not has_token_ids:
            raise WeirError(
                "the prompt is given as embeddings, so it has no token ids", f"{intervention.path}.positions"
            )
        layers = intervention.resolve_layers(facts.num_layers)
        for layer in layers:
            _check_tapped(Site(intervention.hook, layer), facts, intervention.path)
        lowered = intervention.lower(facts.d_model, lookup)
        _check_reach(intervention, lowered, facts)
        if not lowered.instructions or not layers:
            moves.append(None)
            continue
        rows.update(lowered.rows)
        moves.append(
            Move(
                intervention.hook,
                layers,
                intervention.positions,
                lowered.per_position,
                lowered.instructions,
                intervention.path,
            )
        )
    return tuple(moves), rows


def _check_reach(intervention: Intervention, lowered: Lowered, facts: EngineFacts) -> None:
    """A value that no row can hold becomes Inf, and the keys and values made of it NaN, which some attention kernels
    let leak from a block of the cache to whoever gets it next."""
    most = max((reach(term, lowered.rows) for term in lowered.instructions), default=0.0)
    if most > facts.largest:
        raise WeirError(
            f"changes a row by up to {most:.2g}, and {facts.dtype} holds {facts.largest:.3g} at most; make it smaller",
            f"{intervention.path}.{intervention.factor}",
        )


def engine_form(
    admitted: Admitted,
    reply: str,
    prompt_ids: Sequence[int] | None,
    prompt_len: int,
    max_tokens: int,
    facts: EngineFacts,
    chunked: bool,
    sizes: Sizes,
) -> dict[str, Any] | None:
    """What travels with the request to scheduler and workers; None if it asks for nothing that needs them.

    ``spec``: an `EngineSpec`. ``reply``: where its reader listens. ``first``: its first wanted position, or None.
    ``width``: the most rows that one of its tokens can give, 0 if it captures nothing. ``whole``: whether something is
    made of the rows of all its sites together. ``most``: tokens that it can generate. ``needs``: what its interventions
    need of the tables, [vector digests, programs, instructions], None if there are none. The desk adds ``rows``, the
    vectors that travel along, if there are any, and once a request has failed ``salt``, see `Store.salt`.
    """
    moves = admitted.effective
    if not admitted.spec.wishes and not moves:
        return None
    width = admitted.spec.width + admitted.spec.cell(facts.d_model, facts.itemsize)
    if width > facts.ring_rows or (not chunked and width * prompt_len > facts.ring_rows):
        raise WeirError(
            f"this capture needs {width * (1 if chunked else prompt_len)} rows in one step, the buffer holds "
            f"{facts.ring_rows}; raise the setting buffer_bytes",
            "capture",
        )
    return {
        "spec": admitted.wire,
        "reply": reply,
        "first": admitted.spec.first(prompt_len, prompt_ids),
        "width": width,
        "whole": admitted.spec.treatment is not None and admitted.spec.treatment.compression is None,
        "most": max_tokens,
        "needs": _needs(admitted, prompt_ids, prompt_len, max_tokens, sizes) if moves else None,
    }


def _needs(admitted: Admitted, prompt_ids, prompt_len: int, max_tokens: int, sizes: Sizes) -> list[Any]:
    """[vector digests, programs, instructions] that the request can come to hold; refused if it can never fit."""
    simple = admitted.simple_needs
    programs, nodes = _count_needs(admitted.effective, prompt_ids, prompt_len, max_tokens) if simple is None else simple
    needed = (
        ("vectors", len(admitted.digests), sizes.vectors, "vector_bytes"),
        ("programs", programs, sizes.programs, "max_programs"),
        ("instructions", nodes, sizes.nodes, "max_instructions"),
    )
    for name, need, capacity, setting in needed:
        if need > capacity:
            raise WeirError(
                f"needs {need} {name}, the engine's table holds {capacity}; raise the setting {setting}",
                "interventions",
            )
    return [admitted.digests, programs, nodes]


def _count_needs(moves: Sequence[Move], prompt_ids, prompt_len: int, max_tokens: int) -> tuple[int, int]:
    """(programs, instructions), an upper bound: one program for each combination that a position can have."""
    selectors = Selectors(list(dict.fromkeys(m.positions for m in moves)), prompt_len, prompt_ids)
    if len(selectors.by_token) > MAX_TOKEN_SELECTORS:
        raise WeirError(f"at most {MAX_TOKEN_SELECTORS} different selectors by token can steer", "interventions")
    every = np.unique(selectors.codes(np.arange(prompt_len + max_tokens)), return_counts=True)
    programs = nodes = 0
    for code, count in zip(*(array.tolist() for array in every), strict=True):
        active = [m for m in moves if code >> selectors.distinct.index(m.positions) & 1]
        if not active:
            continue
        times = 1 << sum(code >> bit & 1 for bit in selectors.by_token)
        ranked = [m for m in active if m.per_position]
        if ranked:
            times *= min(count, 1 + sum(len(m.instructions) for m in ranked))
        programs += times
        nodes += times * sum(len(m.layers) * (1 if m.per_position else len(m.instructions)) for m in active)
    return programs, nodes


def _check_tapped(site: Site, facts: EngineFacts, path: str) -> None:
    why = facts.sites.get(site, "no worker has this block")
    if why:
        elsewhere = any(s.hook == site.hook and not w for s, w in facts.sites.items())
        raise WeirError(f"{site} is refused: {why}", f"{path}.{'layers' if elsewhere else 'hook'}")
