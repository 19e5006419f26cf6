"""Probes, conditions and rules as callers write them: read back as they were, or refused by field."""

from __future__ import annotations

import json
import timeit
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.machine import module, needs
from tests.unit.request_strategies import selectors
from vllm_weir.errors import MissingFile, WeirError
from vllm_weir.schema.gates import When
from vllm_weir.schema.intervention_kinds import parse_intervention, parse_stored
from vllm_weir.schema.probe_files import read_probe
from vllm_weir.schema.probes import AttentionProbe, MLPProbe, Probe, parse_probe, parse_probes
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.stop_rules import parse_stop_when

D = 8
names = st.text("abc XYZ._-@:+é0", min_size=1, max_size=12).filter(lambda t: t == t.strip())
smooths = st.one_of(
    st.none(),
    st.just(("max",)),
    st.tuples(st.just("ema"), st.floats(0.01, 1)),
    st.tuples(st.just("mean"), st.integers(1, 40)),
)


def floats(*shape):
    numbers = st.floats(-3, 3, width=32)
    return st.lists(numbers, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))).map(
        lambda values: np.array(values, np.float32).reshape(shape)
    )


@st.composite
def probes(draw):
    """A probe of any kind with 1 to 3 outputs."""
    k, m = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    more = {
        "hook": draw(st.sampled_from(["resid_post", "resid_pre", "mlp_out", "post_block"])),
        "layer": draw(st.integers(0, 3)),
        "smooth": draw(smooths),
        "positions": draw(selectors()),
        "activation": draw(st.sampled_from(["none", "sigmoid", *(["softmax"] if k > 1 else [])])),
    }
    name, bias = draw(names), draw(st.one_of(floats(k), st.floats(-2, 2)))
    kind = draw(st.sampled_from(["linear", "mlp", "attention"]))
    if kind == "linear":
        return Probe(name, draw(floats(k, D)), bias, **more)
    if kind == "mlp":
        hidden = draw(st.sampled_from(["relu", "gelu", "silu", "tanh"]))
        return MLPProbe(name, draw(floats(m, D)), draw(floats(m)), draw(floats(k, m)), bias, hidden=hidden, **more)
    return AttentionProbe(name, draw(floats(m, D)), draw(floats(m, k, D)), bias, **more)


@given(probe=probes())
def test_probes_read_back_as_they_were(probe):
    wire = json.loads(json.dumps(probe.to_json()))
    assert parse_probe(wire, "probe").to_json() == probe.to_json()
    for kind in ("safetensors", "json"):
        assert read_probe(probe.to_bytes(kind), "file").to_json() == probe.to_json()
    spec = RequestSpec(probes=(probe, "registered"))
    again = RequestSpec.parse(json.dumps(spec.to_json()))
    assert again.to_json() == spec.to_json() and again.probes[1] == "registered"


@given(probe=probes(), row=floats(D))
def test_a_resolved_probe_has_the_numbers_of_its_formula(probe, row):
    resolved, vectors = probe.resolve((D,), lambda ref, field: None)
    raw = np.array([vectors[digest] @ row for digest in resolved.rows], np.float64) + np.array(resolved.offsets)
    if isinstance(probe, Probe):
        bias = np.array(probe.bias)
        np.testing.assert_allclose(raw, probe.weight.array @ row + bias, atol=1e-4)
    elif isinstance(probe, MLPProbe):
        np.testing.assert_allclose(raw, probe.w_in.array @ row + np.array(probe.b_in), atol=1e-4)
        w_out = np.stack([vectors[digest] for digest in resolved.out_rows])
        np.testing.assert_array_equal(w_out, probe.w_out.array)
        np.testing.assert_allclose(resolved.out_offsets, np.broadcast_to(probe.b_out, resolved.outputs), atol=1e-6)
    else:
        heads, k = resolved.heads, resolved.outputs
        np.testing.assert_allclose(raw[:heads], probe.query.array @ row, atol=1e-4)
        np.testing.assert_allclose(raw[heads:].reshape(heads, k), probe.value.array @ row, atol=1e-4)
        np.testing.assert_allclose(resolved.out_offsets, np.broadcast_to(probe.bias, k), atol=1e-6)
    assert resolved.outputs == probe.outputs and len(resolved.offsets) == len(resolved.rows)
    assert set(vectors) == resolved.vectors


def test_a_head_has_its_columns():
    probe = Probe("p", np.ones(4), hook="z", layer=1, head=2)
    resolved, _ = probe.resolve((3, 4), lambda ref, field: None)
    assert (resolved.start, resolved.stop) == (8, 12)
    for wrong, field in ((Probe("p", np.ones(4), hook="z", layer=1, head=3), "probe.head"),
                         (Probe("p", np.ones(5), hook="z", layer=1, head=0), "probe.weight"),
                         (Probe("p", np.ones(4), hook="z", layer=1), "probe.weight")):  # fmt: skip
        with pytest.raises(WeirError) as error:
            wrong.resolve((3, 4), lambda ref, field: None)
        assert error.value.field == field


w, h2 = np.ones((2, D)), np.ones((2, 2, D))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Probe("", w, layer=0), "probe.name"),
        (lambda: Probe("a > b", w, layer=0), "probe.name"),
        (lambda: Probe(" a", w, layer=0), "probe.name"),
        (lambda: Probe("a\n", w, layer=0), "probe.name"),
        (lambda: Probe(3, w, layer=0), "probe.name"),
        (lambda: Probe("a", w), "probe.layer"),
        (lambda: Probe("a", w, layer="all"), "probe.layer"),
        (lambda: Probe("a", w, layer=[1]), "probe.layer"),
        (lambda: Probe("a", w, layer=-1), "probe.layer"),
        (lambda: Probe("a", w, layer=True), "probe.layer"),
        (lambda: Probe("a", w, hook="blocks.2.hook_resid_post", layer=1), "probe.layer"),
        (lambda: Probe("a", w, hook="nonsense", layer=1), "probe.hook"),
        (lambda: Probe("a", w, hook="pattern", layer=1), "probe.hook"),
        (lambda: Probe("a", w, hook="expert_ids", layer=1), "probe.hook"),
        (lambda: Probe("a", w, layer=0, head=0), "probe.head"),
        (lambda: Probe("a", w, hook="z", layer=0, head=-1), "probe.head"),
        (lambda: Probe("a", w, layer=0, activation="tanh"), "probe.activation"),
        (lambda: Probe("a", w, layer=0, activation=["sigmoid"]), "probe.activation"),
        (lambda: Probe("a", w, layer=0, activation={}), "probe.activation"),
        (lambda: Probe("a", w[0], layer=0, activation="softmax"), "probe.activation"),
        (lambda: Probe("a", w, layer=0, smooth="ema"), "probe.smooth"),
        (lambda: Probe("a", w, layer=0, smooth=("ema", 0)), "probe.smooth[1]"),
        (lambda: Probe("a", w, layer=0, smooth=("ema", 1.1)), "probe.smooth[1]"),
        (lambda: Probe("a", w, layer=0, smooth=("mean", 0)), "probe.smooth[1]"),
        (lambda: Probe("a", w, layer=0, smooth=("mean", 2.5)), "probe.smooth[1]"),
        (lambda: Probe("a", w, layer=0, smooth=("median", 2)), "probe.smooth"),
        (lambda: Probe("a", w, layer=0, positions="sometimes"), "probe.positions"),
        (lambda: Probe("a", np.ones((1, 2, D)), layer=0), "probe.weight"),
        (lambda: Probe("a", np.full(D, np.nan), layer=0), "probe.weight"),
        (lambda: Probe("a", w, [1, 2, 3], layer=0), "probe.bias"),
        (lambda: Probe("a", w, "name", layer=0), "probe.bias"),
        (lambda: Probe("a", w, float("inf"), layer=0), "probe.bias"),
        (lambda: MLPProbe("a", w, 0, np.ones((1, 3)), layer=0), "probe.w_out"),
        (lambda: MLPProbe("a", w, [0, 0, 0], np.ones((1, 2)), layer=0), "probe.b_in"),
        (lambda: MLPProbe("a", w, 0, np.ones((1, 2)), layer=0, hidden="swish"), "probe.hidden"),
        (lambda: MLPProbe("a", w, 0, np.ones((1, 2)), layer=0, hidden=["relu"]), "probe.hidden"),
        (lambda: AttentionProbe("a", w, np.ones((3, D)), layer=0), "probe.value"),
        (lambda: AttentionProbe("a", w, np.ones((2, D + 1)), layer=0), "probe.value"),
        (lambda: AttentionProbe("a", w, h2, [1.0], layer=0), "probe.bias"),
        (lambda: parse_probe({"name": "a"}, "probe"), "probe.kind"),
        (lambda: parse_probe({"kind": "cubic"}, "probe"), "probe.kind"),
        (lambda: parse_probe({"kind": "linear", "name": "a"}, "probe"), "probe.weight"),
        (lambda: parse_probe({"kind": "linear", "name": "a", "weight": [1.0], "w": 1}, "probe"), "probe.w"),
        (lambda: parse_probe(7, "probe"), "probe"),
        (lambda: parse_probes([Probe("a", w, layer=0), "a"], "probe"), "probe[1]"),
        (lambda: parse_probes(7, "probe"), "probe"),
        (lambda: parse_probes(["a"] * 300, "probe"), "probe"),
    ],
)
def test_wrong_probes_name_the_field(make, field):
    with pytest.raises(WeirError) as error:
        make()
    assert error.value.field == field


def test_places_of_a_probe():
    assert Probe("a", w, hook="blocks.2.hook_resid_post").site == ("resid_post", 2)
    assert Probe("a", w, hook="final_norm").site == ("final_norm", 0)
    assert Probe("a", torch.ones(1, D), torch.tensor(0.5), layer=torch.tensor(1)).outputs == 1
    assert Probe("a", "registered", layer=1).outputs is None


def test_files(tmp_path):
    probe = Probe("a", w, [1, 2], layer=1, smooth="max")
    for name in ("p.safetensors", "p.json"):
        probe.save(tmp_path / name)
        assert weir.load_probe(tmp_path / name).to_json() == probe.to_json()
    with pytest.raises(MissingFile):
        weir.load_probe(tmp_path / "none")
    with pytest.raises(WeirError, match="registered vector"):
        Probe("a", "named", layer=1).save(tmp_path / "q")
    with pytest.raises(WeirError, match="cannot name"):
        read_probe(json.dumps(Probe("a", "named", layer=1).to_json()).encode(), "file")
    for damaged in (b"", b"\0" * 64, b"[]", b"{", probe.to_bytes()[:-4], b"\xff" * 100):
        with pytest.raises(WeirError) as error:
            read_probe(damaged, "file")
        assert error.value.field.startswith("file")


def test_a_file_of_tensors_alone_becomes_a_probe_with_the_other_fields():
    from safetensors.torch import save

    data = save({"weight": torch.ones(2, D, dtype=torch.bfloat16), "bias": torch.zeros(2)})
    probe = read_probe(data, "file", name="mine", layer=3)
    assert probe.site == ("resid_post", 3) and probe.outputs == 2 and probe.name == "mine"
    with pytest.raises(WeirError) as error:
        read_probe(data, "file")
    assert error.value.field == "file.name"


def test_a_file_whose_metadata_is_null_has_none():
    from safetensors.numpy import save

    data = save({"weight": np.ones((2, D), np.float32)})
    size = int.from_bytes(data[:8], "little")
    header = json.dumps({"__metadata__": None, **json.loads(data[8 : 8 + size])}).encode()
    changed = len(header).to_bytes(8, "little") + header + data[8 + size :]
    assert read_probe(changed, "file", name="mine", layer=3).outputs == 2
    with pytest.raises(WeirError) as error:
        read_probe(changed, "file", name="mine")
    assert error.value.field == "file.layer"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "when.above"),
        ({"above": 1, "below": 0}, "when.above"),
        ({"above": float("nan")}, "when.above"),
        ({"above": 1, "probe": ""}, "when.probe"),
        ({"above": 1, "latch": 1}, "when.latch"),
        ({"above": 1, "delay": 2}, "when.delay"),
        ({"above": 1, "delay": True}, "when.delay"),
        ({"above": 1, "sharpness": 0}, "when.sharpness"),
        ({"above": 1, "sharpness": 2, "latch": True}, "when.sharpness"),
        ({"above": 1, "output": -1}, "when.output"),
        ({"above": 1, "output": 0.5}, "when.output"),
    ],
)
def test_wrong_conditions_name_the_field(fields, field):
    with pytest.raises(WeirError) as error:
        When(**{"probe": "a", **fields})
    assert error.value.field == field
    with pytest.raises(WeirError) as error:
        When.parse({"probe": "a", **fields}, "when")
    assert error.value.field == field


def test_a_probe_in_place_of_its_name_is_refused():
    with pytest.raises(WeirError, match="give the probe's name"):
        When(Probe("a", w, layer=0), above=1)


INTERVENTIONS = [
    weir.Add(np.ones(D), 1, when=When("a", above=0.5)),
    weir.Ablate(np.ones(D), 1, when={"probe": "a", "below": -1, "latch": True}),
    weir.Clamp(np.ones(D), 1, value=2, when=When("a", above=0, delay=1)),
    weir.Replace(np.ones(D), 1, when=When("a", above=0, output=2)),
    weir.LowRank(np.ones(D), np.ones(D), [0.0], 1, when=When("a", above=0, sharpness=3)),
    weir.SetFeature("sae", 3, value=1, when=When("a", below=0)),
]


@pytest.mark.parametrize("intervention", INTERVENTIONS, ids=lambda one: one.op)
def test_interventions_keep_their_condition(intervention):
    wire = json.loads(json.dumps(intervention.to_json()))
    again = parse_intervention(wire, "i")
    assert again.when == intervention.when and again.to_json() == intervention.to_json()
    assert again.when.path == "i.when"
    if intervention.op != "set_feature":
        stored = parse_stored(wire, "i").with_vectors(lambda vector, field: vector).with_arrays(None)
        assert stored.when == intervention.when
        assert all(part.when == intervention.when for part in stored.by_layer(3, None))
    with pytest.raises(WeirError) as error:
        parse_intervention({**wire, "when": {"probe": "a", "over": 1}}, "i")
    assert error.value.field == "i.when.over"


def test_conditions_that_are_not_given_do_not_travel():
    assert "when" not in weir.Add(np.ones(D), 1).to_json()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a > 0.9", ("a", None, ">", 0.9)),
        ("a[1]<=-2e-3", ("a", 1, "<=", -0.002)),
        ("  my probe [ 0 ] >= .5 ", ("my probe", 0, ">=", 0.5)),
        ("a-b+c:d < 3.", ("a-b+c:d", None, "<", 3.0)),
        ("\ta  b\n[\t12 ]>+1.5E1\r\n", ("a  b", 12, ">", 15.0)),
    ],
)
def test_rules_that_stop(text, rule):
    (parsed,) = parse_stop_when(text, "stop_when")
    assert parsed[:4] == rule
    assert parse_stop_when([str(parsed)], "stop_when")[0][:4] == rule


@pytest.mark.parametrize(
    "text", ["", "a", "a >", "> 1", "a == 1", "a = 1", "a > b", "a > 1 > 2", "a[x] > 1", "a[-1] > 1", "a > inf",
             "a > 1_0", "a != 1", "a > 1e99", 7, "x" * 600]
)  # fmt: skip
def test_rules_that_cannot_be_read(text):
    with pytest.raises(WeirError) as error:
        parse_stop_when([text], "stop_when")
    assert error.value.field == "stop_when[0]"


@pytest.mark.parametrize(
    "text", [" " * 170 + "a" + " " * 341, "a" + " " * 500 + "b", "a " * 256, "a[" + " " * 500, "a>" + "1" * 509 + "x"]
)
def test_a_rule_that_cannot_be_read_is_refused_at_once(text):
    """A server parses rules in its event loop."""

    def parse(rule):
        with pytest.raises(WeirError, match="cannot read"):
            parse_stop_when(rule, "stop_when")

    assert min(timeit.repeat(lambda: parse(text), number=1, repeat=5)) < 0.002


@given(st.text("ab[]<>=.019 -e", max_size=16))
def test_rules_are_read_or_refused(text):
    try:
        rules = parse_stop_when(text, "stop_when")
    except WeirError as error:
        assert error.field == "stop_when"
        return
    assert [rule[:4] for rule in parse_stop_when([str(rule) for rule in rules], "s")] == [rule[:4] for rule in rules]


# --- scikit-learn ---------------------------------------------------------------------------------


def fitted(kind, _params=None, **attributes):
    """A stand-in with the attributes of a fitted estimator."""
    return type(kind, (SimpleNamespace,), {"get_params": lambda self: _params or {}})(**attributes)


rng = np.random.default_rng(0)
ROWS = rng.normal(size=(60, D)) * rng.uniform(0.5, 4, D) + rng.normal(size=D)


def scores_of(probe, rows=ROWS):
    scores = rows @ probe.weight.array.T.astype(np.float64) + np.array(probe.bias)
    if probe.activation == "sigmoid":
        return 1 / (1 + np.exp(-scores))
    if probe.activation == "softmax":
        weights = np.exp(scores - scores.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)
    return scores


def test_transformers_are_folded_in():
    mean, scale, low = rng.normal(size=D), rng.uniform(0.5, 2, D), rng.normal(size=D)
    components, center, variance = rng.normal(size=(3, D)), rng.normal(size=D), rng.uniform(0.5, 2, 3)
    pipeline = fitted("Pipeline", steps=[
        ("scale", fitted("StandardScaler", mean_=mean, scale_=scale)),
        ("skip", "passthrough"),
        ("range", fitted("MinMaxScaler", scale_=scale, min_=low)),
        ("pca", fitted("PCA", {"whiten": True}, components_=components, mean_=center, explained_variance_=variance)),
        ("last", fitted("LinearSVC", coef_=rng.normal(size=(2, 3)), intercept_=np.array([0.5, -1]))),
    ])  # fmt: skip
    probe = Probe.from_sklearn(pipeline, "resid_post", 2, name="svc")
    inside = ((ROWS - mean) / scale * scale + low - center) @ components.T / np.sqrt(variance)
    last = pipeline.steps[-1][1]
    np.testing.assert_allclose(scores_of(probe), inside @ last.coef_.T + last.intercept_, rtol=1e-4, atol=1e-4)
    assert probe.site == ("resid_post", 2) and probe.name == "svc" and probe.activation == "none"


def test_what_gives_probabilities():
    two, three = np.ones((1, D)), np.ones((3, D))

    def activation(kind, params, coefficients):
        estimator = fitted(kind, params, coef_=coefficients, intercept_=np.zeros(len(coefficients)))
        return Probe.from_sklearn(estimator, "resid_post", 0).activation

    assert activation("LogisticRegression", {"solver": "lbfgs"}, two) == "sigmoid"
    assert activation("LogisticRegression", {"solver": "lbfgs"}, three) == "softmax"
    assert activation("LogisticRegression", {"solver": "liblinear"}, three) == "none"
    assert activation("LogisticRegression", {"multi_class": "ovr"}, three) == "none"
    assert activation("SGDClassifier", {"loss": "log_loss"}, two) == "sigmoid"
    assert activation("SGDClassifier", {"loss": "hinge"}, two) == "none"
    assert activation("RidgeClassifier", {}, two) == "none"
    given = fitted("LinearRegression", coef_=np.ones(D), intercept_=0.5)
    probe = Probe.from_sklearn(given, layer=1, activation="sigmoid", positions="generated")
    assert probe.activation == "sigmoid" and probe.positions.kind == "generated" and probe.bias == (0.5,)


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (fitted("KMeans"), "KMeans is no linear estimator"),
        (fitted("LogisticRegression"), "not fitted"),
        (fitted("Pipeline", steps=[]), "no linear estimator"),
        (
            fitted("Pipeline", steps=[("n", fitted("Normalizer")), ("l", fitted("LinearSVC", coef_=w, intercept_=0))]),
            "Normalizer cannot be folded",
        ),
        (
            fitted(
                "Pipeline",
                steps=[
                    ("m", fitted("MinMaxScaler", {"clip": True})),
                    ("l", fitted("LinearSVC", coef_=w, intercept_=0)),
                ],
            ),
            "clips",
        ),
    ],
)
def test_estimators_that_are_refused(estimator, said):
    with pytest.raises(WeirError, match=said) as error:
        Probe.from_sklearn(estimator, "resid_post", 0)
    assert error.value.field.startswith("estimator")


@needs(module("sklearn"))
@pytest.mark.parametrize("classes", [2, 3])
def test_real_estimators_score_alike(classes):
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier, SGDClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, StandardScaler
    from sklearn.svm import LinearSVC

    labels = np.arange(len(ROWS)) % classes
    pairs = [
        (make_pipeline(StandardScaler(), LogisticRegression()), "predict_proba"),
        (make_pipeline(MinMaxScaler((-1, 2)), PCA(4, whiten=True), LogisticRegression()), "predict_proba"),
        (make_pipeline(StandardScaler(with_mean=False), LinearSVC()), "decision_function"),
        (make_pipeline(StandardScaler(with_std=False), RidgeClassifier()), "decision_function"),
        (make_pipeline(PCA(3), SGDClassifier()), "decision_function"),
        (LinearRegression(fit_intercept=False), "predict"),
    ]
    for estimator, method in pairs:
        estimator.fit(ROWS, labels)
        wanted = getattr(estimator, method)(ROWS)
        if method == "predict_proba" and classes == 2:
            wanted = wanted[:, 1]
        got = scores_of(Probe.from_sklearn(estimator, "resid_post", 0))
        np.testing.assert_allclose(got.reshape(wanted.shape), wanted, rtol=1e-3, atol=1e-3)
