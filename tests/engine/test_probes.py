"""Probes on a live engine: their scores are transformers' rows put through the rules."""

from __future__ import annotations

import functools

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import asking, assert_nothing_is_held, directory, oracle, prompts, sampling, tokens, verify
from tests.engine.probe_cases import (
    LAYERS,
    D,
    asked,
    check_scores,
    every_kind,
    preemptions,
    random_probe,
    reference,
    small_engine,
)
from tests.support.machine import module, needs
from tests.support.probe_reference import Act, GateCase
from tests.support.sae_reference import weights
from tests.support.steered import chunks, same_answers
from vllm_weir.errors import WeirError

pytestmark = pytest.mark.engine("default")
LENGTHS = (64, 33, 17, 6, 7, 100, 64, 50, 8, 41, 12, 90)


@pytest.fixture
def truth(root):
    return reference(directory(root))


def groups():
    """The probes of each request of a batch that has every kind, and the prompts."""
    probes = every_kind()
    each = [probes[k::24] for k in range(24)]
    return each, prompts([LENGTHS[k % len(LENGTHS)] + k // 12 for k in range(24)])


@pytest.mark.parametrize("size", [None, 19])
def test_every_kind_of_probe(llm, truth, size):
    """Each activation and smoothing, at every kind of site; with whole prompts, and in chunks of 19 tokens."""
    llm.reset_prefix_cache()
    each, texts = groups()
    with chunks(llm, size):
        outs = llm.generate(texts, [asked(sampling(6), probes) for probes in each], use_tqdm=False)
    for out, probes in zip(outs, each, strict=True):
        check_scores(out, probes, truth)
        assert out.receipt.complete and (out.activations is None or not out.activations.sites)
    del outs, out
    assert_nothing_is_held(llm)


def test_a_hit_of_the_prefix_cache_ends_at_the_first_scored_position(llm, truth):
    llm.reset_prefix_cache()
    text = {"prompt_token_ids": tokens(100, 3)}
    llm.generate(text, sampling(2), use_tqdm=False)
    for selector, cached in (("all", 0), ("generated", 96), ("last_prompt", 96), ("70:", 64), ([40, 90], 32)):
        probes = [
            random_probe("first", "attention", ("resid_post", 2), 1, 2, positions=selector),
            random_probe("second", "linear", ("mlp_post", 1), 2, 1, smooth=("mean", 3), positions="sampled"),
        ]
        (out,) = llm.generate(text, asked(sampling(4), probes), use_tqdm=False)
        check_scores(out, probes, truth)
        assert out.num_cached_tokens == cached, selector
    (plain,) = llm.generate(text, sampling(2), use_tqdm=False)
    assert plain.num_cached_tokens == 96, "probes leave the blocks of the cache to everybody"
    assert plain.scores is None


def test_several_samples_of_one_prompt(llm, truth):
    probes = [
        random_probe("mean", "linear", ("resid_post", 1), 4, 3, smooth=("ema", 0.2)),
        random_probe("attends", "attention", ("resid_post", 3), 5, positions="sampled"),
    ]
    params = asked(sampling(7, temperature=1.0, n=3), probes)
    for size in (None, 16):
        with chunks(llm, size):
            (out,) = llm.generate(prompts([37]), params, use_tqdm=False)
        assert len({tuple(one.token_ids) for one in out.outputs}) == 3
        for one in out.outputs:
            check_scores(out, probes, truth, one)


def test_beside_captures_features_and_neighbours(llm, truth):
    """One batch: probes alone, beside rows, beside features, beside interventions without gates; plain neighbours."""
    if "mid" not in {info.name for info in weir.saes(llm)}:
        sae = weir.SAE.from_tensors("standard", ("resid_post", 1), **weights("standard", 0, D, 64))
        weir.load_sae(llm, "mid", sae)
    probes = [
        random_probe("a", "linear", ("resid_post", 1), 6, 3, activation="softmax"),
        random_probe("b", "mlp", ("z", 2), 7, smooth=("max",), hidden="gelu"),
    ]
    texts = prompts([40, 41, 42, 43, 44])
    capturing, wanted = asking("sampled", LAYERS, 6)
    features = weir.Features("mid", top_k=4)
    captures = [weir.Capture("resid_post", positions="sampled"), weir.Capture("resid_pre", [0, 1], "sampled")]
    captures += [weir.Capture(hook, 1, "sampled") for hook in ("attn_out", "resid_mid", "mlp_out")]
    batch = [
        asked(sampling(6), probes),
        asked(sampling(6), probes, capture=captures),
        asked(sampling(6), probes, features=features),
        capturing,
        sampling(6, logprobs=3),
    ]
    outs = llm.generate(texts, batch, use_tqdm=False)
    for out in outs[:3]:
        check_scores(out, probes, truth)
    verify(outs[1], wanted, oracle_of(truth))
    verify(outs[3], wanted, oracle_of(truth))
    alone = llm.generate([texts[2]], weir.params(sampling(6), features=features), use_tqdm=False)[0]
    assert torch.equal(outs[2].features["mid"].positions, alone.features["mid"].positions)
    assert torch.allclose(outs[2].features["mid"].values, alone.features["mid"].values, rtol=1e-4, atol=1e-4)
    assert outs[3].scores is None and outs[4].scores is None and outs[4].activations is None
    weir.unload_sae(llm, "mid")


def oracle_of(truth):
    return oracle(truth.model_dir)


@pytest.mark.parametrize("gated", [False, True])
def test_neighbours_get_the_same_bits(llm, truth, gated):
    """Beside requests with probes, or gates, and beside the same requests without; probes change nothing themselves."""
    texts = prompts([30 + 3 * k for k in range(16)])
    probes = [
        random_probe(f"p{k}", kind, ("resid_post", k), k) for k, kind in enumerate(("linear", "mlp", "attention"))
    ]
    add = functools.partial(weir.Add, 2 * torch.ones(D), [1, 2])
    acts = [Act(add, GateCase("p0", above=-1e6))] if gated else []
    plain = sampling(6, logprobs=3)
    llm.reset_prefix_cache()
    before = llm.generate(texts, plain, use_tqdm=False)
    llm.reset_prefix_cache()
    mixed = [asked(plain, probes, acts) if k % 2 else plain for k in range(16)]
    outs = llm.generate(texts, mixed, use_tqdm=False)
    assert same_answers(outs[::2], before[::2])
    assert same_answers(outs[1::2], before[1::2]) is not gated
    for k, out in enumerate([] if gated else outs):
        if k % 2:
            check_scores(out, probes, truth)
        (alone,) = llm.generate([texts[k]], sampling(6), use_tqdm=False)
        assert alone.outputs[0].token_ids == out.outputs[0].token_ids


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_scores_survive_preemption(root, truth, caching):
    llm = small_engine(root, enable_prefix_caching=caching)
    selectors = ["all", "generated", "sampled", "prompt", "30:90:2", {"token_ids": list(range(0, 510, 2))}]
    smoothings = [("mean", 40), None, ("ema", 0.1), ("max",), ("mean", 3), ("ema", 0.5)]
    each = [
        [
            random_probe("linear", "linear", ("resid_post", 1), k, 2, positions=selector, smooth=smooth),
            random_probe("attends", "attention", ("resid_post", 3), k, 1, positions=selector),
        ]
        for k, (selector, smooth) in enumerate(zip(selectors, smoothings, strict=True))
    ]
    with preemptions(llm) as found:
        batch = [asked(sampling(90), probes) for probes in each]
        outs = llm.generate(prompts([30, 31, 40, 33, 32, 35]), batch, use_tqdm=False)
    assert any(computed > 40 for computed in found), "nobody had generated tokens to compute again"
    for out, probes in zip(outs, each, strict=True):
        check_scores(out, probes, truth)


def test_registered_probes(llm, truth):
    """By name, in the version that is there when the request is made."""
    first = random_probe("mood", "linear", ("resid_post", 1), 8)
    second = random_probe("mood", "mlp", ("resid_post", 2), 9, 2, activation="sigmoid")
    params = weir.params(sampling(4), probes="mood")
    for probe in (first, second):
        weir.register_probe(llm, probe.public())
        (out,) = llm.generate(prompts([20]), params, use_tqdm=False)
        check_scores(out, [probe], truth)
    assert [info if isinstance(info, str) else info.name for info in weir.list_probes(llm)] == ["mood"]
    weir.unregister_probe(llm, "mood")
    with pytest.raises(WeirError) as error:
        llm.generate(prompts([20]), params, use_tqdm=False)
    assert error.value.field == "probes[0]"


@needs(module("sklearn"))
def test_sklearn(llm, truth):
    """Fitted on captured rows, folded into one probe: scikit-learn's own numbers at every token."""
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    params = weir.params(sampling(8), capture=weir.Capture("resid_post", 2))
    rows = torch.cat([o.activations["resid_post", 2] for o in llm.generate(prompts(), params, use_tqdm=False)]).numpy()
    labels = (rows @ rows[0] > 0).astype(int) + (rows @ rows[1] > 0)
    (text,) = prompts([25])
    for classes in (2, 3):
        pipeline = make_pipeline(StandardScaler(), PCA(16), LogisticRegression(max_iter=500))
        pipeline.fit(rows, labels.clip(max=classes - 1))
        probe = weir.Probe.from_sklearn(pipeline, "resid_post", 2, name="fitted")
        params = weir.params(sampling(5), probes=probe, capture=weir.Capture("resid_post", 2))
        (out,) = llm.generate(text, params, use_tqdm=False)
        expected = torch.from_numpy(pipeline.predict_proba(out.activations["resid_post", 2].numpy())).double()
        got = out.scores["fitted"].double()
        # A score is rounded by its summed products' size.
        size = float((out.activations["resid_post", 2].abs() @ torch.tensor(probe.weight.array).abs().T).max())
        wanted = expected[:, 1:] if classes == 2 else expected
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 * max(1.0, size))


@pytest.mark.parametrize(
    ("probes", "field"),
    [
        ([weir.Probe("p", torch.ones(D + 1), layer=1)], "probes[0].weight"),
        ([weir.Probe("p", torch.ones(40, D), torch.zeros(40), layer=1)], "probes"),  # more than the cells of a token
        ([weir.Probe("p", torch.ones(D), layer=1)] * 2, "probes[1]"),
        (["unknown"], "probes[0]"),
        ([{"kind": "cubic", "name": "p"}], "probes[0].kind"),
    ],
)
def test_refusals(llm, truth, probes, field):
    """A WeirError that names the field; the engine lives on, and scores as before."""
    with pytest.raises(WeirError) as error:
        raw = isinstance(probes[0], dict)
        given = sampling(2, extra_args={"weir": {"v": 1, "probes": probes}}) if raw else None
        llm.generate(prompts([12]), given or weir.params(sampling(2), probes=probes), use_tqdm=False)
    assert error.value.field == field, error.value
    assert not llm.llm_engine.has_unfinished_requests()
    probe = random_probe("p", "linear", ("resid_post", 1), 12)
    (out,) = llm.generate(prompts([12]), asked(sampling(3), [probe]), use_tqdm=False)
    check_scores(out, [probe], truth)
