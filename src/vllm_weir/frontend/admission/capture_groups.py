"""Parts: a request's captures, resolved against the model and sorted by where their rows go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, ResolvedSpec, SiteRequest
from vllm_weir.schema.row_notes import describe_rows
from vllm_weir.schema.sinks import Sink
from vllm_weir.schema.vectors import digest_of

Way: TypeAlias = tuple[Sink, str]
"""Where rows go, and whether they wait to be marked."""
MEMORY: Way = (Sink(), "always")


def way_of(capture: Capture) -> Way:
    """Captures that go the same way are one part."""
    return capture.sink, capture.keep


@dataclass(frozen=True)
class CaptureGroup:
    """Captures of a request whose rows go the same way.

    Attributes:
        spec: the captures, resolved, with what is made of their rows.
        dtypes: dtype of the rows that are handed out, by site.
        dtype: the model's.
        sink: where the rows go.
        keep: ``"always"``, or ``"marked"`` for rows that wait for `weir.mark`.
        lens_layers: blocks asked for by vllm-lens's key.
        late: whether the treatment is left to this process, because other parts of the request want another one: rows
            leave the device as they are.
        directions: of a late treatment, by digest.
        told: of `describe_rows`, for what is not simply the rows of all positions.
        mixed: site -> what its rows become, where that differs from site to site; such parts are late.
    """

    spec: ResolvedSpec
    dtypes: dict[Site, str]
    dtype: str
    sink: Sink = field(default_factory=Sink)
    keep: str = "always"
    lens_layers: tuple[int, ...] = ()
    late: bool = False
    directions: Mapping[str, np.ndarray] = field(default_factory=dict)
    told: tuple[dict[str, Any], ...] = ()
    mixed: Mapping[Site, Postprocess | None] = field(default_factory=dict)

    @functools.cached_property
    def groups(self) -> tuple[tuple[tuple[Site, ...], tuple[Positions, ...], Postprocess | None], ...]:
        """The sites, those with the same selectors and the same treatment together, and these."""
        if not self.mixed:
            return tuple((*group, self.spec.postprocess) for group in self.spec.by_positions)
        out: list[tuple[tuple[Site, ...], tuple[Positions, ...], Postprocess | None]] = []
        for sites, selectors in self.spec.by_positions:
            by_postprocess: dict[Postprocess | None, list[Site]] = {}
            for site in sites:
                by_postprocess.setdefault(self.mixed[site], []).append(site)
            out.extend((tuple(some), selectors, postprocess) for postprocess, some in by_postprocess.items())
        return tuple(out)

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
        """Sites whose rows have to be cast, and to what: products stay float32 unless asked for otherwise."""
        folded = [site for sites, _, how in self.groups if how is not None and how.folds for site in sites]
        return {**self.recast, **{site: self.dtypes[site] for site in folded}}


def make_parts(
    captures: Sequence[Capture],
    num_layers: int,
    dtype: str,
    postprocesses: PostprocessChoice,
    has_token_ids: bool,
    check: Callable[[Site, str], None],
    lens_layers: tuple[int, ...],
) -> tuple[CaptureGroup, ...]:
    """The parts of a request, the one for memory first (empty if nothing comes back on the output).

    `postprocesses`: of these captures. `check`: raises WeirError, naming the field under the path it is given,
    for a site that is not tapped.
    """
    site_requests: dict[Way, list[SiteRequest]] = {MEMORY: []}
    dtypes: dict[Way, dict[Site, str]] = {MEMORY: {}}
    told: dict[Way, list[dict[str, Any]]] = {}
    before: dict[Site, bool] = {}
    mixed: dict[Site, Postprocess | None] = {}
    for capture, asked in zip(captures, postprocesses.each, strict=True):
        if capture.positions.needs_token_ids and not has_token_ids:
            raise WeirError("the prompt is given as embeddings, so it has no token ids", f"{capture.path}.positions")
        way = way_of(capture)
        postprocess = postprocesses.ways[way]
        own = "float32" if postprocess is not None and postprocess.compression is not None else dtype
        of_part = dtypes.setdefault(way, {})
        entry = describe_rows(capture, len(asked.directions) if asked is not None else 0)
        if entry is not None and entry not in told.setdefault(way, []):
            told[way].append(entry)
        for layer in capture.resolve_layers(num_layers):
            site = Site(capture.hook, layer)
            check(site, capture.path)
            if before.setdefault(site, capture.before) != capture.before:
                raise WeirError(f"{site} is asked for both before and after interventions", f"{capture.path}.before")
            wanted = capture.dtype or own
            if of_part.setdefault(site, wanted) != wanted:
                raise WeirError(f"{site} is asked for in both {of_part[site]} and {wanted}", f"{capture.path}.dtype")
            site_request = SiteRequest(site, capture.positions, capture.before)
            if postprocesses.mixed and way == MEMORY:
                _check_site(capture, site, asked, mixed, site_requests[MEMORY])
                mixed[site] = asked
            site_requests.setdefault(way, []).append(site_request)
    parts = [
        CaptureGroup(
            ResolvedSpec(tuple(some), postprocesses.ways.get(way)),
            dtypes[way],
            dtype,
            *way,
            told=tuple(told.get(way, ())),
        )
        for way, some in site_requests.items()
    ]
    parts[0] = replace(parts[0], lens_layers=lens_layers, mixed=mixed)
    return tuple(parts)


def _check_site(
    capture: Capture,
    site: Site,
    asked: Postprocess | None,
    mixed: Mapping[Site, Postprocess | None],
    site_requests: list[SiteRequest],
) -> None:
    """Raise WeirError if rows of one site would become two things, which the output has one place for."""
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
            f"{site} is reduced over one choice of positions; send separate requests", f"{capture.path}.positions"
        )


class PostprocessChoice(NamedTuple):
    """What becomes of a request's rows.

    Attributes:
        device: what the workers do with all of them; None: nothing.
        ways: what each part's rows become; None for a part in which that differs.
        each: what the rows of every capture become.
        mixed: whether what comes back on the output is such a part.
        directions: vectors that they need, by digest.
    """

    device: Postprocess | None
    ways: dict[Way, Postprocess | None]
    each: list[Postprocess | None]
    mixed: bool
    directions: dict[str, np.ndarray]

    def assign(self, parts: Sequence[CaptureGroup]) -> tuple[CaptureGroup, ...]:
        """The parts, with those marked late whose rows are treated in this process."""
        if self.device is not None:
            return tuple(parts)
        return tuple(
            part
            if part.spec.postprocess is None and not part.mixed
            else replace(part, late=True, directions=self.directions)
            for part in parts
        )


def postprocesses_of(
    captures: Sequence[Capture], d_model: int, lookup: Callable[[str, str], np.ndarray]
) -> PostprocessChoice:
    """What is made of the rows of every part, and whether workers can do it: they treat a request's rows all alike."""
    directions: dict[str, np.ndarray] = {}
    groups: dict[Way, list[int]] = {}
    for k, capture in enumerate(captures):
        groups.setdefault(way_of(capture), []).append(k)
    each = [_postprocess_of(capture, d_model, lookup, directions) for capture in captures]
    ways: dict[Way, Postprocess | None] = {}
    mixed = False
    for way, members in groups.items():
        odd = next((k for k in members if not _alike(captures, each, members[0], k)), None)
        ways[way] = each[members[0]] if odd is None else None
        if odd is None:
            continue
        if way != MEMORY or any(t is not None and t.compression is not None for t in (each[k] for k in members)):
            raise _unlike(captures[members[0]], captures[odd], each[members[0]] == each[odd])
        mixed = True
    kinds = set(ways.values())
    device = next(iter(kinds)) if len(kinds) == 1 and not mixed else None
    if device is not None and device.reduce is not None and len({capture.positions for capture in captures}) > 1:
        device = None  # workers reduce over one choice of positions
    return PostprocessChoice(device, ways, each, mixed, directions)


def _postprocess_of(
    capture: Capture, d_model: int, lookup: Callable[[str, str], np.ndarray], rows: dict[str, np.ndarray]
) -> Postprocess | None:
    """A capture's treatment, or None; its directions are added to `rows` by digest."""
    names: list[str] = []
    if capture.project is not None:
        array = capture.project.array
        if array is None:
            array = lookup(capture.project.ref, f"{capture.path}.project")
            if array.ndim > 2:
                shape = list(array.shape)
                raise WeirError(f"expected [d] or [m, d] directions, got shape {shape}", f"{capture.path}.project")
        for row in np.atleast_2d(array):
            if len(row) != d_model:
                raise WeirError(
                    f"directions of {len(row)} values, the model's width is {d_model}", f"{capture.path}.project"
                )
            names.append(digest_of(row))
            rows[names[-1]] = row
    if capture.compress is not None:
        capture.compress.check(d_model)
    found = Postprocess(capture.reduce, tuple(names), capture.compress)
    return None if found == Postprocess(None) else found


def _alike(captures: Sequence[Capture], each: Sequence[Postprocess | None], a: int, b: int) -> bool:
    """Whether a worker can treat the rows of both in one go."""
    return each[a] == each[b] and (captures[a].reduce is None or captures[a].positions == captures[b].positions)


def _unlike(first: Capture, other: Capture, positions: bool) -> WeirError:
    """`positions`: whether they differ in nothing else."""
    if positions:
        return WeirError(
            "captures for one sink that reduce do so over the same positions; send separate requests",
            f"{other.path}.positions",
        )
    return WeirError(
        "a request's captures for one sink all reduce, project and compress alike, or none does, and those for memory "
        "all compress alike; name another sink, or send separate requests",
        f"{other.path}.{_odd(first, other)}",
    )


def _odd(first: Capture, other: Capture) -> str:
    """The field in which two captures differ."""
    if first.compress != other.compress:
        return "compress"
    return "project" if other.project is not None else "reduce"
