"""Interventions of a request become instructions for the blocks that the engine has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.features import Reconstruct, SetFeature
from vllm_weir.schema.fields import with_fields
from vllm_weir.schema.hooks import PART_HOOKS, Site
from vllm_weir.schema.instructions import (
    Instruction,
    LoweredIntervention,
    ResolvedIntervention,
    Source,
    couples,
    reach,
)
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.rows import RowShape, Shard
from vllm_weir.schema.set_activation import Reconstruction, SetActivation
from vllm_weir.schema.taps import comes_before, tap_of
from vllm_weir.schema.user_hooks import Hook
from vllm_weir.schema.vector_axes import check_row_each, check_row_each_for_everyone


class CheckSite(Protocol):
    """Raises WeirError unless a request can have a site."""

    def __call__(self, site: Site, path: str, layers_field: str = "") -> None: ...


_ASKED_AS = {SetActivation.op: SetFeature.op, Reconstruction.op: Reconstruct.op}
"""What an autoencoder has put in the place of an intervention -> what was asked."""


class AdmittedIntervention(NamedTuple):
    """An intervention of a request, and what it has become.

    Attributes:
        op: its name in the wire form.
        hook: its hook point.
        moves: several where its vectors differ by layer; none if it changes nothing (a zero vector, a scale of 0).
        rows: the vectors that these use, by digest.
        by_position: numbers of rows that are for one selected position each, to be counted against the positions of
            each request.
        calls: what workers are told of the functions that they call for it, by key.
        gate: the index of its gate among those of the request, or -1.
        positions: its selector, as it was asked.
        path: named by errors.
    """

    op: str
    hook: str
    moves: tuple[ResolvedIntervention, ...]
    rows: Mapping[str, np.ndarray] = MappingProxyType({})
    by_position: tuple[int, ...] = ()
    calls: Mapping[str, bytes] = MappingProxyType({})
    gate: int = -1
    positions: Positions = Positions("all")
    path: str = ""

    def check_rows(self, prompt_len: int | None = None, everyone: bool = False) -> None:
        """Raise WeirError unless it has a row for each position that it selects, where its rows are for one each.

        Without `prompt_len` it checks what is known without it; `everyone`: whether it is for prompts of any length.
        """
        for rows in self.by_position:
            if everyone:
                check_row_each_for_everyone(rows, self.positions, self.path)
            else:
                check_row_each(rows, self.positions, self.path, prompt_len)

    def gated(self, gate: int, cell: int) -> AdmittedIntervention:
        """Return it with a gate, whose factor stands in a cell."""
        moves = (replace(m, instructions=tuple(one._replace(cell=cell) for one in m.instructions)) for m in self.moves)
        return self._replace(moves=tuple(moves), gate=gate)


def lower(
    interventions: Sequence[Intervention],
    capabilities: EngineCapabilities,
    lookup: Callable[[str, str], np.ndarray],
    has_token_ids: bool,
    check: CheckSite,
) -> list[AdmittedIntervention]:
    """Resolve interventions, in order, for the blocks and row shapes of an engine.

    Autoencoders have replaced each `SetFeature` and `Reconstruct`. `lookup` is (reference, field) -> array; `check`
    refuses a site that the request cannot have.

    Raises:
        WeirError: naming the field, for what cannot be done exactly as asked.
    """
    out = []
    for intervention in interventions:
        if intervention.positions.needs_token_ids and not has_token_ids:
            raise WeirError(
                "the prompt is given as embeddings, so it has no token ids", f"{intervention.path}.positions"
            )
        layers_field = intervention.layers_field
        for layer in intervention.resolve_layers(capabilities.num_layers):
            site = Site(intervention.hook, layer)
            check(site, intervention.path, layers_field)
            if capabilities.read_only and (why := capabilities.read_only.get(site)):
                raise WeirError(f"{site} can be read and not changed: {why}", f"{intervention.path}.hook")
        if isinstance(intervention, Hook):
            _check_hook(intervention, capabilities)
        if isinstance(intervention, SetActivation) and intervention.source_site is not None:
            check_source(intervention, intervention.source_site, capabilities, check)
        admitted = _admitted(intervention, capabilities, lookup)
        if admitted.moves and (connector := capabilities.traits.kv_connector):
            raise WeirError(
                f"this engine's KV connector, {connector}, could give the steered keys and values of this request to "
                "others; steer on an engine without it",
                intervention.path,
            )
        out.append(admitted)
    return out


def _admitted(
    intervention: Intervention, capabilities: EngineCapabilities, lookup: Callable[[str, str], np.ndarray]
) -> AdmittedIntervention:
    """Resolve one intervention: to one result for all layers at which it does the same."""
    rows: dict[str, np.ndarray] = {}
    calls: dict[str, bytes] = {}
    by_position: dict[int, None] = {}
    layers_by_effect: dict[tuple[tuple[Instruction, ...], int, Source | None], list[int]] = {}
    for one in intervention.by_layer(capabilities.num_layers, lookup):
        for shape, layers in _layers_by_shape(one, capabilities).items():
            lowered = one.lower(shape, lookup)
            _check_reach(one, lowered, capabilities)
            for layer in layers if capabilities.shards else ():
                _check_shards(one, lowered, capabilities.shards.get(Site(one.hook, layer), ()))
            if lowered.by_position:
                by_position[lowered.by_position] = None
            if lowered.instructions and layers:
                effect = lowered.instructions, lowered.per_position, lowered.source
                layers_by_effect.setdefault(effect, []).extend(layers)
                rows.update(lowered.rows)
                calls.update(lowered.calls)
    moves = tuple(
        ResolvedIntervention(
            intervention.hook,
            tuple(layers),
            intervention.positions,
            per_position,
            instructions,
            source=source,
            joins=isinstance(intervention, SetActivation) and intervention.joins,
        )
        for (instructions, per_position, source), layers in layers_by_effect.items()
    )
    op = _ASKED_AS.get(intervention.op, intervention.op)
    return AdmittedIntervention(
        op, intervention.hook, moves, rows, tuple(by_position), calls, -1, intervention.positions, intervention.path
    )


def _layers_by_shape(intervention: Intervention, capabilities: EngineCapabilities) -> dict[RowShape, list[int]]:
    """Group an intervention's layers by the shape of their rows."""
    layers = intervention.resolve_layers(capabilities.num_layers)
    if intervention.hook not in PART_HOOKS:
        return {(capabilities.d_model,): list(layers)}
    layers_by_shape: dict[RowShape, list[int]] = {}
    for layer in layers:
        layers_by_shape.setdefault(capabilities.shape(Site(intervention.hook, layer)), []).append(layer)
    return layers_by_shape


def _check_hook(hook: Hook, capabilities: EngineCapabilities) -> None:
    """Raise WeirError if the engine cannot say which positions a function is given, or runs it on tokens to drop."""
    traits = capabilities.traits
    if traits.uncertainty:
        raise WeirError(
            "this engine plans steps before it knows which drafts of the last one are accepted, so that the positions "
            "of rows are not certain; start it with async_scheduling=False",
            hook.path,
        )
    if traits.speculative and hook.state:
        raise WeirError(
            "this engine drafts tokens, and drafts that are rejected would change the state; start it without "
            "speculative decoding",
            f"{hook.path}.state",
        )


def _check_shards(intervention: Intervention, lowered: LoweredIntervention, shards: Sequence[Shard]) -> None:
    """Raise WeirError if one worker would need values of a row that another one holds."""
    for term in lowered.instructions if len(shards) > 1 else ():
        held = any(shard.start <= term.start and term.stop <= shard.stop for shard in shards)
        if couples(term) and not (held and term.stop):
            instead = "" if isinstance(intervention, Hook) else "name heads, or "
            raise WeirError(
                f"{intervention.op} at {intervention.hook} needs whole rows, which tensor-parallel workers hold in "
                f"{len(shards)} parts; {instead}start the engine with tensor_parallel_size=1",
                f"{intervention.path}.hook",
            )


def _check_reach(intervention: Intervention, lowered: LoweredIntervention, capabilities: EngineCapabilities) -> None:
    """Raise WeirError if an intervention can change a row by more than its dtype can hold.

    Such a value becomes Inf, and the keys and values computed from it NaN, which some attention
    kernels let leak from a block of the cache to the request that gets the block next.
    """
    largest_change = max((reach(term, lowered.rows) for term in lowered.instructions), default=0.0)
    if largest_change > capabilities.largest:
        raise WeirError(
            f"changes a row by up to {largest_change:.2g}, and {capabilities.dtype} holds {capabilities.largest:.3g} "
            "at most; make it smaller",
            f"{intervention.path}.{intervention.factor}"
            + (intervention.where if intervention.factor in intervention.vectors else ""),
        )


def joined(interventions: Sequence[Intervention], dose: bool) -> tuple[Intervention, ...]:
    """Return interventions, of which those that set a feature directly before a reconstruction act together with it.

    All of them read the row that is reconstructed, so the reconstruction is that of the activations as they are set.
    `dose`: whether relative doses are measured.

    Raises:
        WeirError: if a feature that an autoencoder reconstructs is set elsewhere, where it would start from a row
            that shows another activation than the one that is decoded.
    """
    out = list(interventions)
    for k, one in enumerate(interventions):
        if not isinstance(one, Reconstruction) or one.error:
            continue
        first = k
        while first and _sets_feature_of(one, out[first - 1]) and out[first - 1].positions == one.positions:
            first -= 1
            out[first] = _joining(out[first], dose)
        for other in itertools.chain(interventions[:first], interventions[k + 1 :]):
            if _sets_feature_of(one, other) and _may_meet(one.positions, other.positions):
                raise WeirError(
                    "this sets a feature of an autoencoder whose Reconstruct acts at some of the same positions; put "
                    "it directly before the Reconstruct, with the same positions, or give both positions that do not "
                    "meet ('prompt' and 'generated')",
                    other.path,
                )
    return tuple(out)


def _sets_feature_of(one: Reconstruction, other: Intervention) -> bool:
    return isinstance(other, SetActivation) and (other.unit or "").rpartition(":")[0] == one.sae


def _joining(one: Intervention, dose: bool) -> Intervention:
    assert isinstance(one, SetActivation)
    if one.read_back:
        raise WeirError(
            "before a Reconstruct the activation that is decoded is set; leave read_back out", f"{one.path}.read_back"
        )
    if dose:
        raise WeirError("a feature that is set in a Reconstruct has no dose of its own; leave dose out", "dose")
    return with_fields(one, joins=True)


def check_units(interventions: Sequence[Intervention]) -> None:
    """Raise WeirError if a unit is set after it was changed, by one that does not read the changed row.

    That is one that reads elsewhere, or acts together with others: the second change would start from a number that
    the first one has made wrong. Additions may follow, since they do not depend on it.
    """
    changed: dict[str, list[Positions]] = {}
    for one in interventions:
        if not isinstance(one, SetActivation) or one.unit is None or (one.read is None and not one.joins):
            continue
        earlier = changed.setdefault(one.unit, [])
        if one.add is None and any(_may_meet(one.positions, other) for other in earlier):
            raise WeirError(
                "an earlier SetFeature of this request changes this feature, whose activation is read before both; "
                "give one SetFeature, put add after value or scale, or choose positions 'prompt' and 'generated'",
                f"{one.path}.feature",
            )
        earlier.append(one.positions)


def _may_meet(first: Positions, second: Positions) -> bool:
    """Return whether two selectors may select one position."""
    kinds = {first.kind, second.kind}
    if kinds in ({"prompt", "generated"}, {"last_prompt", "generated"}):
        return False
    if kinds == {"list"} and min(*first.numbers, *second.numbers) >= 0:
        return not set(first.numbers).isdisjoint(second.numbers)
    return True


def check_source(one: SetActivation, source: Site, capabilities: EngineCapabilities, check: CheckSite) -> None:
    """Raise WeirError unless the activation `source` that an intervention replaces is known where it acts."""
    field = f"{one.path}.name"
    check(source, one.path, field)
    if (parts := len(capabilities.shards.get(source, ()))) > 1:
        raise WeirError(
            f"it reads {source}, whose rows tensor-parallel workers hold in {parts} parts; give add, or start the "
            "engine with tensor_parallel_size=1",
            field,
        )
    for layer in one.resolve_layers(capabilities.num_layers):
        acts = Site(one.hook, layer)
        if not comes_before(tap_of(source), tap_of(acts)):
            raise WeirError(f"it reads {source}, which does not come before {acts}, where it writes; give add", field)
        readers, writers = (capabilities.workers.get(site) for site in (source, acts))
        if readers is not None and writers is not None and readers != writers:
            raise WeirError(
                f"it reads {source} and writes {acts}, which are on different pipeline stages; give add, or start the "
                "engine with pipeline_parallel_size=1",
                field,
            )
