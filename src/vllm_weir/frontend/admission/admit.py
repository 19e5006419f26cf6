"""Admission: requests are checked against the engine, and resolved, before they enter it."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.capture_groups import (
    CaptureGroup,
    assign_postprocesses,
    make_groups,
    with_derived,
    with_read_outs,
)
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.postprocesses import postprocesses_of
from vllm_weir.frontend.admission.probe_registry import ProbeRegistry, RegisteredProbe
from vllm_weir.frontend.admission.reachable import UNKNOWN, Asked, Vocabulary, asked_of, resolve_tokens
from vllm_weir.frontend.admission.read_outs import on_device, read_outs_of
from vllm_weir.frontend.admission.sae_registry import SAERegistry
from vllm_weir.frontend.admission.scoring import ProbeResolver, by_move
from vllm_weir.frontend.admission.units import check_source, check_units
from vllm_weir.frontend.derived.sources import DerivedPoints
from vllm_weir.schema.by_position import ByPosition
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.compat.three_tier import scaled
from vllm_weir.schema.compat.vllm_lens import in_lens_words, lens_capture, lens_interventions, refuse_lens
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.features import SetFeature
from vllm_weir.schema.hooks import DERIVED_HOOKS, PART_HOOKS, Site
from vllm_weir.schema.instructions import (
    Instruction,
    LoweredIntervention,
    ResolvedIntervention,
    Source,
    couples,
    reach,
)
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.intervention_kinds import AnyIntervention
from vllm_weir.schema.keys import LENS_CAPTURE_KEY, LENS_STEER_KEY, WIRE_KEY
from vllm_weir.schema.request import MAX_CAPTURES, Postprocess, RequestSpec, ResolvedSpec, SiteRequest
from vllm_weir.schema.resolved_probes import CellLayout, ResolvedGate, ResolvedProbe
from vllm_weir.schema.row_parts import WHOLE
from vllm_weir.schema.row_shapes import RowShape, Shard
from vllm_weir.schema.row_shards import RowShard, ShardWidths
from vllm_weir.schema.selectors import MAX_SELECTORS
from vllm_weir.schema.set_activation import SetActivation
from vllm_weir.schema.stop_rules import StopRule
from vllm_weir.schema.taps import STAGES, column_of, shard_column

ONE_ROW = ShardWidths({}, {}, 0)


class GivenIntervention(NamedTuple):
    """An intervention as it was given: its name in the wire form, and its hook point."""

    op: str
    hook: str

    @classmethod
    def of(cls, intervention: Intervention) -> GivenIntervention:
        """Describe an intervention of a request."""
        op = SetFeature.op if isinstance(intervention, SetActivation) else intervention.op
        return cls(op, intervention.hook)


@dataclass(frozen=True)
class AdmittedRequest:
    """A request that may enter the engine.

    Attributes:
        spec: its captures, resolved.
        parts: its captures by where their rows go; the first is what comes back on the output.
        dtype: the model's.
        moves: its interventions, resolved. None stands for one that changes nothing (a zero vector,
            a scale of 0); one with different vectors at different layers is several.
        rows: the vectors that these and the probes use, and the directions that captures project
            on, by digest.
        parted: for each intervention as it was given, how many of `moves` it became.
        by_position: rows that are for one selected position each, to be counted against the
            positions of each request.
        asked: the request's own selectors that may select nothing, depending on its lengths.
        widths: of the parts in which its rows come.
        num_layers: blocks of the model.
        probes: what scores its rows.
        gates: what decides on interventions.
        gate_of: for each intervention as it was given, the index of its gate, or -1.
        stops: what ends generation.
        told: how many of `probes`, from the first, come back on its outputs.
        counted: the probes that score every request, each with its index among `probes`.
        given: the kind and the hook point of each intervention as it was given.
        dose: whether the relative doses of its interventions are measured.
    """

    spec: ResolvedSpec
    parts: tuple[CaptureGroup, ...]
    dtype: str
    moves: tuple[ResolvedIntervention | None, ...] = ()
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    parted: tuple[int, ...] = ()
    by_position: tuple[ByPosition, ...] = ()
    asked: Asked = ()
    widths: ShardWidths = ONE_ROW
    num_layers: int = 0
    probes: tuple[ResolvedProbe, ...] = ()
    gates: tuple[ResolvedGate, ...] = ()
    gate_of: tuple[int, ...] = ()
    stops: tuple[StopRule, ...] = ()
    told: int = 0
    counted: tuple[tuple[int, RegisteredProbe], ...] = ()
    given: tuple[GivenIntervention, ...] = ()
    dose: bool = False

    @property
    def cells(self) -> CellLayout:
        """Where its probes' scores, its gates' factors and its doses stand among the cells of a token."""
        return self.engine_spec.layout

    @functools.cached_property
    def gate_of_moves(self) -> tuple[int, ...]:
        """For each of `moves`, the index of its gate, or -1."""
        if not self.gates:
            return (-1,) * len(self.moves)
        return by_move(self.gate_of, self.parted)

    @functools.cached_property
    def columns(self) -> dict[Site | RowShard, int]:
        """The column of the plan in which workers record each site, and what they call each part's."""
        columns: dict[Site | RowShard, int] = {}
        for site, _, before, _ in self.spec.site_requests:
            column = columns[site] = column_of(site, before)
            if site in self.widths:
                for part, _ in self.widths.shards(site):
                    columns[part] = shard_column(column, part.shard, self.num_layers)
        return columns

    @functools.cached_property
    def shard_widths(self) -> dict[Site | RowShard, int]:
        """Part of a row -> its width, for the sites whose rows come in parts."""
        sites = {request.site for request in self.spec.site_requests if request.site in self.widths}
        return {part: width for site in sites for part, width in self.widths.shards(site)}

    @functools.cached_property
    def _grouped(self) -> dict[int, tuple[int, ...]]:
        groups = [sites for part in self.parts for sites, _ in part.spec.by_positions]
        return {id(sites): tuple(map(self.columns.__getitem__, sites)) for sites in groups}

    def columns_of(self, sites: Sequence[Site | RowShard]) -> tuple[int, ...]:
        """Return the columns of sites or parts; fast for the groups of a part's ``spec.by_positions``."""
        return self._grouped.get(id(sites)) or tuple(map(self.columns.__getitem__, sites))

    @functools.cached_property
    def effective(self) -> list[ResolvedIntervention]:
        """The interventions that change something, in order."""
        return [m for m in self.moves if m is not None]

    @functools.cached_property
    def shared(self) -> frozenset[Site]:
        """Sites whose rows come back on the output and go elsewhere as well."""
        memory, *others = (part.spec.sites for part in self.parts)
        return frozenset(memory).intersection(itertools.chain.from_iterable(others))

    @functools.cached_property
    def engine_spec(self) -> EngineSpec:
        """What the engine does."""
        return EngineSpec(self.spec, tuple(self.effective), self.probes, self.gates, self.dose)

    @property
    def wire(self) -> bytes:
        """The bytes of its `EngineSpec`."""
        return self.engine_spec.wire

    @property
    def steps(self) -> tuple[ResolvedIntervention, ...]:
        """What has instructions in the device tables: interventions, and what scores."""
        return self.engine_spec.steps

    @functools.cached_property
    def max_rows_per_tap(self) -> int:
        """The most rows of the ring that one token takes at one tap."""
        rows: Counter[int] = Counter()
        for site, count in {request.site: request.ring_rows for request in self.spec.site_requests}.items():
            rows[self.columns[site] // STAGES] += count
        return max(rows.values(), default=0)

    @functools.cached_property
    def one_program_needs(self) -> tuple[int, int] | None:
        """(programs, instructions) if all positions that need one share one program, else None."""
        moves = self.steps
        if any(m.per_position or m.positions.needs_token_ids for m in moves):
            return None
        if any(m.positions != moves[0].positions for m in moves):
            return None
        return 1, sum(len(m.layers) * (len(m.instructions) + bool(m.dose_cell)) for m in moves)

    @functools.cached_property
    def digests(self) -> list[str]:
        """Digests of the vectors that its interventions and probes use, sorted.

        Directions of captures are not in the table.
        """
        used = [move.vectors for move in self.effective] + [probe.vectors for probe in self.probes]
        return sorted(frozenset().union(*used))


def unknown_reference(ref: str, field: str) -> np.ndarray:
    """Look up a vector in an engine that has none registered: raise WeirError."""
    raise WeirError(f"no vector is registered under {ref!r}", field)


def unknown_module(name: str, field: str) -> Sequence[Intervention]:
    """Look up a module in an engine that has none registered: raise WeirError."""
    raise WeirError(f"no module is registered under {name!r}", field)


def admit(
    extra_args: Mapping[str, Any],
    capabilities: EngineCapabilities,
    has_token_ids: bool = True,
    lookup: Callable[[str, str], np.ndarray] = unknown_reference,
    always: Sequence[AnyIntervention] = (),
    everyone: Sequence[Capture] = (),
    sinks: Collection[str] = (),
    module: Callable[[str, str], Sequence[Intervention]] = unknown_module,
    vocabulary: Vocabulary = UNKNOWN,
    has_embeddings: bool = False,
    saes: SAERegistry | None = None,
    probes: ProbeRegistry | None = None,
    has_media: bool = False,
) -> AdmittedRequest:
    """Check and resolve a request's keys.

    Args:
        extra_args: ``SamplingParams.extra_args``; not changed.
        capabilities: what the engine serves.
        has_token_ids: False for prompts given as embeddings.
        has_embeddings: whether the prompt, or a part of it, is given as embeddings.
        has_media: whether it has images and the like.
        lookup: (reference, field) -> array, or raises WeirError.
        always: interventions that every request undergoes, before its own.
        everyone: captures of every request, for sinks.
        sinks: names of the engine's sinks.
        module: (name, field) -> the interventions registered under a name, or raises WeirError.
        vocabulary: the engine's.
        saes: the sparse autoencoders that the workers hold; None for none.
        probes: the registered probes; None for none.

    Raises:
        WeirError: naming the field, for anything that cannot be done exactly as asked.
    """
    try:
        return _admit(
            extra_args,
            capabilities,
            has_token_ids,
            lookup,
            always,
            everyone,
            sinks,
            module,
            vocabulary,
            has_embeddings,
            saes or SAERegistry(),
            probes or ProbeRegistry(),
            has_media,
        )
    except WeirError as e:
        raise in_lens_words(e) from None


def _admit(
    extra_args: Mapping[str, Any],
    capabilities: EngineCapabilities,
    has_token_ids: bool,
    lookup: Callable[[str, str], np.ndarray],
    always: Sequence[AnyIntervention],
    everyone: Sequence[Capture],
    sinks: Collection[str],
    module: Callable[[str, str], Sequence[Intervention]],
    vocabulary: Vocabulary,
    has_embeddings: bool,
    saes: SAERegistry,
    registered: ProbeRegistry,
    has_media: bool,
) -> AdmittedRequest:
    check = functools.partial(_check_site, capabilities, has_embeddings, has_media)
    refuse_lens(extra_args)
    spec = RequestSpec.parse(extra_args[WIRE_KEY]) if extra_args.get(WIRE_KEY) is not None else RequestSpec()
    lens_layers: tuple[int, ...] = ()
    captures = spec.capture
    if extra_args.get(LENS_CAPTURE_KEY) is not None:
        lens = lens_capture(extra_args[LENS_CAPTURE_KEY])
        if lens is not None:
            lens_layers = lens.resolve_layers(capabilities.num_layers)
            captures = (*captures, lens)
    from_modules = [one for m in spec.modules for one in scaled(module(m.name, m.path), m.scale, f"{m.path}.scale")]
    own = spec.interventions
    if extra_args.get(LENS_STEER_KEY) is not None:
        own += lens_interventions(extra_args[LENS_STEER_KEY])
    asked = asked_of((*captures, *own))
    # What many requests share is about images where there are some.
    shared = [one for one in (*always, *from_modules) if vocabulary.occurs(one.positions)]
    settled = (saes.resolve(one) if isinstance(one, SetFeature) else one for one in (*shared, *own))
    interventions = tuple(resolve_tokens(one, vocabulary) for one in settled)
    check_units(interventions)
    lowered = _lower(interventions, capabilities, lookup, has_token_ids, check)
    scoring = ProbeResolver(capabilities, lookup, registered, vocabulary, has_token_ids, check).resolve(
        spec.probes, spec.stop_when, interventions, len(interventions) - len(own), spec.dose
    )
    asked += tuple(one for one in scoring.asked if one not in asked)
    rows = {**lowered.rows, **scoring.rows}
    for capture in captures:
        if not capture.sink.memory and capture.sink.own is None and capture.sink.name not in sinks:
            known = ", ".join(["memory", *sinks])
            raise WeirError(
                f"unknown sink {capture.sink.name!r}; this engine has {known}; "
                "offline, {consumer: options} makes one",
                f"{capture.path}.sink",
            )
    of_everyone = (one for one in everyone if vocabulary.occurs(one.positions))
    captures = tuple(resolve_tokens(one, vocabulary) for one in (*captures, *of_everyone))
    kept = _kept(captures, spec, scoring.probes, capabilities)
    expansion = DerivedPoints.expand(captures, capabilities, has_embeddings or has_media)
    captures = expansion.captures
    postprocesses = postprocesses_of(captures, capabilities, lookup)
    read_outs = read_outs_of(spec.features, spec.lens, capabilities, saes.find, vocabulary)
    asked += tuple(one for one in asked_of([one.source for one in read_outs]) if one not in asked)
    read_on_device = on_device(read_outs, capabilities, not captures and not expansion.sources)
    if expansion.sources or read_outs:
        postprocesses = postprocesses._replace(device=None)  # the sources' rows are wanted as they are
    if postprocesses.device is not None:
        rows.update(postprocesses.directions)
    parts = make_groups(
        captures,
        capabilities,
        postprocesses,
        has_token_ids,
        check,
        lens_layers,
    )
    parts = assign_postprocesses(parts, postprocesses)
    if expansion.recipes:
        parts = with_derived(parts, expansion, capabilities, has_token_ids, check)
    device = postprocesses.device
    if read_outs:
        parts = with_read_outs(parts, read_outs, capabilities, has_token_ids, check, not read_on_device)
        if read_on_device:
            device = Postprocess(None, read_outs=tuple(dict.fromkeys(one.read_out for one in read_outs)))
    resolved, parts = _resolved(parts, device, kept)
    admitted = AdmittedRequest(
        resolved,
        parts,
        capabilities.dtype,
        scoring.gated(lowered.moves, lowered.parted),
        rows,
        tuple(lowered.parted),
        tuple(dict.fromkeys(lowered.by_position)),
        asked,
        capabilities.shard_widths,
        capabilities.num_layers,
        scoring.probes,
        scoring.gates,
        scoring.gate_of,
        scoring.stops,
        scoring.told,
        scoring.counted,
        tuple(map(GivenIntervention.of, interventions)),
        spec.dose,
    )
    if admitted.probes and (selectors := len(admitted.engine_spec.selectors)) > MAX_SELECTORS:
        raise WeirError(
            f"{selectors} different choices of positions in captures, interventions and probes, more than the limit of "
            f"{MAX_SELECTORS}; send separate requests",
            "probes",
        )
    return admitted


def _resolved(
    parts: tuple[CaptureGroup, ...], device: Postprocess | None, kept: str
) -> tuple[ResolvedSpec, tuple[CaptureGroup, ...]]:
    """Return what workers capture for a request, and the groups that get rows of it."""
    if not kept:
        return ResolvedSpec(_site_requests(parts), device), parts
    return ResolvedSpec(_site_requests(parts), replace(device or Postprocess(None), kept=kept)), parts[:1]


def _kept(
    captures: Sequence[Capture],
    spec: RequestSpec,
    probes: Sequence[ResolvedProbe],
    capabilities: EngineCapabilities,
) -> str:
    """Return the key of the workers' collection in which a request's rows stay; "" if they leave the workers.

    Raises:
        WeirError: if some stay and others leave, or no worker has them whole.
    """
    found = next((capture for capture in captures if capture.sink.kept), None)
    if found is None:
        return ""
    why = ""
    if len(captures) > 1 or spec.features or spec.lens or probes:
        why = "something else of the request, or of all requests, is captured or scored"
    elif found.project is not None or found.compress is not None or found.before or found.part != WHOLE:
        why = "they stay whole, as they are after interventions"
    elif found.hook in DERIVED_HOOKS:
        why = f"{found.hook} is computed in the caller's process"
    elif any(len(parts) > 1 for site, parts in capabilities.shards.items() if site.hook == found.hook):
        why = f"tensor-parallel workers hold rows of {found.hook} in parts"
    if why:
        raise WeirError(f"these rows cannot stay on the workers: {why}", f"{found.path}.sink")
    return found.sink.kept


def _site_requests(parts: Sequence[CaptureGroup]) -> tuple[SiteRequest, ...]:
    """Return all that workers capture for a request.

    Raises:
        WeirError: if that is at more choices of positions than can be told apart.
    """
    hidden = (group for part in parts for group in (part.sources, part.read_rows) if group is not None)
    site_requests = tuple(one for group in (*parts, *hidden) for one in group.spec.site_requests)
    selectors = len({one.positions for one in site_requests})
    if selectors > MAX_CAPTURES + 1:
        raise WeirError(
            f"{selectors} different choices of positions, more than the limit of {MAX_CAPTURES + 1}; send separate "
            "requests",
            "features" if any(part.read_outs for part in parts) else "capture",
        )
    return site_requests


@dataclass
class _LoweredInterventions:
    """The fields of an `AdmittedRequest` that its interventions determine."""

    moves: list[ResolvedIntervention | None] = field(default_factory=list)
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    parted: list[int] = field(default_factory=list)
    by_position: list[ByPosition] = field(default_factory=list)


def _lower(
    interventions: Sequence[Intervention],
    capabilities: EngineCapabilities,
    lookup: Callable[[str, str], np.ndarray],
    has_token_ids: bool,
    check: Callable[..., None],
) -> _LoweredInterventions:
    out = _LoweredInterventions()
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
    out: _LoweredInterventions,
) -> list[ResolvedIntervention]:
    """Resolve one intervention: one result for all layers at which it does the same.

    Vectors are added to `out`.
    """
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
    return [
        ResolvedIntervention(
            intervention.hook, tuple(layers), intervention.positions, per_position, instructions, source=source
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


def _check_shards(intervention: Intervention, lowered: LoweredIntervention, shards: Sequence[Shard]) -> None:
    """Raise WeirError if one worker would need values of a row that another one holds."""
    for term in lowered.instructions if len(shards) > 1 else ():
        held = any(shard.start <= term.start and term.stop <= shard.stop for shard in shards)
        if couples(term) and not (held and term.stop):
            raise WeirError(
                f"{intervention.op} at {intervention.hook} needs whole rows, which tensor-parallel workers hold in "
                f"{len(shards)} parts; name heads, or start the engine with tensor_parallel_size=1",
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


def _check_site(
    capabilities: EngineCapabilities,
    has_embeddings: bool,
    has_media: bool,
    site: Site,
    path: str,
    layers_field: str = "",
) -> None:
    """Raise WeirError, naming the field, unless a request can have the site."""
    why = capabilities.sites.get(site, "no worker has this block")
    if why:
        hook_is_served = any(s.hook == site.hook and not w for s, w in capabilities.sites.items())
        raise WeirError(
            f"{site} is refused: {why}", (layers_field or f"{path}.layers") if hook_is_served else f"{path}.hook"
        )
    if site.hook != "embed":
        return
    if has_embeddings or (has_media and not capabilities.embeds_media):
        what = "embeddings" if has_embeddings else "images or the like"
        raise WeirError(
            f"embed is refused for this request: its prompt, or a part of it, is given as {what}, which never pass "
            "the embedding layer; resid_pre at layer 0 is what enters the first block",
            f"{path}.hook",
        )
