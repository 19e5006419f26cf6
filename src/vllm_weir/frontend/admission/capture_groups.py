"""Capture groups: a request's captures, resolved, and grouped by where their rows go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.postprocesses import MEMORY, Destination, PostprocessChoice, destination_of
from vllm_weir.frontend.admission.read_outs import AskedReadOut
from vllm_weir.frontend.derived.recipe import Recipe
from vllm_weir.frontend.derived.sources import Expansion
from vllm_weir.results.site_slices import NOT_STACKED, Stacked
from vllm_weir.schema.capture import Capture, describe_rows
from vllm_weir.schema.hooks import Site, place_of
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, ResolvedSpec, SiteRequest
from vllm_weir.schema.routing import ModelRouting, Routing
from vllm_weir.schema.rows import RowPick, RowShape
from vllm_weir.schema.sinks import Sink


@dataclass(frozen=True)
class RoutedRows:
    """The rows in which the choices of a model's routers come, and what of them is wanted."""

    asked: Routing
    model: ModelRouting
    group: CaptureGroup


_APART = "send one of them to a sink, or send separate requests"
"""What serves captures that one destination cannot have together."""


@dataclass(frozen=True)
class CaptureGroup:
    """The captures of a request whose rows have the same destination.

    Attributes:
        spec: the captures, resolved, and the postprocess that their rows undergo.
        dtypes: dtype of the rows that are returned, by site.
        dtype: the model's.
        sink: where the rows go.
        keep: ``"always"``, or ``"marked"`` for rows that wait for `weir.mark`.
        stacked: blocks that also come as one tensor.
        late: whether the postprocess runs in this process, on rows that leave the device as they
            are, because other groups of the request want another one.
        directions: the vectors [d_model] of a late postprocess, by digest.
        notes: entries of `describe_rows`, for what is not simply the rows of all positions.
        mixed: site -> its postprocess, where that differs between sites; such groups are late.
        picks: site -> what is returned of its rows, where they are not simply [d_model].
        recipes: how its derived sites are computed.
        sources: the captures whose rows `recipes` take; None if there are none.
        read_outs: the request's features and lens.
        read_rows: the captures of the rows that `read_outs` are read off; None if there are none.
        late_rows: the captures of the rows that this process reads them off; None if workers read them all.
        routed: the routers' choices; None if they are not wanted.
    """

    spec: ResolvedSpec
    dtypes: dict[Site, str]
    dtype: str
    sink: Sink = field(default_factory=Sink)
    keep: str = "always"
    stacked: Stacked = NOT_STACKED
    late: bool = False
    directions: Mapping[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[dict[str, Any], ...] = ()
    mixed: Mapping[Site, Postprocess | None] = field(default_factory=dict)
    picks: Mapping[Site, RowPick] = field(default_factory=dict)
    recipes: tuple[Recipe, ...] = ()
    sources: CaptureGroup | None = None
    read_outs: tuple[AskedReadOut, ...] = ()
    read_rows: CaptureGroup | None = None
    late_rows: CaptureGroup | None = None
    routed: RoutedRows | None = None

    @property
    def has_rows(self) -> bool:
        return bool(self.spec.site_requests or self.recipes or self.read_outs or self.routed)

    def check_prompt(self, prompt_len: int) -> None:
        """Raise WeirError if a prompt of so many tokens does not have what is asked of it."""
        if self.routed is not None and self.routed.asked.prompt_start > prompt_len:
            raise WeirError(f"the prompt has {prompt_len} tokens, so it is at most that", "routing.prompt_start")

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """Distinct sites that have rows in the result, in the order in which a token meets them."""
        derived = (recipe.site for recipe in self.recipes)
        return tuple(sorted((*self.spec.sites, *derived), key=place_of)) if self.recipes else self.spec.sites

    @functools.cached_property
    def groups(self) -> tuple[tuple[tuple[Site, ...], tuple[Positions, ...], Postprocess | None], ...]:
        """The sites, grouped by selectors and postprocess, each group with both."""
        if not self.mixed:
            return tuple((*group, self.spec.postprocess) for group in self.spec.by_positions)
        groups: list[tuple[tuple[Site, ...], tuple[Positions, ...], Postprocess | None]] = []
        for sites, selectors in self.spec.by_positions:
            by_postprocess: dict[Postprocess | None, list[Site]] = {}
            for site in sites:
                by_postprocess.setdefault(self.mixed[site], []).append(site)
            groups.extend((tuple(some), selectors, postprocess) for postprocess, some in by_postprocess.items())
        return tuple(groups)

    @property
    def folds(self) -> bool:
        return not self.late and self.spec.postprocess is not None and self.spec.postprocess.folds

    @functools.cached_property
    def recast(self) -> dict[Site, str]:
        """Sites whose rows are wanted in another dtype than the model's."""
        return {site: dtype for site, dtype in self.dtypes.items() if dtype != self.dtype}

    @functools.cached_property
    def casts(self) -> dict[Site, str]:
        """Sites whose rows have to be cast, with the dtype; reductions are computed in float32."""
        reduced = [site for sites, _, how in self.groups if how is not None and how.folds for site in sites]
        return {**self.recast, **{site: self.dtypes[site] for site in reduced}}


def make_groups(
    captures: Sequence[Capture],
    capabilities: EngineCapabilities,
    postprocesses: PostprocessChoice,
    has_token_ids: bool,
    check: Callable[[Site, str], None],
    stacked: Stacked = NOT_STACKED,
) -> tuple[CaptureGroup, ...]:
    """Return the capture groups of a request.

    The first is what comes back on the output, and may be empty.

    Args:
        captures: the request's, and those of sinks for every request.
        capabilities: what the engine serves.
        postprocesses: of these captures, from `postprocesses_of`.
        has_token_ids: whether the prompt is given as token ids.
        check: (site, path) -> raises WeirError, naming a field under the path, for a site that is
            not served.
        stacked: blocks that also come as one tensor.

    Raises:
        WeirError: naming the field, if captures contradict each other.
    """
    site_requests: dict[Destination, list[SiteRequest]] = {MEMORY: []}
    dtypes: dict[Destination, dict[Site, str]] = {MEMORY: {}}
    notes: dict[Destination, list[dict[str, Any]]] = {}
    before: dict[Site, bool] = {}
    mixed: dict[Site, Postprocess | None] = {}
    picks: dict[Destination, dict[Site, RowPick]] = {}
    dtype = capabilities.dtype
    for capture, asked in zip(captures, postprocesses.each, strict=True):
        if capture.positions.needs_token_ids and not has_token_ids:
            raise WeirError("the prompt is given as embeddings, so it has no token ids", f"{capture.path}.positions")
        destination = destination_of(capture)
        postprocess = postprocesses.by_destination[destination]
        default_dtype = "float32" if postprocess is not None and postprocess.compression is not None else dtype
        group_dtypes = dtypes.setdefault(destination, {})
        entry = describe_rows(capture, len(asked.directions) if asked is not None else 0)
        if entry is not None and entry not in notes.setdefault(destination, []):
            notes[destination].append(entry)
        for layer in capture.resolve_layers(capabilities.num_layers):
            site = Site(capture.hook, layer)
            check(site, capture.path)
            if before.setdefault(site, capture.before) != capture.before:
                raise WeirError(
                    f"{site} is asked for both before and after interventions; send separate requests",
                    f"{capture.path}.before",
                )
            wanted = capture.dtype or default_dtype
            if group_dtypes.setdefault(site, wanted) != wanted:
                raise WeirError(
                    f"{site} is asked for in both {group_dtypes[site]} and {wanted}; {_APART}", f"{capture.path}.dtype"
                )
            ring_rows = capabilities.shard_widths.ring_rows(site)
            site_request = SiteRequest(site, capture.positions, capture.before, ring_rows)
            if site in capabilities.shapes:
                _pick(capture, site, capabilities.shapes[site], picks.setdefault(destination, {}))
            if postprocesses.mixed and destination == MEMORY:
                _check_memory_site(capture, site, asked, mixed, site_requests[MEMORY])
                mixed[site] = asked
            site_requests.setdefault(destination, []).append(site_request)
    groups = [
        CaptureGroup(
            ResolvedSpec(tuple(requested), postprocesses.by_destination.get(destination)),
            dtypes[destination],
            dtype,
            *destination,
            notes=tuple(notes.get(destination, ())),
            picks=picks.get(destination, {}),
        )
        for destination, requested in site_requests.items()
    ]
    groups[0] = replace(groups[0], stacked=stacked, mixed=mixed)
    return tuple(groups)


def with_derived(
    groups: Sequence[CaptureGroup],
    expansion: Expansion,
    capabilities: EngineCapabilities,
    has_token_ids: bool,
    check: Callable[[Site, str], None],
) -> tuple[CaptureGroup, ...]:
    """Return the groups, of which the first computes the derived sites.

    Raises:
        WeirError: naming the field, if a source is asked for both before and after interventions.
    """
    own = groups[0].spec.postprocess
    if own is not None and own.compression is not None:
        hooks = ", ".join(sorted({recipe.site.hook for recipe in expansion.recipes}))
        raise WeirError(
            f"{hooks} cannot come back on one output with compressed rows; send separate requests",
            "capture",
        )
    sources, *_ = make_groups(
        expansion.sources, capabilities, PostprocessChoice.none(expansion.sources), has_token_ids, check
    )
    before = {request.site: request.before for group in groups for request in group.spec.site_requests}
    for capture in expansion.sources:
        for layer in capture.resolve_layers(capabilities.num_layers):
            if before.get(site := Site(capture.hook, layer), capture.before) != capture.before:
                raise WeirError(f"{site} is needed both before and after interventions", f"{capture.path}.before")
    return (replace(groups[0], recipes=expansion.recipes, sources=sources), *groups[1:])


def with_read_outs(
    groups: Sequence[CaptureGroup],
    asked: tuple[AskedReadOut, ...],
    capabilities: EngineCapabilities,
    has_token_ids: bool,
    check: Callable[[Site, str], None],
    late: Sequence[AskedReadOut],
) -> tuple[CaptureGroup, ...]:
    """Return the groups, of which the first returns what features and lens read; `late`: what this process reads.

    Raises:
        WeirError: naming the field, if rows that are read are captured before interventions.
    """

    def rows_of(some: Sequence[AskedReadOut]) -> CaptureGroup:
        captures = [one.source for one in some]
        rows, *_ = make_groups(captures, capabilities, PostprocessChoice.none(captures), has_token_ids, check)
        return rows

    before = {request.site for group in groups for request in group.spec.site_requests if request.before}
    for one in asked:
        if one.read_out.site in before:
            raise WeirError(
                f"it is read off {one.read_out.site} after interventions, and the request captures that point before "
                "them; send separate requests",
                one.path,
            )
    late_rows = rows_of(late) if late else None
    return (replace(groups[0], read_outs=asked, read_rows=rows_of(asked), late_rows=late_rows), *groups[1:])


def with_routing(
    groups: Sequence[CaptureGroup], asked: Routing, capabilities: EngineCapabilities
) -> tuple[CaptureGroup, ...]:
    """Return the groups, of which the first has the routers' choices.

    Raises:
        WeirError: naming the field, if the engine does not serve them.
    """
    model, dtype = capabilities.routing, capabilities.dtype
    if model.refused:
        raise WeirError(f"no routing is served: {model.refused}", "routing")
    own = groups[0].spec.postprocess
    if own is not None and own.compression is not None:
        raise WeirError("it cannot come back on one output with compressed rows; send separate requests", "routing")
    positions = Positions("slice", (asked.prompt_start, None, None)) if asked.prompt_start else Positions("all")
    sites = [stage.site for stage in model.stages]
    requests = (SiteRequest(site, positions, False, capabilities.shard_widths.ring_rows(site)) for site in sites)
    picks = {site: RowPick(capabilities.shapes[site]) for site in sites}
    rows = CaptureGroup(ResolvedSpec(tuple(requests)), dict.fromkeys(sites, dtype), dtype, picks=picks)
    return (replace(groups[0], routed=RoutedRows(asked, model, rows)), *groups[1:])


def _pick(capture: Capture, site: Site, shape: RowShape, picks: dict[Site, RowPick]) -> None:
    """Note what a capture takes of a site's rows.

    Raises:
        WeirError: naming the field, if the rows do not have it, or another capture takes something
            else.
    """
    capture.check_shape(shape)
    pick = RowPick.of(shape, capture.part)
    if picks.setdefault(site, pick) != pick:
        name = "heads" if capture.neurons is None and capture.heads is not None else "neurons"
        raise WeirError(f"{site} is asked for with different {name}; send separate requests", f"{capture.path}.{name}")


def _check_memory_site(
    capture: Capture,
    site: Site,
    asked: Postprocess | None,
    mixed: Mapping[Site, Postprocess | None],
    site_requests: list[SiteRequest],
) -> None:
    """Raise WeirError if two captures for the output want different results for one site."""
    if site not in mixed:
        return
    if mixed[site] != asked:
        name = "project" if capture.project is not None else "reduce"
        raise WeirError(f"{site} is wanted in two ways; {_APART}", f"{capture.path}.{name}")
    if (
        asked is not None
        and asked.reduce is not None
        and any(w.positions != capture.positions for w in site_requests if w.site == site)
    ):
        raise WeirError(
            f"{site} is to be reduced over two choices of positions; {_APART}",
            f"{capture.path}.positions",
        )


def assign_postprocesses(groups: Sequence[CaptureGroup], postprocesses: PostprocessChoice) -> tuple[CaptureGroup, ...]:
    """Return the groups, those marked late whose postprocess runs in this process."""
    if postprocesses.device is not None:
        return tuple(groups)
    return tuple(
        group
        if group.spec.postprocess is None and not group.mixed
        else replace(group, late=True, directions=postprocesses.directions)
        for group in groups
    )
