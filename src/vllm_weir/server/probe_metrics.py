"""Prometheus metrics of the probes that score every request: histograms of scores, and alerts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.registry import Collector

from vllm_weir.frontend.admission.watches import Watch

NAME, TEXT = "weir_probe_score", "Scores of the probes that score every request, by output"


class ProbeMetrics:
    """The metrics of the probes that score every request, in one API-server process.

    Args:
        model: vLLM's label ``model_name``.
        registry: The registry of the metrics.
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

    def watch(self, watches: Iterable[Watch]) -> None:
        """Show the counters of probes from now on, at 0 until something is counted."""
        for watch in watches:
            self._sequences.labels(self._model, watch.name)
            if watch.alerts:
                self._alerts.labels(self._model, watch.name)

    def observe(self, watch: Watch, scores: np.ndarray) -> None:
        """Count the scores [rows, k] of a finished sequence; NaN and infinities are left out of the histogram.

        Nothing is counted without rows.
        """
        if not len(scores):
            return
        histogram = self._histograms.of(watch)
        for output in range(scores.shape[1]):
            child = histogram.labels(self._model, watch.name, str(output))
            column = scores[:, output]
            for score in column[np.isfinite(column)].tolist():
                child.observe(score)
        self._sequences.labels(self._model, watch.name).inc()
        thresholds = [np.inf if one is None else one for one in watch.alerts]
        if thresholds and bool((scores > np.array(thresholds, scores.dtype)).any()):
            self._alerts.labels(self._model, watch.name).inc()


class _Histograms(Collector):
    """One metric with buckets of its own for each probe; a `Histogram` has the same ones for all labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._by_probe: dict[str, tuple[tuple[float, ...], Histogram]] = {}
        registry.register(self)

    def of(self, watch: Watch) -> Histogram:
        """Return a probe's histogram, a new one if its buckets have changed."""
        buckets, histogram = self._by_probe.get(watch.name, ((), None))
        if histogram is None or buckets != watch.buckets:
            labels = ["model_name", "probe", "output"]
            histogram = Histogram(NAME, TEXT, labels, buckets=watch.buckets, registry=None)
            self._by_probe[watch.name] = watch.buckets, histogram
        return histogram

    def collect(self) -> Iterable[Metric]:
        metric = Metric(NAME, TEXT, "histogram")
        for _, histogram in list(self._by_probe.values()):
            for part in histogram.collect():
                metric.samples += part.samples
        return [metric]
