"""`CellRunner`: computes the numbers of a plan with an engine, as one stream of requests."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm_weir.experiments.metrics import BoundMetric, OnOutput
from vllm_weir.experiments.sweep.plan import BASE_RUN, SOURCE_RUN, Job, SweepPlan
from vllm_weir.experiments.sweep.result import Checkpoint, NoCheckpoint
from vllm_weir.frontend.engine import Engine
from vllm_weir.guard.request_extras import extras_in, set_extras, with_extras
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.fields import with_fields
from vllm_weir.schema.hooks import MODEL_HOOKS, Site
from vllm_weir.schema.interventions import Replace
from vllm_weir.schema.keys import WIRE_KEY
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.vectors import Vector

Request = tuple[Sequence[int], Any, Callable[[Any], None]]
"""Tokens, params, and what takes the output."""


class CellRunner:
    """Runs what of a plan is not computed yet.

    For each pair of prompts the two unpatched runs come first: they are captured once, and leave the
    base prompt's keys and values in the prefix cache. Those of the next pair are submitted before
    the cells of this one, so that the engine need not wait between pairs. A cell is one request; on
    a path it is two, the second of which follows as soon as the first is done.

    The key of a request is the function that takes its output.
    """

    def __init__(
        self,
        engine: Engine,
        plan: SweepPlan,
        metric: BoundMetric,
        store: Checkpoint | NoCheckpoint,
        report: Callable[[int], Any],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._engine, self._plan, self._metric, self._store, self._report = engine, plan, metric, store, report
        self._options = options
        self._rows: dict[tuple[int, int], RunRows] = {}
        self._submitted: set[int] = set()
        self._second_runs: deque[Request] = deque()
        """Of paths, as soon as the first is done."""
        self._measured: dict[int, RequestTemplate] = {}
        self._one_token = RequestTemplate(_sampling_params(max_tokens=1, temperature=0.0, detokenize=False))
        self._held: dict[Site, Replace] = {}
        self._held_for: tuple[int, int] | None = None

    def run(self) -> None:
        """Compute all that is missing; after an error nothing of it is left in the engine."""
        with contextlib.closing(self._engine.stream(self._requests(), **self._options)) as outputs:
            for take, out in outputs:
                take(out)

    def _requests(self) -> Iterator[Request | None]:
        """Yield what is to be run; None while that depends on what runs."""
        missing = [pair for pair in range(len(self._plan.pairs)) if self._lacks(pair)]
        for number, pair in enumerate(missing):
            for near in missing[number : number + 2]:
                yield from self._unpatched_runs(near)
            while not self._has_run(pair):
                yield self._second_runs.popleft() if self._second_runs else None
            for job in self._plan.jobs(pair):
                while self._second_runs:
                    yield self._second_runs.popleft()
                if job.key not in self._store.values:
                    yield self._first_run(job)
            del self._rows[pair, SOURCE_RUN], self._rows[pair, BASE_RUN]
        while len(self._store.values) < self._plan.keys:
            yield self._second_runs.popleft() if self._second_runs else None

    def _has_run(self, pair: int) -> bool:
        return (pair, SOURCE_RUN) in self._rows and (pair, BASE_RUN) in self._rows

    def _lacks(self, pair: int) -> bool:
        first = self._plan.run_key(pair, 0)
        return any(key not in self._store.values for key in range(first, first + self._plan.keys_of_pair))

    def _template(self, pair: int) -> RequestTemplate:
        """Return what makes the params of the runs that are measured."""
        if pair not in self._measured:
            given = self._metric.arguments if isinstance(self._metric, OnOutput) else None
            made = _sampling_params(**self._metric.sampling(pair)) if given is None else given
            self._measured[pair] = RequestTemplate(made)
        return self._measured[pair]

    def _unpatched_runs(self, pair: int) -> Iterator[Request]:
        """Yield the two unpatched runs of a pair, unless they have been submitted."""
        if pair in self._submitted:
            return
        self._submitted.add(pair)
        plan = self._plan
        of_source = sorted({p for place in plan.places[pair] for p in place.source})
        of_base = sorted({p for place in plan.places[pair] for p in place.base})
        held = dict.fromkeys(site for sender in plan.sites for site in plan.frozen(sender))
        if plan.to is not None:
            of_base = list(range(of_base[0], len(plan.base(pair))))
        runs = (
            (SOURCE_RUN, plan.source(pair), capture(plan.sites, of_source)),
            (BASE_RUN, plan.base(pair), capture(tuple(dict.fromkeys([*plan.sites, *held])), of_base)),
        )
        for run, token_ids, captures in runs:
            asked = self._template(pair).asking(capture=captures)
            yield token_ids, asked, functools.partial(self._take_run, pair, run)

    def _take_run(self, pair: int, run: int, out: Any) -> None:
        self._rows[pair, run] = RunRows(out.activations)
        self._keep(self._plan.run_key(pair, run), pair, out)

    def _first_run(self, job: Job) -> Request:
        """Return the run of a cell; on a path, the first of two."""
        heads = None if job.head is None else (job.head,)
        source = BASE_RUN if job.own else SOURCE_RUN
        rows = self._rows[job.pair, source].at(job.site, job.place.source, heads)
        patch = put(job.site, rows, job.place.base, heads)
        if self._plan.to is None:
            return self._measured_run(job, patch)
        asked = self._one_token.asking(interventions=(patch, *self._hold_still(job)), capture=self._receiver(job))
        return self._plan.base(job.pair), asked, functools.partial(self._patch_receiver, job)

    def _receiver(self, job: Job) -> tuple[Capture, ...]:
        """Return the capture of the receiver, from the first position that the sender can change."""
        to = self._plan.to
        assert to is not None
        return capture([to.site], range(job.place.base[0], len(self._plan.base(job.pair))), to.heads)

    def _hold_still(self, job: Job) -> list[Replace]:
        """Return what puts the base run's rows in between sender and receiver.

        Before the first patched position nothing can have changed.
        """
        start, end = job.place.base[0], len(self._plan.base(job.pair))
        if self._held_for != (job.pair, start):
            self._held, self._held_for = {}, (job.pair, start)
        positions, rows = range(start, end), self._rows[job.pair, BASE_RUN]
        for site in self._plan.frozen(job.site):
            if site not in self._held:
                self._held[site] = put(site, rows.at(site, positions), positions)
        return [self._held[site] for site in self._plan.frozen(job.site)]

    def _patch_receiver(self, job: Job, out: Any) -> None:
        """Make the second run of a path: the base run with what the receiver had in the first."""
        to = self._plan.to
        assert to is not None
        rows = out.activations.numpy(*to.site)
        positions = range(job.place.base[0], len(self._plan.base(job.pair)))
        self._second_runs.append(self._measured_run(job, put(to.site, rows, positions, to.heads)))

    def _measured_run(self, job: Job, patch: Replace) -> Request:
        asked = self._template(job.pair).asking(interventions=(patch,))
        return self._plan.base(job.pair), asked, functools.partial(self._keep, job.key, job.pair)

    def _keep(self, key: int, pair: int, out: Any) -> None:
        if key not in self._store.values:
            self._store.add(key, self._metric.score(out, pair))
            self._report(len(self._store.values))


def _sampling_params(**arguments: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**arguments)


class RequestTemplate:
    """Makes params for requests to an engine of this process.

    They carry the `RequestSpec` itself, where `weir.params` writes it as JSON data for any process,
    which admission has to parse again.
    """

    def __init__(self, params: Any) -> None:
        self._params = params.clone()  # vLLM completes its requests' params, sharing what copies share
        self._params.skip_clone = True  # and nobody changes what it has made
        self._extras = extras_in(self._params) or {}
        self._spec = RequestSpec.carried_by(self._extras)

    def asking(self, **fields: Any) -> Any:
        """Return params that ask for the same, but for these fields of a `RequestSpec`."""
        made = with_extras(self._params)
        set_extras(made, {**self._extras, WIRE_KEY: with_fields(self._spec, **fields)})
        return made


class RunRows:
    """The captured rows of a run."""

    def __init__(self, activations: Any) -> None:
        self._rows: dict[Site, np.ndarray] = {site: activations.numpy(*site) for site in activations.sites}
        self._ranks = {
            site: {position: k for k, position in enumerate(activations.positions_of(*site).tolist())}
            for site in activations.sites
        }

    def at(self, site: Site, positions: Sequence[int], heads: Sequence[int] | None = None) -> np.ndarray:
        """Return rows [n, ...] at n positions; with `heads`, [n, heads picked, d_head]."""
        ranks = self._ranks[site]
        first = ranks[positions[0]]
        # A slice of one row is no copy; several positions need not follow each other.
        at = slice(first, first + 1) if len(positions) == 1 else [ranks[position] for position in positions]
        rows = self._rows[site][at]
        return rows if heads is None else rows[:, list(heads)]


def capture(sites: Sequence[Site], positions: Sequence[int], heads: Sequence[int] | None = None) -> tuple[Capture, ...]:
    """Return captures of some sites at some positions."""
    layers: dict[str, list[int]] = {}
    for site in sites:
        layers.setdefault(site.hook, []).append(site.layer)
    return tuple(
        Capture(hook, _layers(hook, at), positions=list(positions), heads=None if heads is None else list(heads))
        for hook, at in layers.items()
    )


def put(site: Site, rows: np.ndarray, positions: Sequence[int], heads: Sequence[int] | None = None) -> Replace:
    """Return the intervention that puts rows [n, ...] at n positions, ascending."""
    if heads is None:
        rows = rows.reshape(len(rows), -1)
    made = _replacing(site, None if heads is None else tuple(heads))
    values = Vector.parse(rows, f"{made.path}.values", (2, 3))
    return with_fields(made, values=values, positions=_selector(tuple(positions)))


@functools.lru_cache(maxsize=4096)
def _replacing(site: Site, heads: tuple[int, ...] | None) -> Replace:
    """Return the intervention at a site to which rows and positions are still to be given."""
    return Replace(np.zeros(1, np.float32), _layers(site.hook, [site.layer]), hook=site.hook, heads=heads)


@functools.lru_cache(maxsize=4096)
def _selector(positions: tuple[int, ...]) -> Positions:
    return Positions.parse(positions)


def _layers(hook: str, layers: list[int]) -> Any:
    return "all" if hook in MODEL_HOOKS else layers
