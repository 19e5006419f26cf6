"""Parts: a request's captures, resolved against the model and sorted by where their rows go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.spec.capture import Capture
from vllm_weir.spec.hooks import Site
from vllm_weir.spec.request import ResolvedSpec, Treatment, Wish
from vllm_weir.spec.rowkinds import describe_rows
from vllm_weir.spec.sinks import Sink
from vllm_weir.spec.vectors import digest_of

Way: TypeAlias = tuple[Sink, str]
"""Where rows go, and whether they wait to be marked."""
MEMORY: Way = (Sink(), "always")


def way_of(capture: Capture) -> Way:
    """Captures that go the same way are one part."""
    return capture.sink, capture.keep


@dataclass(frozen=True)
class Part:
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

    @functools.cached_property
    def recast(self) -> dict[Site, str]:
        """Sites whose rows are wanted in another dtype than the model's."""
        return {site: dtype for site, dtype in self.dtypes.items() if dtype != self.dtype}


def make_parts(
    captures: Sequence[Capture],
    num_layers: int,
    dtype: str,
    treatments: Mapping[Way, Treatment | None],
    has_token_ids: bool,
    check: Callable[[Site, str], None],
    lens_layers: tuple[int, ...],
) -> tuple[Part, ...]:
    """The parts of a request, the one for memory first (empty if nothing comes back on the output).

    `treatments`: what each part's rows become. `check`: raises WeirError, naming the field under the path it is given,
    for a site that is not tapped.
    """
    wishes: dict[Way, list[Wish]] = {MEMORY: []}
    dtypes: dict[Way, dict[Site, str]] = {MEMORY: {}}
    told: dict[Way, list[dict[str, Any]]] = {}
    before: dict[Site, bool] = {}
    for capture in captures:
        if capture.positions.needs_token_ids and not has_token_ids:
            raise WeirError("the prompt is given as embeddings, so it has no token ids", f"{capture.path}.positions")
        way = way_of(capture)
        treatment = treatments[way]
        own = "float32" if treatment is not None and treatment.compression is not None else dtype
        of_part = dtypes.setdefault(way, {})
        entry = describe_rows(capture, len(treatment.directions) if treatment is not None else 0)
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
            wishes.setdefault(way, []).append(Wish(site, capture.positions, capture.before))
    parts = [
        Part(ResolvedSpec(tuple(some), treatments.get(way)), dtypes[way], dtype, *way, told=tuple(told.get(way, ())))
        for way, some in wishes.items()
    ]
    if lens_layers:
        parts[0] = replace(parts[0], lens_layers=lens_layers)
    return tuple(parts)


class Treatments(NamedTuple):
    """What becomes of a request's rows.

    Attributes:
        device: what the workers do with all of them; None: nothing.
        ways: what each part's rows become.
        directions: vectors that they need, by digest.
    """

    device: Treatment | None
    ways: dict[Way, Treatment | None]
    directions: dict[str, np.ndarray]

    def assign(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """The parts, with those marked late whose rows are treated in this process."""
        if self.device is not None:
            return tuple(parts)
        return tuple(
            part if part.spec.treatment is None else replace(part, late=True, directions=self.directions)
            for part in parts
        )


def treatments_of(captures: Sequence[Capture], d_model: int, lookup: Callable[[str, str], np.ndarray]) -> Treatments:
    """What is made of the rows of every part, and whether workers can do it: they treat a request's rows all alike."""
    directions: dict[str, np.ndarray] = {}
    groups: dict[Way, list[Capture]] = {}
    for capture in captures:
        groups.setdefault(way_of(capture), []).append(capture)
    ways = {way: _treatment_of(some, d_model, lookup, directions) for way, some in groups.items()}
    kinds = set(ways.values())
    device = next(iter(kinds)) if len(kinds) == 1 else None
    if device is not None and device.reduce is not None and len({capture.positions for capture in captures}) > 1:
        device = None  # workers reduce over one choice of positions
    return Treatments(device, ways, directions)


def _treatment_of(
    captures: Sequence[Capture], d_model: int, lookup: Callable[[str, str], np.ndarray], rows: dict[str, np.ndarray]
) -> Treatment | None:
    """The one treatment of a part's captures, or None; its directions are added to `rows` by digest."""
    found: set[Treatment] = set()
    for capture in captures:
        names: list[str] = []
        if capture.project is not None:
            array = capture.project.array
            if array is None:
                array = lookup(capture.project.ref, f"{capture.path}.project")
            for row in np.atleast_2d(array):
                if len(row) != d_model:
                    raise WeirError(
                        f"directions of {len(row)} values, the model's width is {d_model}", f"{capture.path}.project"
                    )
                names.append(digest_of(row))
                rows[names[-1]] = row
        if capture.compress is not None:
            capture.compress.check(d_model)
        found.add(Treatment(capture.reduce, tuple(names), capture.compress))
        if len(found) > 1:
            raise WeirError(
                "a request's captures that go to the same place all reduce, project and compress alike, or none does; "
                "name another sink, or send separate requests",
                f"{capture.path}.{_odd(captures[0], capture)}",
            )
        if capture.reduce is not None and capture.positions != captures[0].positions:
            raise WeirError(
                "captures that reduce do so over the same positions; send separate requests",
                f"{capture.path}.positions",
            )
    return next(iter(found)) if found and found != {Treatment(None)} else None


def _odd(first: Capture, other: Capture) -> str:
    """The field in which two captures differ."""
    if first.compress != other.compress:
        return "compress"
    return "project" if other.project is not None else "reduce"
