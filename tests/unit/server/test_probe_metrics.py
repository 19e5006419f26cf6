"""What is counted of probes that score every request."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_weir.frontend.admission.registries import RegisteredProbe
from vllm_weir.schema.probes import Probe
from vllm_weir.server.metrics import LOGITS, SHARES, ProbeMetrics


@pytest.fixture
def registry():
    return CollectorRegistry(auto_describe=True)


@pytest.fixture
def meter(registry):
    return ProbeMetrics("m", registry)


def watch(name, buckets, alerts=(), **fields):
    return RegisteredProbe(Probe(name, [1.0], layer=0, **fields), True, alerts, buckets)


def value(registry, name, probe="p", **labels):
    return registry.get_sample_value(name, {"model_name": "m", "probe": probe, **labels})


def buckets(registry, probe="p", output="0"):
    """Upper bound -> scores at most so large, as Prometheus reads them."""
    text = generate_latest(registry).decode()
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "weir_probe_score"]
    assert family.type == "histogram"
    found = [s for s in family.samples if s.name.endswith("_bucket")]
    wanted = {"model_name": "m", "probe": probe, "output": output}
    return {float(s.labels["le"]): s.value for s in found if wanted.items() <= s.labels.items()}


@pytest.mark.parametrize("edges", [SHARES, LOGITS, (0.5,), (-1.0, 3.5)])
def test_a_score_is_in_the_buckets_above_it(meter, registry, edges):
    scores = np.random.default_rng(0).normal(size=200).astype(np.float32)
    meter.observe(watch("p", edges), scores[:150, None])
    meter.observe(watch("p", edges), scores[150:, None])
    found = buckets(registry)
    assert list(found) == [*edges, float("inf")]
    assert found == {edge: int((scores <= edge).sum()) for edge in found}
    assert value(registry, "weir_probe_score_count", output="0") == 200
    assert value(registry, "weir_probe_sequences_total") == 2


def test_probes_and_outputs_have_buckets_of_their_own(meter, registry):
    meter.observe(watch("two", (0.5,)), np.array([[0.1, 0.9], [0.2, 0.8], [0.3, 0.7]], np.float32))
    assert buckets(registry, "two", output="0") == {0.5: 3, float("inf"): 3}
    assert buckets(registry, "two", output="1") == {0.5: 0, float("inf"): 3}
    meter.observe(watch("p", (0.5,)), np.array([[0.1], [0.9]]))
    meter.observe(watch("q", (0.0, 2.0)), np.array([[1.0]]))
    assert buckets(registry) == {0.5: 1, float("inf"): 2}
    assert buckets(registry, "q") == {0.0: 0, 2.0: 1, float("inf"): 1}
    meter.observe(watch("p", (0.25,)), np.array([[0.1]]))  # a probe that was replaced begins anew
    assert buckets(registry) == {0.25: 1, float("inf"): 1}


def test_an_alert_is_a_sequence_with_a_score_above_the_threshold(meter, registry):
    """Its counter is there from the start: a rate of alerts must not lack what it counts until one is raised."""
    one = watch("p", SHARES, alerts=(0.9,))
    meter.show([one, watch("quiet", SHARES)])
    assert value(registry, "weir_probe_alerts_total") == value(registry, "weir_probe_sequences_total") == 0
    assert value(registry, "weir_probe_alerts_total", "quiet") is None
    for name, alerts in (("unshown", (0.9,)), ("quiet", ())):
        meter.observe(watch(name, SHARES, alerts=alerts), np.array([[0.1]]))
    assert value(registry, "weir_probe_alerts_total", "unshown") == 0
    assert value(registry, "weir_probe_alerts_total", "quiet") is None
    for scores in ([0.1, 0.95, 0.99], [0.9, 0.2], [0.3], [0.91], [np.nan, 0.2], [np.inf]):
        meter.observe(one, np.array(scores)[:, None])
    assert value(registry, "weir_probe_alerts_total") == 3
    assert value(registry, "weir_probe_sequences_total") == 6


def test_each_output_has_a_threshold_of_its_own(meter, registry):
    one = watch("p", SHARES, alerts=(None, 0.5, 0.8))
    for scores in ([[1, 0.5, 0.8]], [[0, 0.51, 0]], [[0, 0, 0.7], [0, 0, 0.81]], [[np.inf, 0, 0]]):
        meter.observe(one, np.array(scores, np.float32))
    assert value(registry, "weir_probe_alerts_total") == 2
    assert value(registry, "weir_probe_sequences_total") == 4


def test_only_finite_scores_are_in_the_histogram(meter, registry):
    meter.observe(watch("p", (0.5,)), np.array([[np.nan], [np.inf], [-np.inf], [0.25]]))
    assert buckets(registry) == {0.5: 1, float("inf"): 1}
    assert value(registry, "weir_probe_score_sum", output="0") == 0.25


def test_buckets_suit_the_activation(meter, registry):
    for activation, edges in (("none", LOGITS), ("sigmoid", SHARES)):
        meter.observe(watch(activation, (), activation=activation), np.array([[0.5]]))
        assert list(buckets(registry, activation)) == [*edges, float("inf")]


def test_without_rows_nothing_is_counted(meter, registry):
    meter.observe(watch("p", (0.5,), alerts=(0.1, None, None)), np.zeros((0, 3)))
    assert value(registry, "weir_probe_sequences_total") is None
