"""`Reconstruct`: against transformers with SAELens's formula in a hook, alone, with features set, in batches; what is
refused."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import BOUND
from tests.engine.sae_cases import D_HEAD, EVERYTHING, D, Decoded, Edited, loading, random_sae, run, transcoder
from tests.engine.test_set_feature import coder
from tests.support.measure import alike
from tests.support.steered import check, chunks, idle, prompt, same_answers, sampling, usage

pytestmark = pytest.mark.engine("steering")
SITES = [("resid_post", 1), ("resid_pre", 2), ("attn_in", 0), ("mlp_in", 1), ("mlp_post", 2), ("z", 1), ("q", 0)]
KINDS = ("standard", "gated", "jumprelu", "topk", "batchtopk", "abstopk", "matching_pursuit")
ROW_BY_ROW = [("standard", "layer_norm"), ("topk", "constant_norm_rescale")]


@pytest.fixture
def loaded(llm):
    with loading(llm) as load:
        yield load


def decoded(sae, asked, *edits) -> Decoded:
    reference = Decoded(sae, asked)
    reference.edits = edits
    return reference


@pytest.mark.parametrize(("architecture", "site"), [*zip(KINDS, SITES, strict=True)])
def test_it_is_the_model_with_the_reconstruction_in_a_hook(engine, loaded, architecture, site):
    llm, oracle = engine
    sae = loaded("it", coder(architecture, site, 5))
    asked = [weir.Reconstruct("it", positions=at) for at in ("all", "prompt", "generated", [2, 5, -1])]
    found = run(llm, [[one] for one in asked], [prompt(12, 40 + k) for k in range(4)])
    for out, one in zip(found, asked, strict=True):
        check(out, [decoded(sae, one)], oracle)
        (receipt,) = out.receipt.interventions
        assert receipt.op == "reconstruct" and receipt.acted > 0
    assert found[0].receipt.steered == ({site: 17},)


@pytest.mark.parametrize(("architecture", "normalised"), ROW_BY_ROW)
def test_rows_that_are_normalised_one_by_one(engine, loaded, architecture, normalised):
    """Of which no feature can be set."""
    llm, oracle = engine
    sae = loaded("it", coder(architecture, seed=6, normalize_activations=normalised))
    (out,) = run(llm, [[weir.Reconstruct("it")]], [prompt(12, 50)])
    check(out, [decoded(sae, weir.Reconstruct("it"))], oracle)


def test_one_head_of_z(engine, loaded):
    llm, oracle = engine
    sae = loaded("head", coder("jumprelu", ("z", 2), 31, d_in=D_HEAD, head=2))
    capture = [*EVERYTHING, weir.Capture("z", 2)]
    asked = [weir.SetFeature("head", 9, value=5.0), weir.Reconstruct("head")]
    (out,) = run(llm, [asked], [prompt(9, 3)], capture)
    check(out, [decoded(sae, asked[1], asked[0])], oracle)
    (plain,) = run(llm, [[]], [prompt(9, 3)], capture)
    heads = zip(out.activations["z", 2][:9].unbind(1), plain.activations["z", 2][:9].unbind(1), strict=True)
    assert [alike(*pair) for pair in heads] == [True, True, False, True]


@pytest.mark.parametrize("architecture", ["jumprelu", "topk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_features_that_are_set_are_decoded_as_they_are_set(llm, loaded, architecture, dtype):
    """The row itself, by `SAE.encode` and `SAE.decode`; and the tokens after it."""
    sae = loaded("it", coder(architecture, ("resid_post", 2)).to(dtype=dtype))
    edits = [weir.SetFeature("it", 3, value=4.0), weir.SetFeature("it", 7, scale=-2.0), weir.SetFeature("it", 3, add=1)]
    asked = [*edits, weir.Reconstruct("it")]
    pair = [run(llm, [asked], [prompt(20, 4)], weir.Capture("resid_post", 2, before=b))[0] for b in (True, False)]
    h, got = (out.activations["resid_post", 2][:20] for out in pair)
    features = sae.encode(h)
    features[:, 3], features[:, 7] = 5.0, -2 * features[:, 7]
    wanted = sae.decode(features, h)
    assert (got - wanted).abs().max() <= BOUND * wanted.abs().max()
    assert [one.op for one in pair[1].receipt.interventions] == ["set_feature"] * 3 + ["reconstruct"]


def test_with_features_set_it_is_the_model_with_both_in_a_hook(engine, loaded):
    llm, oracle = engine
    sae, other = loaded("it", coder("gated", seed=8)), loaded("other", coder("topk", ("resid_post", 2), 9))
    v = torch.randn(D, generator=torch.Generator().manual_seed(0))
    edits = [weir.SetFeature("it", 4, value=6.0), weir.SetFeature("it", 9, scale=3.0)]
    both = [weir.SetFeature("other", 2, value=3.0), weir.Reconstruct("other")]
    orders = [[*edits, weir.Reconstruct("it")], [weir.Add(v, 1), *edits, weir.Reconstruct("it"), *both, weir.Add(v, 2)]]
    first, second = run(llm, orders, [prompt(14, 60 + k) for k in range(2)])
    alone = decoded(sae, orders[0][-1], *edits)
    check(first, [alone], oracle)
    check(second, [orders[1][0], alone, decoded(other, both[1], both[0]), orders[1][-1]], oracle)


def test_with_its_error_rows_stay_as_they_are(engine, loaded):
    llm, oracle = engine
    sae = loaded("it", coder("jumprelu", seed=10))
    kept, edit = weir.Reconstruct("it", error=True), weir.SetFeature("it", 4, value=6.0)
    plain, same, edited, after = run(llm, [[], [kept], [edit, kept], [kept, edit]], [prompt(14, 70)] * 4)
    assert same.outputs[0].token_ids == plain.outputs[0].token_ids and not any(same.receipt.steered)
    assert all(torch.equal(same.activations[site], plain.activations[site]) for site in plain.activations.sites)
    for out in (edited, after):
        check(out, [Edited(sae, edit)], oracle)


def test_under_gates_of_their_own(engine, loaded):
    llm, oracle = engine
    sae = loaded("it", coder("batchtopk", ("resid_post", 2), 7))
    generator = torch.Generator().manual_seed(1)
    probes = [weir.Probe(n, torch.randn(1, D, generator=generator), [0.0], "resid_post", 1) for n in ("p", "q")]
    edit = weir.SetFeature("it", 8, value=5.0, when=weir.When("p", above=0.0))
    asked = [edit, weir.Reconstruct("it", when=weir.When("q", above=0.0))]
    params = weir.params(sampling(), capture=EVERYTHING, interventions=asked, probes=probes)
    (out,) = llm.generate([prompt(30, 80)], params, use_tqdm=False)
    p, q = ((out.scores[name][:, 0] > 0).nonzero()[:, 0].tolist() for name in ("p", "q"))
    both, one, other = sorted({*p} & {*q}), sorted({*p} - {*q}), sorted({*q} - {*p})
    assert both and one and other
    set_alone = weir.SetFeature("it", 8, value=5.0, positions=one)
    parts = [decoded(sae, weir.Reconstruct("it", positions=both), edit), Edited(sae, set_alone)]
    check(out, [*parts, decoded(sae, weir.Reconstruct("it", positions=other))], oracle)
    assert [receipt.acted for receipt in out.receipt.interventions] == [len(p), len(q)]


def test_each_of_a_batch_gets_its_own(engine, loaded):
    """And those beside them get the bits that they have where nobody asks for anything."""
    llm, oracle = engine
    saes = [loaded(name, coder(kind, seed=20 + k)) for k, (name, kind) in enumerate((("a", "jumprelu"), ("b", "topk")))]
    asked = [
        [*([weir.SetFeature("ab"[k % 2], k, value=2.0)] if k % 3 else []), weir.Reconstruct("ab"[k % 2])]
        for k in range(8)
    ]
    params, plain = (
        [weir.params(sampling(), capture=EVERYTHING, interventions=one) for one in asked],
        sampling(logprobs=3),
    )
    texts = [prompt(6 + k, 90 + k) for k in range(16)]
    stock = llm.generate(texts, plain, use_tqdm=False)
    llm.reset_prefix_cache()  # the steps have the same shapes again
    mixed = llm.generate(texts, [*params, *[plain] * 8], use_tqdm=False)
    for k, (out, (*edits, whole)) in enumerate(zip(mixed, asked, strict=False)):
        check(out, [decoded(saes[k % 2], whole, *edits)], oracle)
    assert same_answers(mixed[8:], stock[8:])
    assert usage(llm)["programs"] == 0


def test_prompts_in_chunks(engine, loaded):
    llm, oracle = engine
    sae = loaded("it", coder("topk", seed=38))
    asked = weir.Reconstruct("it", positions="4:")
    with chunks(llm, 7):
        found = run(llm, [[asked]] * 3, [prompt(23 + k, 100 + k) for k in range(3)])
    for out in found:
        check(out, [decoded(sae, asked)], oracle)


def test_blocks_of_the_cache_are_shared_where_the_same_is_done(llm, loaded):
    for name, k in (("keys", 24), ("others", 25)):
        loaded(name, coder("topk", seed=40, k=k))

    def cached(*asked):
        params = weir.params(sampling(2), interventions=list(asked))
        return llm.generate(prompt(100, 110), params, use_tqdm=False)[0].num_cached_tokens

    whole, edit = weir.Reconstruct("keys"), weir.SetFeature("keys", 6, value=3.0)
    for other in ([], [whole], [edit], [edit, whole], [weir.Reconstruct("others")]):
        assert cached(*other) == 0, other
        assert cached(*other) == 96, other
    assert cached(weir.Reconstruct("keys", error=True)) == 96, "as a plain request"
    assert cached(weir.Reconstruct("keys", positions="-20:")) == 64


def test_every_request_undergoes_it(engine, loaded):
    llm, oracle = engine
    sae = loaded("name", coder("jumprelu", seed=12))
    asked = weir.Reconstruct("name")
    weir.set_global(llm, asked)
    try:
        with pytest.raises(weir.WeirError, match="clear that first") as e:
            weir.unload_sae(llm, "name")
        assert e.value.field == "name"
        (out,) = run(llm, [[]], [prompt(8, 120)])
        check(out, [decoded(sae, asked)], oracle)
    finally:
        weir.clear_global(llm)
    weir.unload_sae(llm, "name")
    assert idle(llm)


def test_what_cannot_be_done_is_refused_by_field(llm, loaded):
    loaded("it", coder("jumprelu"))
    loaded("transcoder", transcoder("transcoder"))
    whole, edit = weir.Reconstruct("it"), weir.SetFeature("it", 1, value=1.0)
    before = "directly before the Reconstruct"
    for asked, error, at in (
        ([weir.Reconstruct("transcoder")], "reads rows of mlp_in and reconstructs those of mlp_out", "[0].name"),
        ([weir.Reconstruct("nobody")], "loaded are it, transcoder", "[0].name"),
        ([whole, edit], before, "[1]"),
        ([edit, weir.Add(torch.ones(D), 1), whole], before, "[0]"),
        ([weir.SetFeature("it", 1, value=1.0, positions="prompt"), whole], before, "[0]"),
        ([weir.SetFeature("it", 1, value=1.0, read_back=True), whole], "leave read_back out", "[0].read_back"),
        ([edit, weir.SetFeature("it", 1, scale=2.0), whole], "put add after value or scale", "[1].feature"),
    ):
        with pytest.raises(weir.WeirError, match=error) as e:
            run(llm, [asked], [prompt(5, 130)])
        assert e.value.field == f"interventions{at}"
    with pytest.raises(weir.WeirError, match="leave dose out") as e:
        llm.generate(prompt(5, 130), weir.params(sampling(), interventions=[edit, whole], dose=True), use_tqdm=False)
    assert e.value.field == "dose"


def test_a_reconstruction_that_is_not_finite_fails_its_request(llm, loaded):
    sae = random_sae("standard", ("resid_post", 1), 3)
    sae.tensors["W_dec"].fill_(3e38)
    loaded("huge", sae)
    with pytest.raises(weir.WeirError, match="not finite in the model's dtype"):
        run(llm, [[weir.Reconstruct("huge")], []], [prompt(9, 140 + k) for k in range(2)])
    plain = llm.generate(prompt(9, 141), sampling(logprobs=3), use_tqdm=False)
    (out,) = llm.generate(prompt(9, 141), sampling(logprobs=3), use_tqdm=False)
    assert same_answers([out], plain)


def test_a_reconstruction_without_memory_fails_its_request(llm, loaded, monkeypatch):
    loaded("large", random_sae("standard", ("resid_post", 1), 3))

    def reconstructed(self, rows):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(weir.SAE, "reconstructed", reconstructed)
    with pytest.raises(weir.WeirError, match="no memory left"):
        run(llm, [[weir.Reconstruct("large")], []], [prompt(9, 140 + k) for k in range(2)])
    monkeypatch.undo()
    (out,) = run(llm, [[weir.Reconstruct("large")]], [prompt(9, 142)])
    assert out.receipt.interventions[0].acted
