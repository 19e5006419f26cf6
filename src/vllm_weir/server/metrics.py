"""Weir's Prometheus metrics, beside vLLM's on ``/metrics``. Plain requests cost nothing here.

Counters grow when a sequence finishes or is refused. Workers report the load of their buffers and
the waiting requests with the rows; a task reads the reports once a second while a request that
captures or is steered is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from vllm_weir.frontend.admission.registries import RegisteredProbe
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.schema.probes import AnyProbe
from vllm_weir.server.shared.result_files import ResultFiles

PERIOD = 1.0
"""Seconds between two updates of the gauges."""
REFUSED, FAILED = "refused", "failed"
NAME, TEXT = "weir_probe_score", "Scores of the probes that score every request, by output"
SHARES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Default buckets of scores between 0 and 1, those of sigmoid and softmax."""
LOGITS = (-16.0, -8.0, -4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Default buckets of other scores."""


class ServerMetrics:
    """The metrics of one API-server process; prometheus_client adds up those of several.

    `model`: vLLM's label ``model_name``.
    """

    def __init__(
        self,
        frontend: EngineFrontend,
        model: str,
        spool: ResultFiles | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._frontend, self._model, self._spool = frontend, model, spool
        self._task: asyncio.Task[None] | None = None
        self._engines: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=registry)

        def gauge(name: str, text: str, mode: str, *labels: str) -> Gauge:
            return Gauge(name, text, ["model_name", *labels], multiprocess_mode=mode, registry=registry)  # type: ignore[arg-type]

        self._rows = counter("weir_rows_captured", "Rows captured by sequences that finished").labels(model)
        self._bytes = counter("weir_bytes_out", "Bytes of these rows as they were handed out").labels(model)
        self._dropped = counter("weir_rows_dropped", "Rows for which workers had no room").labels(model)
        self._steered = counter("weir_steered_tokens", "Positions changed by interventions").labels(model)
        self._errors = counter("weir_errors", "Requests refused before, or failed after, they entered", "reason")
        self._fill = gauge("weir_buffer_fill", "Share of the host buffer for rows in use (0-1)", "livemax", "engine")
        self._waiting = gauge("weir_requests_waiting", "Requests waiting for table space", "livemax", "engine")
        self._held = gauge("weir_requests_held", "Requests held back for plain ones", "livesum").labels(model)
        self._spooled = gauge("weir_spool_bytes", "Bytes kept to be fetched", "mostrecent").labels(model)
        self._probes = ProbeMetrics(model, registry)
        for reason in (REFUSED, FAILED):
            self._errors.labels(model, reason)
        self.update()

    def admitted(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch())

    def refused(self) -> None:
        self._errors.labels(self._model, REFUSED).inc()

    def failed(self) -> None:
        """Count a request whose rows were lost or that was not steered as asked."""
        self._errors.labels(self._model, FAILED).inc()

    def finished(self, view: OutputView) -> None:
        """Count a successful sequence's rows, waiting for them if some may be dropped."""
        rows = size = dropped = 0
        for part in view.pending.admitted.parts if view.pending.admitted.spec.site_requests else ():
            part_view = view if part is view.part and not view.start else view.with_start(0, part)
            rows += part_view.rows
            size += part_view.size
        if self._frontend.settings.overflow == "drop" and view.part.has_rows:
            dropped = sum(view.missing(view.activations()).values())
        for registered, scores in view.with_start(0).counted_scores():
            self._probes.observe(registered, scores)
        steered = view.steered
        increments = (
            (self._rows, rows - dropped),
            (self._bytes, size),
            (self._dropped, dropped),
            (self._steered, steered),
        )
        for counter, increment in increments:
            if increment:
                counter.inc(increment)

    def update(self) -> None:
        """Update the gauges."""
        store = self._frontend.store
        loads = list(store.loads.values()) if len(store) else []
        self._engines |= {str(load.engine) for load in loads} or {"0"}
        for engine in self._engines:
            engine_loads = [load for load in loads if str(load.engine) == engine]
            self._fill.labels(self._model, engine).set(max((load.pressure for load in engine_loads), default=0.0))
            self._waiting.labels(self._model, engine).set(max((load.waiting for load in engine_loads), default=0))
        self._probes.show(self._frontend.names.probes.everyone)
        self._held.set(self._frontend.pacing.held)
        if self._spool is not None:
            self._spooled.set(self._spool.used)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            self.update()
            if not len(self._frontend.store) and not self._frontend.pacing.held:
                return


class ProbeMetrics:
    """The metrics of the probes that score every request, in one API-server process.

    `model`: vLLM's label ``model_name``.
    """

    def __init__(self, model: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._model = model
        self._histograms = _Histograms(registry)
        self._sequences = Counter(
            "weir_probe_sequences", "Finished sequences that a probe scored", ["model_name", "probe"], registry=registry
        )
        self._alerts = Counter(
            "weir_probe_alerts",
            "Finished sequences with a score above the probe's alert threshold",
            ["model_name", "probe"],
            registry=registry,
        )

    def show(self, probes: Iterable[RegisteredProbe]) -> None:
        for registered in probes:
            self._sequences.labels(self._model, registered.probe.name)
            if registered.alerts:
                self._alerts.labels(self._model, registered.probe.name)

    def observe(self, registered: RegisteredProbe, scores: np.ndarray) -> None:
        """Count the scores [rows, k] of a finished sequence.

        Those that are not finite are left out of the histogram. Nothing is counted without rows.
        """
        if not len(scores):
            return
        name = registered.probe.name
        histogram = self._histograms.of(name, registered.buckets or default_buckets(registered.probe))
        for output in range(scores.shape[1]):
            child = histogram.labels(self._model, name, str(output))
            column = scores[:, output]
            for score in column[np.isfinite(column)].tolist():
                child.observe(score)
        self._sequences.labels(self._model, name).inc()
        if registered.alerts:
            thresholds = np.array([np.inf if one is None else one for one in registered.alerts], scores.dtype)
            self._alerts.labels(self._model, name).inc(int((scores > thresholds).any()))


def default_buckets(probe: AnyProbe) -> tuple[float, ...]:
    return LOGITS if probe.activation == "none" else SHARES


class _Histograms(Collector):
    """One metric with buckets of its own for each probe; a `Histogram` has the same ones for all labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._by_probe: dict[str, tuple[tuple[float, ...], Histogram]] = {}
        registry.register(self)

    def of(self, probe: str, buckets: tuple[float, ...]) -> Histogram:
        """Return a probe's histogram, a new one if its buckets have changed."""
        before, histogram = self._by_probe.get(probe, ((), None))
        if histogram is None or before != buckets:
            labels = ["model_name", "probe", "output"]
            histogram = Histogram(NAME, TEXT, labels, buckets=buckets, registry=None)
            self._by_probe[probe] = buckets, histogram
        return histogram

    def collect(self) -> Iterable[Metric]:
        metric = Metric(NAME, TEXT, "histogram")
        for _, histogram in list(self._by_probe.values()):
            for part in histogram.collect():
                metric.samples += part.samples
        return [metric]
