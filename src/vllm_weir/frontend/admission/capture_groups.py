"""Capture groups: a request's captures, resolved, and grouped by where their rows go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, ResolvedSpec, SiteRequest
from vllm_weir.schema.row_notes import describe_rows
from vllm_weir.schema.row_parts import RowPick
from vllm_weir.schema.row_shapes import RowShape
from vllm_weir.schema.sinks import Sink
from vllm_weir.schema.vectors import digest_of

Destination: TypeAlias = tuple[Sink, str]
"""(sink, `Capture.keep`): where rows go, and whether they wait to be marked."""
MEMORY: Destination = (Sink(), "always")
"""The destination of rows that come back on the output."""


def _destination(capture: Capture) -> Destination:
    return capture.sink, capture.keep


@dataclass(frozen=True)
class CaptureGroup:
    """The captures of a request whose rows have the same destination.

    Attributes:
        spec: the captures, resolved, and the postprocess that their rows undergo.
        dtypes: dtype of the rows that are returned, by site.
        dtype: the model's.
        sink: where the rows go.
        keep: ``"always"``, or ``"marked"`` for rows that wait for `weir.mark`.
        lens_layers: blocks asked for by vllm-lens's key.
        late: whether the postprocess runs in this process, on rows that leave the device as they
            are, because other groups of the request want another one.
        directions: the vectors [d_model] of a late postprocess, by digest.
        notes: entries of `describe_rows`, for what is not simply the rows of all positions.
        mixed: site -> its postprocess, where that differs between sites; such groups are late.
        picks: site -> what is returned of its rows, where they are not simply [d_model].
    """

    spec: ResolvedSpec
    dtypes: dict[Site, str]
    dtype: str
    sink: Sink = field(default_factory=Sink)
    keep: str = "always"
    lens_layers: tuple[int, ...] = ()
    late: bool = False
    directions: Mapping[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[dict[str, Any], ...] = ()
    mixed: Mapping[Site, Postprocess | None] = field(default_factory=dict)
    picks: Mapping[Site, RowPick] = field(default_factory=dict)

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
        """Whether workers reduce the prompt's rows."""
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
    lens_layers: tuple[int, ...],
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
        lens_layers: blocks asked for by vllm-lens's key.

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
        destination = _destination(capture)
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
                raise WeirError(f"{site} is asked for both before and after interventions", f"{capture.path}.before")
            wanted = capture.dtype or default_dtype
            if group_dtypes.setdefault(site, wanted) != wanted:
                raise WeirError(
                    f"{site} is asked for in both {group_dtypes[site]} and {wanted}", f"{capture.path}.dtype"
                )
            ring_rows = capabilities.part_widths.ring_rows(site)
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
    groups[0] = replace(groups[0], lens_layers=lens_layers, mixed=mixed)
    return tuple(groups)


def _pick(capture: Capture, site: Site, shape: RowShape, picks: dict[Site, RowPick]) -> None:
    """Note what a capture takes of a site's rows.

    Raises:
        WeirError: naming the field, if the rows do not have it, or another capture takes something
            else.
    """
    capture.check_shape(shape)
    pick = RowPick.of(shape, capture.heads, capture.neurons)
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
        raise WeirError(f"{site} is wanted in two ways; send separate requests", f"{capture.path}.{name}")
    if (
        asked is not None
        and asked.reduce is not None
        and any(w.positions != capture.positions for w in site_requests if w.site == site)
    ):
        raise WeirError(
            f"{site} is to be reduced over two choices of positions; send separate requests",
            f"{capture.path}.positions",
        )


class PostprocessChoice(NamedTuple):
    """Which postprocesses a request's rows undergo, and where these run.

    Attributes:
        device: the postprocess that workers apply to all rows; None: none.
        by_destination: the postprocess of each group; None if it has none, or different ones.
        each: the postprocess of every capture.
        mixed: whether the captures that come back on the output have different ones.
        directions: the vectors [d_model] that they need, by digest.
    """

    device: Postprocess | None
    by_destination: dict[Destination, Postprocess | None]
    each: list[Postprocess | None]
    mixed: bool
    directions: dict[str, np.ndarray]

    def assign(self, groups: Sequence[CaptureGroup]) -> tuple[CaptureGroup, ...]:
        """Return the groups, those marked late whose postprocess runs in this process."""
        if self.device is not None:
            return tuple(groups)
        return tuple(
            group
            if group.spec.postprocess is None and not group.mixed
            else replace(group, late=True, directions=self.directions)
            for group in groups
        )


def postprocesses_of(
    captures: Sequence[Capture], capabilities: EngineCapabilities, lookup: Callable[[str, str], np.ndarray]
) -> PostprocessChoice:
    """Choose the postprocesses of a request's captures.

    Workers apply one postprocess to all rows of a request; where captures differ, this process does
    it.

    Raises:
        WeirError: naming the field, if captures with one destination cannot differ as they do.
    """
    directions: dict[str, np.ndarray] = {}
    members_of: dict[Destination, list[int]] = {}
    for k, capture in enumerate(captures):
        members_of.setdefault(_destination(capture), []).append(k)
    each = [_postprocess_of(capture, capabilities, lookup, directions) for capture in captures]
    by_destination: dict[Destination, Postprocess | None] = {}
    mixed = False
    for destination, members in members_of.items():
        first = members[0]
        differing = next((k for k in members if not _alike(captures, each, first, k)), None)
        by_destination[destination] = each[first] if differing is None else None
        if differing is None:
            continue
        compresses = any(how is not None and how.compression is not None for how in (each[k] for k in members))
        if destination != MEMORY or compresses:
            raise _mismatch(captures[first], captures[differing], each[first] == each[differing])
        mixed = True
    kinds = set(by_destination.values())
    device = next(iter(kinds)) if len(kinds) == 1 and not mixed else None
    if device is not None and device.reduce is not None and len({capture.positions for capture in captures}) > 1:
        device = None  # workers reduce over one choice of positions
    if device is not None and device.directions and any(_has_shape(c, capabilities) for c in captures):
        device = None  # workers project rows of the stream's width
    return PostprocessChoice(device, by_destination, each, mixed, directions)


def _postprocess_of(
    capture: Capture,
    capabilities: EngineCapabilities,
    lookup: Callable[[str, str], np.ndarray],
    rows: dict[str, np.ndarray],
) -> Postprocess | None:
    """Return a capture's postprocess, or None; add its directions to `rows` by digest."""
    digests: list[str] = []
    if capture.project is not None:
        array = capture.project.array
        if array is None:
            array = lookup(capture.project.ref, f"{capture.path}.project")
            if array.ndim > 2:
                shape = list(array.shape)
                raise WeirError(f"expected [d] or [m, d] directions, got shape {shape}", f"{capture.path}.project")
        for row in np.atleast_2d(array):
            _check_direction(capture, len(row), capabilities)
            digests.append(digest_of(row))
            rows[digests[-1]] = row
    if capture.compress is not None:
        if _has_shape(capture, capabilities):
            raise WeirError(
                f"rows of {capture.hook} cannot be compressed, which is for rows of the stream; leave compress out",
                f"{capture.path}.compress",
            )
        capture.compress.check(capabilities.d_model)
    postprocess = Postprocess(capture.reduce, tuple(digests), capture.compress)
    return None if postprocess == Postprocess(None) else postprocess


def _has_shape(capture: Capture, capabilities: EngineCapabilities) -> bool:
    """Return whether some rows of a capture are not simply [d_model]."""
    if not capabilities.shapes:
        return False
    layers = capture.resolve_layers(capabilities.num_layers)
    return any(Site(capture.hook, layer) in capabilities.shapes for layer in layers)


def _check_direction(capture: Capture, values: int, capabilities: EngineCapabilities) -> None:
    """Raise WeirError unless a direction has as many values as the rows that a capture returns."""
    for layer in capture.resolve_layers(capabilities.num_layers):
        width = RowPick.of(capabilities.shape(Site(capture.hook, layer)), capture.heads, capture.neurons).width
        if values != width:
            raise WeirError(
                f"directions of {values} values, rows of {capture.hook} have {width}", f"{capture.path}.project"
            )


def _alike(captures: Sequence[Capture], each: Sequence[Postprocess | None], a: int, b: int) -> bool:
    """Return whether a worker can apply one postprocess to the rows of captures `a` and `b`."""
    return each[a] == each[b] and (captures[a].reduce is None or captures[a].positions == captures[b].positions)


def _mismatch(first: Capture, other: Capture, only_positions: bool) -> WeirError:
    """Return the error for captures that differ where they must not.

    `only_positions` says whether they differ in nothing else.
    """
    if only_positions:
        return WeirError(
            "captures for one sink must reduce over the same positions; send separate requests",
            f"{other.path}.positions",
        )
    return WeirError(
        "a request's captures for one sink must agree in reduce, project and compress, and those for memory in "
        "compress; name another sink, or send separate requests",
        f"{other.path}.{_differing_field(first, other)}",
    )


def _differing_field(first: Capture, other: Capture) -> str:
    if first.compress != other.compress:
        return "compress"
    return "project" if other.project is not None else "reduce"
