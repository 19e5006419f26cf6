"""Probes, conditions and rules as callers write them: read back as they were, or refused by field."""

from __future__ import annotations

import json
import timeit
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

import vllm_weir as weir
from tests.support.machine import module, needs
from tests.unit.refusals import pairs, refused
from tests.unit.request_strategies import selectors
from vllm_weir.errors import MissingFile, WeirError
from vllm_weir.schema.gates import When, parse_stop_when
from vllm_weir.schema.intervention_kinds import parse_intervention, parse_stored
from vllm_weir.schema.probes import AttentionProbe, MLPProbe, Probe, parse_probe, parse_probes, read_probe
from vllm_weir.schema.request import RequestSpec

D, FLOAT32 = 8, np.finfo(np.float32)
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
    """Sums of products in float32, so the bound is of the sum of their magnitudes."""
    resolved, vectors = probe.resolve((D,), lambda ref, field: None)
    raw = np.array([vectors[digest] @ row for digest in resolved.rows], np.float64) + np.array(resolved.offsets)
    row = row.astype(np.float64)

    def same(got, weight, bias=0.0):
        weight, bias = weight.array.astype(np.float64), np.array(bias, np.float32)
        size = np.abs(weight) @ np.abs(row) + np.abs(bias)
        assert (np.abs(got - (weight @ row + bias)) <= D * (FLOAT32.eps * size + FLOAT32.tiny)).all()

    if isinstance(probe, Probe):
        same(raw, probe.weight, probe.bias)
    elif isinstance(probe, MLPProbe):
        same(raw, probe.w_in, probe.b_in)
        w_out = np.stack([vectors[digest] for digest in resolved.out_rows])
        np.testing.assert_array_equal(w_out, probe.w_out.array)
        assert (np.float32(resolved.out_offsets) == np.float32(probe.b_out)).all()
    else:
        heads, k = resolved.heads, resolved.outputs
        same(raw[:heads], probe.query)
        same(raw[heads:].reshape(heads, k), probe.value)
        assert (np.float32(resolved.out_offsets) == np.float32(probe.bias)).all()
    assert resolved.outputs == probe.outputs and len(resolved.offsets) == len(resolved.rows)
    assert set(vectors) == resolved.vectors


def test_a_head_has_its_columns():
    probe = Probe("p", np.ones(4), hook="z", layer=1, head=2)
    resolved, _ = probe.resolve((3, 4), lambda ref, field: None)
    assert (resolved.start, resolved.stop) == (8, 12)
    for wrong, field in ((Probe("p", np.ones(4), hook="z", layer=1, head=3), "probe.head"),
                         (Probe("p", np.ones(5), hook="z", layer=1, head=0), "probe.weight"),
                         (Probe("p", np.ones(4), hook="z", layer=1), "probe.weight")):  # fmt: skip
        with refused(field):
            wrong.resolve((3, 4), lambda ref, field: None)


w, h2 = np.ones((2, D)), np.ones((2, 2, D))


def linear(weight=w, *bias, name="a", **more):
    return lambda: Probe(name, weight, *bias, **{"layer": 0} | more)


def mlp(w_out=w[:1, :2], b_in=0, **more):
    return lambda: MLPProbe("a", w, b_in, w_out, layer=0, **more)


def attention(value=h2, *bias):
    return lambda: AttentionProbe("a", w, value, *bias, layer=0)


def read(wire):
    return lambda: parse_probe(wire, "probe")


WRONG = {
    "probe.name": [linear(name=name) for name in ("", "a > b", " a", "a\n", 3)],
    "probe.layer": [
        *(linear(layer=layer) for layer in (None, "all", [1], -1, True)),
        linear(hook="blocks.2.hook_resid_post", layer=1),
    ],
    "probe.hook": [linear(hook=hook, layer=1) for hook in ("nonsense", "pattern", "expert_ids")],
    "probe.head": [linear(head=0), linear(hook="z", head=-1)],
    "probe.activation": [
        *(linear(activation=activation) for activation in ("tanh", ["sigmoid"], {})),
        linear(w[0], activation="softmax"),
    ],
    "probe.smooth": [linear(smooth="ema"), linear(smooth=("median", 2))],
    "probe.smooth[1]": [linear(smooth=smooth) for smooth in (("ema", 0), ("ema", 1.1), ("mean", 0), ("mean", 2.5))],
    "probe.positions": [linear(positions="sometimes")],
    "probe.weight": [
        *(linear(np.ones((1, 2, D))), linear(np.full(D, np.nan))),
        read({"kind": "linear", "name": "a"}),
    ],
    "probe.bias": [linear(w, [1, 2, 3]), linear(w, "name"), linear(w, float("inf")), attention(h2, [1.0])],
    "probe.w_out": [mlp(np.ones((1, 3)))],
    "probe.b_in": [mlp(b_in=[0, 0, 0])],
    "probe.hidden": [mlp(hidden="swish"), mlp(hidden=["relu"])],
    "probe.value": [attention(np.ones((3, D))), attention(np.ones((2, D + 1)))],
    "probe.kind": [read({"name": "a"}), read({"kind": "cubic"})],
    "probe.w": [read({"kind": "linear", "name": "a", "weight": [1.0], "w": 1})],
    "probe": [read(7), lambda: parse_probes(7, "probe"), lambda: parse_probes(["a"] * 300, "probe")],
    "probe[1]": [lambda: parse_probes([Probe("a", w, layer=0), "a"], "probe")],
}


@pytest.mark.parametrize(("field", "make"), pairs(WRONG))
def test_wrong_probes_name_the_field(field, make):
    with refused(field):
        make()


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
    """Also where its metadata is null."""
    data = save({"weight": torch.ones(2, D, dtype=torch.bfloat16), "bias": torch.zeros(2)})
    size = int.from_bytes(data[:8], "little")
    header = json.dumps({"__metadata__": None, **json.loads(data[8 : 8 + size])}).encode()
    for file in (data, len(header).to_bytes(8, "little") + header + data[8 + size :]):
        probe = read_probe(file, "file", name="mine", layer=3)
        assert probe.site == ("resid_post", 3) and probe.outputs == 2 and probe.name == "mine"
        with refused("file.name"):
            read_probe(file, "file")
        with refused("file.layer"):
            read_probe(file, "file", name="mine")


WRONG_CONDITIONS = {
    "when.above": [{}, {"above": 1, "below": 0}, {"above": float("nan")}],
    "when.probe": [{"above": 1, "probe": ""}],
    "when.latch": [{"above": 1, "latch": 1}],
    "when.delay": [{"above": 1, "delay": delay} for delay in (2, True)],
    "when.metric": [
        {"above": 1, "metric": "dot"},
        {"above": 1, "metric": "cosine", "feature": 1, "probe": "sae:a"},
        {"metric": "cosine", "probe": "controller:a"},
    ],
    "when.sharpness": [{"above": 1, "sharpness": 0}, {"above": 1, "sharpness": 2, "latch": True}],
    "when.output": [{"above": 1, "output": output} for output in (-1, 0.5)],
}


@pytest.mark.parametrize(("field", "fields"), pairs(WRONG_CONDITIONS))
def test_wrong_conditions_name_the_field(field, fields):
    for make in (lambda given: When(**given), lambda given: When.parse(given, "when")):
        with refused(field):
            make({"probe": "a", **fields})


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
    assert "when" not in replace(intervention, when=None).to_json()
    again = parse_intervention(wire, "i")
    assert again.when == intervention.when and again.to_json() == intervention.to_json()
    assert again.when.path == "i.when"
    if intervention.op != "set_feature":
        stored = parse_stored(wire, "i").with_vectors(lambda vector, field: vector).with_arrays(None)
        assert stored.when == intervention.when
        assert all(part.when == intervention.when for part in stored.by_layer(3, None))
    with refused("i.when.over"):
        parse_intervention({**wire, "when": {"probe": "a", "over": 1}}, "i")


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


NO_RULES = str.split("|a|a >|> 1|a == 1|a = 1|a > b|a > 1 > 2|a[x] > 1|a[-1] > 1|a > inf|a > 1_0|a != 1|a > 1e99", "|")


@pytest.mark.parametrize("text", [*NO_RULES, 7, "x" * 600])
def test_rules_that_cannot_be_read(text):
    with refused("stop_when[0]"):
        parse_stop_when([text], "stop_when")


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


@pytest.mark.parametrize(
    ("kind", "params", "classes", "activation"),
    [
        ("LogisticRegression", {"solver": "lbfgs"}, 1, "sigmoid"),
        ("LogisticRegression", {"solver": "lbfgs"}, 3, "softmax"),
        ("LogisticRegression", {"solver": "liblinear"}, 3, "none"),
        ("LogisticRegression", {"multi_class": "ovr"}, 3, "none"),
        ("SGDClassifier", {"loss": "log_loss"}, 1, "sigmoid"),
        ("SGDClassifier", {"loss": "hinge"}, 1, "none"),
        ("RidgeClassifier", {}, 1, "none"),
    ],
)
def test_what_gives_probabilities(kind, params, classes, activation):
    estimator = fitted(kind, params, coef_=np.ones((classes, D)), intercept_=np.zeros(classes))
    assert Probe.from_sklearn(estimator, "resid_post", 0).activation == activation


def test_what_is_given_beside_an_estimator():
    given = fitted("LinearRegression", coef_=np.ones(D), intercept_=0.5)
    probe = Probe.from_sklearn(given, layer=1, activation="sigmoid", positions="generated")
    assert probe.activation == "sigmoid" and probe.positions.kind == "generated" and probe.bias == (0.5,)


def pipeline(step):
    steps = [("first", step), ("last", fitted("LinearSVC", coef_=w, intercept_=0))]
    return fitted("Pipeline", steps=steps)


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (fitted("KMeans"), "KMeans is no linear estimator"),
        (fitted("LogisticRegression"), "not fitted"),
        (fitted("Pipeline", steps=[]), "no linear estimator"),
        (pipeline(fitted("Normalizer")), "Normalizer cannot be folded"),
        (pipeline(fitted("MinMaxScaler", {"clip": True})), "clips"),
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
        (make_pipeline(PCA(3), "passthrough", SGDClassifier()), "decision_function"),
        (LinearRegression(fit_intercept=False), "predict"),
    ]
    for estimator, method in pairs:
        estimator.fit(ROWS, labels)
        wanted = getattr(estimator, method)(ROWS)
        if method == "predict_proba" and classes == 2:
            wanted = wanted[:, 1]
        got = scores_of(Probe.from_sklearn(estimator, "resid_post", 0))
        np.testing.assert_allclose(got.reshape(wanted.shape), wanted, rtol=1e-3, atol=1e-3)
