"""Interventions of a request become instructions for the blocks that the engine has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.units import check_source
from vllm_weir.schema.by_position import ByPosition
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
from vllm_weir.schema.row_shapes import RowShape, Shard
from vllm_weir.schema.set_activation import SetActivation
from vllm_weir.schema.user_hooks import Hook


@dataclass
class LoweredInterventions:
    """The fields of an `AdmittedRequest` that its interventions determine."""

    moves: list[ResolvedIntervention | None] = field(default_factory=list)
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    parted: list[int] = field(default_factory=list)
    by_position: list[ByPosition] = field(default_factory=list)
    calls: dict[str, bytes] = field(default_factory=dict)


def lower(
    interventions: Sequence[Intervention],
    capabilities: EngineCapabilities,
    lookup: Callable[[str, str], np.ndarray],
    has_token_ids: bool,
    check: Callable[..., None],
) -> LoweredInterventions:
    """Resolve interventions, in order, for the blocks and row shapes of an engine.

    Autoencoders have replaced each `SetFeature` and `Reconstruct`. `lookup` is (reference, field) -> array; `check`
    refuses a site that the request cannot have.

    Raises:
        WeirError: naming the field, for what cannot be done exactly as asked.
    """
    out = LoweredInterventions()
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
        moves = _moves(intervention, capabilities, lookup, out)
        if moves and (connector := capabilities.traits.kv_connector):
            raise WeirError(
                f"this engine's KV connector, {connector}, could give the steered keys and values of this request to "
                "others; steer on an engine without it",
                intervention.path,
            )
        out.moves += moves or [None]
        out.parted.append(len(moves) or 1)
    return out


def _moves(
    intervention: Intervention,
    capabilities: EngineCapabilities,
    lookup: Callable[[str, str], np.ndarray],
    out: LoweredInterventions,
) -> list[ResolvedIntervention]:
    """Resolve one intervention: one result for all layers at which it does the same; add vectors to `out`."""
    layers_by_effect: dict[tuple[tuple[Instruction, ...], int, Source | None], list[int]] = {}
    for one in intervention.by_layer(capabilities.num_layers, lookup):
        for shape, layers in _layers_by_shape(one, capabilities).items():
            lowered = one.lower(shape, lookup)
            _check_reach(one, lowered, capabilities)
            for layer in layers if capabilities.shards else ():
                _check_shards(one, lowered, capabilities.shards.get(Site(one.hook, layer), ()))
            if lowered.by_position is not None:
                out.by_position.append(lowered.by_position)
            if lowered.instructions and layers:
                effect = lowered.instructions, lowered.per_position, lowered.source
                layers_by_effect.setdefault(effect, []).extend(layers)
                out.rows.update(lowered.rows)
                out.calls.update(lowered.calls)
    return [
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
    ]


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
