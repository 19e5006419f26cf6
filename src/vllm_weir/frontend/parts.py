"""Parts: a request's captures, resolved against the model and sorted by where their rows go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.spec.capture import Capture
from vllm_weir.spec.hooks import Site
from vllm_weir.spec.request import ResolvedSpec, Treatment, Wish
from vllm_weir.spec.sinks import Sink
from vllm_weir.spec.vectors import digest_of


@dataclass(frozen=True)
class Part:
    """Captures of a request whose rows go the same way.

    Attributes:
        spec: the captures, resolved; the treatment is that of the whole request.
        dtypes: dtype of the rows that are handed out, by site.
        dtype: the model's.
        sink: where the rows go.
        keep: ``"always"``, or ``"marked"`` for rows that wait for `weir.mark`.
        lens_layers: blocks asked for by vllm-lens's key.
    """

    spec: ResolvedSpec
    dtypes: dict[Site, str]
    dtype: str
    sink: Sink = field(default_factory=Sink)
    keep: str = "always"
    lens_layers: tuple[int, ...] = ()

    @functools.cached_property
    def recast(self) -> dict[Site, str]:
        """Sites whose rows are wanted in another dtype than the model's."""
        return {site: dtype for site, dtype in self.dtypes.items() if dtype != self.dtype}


def make_parts(
    captures: Sequence[Capture],
    num_layers: int,
    dtype: str,
    treatment: Treatment | None,
    has_token_ids: bool,
    check: Callable[[Site, str], None],
    lens_layers: tuple[int, ...],
) -> tuple[Part, ...]:
    """The parts of a request, the one for memory first (empty if nothing comes back on the output).

    `check`: raises WeirError, naming the field under the path it is given, for a site that is not tapped.
    """
    own = "float32" if treatment is not None and treatment.compression is not None else dtype
    wishes: dict[tuple[Sink, str], list[Wish]] = {(Sink(), "always"): []}
    dtypes: dict[tuple[Sink, str], dict[Site, str]] = {(Sink(), "always"): {}}
    before: dict[Site, bool] = {}
    for capture in captures:
        if capture.positions.needs_token_ids and not has_token_ids:
            raise WeirError("the prompt is given as embeddings, so it has no token ids", f"{capture.path}.positions")
        key = (capture.sink, capture.keep)
        of_part = dtypes.setdefault(key, {})
        for layer in capture.resolve_layers(num_layers):
            site = Site(capture.hook, layer)
            check(site, capture.path)
            if before.setdefault(site, capture.before) != capture.before:
                raise WeirError(f"{site} is asked for both before and after interventions", f"{capture.path}.before")
            wanted = capture.dtype or own
            if of_part.setdefault(site, wanted) != wanted:
                raise WeirError(f"{site} is asked for in both {of_part[site]} and {wanted}", f"{capture.path}.dtype")
            wishes.setdefault(key, []).append(Wish(site, capture.positions, capture.before))
    parts = [Part(ResolvedSpec(tuple(some), treatment), dtypes[key], dtype, *key) for key, some in wishes.items()]
    if lens_layers:
        memory = parts[0]
        parts[0] = Part(memory.spec, memory.dtypes, dtype, lens_layers=lens_layers)
    return tuple(parts)


def common_treatment(
    captures: Sequence[Capture], d_model: int, lookup: Callable[[str, str], np.ndarray], rows: dict[str, np.ndarray]
) -> Treatment | None:
    """The one treatment of all captures, or None; its directions are added to `rows` by digest."""
    found: set[Treatment] = set()
    for capture in captures:
        directions: list[str] = []
        if capture.project is not None:
            array = capture.project.array
            if array is None:
                array = lookup(capture.project.ref, f"{capture.path}.project")
            for row in np.atleast_2d(array):
                if len(row) != d_model:
                    raise WeirError(
                        f"directions of {len(row)} values, the model's width is {d_model}", f"{capture.path}.project"
                    )
                directions.append(digest_of(row))
                rows[directions[-1]] = row
        if capture.compress is not None:
            capture.compress.check(d_model)
        found.add(Treatment(capture.reduce, tuple(directions), capture.compress))
        if len(found) > 1:
            raise WeirError(
                "a request's captures (and those that sinks make of every request) all reduce, project and compress "
                "alike, or none does; send separate requests",
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
