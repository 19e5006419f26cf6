"""Admission: requests are checked against the engine, and resolved, before they enter it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.frontend.admission.capture_groups import (
    CaptureGroup,
    assign_postprocesses,
    make_groups,
    with_derived,
    with_read_outs,
    with_routing,
)
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.lowering import check_units, joined, lower
from vllm_weir.frontend.admission.postprocesses import PostprocessChoice, postprocesses_of, stack
from vllm_weir.frontend.admission.reachable import UNKNOWN, Vocabulary, asked_of, resolve_tokens
from vllm_weir.frontend.admission.read_outs import AskedReadOut, read_late, read_outs_of
from vllm_weir.frontend.admission.registries import HookRegistry, LensRegistry, ProbeRegistry
from vllm_weir.frontend.admission.replay import replay_of
from vllm_weir.frontend.admission.sae_registry import SAERegistry
from vllm_weir.frontend.admission.scoring import ProbeResolver
from vllm_weir.frontend.derived.sources import DerivedPoints, Expansion
from vllm_weir.results.site_slices import Stacked
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.fields import with_fields
from vllm_weir.schema.functions import pickled
from vllm_weir.schema.hooks import DERIVED_HOOKS, Site
from vllm_weir.schema.intervention_base import Intervention, at_most
from vllm_weir.schema.intervention_kinds import AnyIntervention, Kept, OfAutoencoder
from vllm_weir.schema.interventions import scaled
from vllm_weir.schema.named_hooks import NO_CODE, Use
from vllm_weir.schema.request import MAX_CAPTURES, Postprocess, RequestSpec, ResolvedSpec, SiteRequest
from vllm_weir.schema.resolved_probes import ResolvedProbe
from vllm_weir.schema.routing import Routing
from vllm_weir.schema.rows import WHOLE
from vllm_weir.schema.selectors import MAX_SELECTORS
from vllm_weir.schema.user_hooks import Hook


def unknown_reference(ref: str, field: str) -> np.ndarray:
    """Look up a vector in an engine that has none registered: raise WeirError."""
    raise WeirError(f"no vector is registered under {ref!r}", field)


def unknown_module(name: str, field: str) -> Sequence[Kept]:
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
    module: Callable[[str, str], Sequence[Kept]] = unknown_module,
    vocabulary: Vocabulary = UNKNOWN,
    has_embeddings: bool = False,
    saes: SAERegistry | None = None,
    probes: ProbeRegistry | None = None,
    has_media: bool = False,
    by_client: bool = False,
    hooks: HookRegistry | None = None,
    registered: Sequence[Hook] = (),
    lenses: LensRegistry | None = None,
) -> AdmittedRequest:
    """Check and resolve a request's keys.

    Args:
        extra_args: ``SamplingParams.extra_args``; not changed.
        capabilities: what the engine serves.
        has_token_ids: False for prompts given as embeddings.
        has_embeddings: whether the prompt, or a part of it, is given as embeddings.
        has_media: whether it has images and the like.
        by_client: whether the request comes from a client of a server, which chooses no path there.
        registered: hooks of every request, which act after the request's own hooks and before its last ones.
        lookup: (reference, field) -> array, or raises WeirError.
        always: interventions that every request undergoes, before its own.
        everyone: captures of every request, for sinks.
        sinks: names of the engine's sinks.
        module: (name, field) -> the interventions registered under a name, or raises WeirError.
        vocabulary: the engine's.
        saes: the sparse autoencoders that the workers hold; None for none.
        probes: the registered probes; None for none.
        hooks: the registered hooks; None for none.
        lenses: the named lenses; None for none.

    Raises:
        WeirError: naming the field, for anything that cannot be done exactly as asked.
    """
    admission = _Admission(
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
        hooks or HookRegistry(),
        lenses or LensRegistry(),
    )
    spec = RequestSpec.carried_by(extra_args)
    if by_client:
        _refuse_paths(spec)
    return admission.admit(spec, (*spec.interventions, *spec.hooks, *registered, *spec.last_hooks))


def _refuse_paths(spec: RequestSpec) -> None:
    """Raise WeirError if a request chooses where files are written, or which one is read."""
    for capture in spec.capture:
        if capture.sink.own is not None:
            raise WeirError(
                "over HTTP a sink is 'memory' or the name of one that the server's operator set up",
                f"{capture.path}.sink",
            )
    for one in (*spec.interventions, *spec.hooks):
        if isinstance(one, Hook):
            raise WeirError(NO_CODE, one.path)
    for lens in spec.lens:
        if lens.path is not None:
            raise WeirError("over HTTP a fitted lens is named, and has no path", f"{lens.at}.path")


@functools.cache
def _nothing_captured(dtype: str) -> tuple[ResolvedSpec, tuple[CaptureGroup, ...]]:
    """Return what all requests that want no rows share."""
    return ResolvedSpec(()), (CaptureGroup(ResolvedSpec(()), {}, dtype),)


@dataclass(frozen=True)
class _Admission:
    """What `admit` was given beside the request, and the steps that it takes."""

    capabilities: EngineCapabilities
    has_token_ids: bool
    lookup: Callable[[str, str], np.ndarray]
    always: Sequence[AnyIntervention]
    everyone: Sequence[Capture]
    sinks: Collection[str]
    module: Callable[[str, str], Sequence[Kept]]
    vocabulary: Vocabulary
    has_embeddings: bool
    saes: SAERegistry
    probes: ProbeRegistry
    has_media: bool
    hooks: HookRegistry
    lenses: LensRegistry

    def admit(self, spec: RequestSpec, given: Sequence[AnyIntervention]) -> AdmittedRequest:
        """Check and resolve what a request asks; `given` are its interventions and hooks, in order."""
        capabilities = self.capabilities
        own = [self._settled(one) if isinstance(one, Use) else one for one in given]
        interventions = self._interventions(spec, own)
        lowered = lower(interventions, capabilities, self.lookup, self.has_token_ids, self._check)
        captured, parts = _nothing_captured(capabilities.dtype)
        admitted = AdmittedRequest(
            captured,
            parts,
            capabilities.dtype,
            tuple(lowered),
            {digest: row for one in lowered for digest, row in one.rows.items()},
            asked_of((*spec.capture, *own)),
            capabilities.shard_widths,
            capabilities.num_layers,
            dose=spec.dose,
            functions=tuple(one.function for one in interventions if isinstance(one, Hook)),
            replay=replay_of(spec.routing, capabilities),
        )
        resolver = ProbeResolver(
            capabilities, self.lookup, self.probes, self.vocabulary, self.has_token_ids, self._check, self.saes.find
        )
        admitted = resolver.resolve(spec.probes, spec.stop_when, interventions, len(interventions) - len(own), admitted)
        stacked, more = stack(spec, capabilities, self.has_embeddings or self.has_media)
        captures = (*self._captures(spec), *more)
        if captures or spec.features or spec.lens or spec.routing:
            admitted = self._with_captures(admitted, captures, spec, stacked)
        admitted = replace(admitted, asked=tuple(dict.fromkeys(admitted.asked)))
        if admitted.probes and (selectors := len(admitted.engine_spec.selectors)) > MAX_SELECTORS:
            raise WeirError(
                f"{selectors} different choices of positions in captures, interventions and probes, more than the "
                f"limit of {MAX_SELECTORS}; send separate requests",
                "probes",
            )
        return admitted

    def _with_captures(
        self, admitted: AdmittedRequest, captures: tuple[Capture, ...], spec: RequestSpec, stacked: Stacked
    ) -> AdmittedRequest:
        """Return the request with its captures, features and lens resolved."""
        capabilities = self.capabilities
        kept = _kept(captures, spec, admitted.probes, capabilities)
        expansion = DerivedPoints.expand(captures, capabilities, self.has_embeddings or self.has_media)
        postprocesses = postprocesses_of(expansion.captures, capabilities, self.lookup)
        read_outs = read_outs_of(
            spec.features, spec.lens, capabilities, self.saes.find, self.lenses.find, self.vocabulary
        )
        if expansion.sources or read_outs or spec.routing:
            postprocesses = postprocesses._replace(device=None)  # the sources' rows are wanted as they are
        parts, device = self._groups(expansion, postprocesses, read_outs, stacked, spec.routing)
        resolved, parts = _resolved(parts, device, kept)
        directions = postprocesses.directions if postprocesses.device is not None else {}
        asked = (*admitted.asked, *asked_of([one.source for one in read_outs]))
        return replace(admitted, spec=resolved, parts=parts, rows={**admitted.rows, **directions}, asked=asked)

    def _interventions(self, spec: RequestSpec, own: Sequence[AnyIntervention]) -> tuple[Intervention, ...]:
        """Return those of every request, of the request's modules, and its own, in the order in which they act."""
        settled = ((list(map(self._settled, self.module(m.name, m.path))), m) for m in spec.modules)
        from_modules = at_most(
            (one for kept, m in settled for one in scaled(kept, m.scale, f"{m.path}.scale")), "modules"
        )
        # What many requests share is about images where there are some.
        everybody = (*map(self._settled, self.always), *from_modules)
        shared = [one for one in everybody if self.vocabulary.occurs(one.positions)]
        resolved = (resolve_tokens(self._settled(one), self.vocabulary) for one in (*shared, *own))
        interventions = joined(tuple(resolved), spec.dose)
        check_units(interventions)
        for one in interventions:
            if isinstance(one, Hook) and one.function.adapter:
                self._check_one_stage(one)
        return interventions

    def _settled(self, one: AnyIntervention) -> Intervention:
        """Return what an intervention does that names something, with a function as it travels."""
        if isinstance(one, Use):
            one = self.hooks.resolve(one, self.lookup)
        if isinstance(one, Hook) and one.function.why and self.capabilities.traits.pickles:
            return with_fields(one, function=pickled(one.function, f"{one.path}.function"))
        return self.saes.resolve(one) if isinstance(one, OfAutoencoder) else one

    def _check_one_stage(self, hook: Hook) -> None:
        """Raise WeirError if the blocks of a hook, which saves for all of them in one place, have different workers."""
        layers = hook.resolve_layers(self.capabilities.num_layers)
        if len({self.capabilities.workers.get(Site(hook.hook, layer)) for layer in layers}) > 1:
            raise WeirError(
                "these blocks are on different pipeline stages; give a hook for the blocks of each",
                f"{hook.path}.layers",
            )

    def _captures(self, spec: RequestSpec) -> tuple[Capture, ...]:
        """Return the request's own, whose sinks have to exist, and those of every request."""
        for capture in spec.capture:
            if not capture.sink.memory and capture.sink.own is None and capture.sink.name not in self.sinks:
                known = ", ".join(["memory", *self.sinks])
                raise WeirError(
                    f"unknown sink {capture.sink.name!r}; this engine has {known}; "
                    "offline, {consumer: options} makes one",
                    f"{capture.path}.sink",
                )
        of_everyone = (one for one in self.everyone if self.vocabulary.occurs(one.positions))
        return tuple(resolve_tokens(one, self.vocabulary) for one in (*spec.capture, *of_everyone))

    def _groups(
        self,
        expansion: Expansion,
        postprocesses: PostprocessChoice,
        read_outs: tuple[AskedReadOut, ...],
        stacked: Stacked,
        routing: Routing | None,
    ) -> tuple[tuple[CaptureGroup, ...], Postprocess | None]:
        """Return the captures by where their rows go, and what workers make of the rows before they send them."""
        capabilities, has_token_ids, check = self.capabilities, self.has_token_ids, self._check
        parts = make_groups(expansion.captures, capabilities, postprocesses, has_token_ids, check, stacked)
        parts = assign_postprocesses(parts, postprocesses)
        if expansion.recipes:
            parts = with_derived(parts, expansion, capabilities, has_token_ids, check)
        if routing is not None:
            parts = with_routing(parts, routing, capabilities)
        if not read_outs:
            return parts, postprocesses.device
        alone = not expansion.captures and not expansion.sources and routing is None
        late = read_late(read_outs, capabilities, alone)
        parts = with_read_outs(parts, read_outs, capabilities, has_token_ids, check, late)
        on_workers = tuple(dict.fromkeys(one.read_out for one in read_outs if one not in late))
        if not on_workers:
            return parts, postprocesses.device
        return parts, Postprocess(None, read_outs=on_workers, with_rows=bool(late) or not alone)

    def _check(self, site: Site, path: str, layers_field: str = "") -> None:
        """Raise WeirError, naming the field, unless the request can have the site."""
        sites = self.capabilities.sites
        if why := sites.get(site, "no worker has this block"):
            hook_is_served = any(s.hook == site.hook and not w for s, w in sites.items())
            raise WeirError(
                f"{site} is refused: {why}", (layers_field or f"{path}.layers") if hook_is_served else f"{path}.hook"
            )
        if site.hook != "embed":
            return
        if self.has_embeddings or (self.has_media and not self.capabilities.embeds_media):
            what = "embeddings" if self.has_embeddings else "images or the like"
            raise WeirError(
                f"embed is refused for this request: its prompt, or a part of it, is given as {what}, which never pass "
                "the embedding layer; resid_pre at layer 0 is what enters the first block",
                f"{path}.hook",
            )


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
    if len(captures) > 1 or spec.features or spec.lens or spec.routing or probes:
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
    hidden = [group for part in parts for group in (part.sources, part.read_rows) if group is not None]
    hidden += [part.routed.group for part in parts if part.routed is not None]
    site_requests = tuple(one for group in (*parts, *hidden) for one in group.spec.site_requests)
    selectors = len({one.positions for one in site_requests})
    if selectors > MAX_CAPTURES + 1:
        raise WeirError(
            f"{selectors} different choices of positions, more than the limit of {MAX_CAPTURES + 1}; send separate "
            "requests",
            "features" if any(part.read_outs for part in parts) else "capture",
        )
    return site_requests
