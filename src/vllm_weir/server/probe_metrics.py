"""Prometheus metrics of the probes that score every request: histograms of scores, and alerts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.registry import Collector

from vllm_weir.frontend.admission.probe_registry import RegisteredProbe
from vllm_weir.schema.probes import AnyProbe

NAME, TEXT = "weir_probe_score", "Scores of the probes that score every request, by output"
SHARES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Default buckets of scores between 0 and 1, those of sigmoid and softmax."""
LOGITS = (-16.0, -8.0, -4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Default buckets of other scores."""


class ProbeMetrics:
    """The metrics of the probes that score every request, in one API-server process.

    Args:
        model: vLLM's label ``model_name``.
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
