"""`SetFeature` on transcoders: the activation of the row that the MLP reads, and the change in what it adds."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.sae_cases import ENGINE, EVERYTHING, D, Elsewhere, loading, random_sae, run, transcoder
from tests.support.engines import close_all, get_llm
from tests.support.measure import alike
from tests.support.sae_reference import TRANSCODERS
from tests.support.steered import check, chunks, directory, idle, prompt, sampling, truth

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SITES = [*EVERYTHING, weir.Capture("mlp_in", 1), weir.Capture("mlp_out", 1)]
WRITES = ("mlp_out", 1)


@pytest.fixture(scope="module", autouse=True)
def close_engines():
    yield
    close_all()


@pytest.fixture(scope="module")
def engine():
    return get_llm(directory(), **ENGINE), truth(directory())


@pytest.fixture
def loaded(engine):
    with loading(engine[0]) as load:
        yield load


def compare(out, oracle, sae, asked, before=(), after=()):
    """One request with a `SetFeature` is the reference; return the activations that it found."""
    reference = Elsewhere(sae, asked)
    check(out, [*before, reference.writes, *after, reference.reads], oracle)
    return reference.activations


@pytest.mark.parametrize("architecture", TRANSCODERS)
def test_it_is_the_model_with_the_edit_in_two_hooks(engine, loaded, architecture):
    """Several features and positions in one batch, on rows where the feature is active and where it is not."""
    llm, oracle = engine
    sae = loaded("it", transcoder(architecture, 3))
    asked = [
        weir.SetFeature("it", 3, value=4.0),
        weir.SetFeature("it", 5, value=0.0, positions="prompt"),
        weir.SetFeature("it", 7, scale=-2.0, positions="generated"),
        weir.SetFeature("it", 11, scale=3.0, positions=[2, 5, -1]),
        weir.SetFeature("it", 13, value=2.0, positions={"token_ids": list(range(5, 260))}),
    ]
    found = run(llm, [[one] for one in asked], [prompt(12, 300 + k) for k in range(5)], SITES)
    on = torch.cat([compare(out, oracle, sae, one) for out, one in zip(found, asked, strict=True)]) > 0
    assert 5 < int(on.sum()) < len(on) - 5, "features are active on some rows"
    for out, one in zip(found, asked, strict=True):
        assert [*out.receipt.steered[0]] == [WRITES] and out.receipt.interventions[0].op == one.op
    assert found[0].receipt.steered == ({WRITES: 17},)


def test_the_activation_is_that_of_what_the_mlp_is_given(engine, loaded):
    """After all interventions at `mlp_in`, wherever they stand in the list."""
    llm, oracle = engine
    sae = loaded("it", transcoder("jumprelu_transcoder", 4))
    loaded("reads", random_sae("jumprelu", ("mlp_in", 1), 24))
    v = torch.randn(D, generator=torch.Generator().manual_seed(0))
    asked = weir.SetFeature("it", 6, value=3.0)
    first, later = weir.Add(v, 1, hook="mlp_in"), weir.Add(-v, 1, hook="mlp_out")
    found = run(llm, [[first, asked, later], [asked, first, later]], [prompt(14, 310)] * 2, SITES)
    for out in found:
        compare(out, oracle, sae, asked, [first], [later])
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids
    (out,) = run(llm, [[asked]], [prompt(14, 311)], [weir.Capture("mlp_out", 1, before=True), SITES[-2]])
    a = sae.encode(out.activations["mlp_in", 1])[:, 6]
    (after,) = run(llm, [[asked]], [prompt(14, 311)], SITES[-2:])
    wanted = out.activations["mlp_out", 1] + (3.0 - a)[:, None] * sae.tensors["W_dec"][6]
    assert (after.activations["mlp_out", 1] - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_many_features_in_one_request_and_one_batch(engine, loaded):
    """Neighbours get the bits that they have alone."""
    llm, oracle = engine
    sae = loaded("it", transcoder("transcoder", 5))
    plain_params = sampling(6, logprobs=3)
    alone = llm.generate(prompt(10, 400), plain_params, use_tqdm=False)[0]
    params, all_asked = [], []
    for k in range(12):
        all_asked.append([weir.SetFeature("it", 6 * k + j, value=1.0 + j) for j in range(1 + k % 3)])
        params.append(weir.params(sampling(), capture=SITES, interventions=all_asked[-1]))
    prompts = [*(prompt(6 + k, 401 + k) for k in range(12)), prompt(10, 400)]
    mixed = llm.generate(prompts, [*params, plain_params], use_tqdm=False)
    for out, asked in zip(mixed, all_asked, strict=False):
        parts = [Elsewhere(sae, one) for one in asked]
        check(out, [*(part.writes for part in parts), *(part.reads for part in parts)], oracle)
    got, wanted = ([{t: x.logprob for t, x in s.items()} for s in o.outputs[0].logprobs] for o in (mixed[-1], alone))
    assert alike(got, wanted) and idle_but_for_saes(llm)


def idle_but_for_saes(llm):
    llm.generate(prompt(3, 91), sampling(1), use_tqdm=False)
    return llm.collective_rpc("weir_usage")[0]["programs"] == 0


def test_prompts_in_chunks(engine, loaded):
    llm, oracle = engine
    sae = loaded("it", transcoder("skip_transcoder", 6))
    asked = weir.SetFeature("it", 9, scale=0.0, positions="4:")
    with chunks(llm, 7):
        found = run(llm, [[asked]] * 3, [prompt(23 + k, 320 + k) for k in range(3)], SITES)
    for out in found:
        compare(out, oracle, sae, asked)


def test_under_a_gate_and_with_its_dose(engine, loaded):
    """The gate's probe reads between the activation and the change."""
    llm, oracle = engine
    sae = loaded("it", transcoder("transcoder", 7))
    w = torch.randn(192, generator=torch.Generator().manual_seed(1))
    probe = weir.Probe("p", w[None], [0.0], "mlp_post", 1)
    when = weir.When("p", above=0.0)
    asked = weir.SetFeature("it", 8, value=5.0, when=when)
    params = weir.params(sampling(), capture=SITES, interventions=asked, probes=[probe], dose=True)
    (out,) = llm.generate([prompt(30, 330)], params, use_tqdm=False)
    fired = (out.scores["p"][:, 0] > 0).nonzero()[:, 0].tolist()
    assert 3 < len(fired) < 30
    same = weir.SetFeature("it", 8, value=5.0, positions=fired)
    compare(out, oracle, sae, same)
    (receipt,) = out.receipt.interventions
    assert receipt.op == "set_feature" and receipt.relative_dose_by_layer[1] > 0


def test_blocks_of_the_cache_are_shared_where_the_same_is_done(engine, loaded):
    """Also among requests whose other probes give their activations other places."""
    llm, _ = engine
    first, second = transcoder("transcoder", 8), transcoder("transcoder", 8)
    w = first.tensors["W_enc"].clone()
    w[:, 6] += 1.0
    loaded("keys", first)
    loaded("others", weir.SAE.from_tensors("transcoder", ("mlp_in", 1), **second.tensors | {"W_enc": w}))

    def cached(asked, **more):
        params = weir.params(sampling(2), interventions=asked, **more)
        return llm.generate(prompt(100, 340), params, use_tqdm=False)[0].num_cached_tokens

    set_three = weir.SetFeature("keys", 6, value=3.0)
    assert cached(set_three) == 0
    assert cached(set_three) == 96
    probe = weir.Probe("p", torch.ones(1, D), [0.0], "resid_post", 0, positions="generated")
    assert cached(set_three, probes=[probe]) == 96
    for other in (
        [],
        weir.SetFeature("keys", 6, value=3.5),
        weir.SetFeature("keys", 7, value=3.0),
        weir.SetFeature("keys", 6, scale=3.0),
        weir.SetFeature("others", 6, value=3.0),  # with the same decoder
    ):
        assert cached(other) == 0, other


def test_what_goes_on_without_its_transcoder(engine, loaded):
    """An admitted request and one that all undergo have all that they need."""
    llm, oracle = engine
    sae = loaded("gone", transcoder("transcoder", 9))
    asked = weir.SetFeature("gone", 2, value=6.0)
    weir.set_global(llm, asked)
    try:
        weir.unload_sae(llm, "gone")
        (out,) = run(llm, [[]], [prompt(8, 350)], SITES)
        compare(out, oracle, sae, asked)
    finally:
        weir.clear_global(llm)
    assert idle(llm)


def test_a_feature_that_was_changed_before_is_not_set_again(engine, loaded):
    llm, oracle = engine
    sae = loaded("it", transcoder("transcoder", 10))
    v, s, a = ({"value": 1.0}, {"scale": 2.0}, {"add": 1.5})
    for first, second in ((v, v), (a, v), (s, s), (v, s), (a, s)):
        asked = [weir.SetFeature("it", 4, **first), weir.SetFeature("it", 4, **second)]
        with pytest.raises(weir.WeirError, match="put add after value or scale") as e:
            run(llm, [asked], [prompt(5, 360)])
        assert e.value.field == "interventions[1].feature"
    asked = [
        weir.SetFeature("it", 4, value=1.0, positions="prompt"),
        weir.SetFeature("it", 5, value=1.0),
        weir.SetFeature("it", 4, value=-2.0, positions="generated"),
        weir.SetFeature("it", 4, add=0.5),
    ]
    (out,) = run(llm, [asked], [prompt(9, 361)], SITES)
    parts = [Elsewhere(sae, one) for one in asked]
    check(out, [*(part.writes for part in parts), *(part.reads for part in parts)], oracle)
