"""`weir.fit` on a live engine: transformers' rows, repeng's and steering-vectors' directions, and what they do."""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import pytest
import torch

import vllm_weir as weir
from examples.demo.stories import make_stories
from tests.support.machine import module, needs
from tests.support.measure import logit_bound
from tests.support.oracle import Oracle
from tests.support.steering_packages import repeng, steering_vectors
from vllm_weir.errors import WeirError
from vllm_weir.experiments.vectors.load import load_vector
from vllm_weir.fitting.layer import auc, split

pytestmark = pytest.mark.engine("demo")
LAYERS, PAIRS = 6, 25  # an odd number of pairs: their votes on a sign are no tie
PACKAGES = needs(module("repeng"), module("steering_vectors"), module("sklearn"))
BEST = (" best", " worst")
"""What the model says next in happy and in sad stories."""


def texts(sentiment: str, n: int = PAIRS) -> list[str]:
    """Stories that differ in words of sentiment alone, up to a word of sentiment."""
    return [" ".join(s.sentences[:-1]) + " It was the" for s in make_stories(n, 1, sentiment=sentiment)]


HAPPY, SAD = texts("positive"), texts("negative")


@functools.lru_cache(maxsize=1)
def truth() -> Oracle:
    return Oracle(weir.demo_model())


@functools.lru_cache(maxsize=1)
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(weir.demo_model())


def rows(prompts, layer, position=-1, hook="resid_post"):
    """Transformers' rows of texts [n, d], float64."""
    site = hook, layer
    found = [truth().rows(tokenizer()(text)["input_ids"], [site])[site][position] for text in prompts]
    return torch.stack([row.mean(0) if row.ndim == 2 else row for row in found]).double().numpy()


def fit(llm, positive=HAPPY, negative=SAD, method="diff", **more):
    return weir.fit(llm, positive, negative, method, **{"check": False, "progress": False} | more)


def areas(positive, negative, lengths):
    """The least and the largest AUC of scores that may each be off by what rounding makes of rows that long."""
    slack = 2e-5 * lengths
    return tuple(auc(np.asarray(positive) + by, negative) for by in (-slack, slack))


def cosine(a, b):
    a, b = (np.asarray(v, np.float64).ravel() for v in (a, b))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_the_difference_of_means_of_transformers_rows(llm):
    """At every block, to 1e-5 of a row's length; in chats, token ids, averages, and lists of different lengths."""
    found = fit(llm)
    assert found.layers == tuple(range(LAYERS)) and found.hook == "resid_post" and found.method == "diff"
    for layer in found.layers:
        positive, negative = rows(HAPPY, layer), rows(SAD, layer)
        expected, length = positive.mean(0) - negative.mean(0), found.details["layers"][str(layer)]["norm"]
        assert np.abs(found.vector(layer).numpy() - expected).max() < 1e-5 * length
        assert length == pytest.approx(np.linalg.norm(np.concatenate([positive, negative]), axis=1).mean(), rel=1e-5)
        assert found.details["layers"][str(layer)]["gap"] == pytest.approx(np.linalg.norm(expected), rel=1e-4)
    ids = [tokenizer()(text)["input_ids"] for text in HAPPY]
    same = fit(llm, ids, SAD, layers=[1, 4])
    assert same.layers == (1, 4)
    for layer in same.layers:
        length = found.details["layers"][str(layer)]["norm"]
        assert torch.allclose(same.vector(layer), found.vector(layer), rtol=0, atol=1e-5 * length)
    fewer = fit(llm, HAPPY, SAD[:7], layers=2)
    expected = rows(HAPPY, 2).mean(0) - rows(SAD[:7], 2).mean(0)
    assert np.abs(fewer.vector(2).numpy() - expected).max() < 1e-5 * fewer.details["layers"]["2"]["norm"]
    mean = fit(llm, layers=3, hook="mlp_out", positions="prompt")
    expected = np.subtract(*(rows(side, 3, slice(None), "mlp_out").mean(0) for side in (HAPPY, SAD)))
    assert cosine(mean.vector(3), expected) > 1 - 1e-6


def test_chats(llm):
    def ask(kind):
        return [[{"role": "user", "content": f"Tell me a {kind} story about {it}."}] for it in ("sailing", "music")]

    found = fit(llm, ask("happy"), ask("sad"), layers=2)
    ids = [
        [tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in side]
        for side in (ask("happy"), ask("sad"))
    ]
    means = [np.mean([truth().rows(tokens)["resid_post", 2][-1].numpy() for tokens in side], 0) for side in ids]
    assert cosine(found.vector(2), means[0] - means[1]) > 1 - 1e-6


@PACKAGES
@pytest.mark.thorough
@pytest.mark.parametrize("method", ["pca", "pca_center"])
def test_parity_with_repeng(llm, method):
    """Its ControlVector.train on the same pairs, sign and all; it reads the last block behind the final norm."""
    package = repeng()
    pairs = [package.DatasetEntry(happy, sad) for happy, sad in zip(HAPPY, SAD, strict=True)]
    theirs = package.ControlVector.train(
        truth().model, tokenizer(), pairs, batch_size=4, method={"pca": "pca_diff"}.get(method, method)
    )
    ours, normed = fit(llm, method=method), fit(llm, method=method, hook="final_norm")
    assert set(theirs.directions) == set(range(1, LAYERS))
    for layer in range(1, LAYERS - 1):
        assert cosine(ours.vector(layer), theirs.directions[layer]) >= 0.999, layer
    assert cosine(normed.vector(0), theirs.directions[LAYERS - 1]) >= 0.999


@PACKAGES
@pytest.mark.thorough
@pytest.mark.parametrize("method", ["diff", "pca_center", "logistic_pairs"])
def test_parity_with_steering_vectors(llm, method):
    """Its train_steering_vector on the same pairs with each of its aggregators; of the means also the length."""
    package = steering_vectors()
    aggregators = {
        "diff": package.mean_aggregator(),
        "pca_center": package.pca_aggregator(),
        "logistic_pairs": package.logistic_aggregator({"tol": 1e-8, "max_iter": 10_000}),
    }
    theirs = package.train_steering_vector(
        truth().model, tokenizer(), list(zip(HAPPY, SAD, strict=True)), aggregator=aggregators[method], batch_size=4
    ).layer_activations
    ours = fit(llm, method=method)
    assert set(theirs) == set(ours.layers)
    for layer, vector in theirs.items():
        assert cosine(ours.vector(layer), vector) >= 0.999, layer
        if method == "diff":
            length = ours.details["layers"][str(layer)]["norm"]
            assert torch.allclose(ours.vector(layer), vector, rtol=0, atol=1e-5 * length)


@needs(module("sklearn"))
def test_logistic_regression_and_its_probe(llm):
    """Weights and bias are scikit-learn's on transformers' rows; a probe in the engine gives their log odds."""
    from sklearn.linear_model import LogisticRegression

    found = fit(llm, method="logistic", layers=[2, 3])
    labels = np.arange(2 * PAIRS) < PAIRS
    for layer in found.layers:
        both = np.concatenate([rows(HAPPY, layer), rows(SAD, layer)])
        theirs = LogisticRegression(tol=1e-8, max_iter=10_000).fit(both, labels)
        assert cosine(found.vector(layer), theirs.coef_[0]) > 0.9999
        odds = both @ found.vector(layer).double().numpy() + found.bias[layer]
        np.testing.assert_allclose(odds, theirs.decision_function(both), atol=0.02)
    one = weir.params(probes=found.probe(3, name="mood", positions="last_prompt"))
    outs = llm.generate(HAPPY[:3], one, use_tqdm=False)
    np.testing.assert_allclose([float(out.scores["mood"][0, 0]) for out in outs], odds[:3], atol=0.01)


@pytest.mark.parametrize("method", ["diff", "pca", "pca_center", "lat", "logistic", "logistic_pairs"])
def test_the_auc_is_of_pairs_that_were_held_out(llm, method):
    """Computed again: fitted on the other folds' prompts, and scored on a fold's own, by the engine's own rows."""
    found = fit(llm, method=method, layers=[1, 3], folds=3, seed=4)
    parts = split(PAIRS, PAIRS, True, 3, 4)
    between = []
    for fold in range(3):
        kept, held = (np.flatnonzero(mask) for mask in (parts.positive != fold, parts.positive == fold))
        part = fit(llm, [HAPPY[k] for k in kept], [SAD[k] for k in kept], method, layers=[1], seed=4)
        vector, sides = part.vector(1).double().numpy(), [rows([side[k] for k in held], 1) for side in (HAPPY, SAD)]
        lengths = np.linalg.norm(np.concatenate(sides), axis=1).max() * np.linalg.norm(vector)
        between.append(areas(*(side @ vector for side in sides), lengths))
    # LAT's order within pairs is drawn again for fewer pairs.
    (least, most), slack = np.mean(between, 0), 0.1 if method == "lat" else 1e-9
    assert least - slack <= found.auc(1) <= most + slack and most - least < 0.05
    assert found.best == max(found.layers, key=found.auc)
    again = fit(llm, method=method, layers=[1, 3], folds=3, seed=4)
    same_directions(again, found)


def same_directions(one, other):
    """Fitted twice: rows that are rounded otherwise turn a direction a little, and swap pairs that are nearly tied."""
    assert one.layers == other.layers
    for layer in one.layers:
        assert cosine(one.vector(layer), other.vector(layer)) > 1 - 1e-6
        assert one.auc(layer) == pytest.approx(other.auc(layer), abs=0.02)
        size = float(one.vector(layer).norm()) * one.details["layers"][str(layer)]["norm"]
        assert one.bias[layer] == pytest.approx(other.bias[layer], abs=1e-4 * size)


def test_the_check_steers_and_ablates_prompts_that_were_held_out(llm):
    """Each mean is what requests with these interventions give, and the direction moves the next word."""
    metric = weir.logit_diff(*BEST)
    found = fit(llm, layers=[2, 5], metric=metric, folds=4, seed=1)
    check, parts = found.details["causal"], split(PAIRS, PAIRS, True, 4, 1)
    kept, held = (np.flatnonzero(mask) for mask in (parts.positive != 0, parts.positive == 0))
    assert check["layer"] == found.best and check["readout"] == "logit difference"
    assert check["prompts"] == {"positive": len(held), "negative": len(held)}
    layer = check["layer"]
    part = fit(llm, [HAPPY[k] for k in kept], [SAD[k] for k in kept], layers=layer)
    vector = part.vector(layer)
    assert check["dose"] == pytest.approx(float(vector.norm()), rel=1e-4)

    def mean(prompts, interventions=()):
        bound = metric.bind(tokenizer(), 1)
        params = weir.params(weir.SamplingParams(**bound.sampling(0)), interventions=list(interventions))
        return np.mean([bound.score(out, 0) for out in llm.generate(prompts, params, use_tqdm=False)])

    happy, sad = ([side[k] for k in held] for side in (HAPPY, SAD))
    expected = {
        "plain_positive": mean(happy),
        "plain_negative": mean(sad),
        "subtracted_positive": mean(happy, [weir.Add(vector, layer, -1.0)]),
        "added_negative": mean(sad, [weir.Add(vector, layer, 1.0)]),
        "ablated_positive": mean(happy, [weir.Ablate(vector, layer)]),
        "ablated_negative": mean(sad, [weir.Ablate(vector, layer)]),
    }
    # Differences of logits of about 20, of steered runs, by a vector that is rounded itself.
    assert check["means"] == pytest.approx(expected, abs=2 * logit_bound(20.0, LAYERS, 512))
    assert check["means"]["plain_positive"] > 3 > -3 > check["means"]["plain_negative"]
    assert layer == LAYERS - 1 and check["added"] > 0.9 and check["subtracted"] > 0.9
    assert abs(check["left_after_ablation"]) < 0.1
    lengths = np.linalg.norm(np.concatenate([rows(happy, layer), rows(sad, layer)]), axis=1)
    along = np.concatenate([rows(happy, layer), rows(sad, layer)]) @ vector.double().numpy() / check["dose"]
    assert check["relative_dose"]["add"] == pytest.approx((check["dose"] / lengths).mean(), rel=1e-4)
    assert check["relative_dose"]["ablate"] == pytest.approx((abs(along) / lengths).mean(), rel=1e-3)
    json.dumps(found.details, allow_nan=False)


def test_the_check_reads_the_probe_further_down_and_any_metric(llm):
    check = fit(llm, check=True, layers=[1, 4, 5]).details["causal"]
    assert check["readout"] == "probe's score at resid_post.5" and check["layer"] in (1, 4)
    assert check["means"]["plain_positive"] > 0 > check["means"]["plain_negative"] and check["added"] > 0.01
    says = fit(
        llm, layers=3, metric=lambda out: float("best" in out.outputs[0].text),
        sampling=weir.SamplingParams(max_tokens=3, temperature=0),
    ).details["causal"]  # fmt: skip
    assert says["readout"] == "<lambda>" and says["means"]["plain_positive"] > says["means"]["plain_negative"]
    with pytest.raises(weir.WeirError, match="not finite") as error:
        fit(llm, layers=3, metric=lambda out: float("nan"))
    assert error.value.field == "metric"
    assert fit(llm, check=True, layers=2).details["causal"]["skipped"].startswith("one block was fitted")
    assert "too few prompts" in fit(llm, HAPPY[:1], SAD[:1], check=True).details["causal"]["skipped"]


def test_more_prompts_than_the_engine_holds_at_once(llm, monkeypatch):
    whole = fit(llm, layers=[2])
    stream = weir.Engine.stream
    monkeypatch.setattr(weir.Engine, "stream", lambda self, requests: stream(self, requests, in_flight=7))
    same_directions(fit(llm, layers=[2]), whole)


OTHERS = [("diff", "last_prompt"), ("pca", "prompt"), ("pca", "last_prompt"), ("lat", "prompt"), ("lat", "last_prompt")]


@pytest.mark.parametrize(
    ("method", "positions"),
    [
        ("diff", "prompt"),
        ("logistic", "last_prompt"),
        *(pytest.param(*other, marks=pytest.mark.thorough) for other in [*OTHERS, ("logistic", "prompt")]),
    ],
)
def test_rows_that_stay_on_the_workers_give_what_rows_here_give(llm, monkeypatch, method, positions):
    """Interventions of every request act on both, and the workers keep nothing afterwards."""
    weir.set_global(llm, weir.Add(torch.ones(256), 1, 3.0))
    try:
        there = fit(llm, method=method, positions=positions, layers=[1, 4])
        monkeypatch.setattr("vllm_weir.experiments.fit.engine.stays_on_workers", lambda *_: False)
        here = fit(llm, method=method, positions=positions, layers=[1, 4])
    finally:
        weir.clear_global(llm)
    assert there.details.pop("rows") == "workers" and here.details.pop("rows") == "caller"
    same_directions(there, here)
    assert [usage["kept_bytes"] for usage in llm.collective_rpc("weir_usage")] == [0]


def test_heads(llm, monkeypatch):
    """Each head's direction is that of transformers' rows of the head; what it is used for acts on that head alone."""
    found = fit(llm, hook="z", heads="all", layers=[1, 4])
    monkeypatch.setattr("vllm_weir.experiments.fit.engine.stays_on_workers", lambda *_: False)
    here = fit(llm, hook="z", heads=[2, 0], layers=[4], positions="prompt", method="logistic")
    assert list(found) == [0, 1, 2, 3] and list(here) == [2, 0]
    for layer in (1, 4):
        ids = [[tokenizer()(text)["input_ids"] for text in side] for side in (HAPPY, SAD)]
        both = [np.stack([truth().rows(one, [("z", layer)])["z", layer][-1] for one in side]) for side in ids]
        for head, one in found.items():
            expected = both[0][:, head].mean(0) - both[1][:, head].mean(0)
            length = one.details["layers"][str(layer)]["norm"]
            assert np.abs(one.vector(layer).numpy() - expected).max() < 1e-5 * length and one.head == head
            lengths = np.linalg.norm(np.concatenate([side[:, head] for side in both]), axis=1)
            assert length == pytest.approx(lengths.mean(), rel=1e-5)
    assert here[2].details["rows"] == "caller" and found[2].details["rows"] == "workers"
    one = found[2].only(4)
    asked = [weir.Capture("z", 4)]
    params = weir.params(capture=asked, interventions=one.add(2.0), probes=one.probe(4, positions="last_prompt"))
    plain, out = (llm.generate(HAPPY[0], p, use_tqdm=False)[0] for p in (weir.params(capture=asked), params))
    at = len(plain.prompt_token_ids) - 1
    moved = out.activations["z", 4][at] - plain.activations["z", 4][at]
    assert torch.allclose(moved[2], 2 * one.vector(4), atol=1e-4)
    assert torch.allclose(moved[[0, 1, 3]], torch.zeros(3, moved.shape[1]), atol=1e-5)
    weight = one.vector(4) / one.vector(4).norm()
    score = float(out.activations["z", 4][at, 2] @ weight) + one.bias[4]
    assert float(out.scores["probe"][-1, 0]) == pytest.approx(score, abs=1e-4)


def test_of_several_heads_the_best_is_tried(llm, tmp_path):
    found = fit(llm, hook="z", heads=[0, 3], layers=[1, 4], metric=weir.logit_diff(*BEST))
    checks = {head: one.details["causal"] for head, one in found.items()}
    best = max(found, key=lambda head: max(found[head].auc(layer) for layer in (1, 4)))
    assert checks[best]["head"] == best and checks[3 - best] == {"skipped": f"the AUC of head {best} is higher"}
    layer, head = checks[best]["layer"], found[best]
    parts = split(PAIRS, PAIRS, True, 5, 0)
    held = np.flatnonzero(parts.positive == 0)
    bound = weir.logit_diff(*BEST).bind(tokenizer(), 1)
    kept = np.flatnonzero(parts.positive != 0)
    part = fit(llm, [HAPPY[k] for k in kept], [SAD[k] for k in kept], hook="z", heads=best, layers=layer)[best]
    params = weir.params(weir.SamplingParams(**bound.sampling(0)), interventions=part.add(1.0))
    mean = np.mean([bound.score(out, 0) for out in llm.generate([SAD[k] for k in held], params, use_tqdm=False)])
    assert checks[best]["means"]["added_negative"] == pytest.approx(mean, abs=2 * logit_bound(20.0, LAYERS, 512))
    head.save(tmp_path / "head.safetensors")
    again = load_vector(tmp_path / "head.safetensors")
    assert again == head and again.head == best


def test_rows_come_here_where_something_reads_those_of_every_request(llm):
    probe = weir.Probe("everyone", torch.ones(256), layer=2)
    weir.register_probe(llm, probe, everyone=True)
    try:
        assert fit(llm, layers=2).details["rows"] == "caller"
    finally:
        weir.unregister_probe(llm, "everyone")
    assert fit(llm, layers=2).details["rows"] == "workers"


def test_what_the_workers_cannot_keep_is_refused(llm, monkeypatch):
    monkeypatch.setattr("vllm_weir.worker.kept_rows.available_bytes", lambda: 1 << 10)
    with pytest.raises(WeirError, match=r"take 51200 bytes on a worker.*fit fewer layers") as e:
        fit(llm, layers=2)
    assert e.value.field == "layers"
    monkeypatch.undo()
    capture = weir.Capture(layers=2, positions="last_prompt", sink={"workers": {"rows": "gone"}})
    with pytest.raises(WeirError, match="the workers keep no rows under this key"):
        llm.generate(HAPPY[:1], weir.params(capture=capture), use_tqdm=False)


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ({"method": "means"}, "method", "unknown method 'means'"),
        ({"hook": "resid"}, "hook", "resid"),
        ({"layers": 9}, "layers", "block 9 does not exist"),
        ({"positions": "last"}, "positions", "unknown selector 'last'"),
        ({"hook": "z", "heads": [1, 4]}, "heads", "head 4 does not exist: z has heads 0..3"),
        ({"hook": "pattern", "heads": "all"}, "hook", "no direction"),
        ({"heads": [0]}, "heads", "resid_post has no heads"),
        ({"hook": "z"}, "hook", r"a row of z is \[\d+, \d+\], and a direction is one vector"),
        ({"negative": SAD[:3], "method": "pca"}, "negative", "do not pair up"),
        ({"positive": ["x " * 400]}, "positive[0]", "tokens, and the engine takes 1 to 255"),
        ({"folds": 1}, "folds", "at least 2"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"C": 0}, "C", "above 0"),
        ({"metric": "loss"}, "metric", "expected weir.logit_diff"),
        ({"metric": weir.logit_diff("best", " worst")}, "metric.a", "becomes '<unk>' .3.; did you mean ' best'"),
        ({"metric": weir.logit_diff(" best", " best")}, "metric.b", "the same token"),
        ({"sampling": weir.SamplingParams()}, "sampling", "it is for a metric"),
        ({"positions": 200}, "positions", "position"),
    ],
)
def test_refusals(llm, arguments, field, message):
    with pytest.raises(WeirError, match=message) as e:
        fit(llm, **{"layers": 2} | arguments)
    assert e.value.field == field, str(e.value)


def test_only_an_llm_is_asked():
    with pytest.raises(WeirError) as e:
        weir.fit(object(), HAPPY, SAD)
    assert e.value.field == "llm" and not math.isnan(len(str(e.value)))


@needs(module("matplotlib"))
def test_from_files_to_a_control_vector(llm, tmp_path, monkeypatch, capsys):
    """`weir fit` reads a text a line and JSONL, and writes the vectors and the picture."""
    from typer.testing import CliRunner

    from vllm_weir.cli.main import app

    (tmp_path / "happy.txt").write_text("\n".join(HAPPY) + "\n")
    (tmp_path / "sad.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in SAD))
    monkeypatch.setattr("vllm_weir.experiments.fit.cli.start_llm", lambda model, options: llm)
    fitted = fit(llm, layers=[1, 5])
    for name in ("mood.gguf", "mood.safetensors"):
        arguments = ["fit", "happy.txt", "sad.jsonl", "--column", "prompt", "-m", "model", "-o", name]
        arguments += ["--layers", "1,5", "--plot", "auc.png", "--answer", BEST[0], "--wrong", BEST[1], "--quiet"]
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert "25 positive and 25 negative prompts, 2 blocks" in done.output
        assert "check at block 5, logit difference" in done.output and f"-> {name}" in done.output
        read = load_vector(tmp_path / name)
        for n in (1, 5):
            torch.testing.assert_close(
                read.vector(n), fitted.vector(n), rtol=0, atol=1e-5 * float(rows(HAPPY, n).max())
            )
        assert (tmp_path / "auc.png").read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(app, ["fit", "happy.txt", "none.txt", "-m", "model", "-o", "x.gguf"])
    assert refused.exit_code == 1 and "negative: cannot read none.txt" in refused.output
    refused = CliRunner().invoke(app, ["fit", "happy.txt", "sad.jsonl", "-m", "model", "-o", "x.npz"])
    assert refused.exit_code == 1 and "out: expected a name that ends in .gguf or .safetensors" in refused.output
