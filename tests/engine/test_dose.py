"""Receipts on a live engine: how often interventions acted, and their relative doses, against transformers."""

from __future__ import annotations

import functools
import itertools
import statistics
from types import SimpleNamespace

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, prompts, sampling, tokens
from tests.engine.probe_cases import D, preemptions, random_probe, small_engine
from tests.support.measure import alike
from tests.support.probe_reference import Act, GateCase, GatedOracle
from tests.support.sae_reference import Reference, weights
from tests.support.steered import SteeredOracle, chunks, vectors
from vllm_weir.errors import WeirError

pytestmark = pytest.mark.engine("default")
BOUND = {"rel": 1e-5, "abs": 1e-5}
"""Of a relative dose: both lengths are rounded as the row is, however small the change."""
EVERYTHING = weir.Capture("resid_post")
HEADS, D_HEAD = 4, 32


@pytest.fixture
def llm(llm):
    llm.reset_prefix_cache()
    return llm


@functools.lru_cache(maxsize=1)
def reference(model_dir):
    return SteeredOracle(model_dir)


@pytest.fixture
def truth(root):
    return reference(directory(root))


def run(llm, prompt_list, requests, max_tokens=6, dose=True, **more):
    """Outputs of lists of interventions."""
    params = [
        weir.params(sampling(max_tokens, **more), capture=EVERYTHING, interventions=items, dose=dose)
        for items in requests
    ]
    return llm.generate(prompt_list, params, use_tqdm=False)


def check(out, items, truth, completion=None, cached=0):
    """What the receipt says of each intervention is what the reference finds at the positions computed here."""
    completion = completion or out.outputs[0]
    ids, doses = list(out.prompt_token_ids) + list(completion.token_ids), {}
    truth.steered(ids[:-1], len(out.prompt_token_ids), items, doses)
    receipt = completion.receipt
    assert len(receipt.interventions) == len(items) and receipt.cached_tokens == cached
    for k, (item, got) in enumerate(zip(items, receipt.interventions, strict=True)):
        by_layer = {layer: at for (j, layer), at in sorted(doses.items()) if j == k}
        rows = {layer: [x for p, x in at.items() if p >= cached] for layer, at in by_layer.items()}
        assert (got.op, got.hook, got.layers) == (item.op, item.hook, tuple(by_layer))
        assert got.acted == len({p for at in by_layer.values() for p in at if p >= cached})
        assert list(got.relative_dose_by_layer) == [layer for layer, found in rows.items() if found]
        for layer, dose in got.relative_dose_by_layer.items():
            assert dose == pytest.approx(statistics.fmean(rows[layer]), **BOUND), (item, layer)
        assert got.relative_dose == pytest.approx(statistics.fmean(itertools.chain(*rows.values())), **BOUND), item


def one_of_each(v):
    """Lists of interventions."""
    return [
        [weir.Add(v(D), 1, 1.5)],
        [weir.Add(v(D), "all", 0.2, norm_match=True)],
        [weir.Add(v(D), [0, 2], 4.0, keep_norm=True, hook="resid_pre")],
        [weir.Add(v(4, D), per_layer=True, positions="prompt")],
        [weir.Add({2: v(D), 0: v(3, D)[0]}, scale=2.0, positions="generated")],
        [weir.Add(v(3, D), [1, 3], positions=[4, 0, -1])],
        [weir.Ablate(v(3, D), "all")],
        [weir.Clamp(v(D), 2, value=3.0)],
        [weir.Clamp(v(D), [1, 2], min=-0.1, max=0.1, strength=0.5)],
        [weir.Replace(v(D), 1, positions="2:9")],
        [weir.Replace(v(D), 3, alpha=0.3, hook="attn_in", positions={"token_ids": list(range(0, 500, 2))})],
        [weir.LowRank(v(4, D) / 10, v(4, D) / 10, v(4), 2, hook="mlp_in")],
        [weir.Add(v(D_HEAD), 1, hook="z", heads=[1, 3])],
        [weir.Replace(v(2, D_HEAD), 2, hook="z", heads=[0, 2], positions="sampled")],
        [weir.Clamp([1.0], 1, max=0.0, hook="mlp_post", neurons=[17]), weir.Add(v(192), 2, hook="mlp_post")],
        [
            weir.Add(v(D), 1),
            weir.Ablate(v(2, D), 1, positions="prompt"),
            weir.Add(v(D), 2, 0.5, hook="resid_pre"),
            weir.Clamp(v(D), [0, 1, 2], value=1.0),
            weir.Replace(v(D), 1, alpha=0.3),
        ],
    ]


@pytest.mark.parametrize("size", [None, 7])
def test_every_intervention(llm, truth, size):
    """In one batch, whole and in chunks; and measuring changes no bit of any row."""
    requests = one_of_each(vectors(3))
    texts = prompts([20 + k for k in range(len(requests))])
    with chunks(llm, size):
        measured = run(llm, texts, requests)
        llm.reset_prefix_cache()
        plain = run(llm, texts, requests, dose=False)
    for out, twin, items in zip(measured, plain, requests, strict=True):
        check(out, items, truth)
        assert out.outputs[0].token_ids == twin.outputs[0].token_ids
        for site in out.activations.sites:
            assert alike(out.activations[site], twin.activations[site]), (items, site)
        for one, other in zip(out.receipt.interventions, twin.receipt.interventions, strict=True):
            assert (one.acted, one.layers) == (other.acted, other.layers)
            assert other.relative_dose is None and not other.relative_dose_by_layer
    del measured, plain, out, twin
    assert_nothing_is_held(llm)


def test_neighbours_keep_their_bits(llm):
    """Of requests that do not measure, with and without interventions, whatever the request beside them does."""
    v = vectors(5)
    texts, steer = prompts([24, 30, 18, 27]), [weir.Add(v(D), "all", 0.5)]
    found = []
    for dose in (False, True):
        llm.reset_prefix_cache()
        params = [weir.params(sampling(), capture=EVERYTHING, interventions=items) for items in ([], steer, [])]
        params.insert(2, weir.params(sampling(), capture=EVERYTHING, interventions=steer, dose=dose))
        found.append(llm.generate(texts, params, use_tqdm=False))
    for before, after in zip(*found, strict=True):
        for site in before.activations.sites:
            assert torch.equal(before.activations[site], after.activations[site])
    assert [[one.relative_dose is None for one in out.receipt.interventions] for out in found[1]] == [
        [], [True], [False], [],
    ]  # fmt: skip


def test_what_comes_from_the_prefix_cache_is_not_measured_again(llm, truth):
    """Measured or not, requests share blocks; what one has computed counts there."""
    items, text = [weir.Add(vectors(7)(D), [1, 2], 1.5)], {"prompt_token_ids": tokens(100, 7)}

    def ask(dose):
        params = weir.params(sampling(4), interventions=items, dose=dose)
        return llm.generate([text], params, use_tqdm=False)[0]

    plain, first, second = ask(False), ask(True), ask(True)
    assert plain.receipt.interventions[0].acted == 103 and plain.receipt.interventions[0].relative_dose is None
    for out in (first, second):
        assert out.receipt.shared == (96,) and out.receipt.interventions[0].acted == 7
        check(out, items, truth, cached=96)
    in_prompt = weir.Add(vectors(7)(D), 1, 1.5, positions="0:32")
    params = weir.params(sampling(4), interventions=in_prompt, dose=True)
    for acted in (32, 0):
        (out,) = llm.generate([{"prompt_token_ids": tokens(100, 8)}], params, use_tqdm=False)
        (one,) = out.receipt.interventions
        assert one.acted == acted and (one.relative_dose is None) == (acted == 0)


def test_several_samples(llm, truth):
    items = [weir.Add(vectors(9)(D), 1, 2.0), weir.Ablate(vectors(10)(D), "all", positions="generated")]
    (out,) = run(llm, prompts([33]), [items], n=3, temperature=1.0, seed=1)
    assert len({tuple(one.token_ids) for one in out.outputs}) > 1
    for one in out.outputs:
        check(out, items, truth, one, one.receipt.cached_tokens)


@pytest.mark.parametrize("when", [{"above": 0.1}, {"above": 0.1, "sharpness": 3.0}, {"below": -1e9}])
def test_gates(llm, root, when):
    """Only where the gate lets it act, and by as much of the change as a sigmoid lets through."""
    v, ids = vectors(11)(D), tokens(40, 11)
    probe = random_probe("p", "linear", ("resid_post", 0), 11)
    act = Act(functools.partial(weir.Add, v, [1, 2], 2.0), GateCase("p", **when))
    params = weir.params(sampling(6), capture=EVERYTHING, probes=probe.public(), interventions=act.public(), dose=True)
    (out,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    (got,), (gate,) = out.receipt.interventions, out.receipt.gates
    assert got.acted == gate["fired"] and got.layers == (1, 2)
    traced = GatedOracle(directory(root)).gated([*ids, *out.outputs[0].token_ids][:-1], 40, [probe], [act])
    scores = traced.scores["p"][1][:, 0]
    if "below" in when:
        assert got.acted == 0 and got.relative_dose is None
        return
    over = scores - when["above"]
    factors = (when["sharpness"] * over).sigmoid() if "sharpness" in when else (over > 0).double()
    acted = factors != 0
    assert got.acted == int(acted.sum()) and (0 < got.acted < 45 or "sharpness" in when)
    for layer in (1, 2):
        change = 2.0 * factors[acted, None].double() * v.double()
        before = traced.rows["resid_post", layer][acted].double() - change
        dose = float((change.norm(dim=1) / before.norm(dim=1)).mean())
        assert got.relative_dose_by_layer[layer] == pytest.approx(dose, **BOUND)


def test_a_feature(llm, truth):
    sae = weir.SAE.from_tensors("standard", ("resid_post", 2), **weights("standard", 3, D, 64))
    weir.load_sae(llm, "dosed", sae)
    known = Reference("standard", weights("standard", 3, D, 64))
    item = SimpleNamespace(
        op="set_feature", hook="resid_post", layers=(2,), vectors=(), neurons=None, heads=None, per_layer=False,
        positions=SimpleNamespace(to_json=lambda: "all"),
        changed=lambda h: torch.from_numpy(known.with_feature(h, 5, 4.0)).float(),
    )  # fmt: skip
    (out,) = run(llm, prompts([30]), [[weir.SetFeature("dosed", 5, value=4.0)]])
    check(out, [item], truth)
    weir.unload_sae(llm, "dosed")


def test_beside_probes_and_global_interventions(llm, truth):
    """Global interventions come first, and are measured for those that ask."""
    v = vectors(13)
    always, own = weir.Add(v(D), "all", 0.7), weir.Ablate(v(D), 3)
    probe = random_probe("p", "linear", ("resid_post", 3), 13, 2)
    weir.set_global(llm, always)
    try:
        texts = prompts([21, 22])
        params = [
            weir.params(sampling(), probes=probe.public(), interventions=own, dose=True),
            weir.params(sampling(), dose=True),
        ]
        outs = llm.generate(texts, params, use_tqdm=False)
    finally:
        weir.clear_global(llm)
    check(outs[0], [always, own], truth)
    check(outs[1], [always], truth)
    assert outs[0].scores["p"].shape == (21 + 7, 2)


def test_a_row_of_zeros_is_left_out(llm, truth):
    """It has no norm to compare with; what finds it next changes it all the same."""
    v = vectors(15)(D)
    items = [weir.Replace(torch.zeros(D), 1, positions=[3]), weir.Add(v, 1, positions=[3, 5])]
    (out,) = run(llm, prompts([20]), [items])
    doses = {}
    truth.steered(list(out.prompt_token_ids), 20, items, doses)
    replaced, added = out.receipt.interventions
    assert replaced.relative_dose == pytest.approx(1.0, **BOUND)
    assert added.acted == 2 and added.relative_dose == pytest.approx(doses[1, 1][5], **BOUND)


def test_too_much_to_measure_is_refused(llm):
    many = [weir.Add(torch.ones(D), "all", 0.1 + k / 100) for k in range(17)]
    with pytest.raises(WeirError, match=r"68 numbers for each token.*room for 64.*probe_cells") as error:
        run(llm, prompts([20]), [many])
    assert error.value.field == "dose"
    (out,) = run(llm, prompts([20]), [many[:16]])
    assert all(one.relative_dose > 0 for one in out.receipt.interventions)
    with pytest.raises(WeirError, match="dose is true or false"):
        weir.params(sampling(), dose=1)


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_doses_survive_preemption(root, truth, caching):
    llm = small_engine(root, enable_prefix_caching=caching)
    v = vectors(17)
    requests = [[weir.Add(v(D), [1, 2], 0.5 + k / 5), weir.Ablate(v(D), 3, positions="generated")] for k in range(6)]
    texts = prompts([30, 31, 40, 33, 32, 35])
    with preemptions(llm) as found:
        params = [weir.params(sampling(90), interventions=items, dose=True) for items in requests]
        outs = llm.generate(texts, params, use_tqdm=False)
    assert any(computed > 40 for computed in found), "nobody had generated tokens to compute again"
    for out, items in zip(outs, requests, strict=True):
        check(out, items, truth)
