"""`SetFeature` on TopK autoencoders, whose rows are encoded whole inside the tap."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.sae_cases import (
    D_HEAD,
    ENGINE,
    EVERYTHING,
    D,
    Edited,
    Elsewhere,
    loading,
    random_sae,
    run,
    transcoder,
)
from tests.support.engines import close_all, get_llm
from tests.support.measure import alike
from tests.support.steered import check, chunks, directory, idle, prompt, sampling, truth, usage

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
K = 24
SITES = [("resid_post", 1), ("resid_pre", 2), ("mlp_in", 1), ("mlp_post", 2), ("z", 1)]


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


def top_k(site, seed=0, k=K, **options):
    return random_sae("topk", site, seed, k=k, **options)


@pytest.mark.parametrize("site", SITES, ids=str)
def test_it_is_the_model_with_the_edit_in_a_hook(engine, loaded, site):
    """Several features and positions in one batch, on rows where the feature is chosen and where it is not."""
    llm, oracle = engine
    seed = SITES.index(site)
    sae = loaded("it", top_k(site, seed, apply_b_dec_to_input=seed % 2 == 0))
    asked = [
        weir.SetFeature("it", 3, value=4.0),
        weir.SetFeature("it", 5, value=0.0, positions="prompt"),
        weir.SetFeature("it", 7, scale=-2.0, positions="generated"),
        weir.SetFeature("it", 11, scale=3.0, positions=[2, 5, -1]),
        weir.SetFeature("it", 13, value=2.0, positions={"token_ids": list(range(5, 260))}),
    ]
    found = run(llm, [[one] for one in asked], [prompt(12, 500 + seed * 10 + k) for k in range(5)])
    on = []
    for out, one in zip(found, asked, strict=True):
        edit = Edited(sae, one)
        check(out, [edit], oracle)
        on += edit.active
        assert out.receipt.steered[0][sae.site] > 0 and out.receipt.interventions[0].op == "set_feature"
    assert 3 < sum(on) < len(on) - 10, "features are chosen on some rows"
    assert found[0].receipt.steered == ({sae.site: 17},)


def test_a_row_in_which_the_feature_is_positive_and_not_among_the_largest(engine, loaded):
    """Its activation is 0, so the whole value is added; without the selection it would be less."""
    llm, _ = engine
    sae = loaded("few", top_k(("resid_post", 2), 30, k=4))
    capture = weir.Capture("resid_post", 2, before=True)
    (plain,) = run(llm, [[]], [prompt(20, 600)], [capture])
    h = plain.activations["resid_post", 2]
    pre = h @ sae.tensors["W_enc"] + sae.tensors["b_enc"]
    chosen = sae.encode(h)
    feature = int(((pre > 0.2) & (chosen == 0)).sum(0).argmax())
    assert bool(((pre[:20, feature] > 0.2) & (chosen[:20, feature] == 0)).any())
    asked = weir.SetFeature("few", feature, value=3.0, positions="prompt")
    (out,) = run(llm, [[asked]], [prompt(20, 600)], [weir.Capture("resid_post", 2)])
    wanted = h[:20] + (3.0 - chosen[:20, feature])[:, None] * sae.tensors["W_dec"][feature]
    got = out.activations["resid_post", 2][:20]
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_one_head_of_z(engine, loaded):
    llm, oracle = engine
    sae = loaded("head", top_k(("z", 2), 31, d_in=D_HEAD, head=2))
    asked = weir.SetFeature("head", 9, value=5.0)
    (out,) = run(llm, [[asked]], [prompt(9, 610)], [*EVERYTHING, weir.Capture("z", 2)])
    check(out, [Edited(sae, asked)], oracle)


def test_interventions_compose_in_order(engine, loaded):
    """Each sees the row as the one before has left it, also another feature of the same autoencoder."""
    llm, oracle = engine
    first = loaded("first", top_k(("resid_post", 1), 32))
    second = loaded("second", top_k(("resid_post", 1), 33))
    third = loaded("third", random_sae("gated", ("resid_post", 1), 34))
    before = loaded("before", top_k(("resid_pre", 2), 35))
    v = torch.randn(D, generator=torch.Generator().manual_seed(0))
    a, b = weir.SetFeature("first", 4, value=3.0), weir.SetFeature("second", 8, scale=3.0)
    c, d = weir.SetFeature("third", 15, value=2.0), weir.SetFeature("before", 16, value=-1.0)
    again, other = weir.SetFeature("first", 4, scale=0.5), weir.SetFeature("first", 5, value=2.0)
    add, clamp = weir.Add(v, 1), weir.Clamp(v, 1, value=-2.0)
    saes = {id(a): first, id(b): second, id(c): third, id(d): before, id(again): first, id(other): first}
    orders = [[a, add, b, clamp, c], [add, b, d, a, c], [b, clamp, again, a], [a, again, other, other], [d, add, c, a]]
    found = run(llm, orders, [prompt(14, 620 + k) for k in range(5)])
    for out, order in zip(found, orders, strict=True):
        check(out, [Edited(saes[id(x)], x) if id(x) in saes else x for x in order], oracle)


def test_many_features_in_one_batch(engine, loaded):
    """Each request gets its own, and those beside them get the bits that they have alone."""
    llm, oracle = engine
    sae = loaded("many", top_k(("resid_post", 1), 36))
    other = loaded("other", random_sae("jumprelu", ("resid_post", 1), 37))
    plain_params = sampling(6, logprobs=3)
    plain_prompts = [prompt(10 + k, 700 + k) for k in range(3)]
    alone = [llm.generate(one, plain_params, use_tqdm=False)[0] for one in plain_prompts]
    asked = [weir.SetFeature("many", 7 * f, value=3.0 + f / 4) for f in range(9)]
    asked += [weir.SetFeature("other", f, value=3.0) for f in range(3)]
    params = [weir.params(sampling(), capture=EVERYTHING, interventions=one) for one in asked]
    prompts = [prompt(6 + k, 720 + k) for k in range(12)]
    mixed = llm.generate([*prompts, *plain_prompts], [*params, *[plain_params] * 3], use_tqdm=False)
    for out, one in zip(mixed, asked, strict=False):
        check(out, [Edited(other if one.name == "other" else sae, one)], oracle)
    for out, before in zip(mixed[12:], alone, strict=True):
        assert out.outputs[0].token_ids == before.outputs[0].token_ids
        got, wanted = (
            [{t: x.logprob for t, x in step.items()} for step in o.outputs[0].logprobs] for o in (out, before)
        )
        assert alike(got, wanted)
    assert usage(llm)["programs"] == 0


def test_prompts_in_chunks(engine, loaded):
    llm, oracle = engine
    sae = loaded("it", top_k(("resid_post", 1), 38))
    asked = weir.SetFeature("it", 9, scale=0.0, positions="4:")
    with chunks(llm, 7):
        found = run(llm, [[asked]] * 3, [prompt(23 + k, 740 + k) for k in range(3)])
    for out in found:
        check(out, [Edited(sae, asked)], oracle)


def test_under_a_gate_and_with_its_dose(engine, loaded):
    llm, oracle = engine
    sae = loaded("it", top_k(("resid_post", 2), 39))
    w = torch.randn(D, generator=torch.Generator().manual_seed(1))
    probe = weir.Probe("p", w[None], [0.0], "resid_post", 1)
    asked = weir.SetFeature("it", 8, value=5.0, when=weir.When("p", above=0.0))
    params = weir.params(sampling(), capture=EVERYTHING, interventions=asked, probes=[probe], dose=True)
    (out,) = llm.generate([prompt(30, 750)], params, use_tqdm=False)
    fired = (out.scores["p"][:, 0] > 0).nonzero()[:, 0].tolist()
    assert 3 < len(fired) < 30
    check(out, [Edited(sae, weir.SetFeature("it", 8, value=5.0, positions=fired))], oracle)
    (receipt,) = out.receipt.interventions
    assert receipt.acted == len(fired) and receipt.relative_dose_by_layer[2] > 0


def test_blocks_of_the_cache_are_shared_where_the_same_is_done(engine, loaded):
    llm, _ = engine
    loaded("keys", top_k(("resid_post", 1), 40))
    loaded("others", top_k(("resid_post", 1), 40, k=K + 1))

    def cached(asked):
        params = weir.params(sampling(2), interventions=asked)
        return llm.generate(prompt(100, 760), params, use_tqdm=False)[0].num_cached_tokens

    set_three = weir.SetFeature("keys", 6, value=3.0)
    assert cached(set_three) == 0
    assert cached(set_three) == 96
    for other in (
        [],
        weir.SetFeature("keys", 6, value=3.5),
        weir.SetFeature("keys", 7, value=3.0),
        weir.SetFeature("keys", 6, scale=3.0),
        weir.SetFeature("others", 6, value=3.0),  # with the same weights
    ):
        assert cached(other) == 0, other
    assert cached(weir.SetFeature("keys", 6, value=1.0, positions="-20:")) == 64


def test_what_is_used_is_not_taken_away(engine, loaded):
    """A running request keeps its autoencoder; one that all requests or a module use is not unloaded."""
    llm, oracle = engine
    sae = loaded("used", top_k(("resid_post", 1), 41))
    asked = weir.SetFeature("used", 1, value=4.0)
    core = llm.llm_engine
    core.add_request("running", prompt(7, 770), weir.params(sampling(5), capture=EVERYTHING, interventions=asked))
    outputs = [*core.step()]
    weir.unload_sae(llm, "used")
    assert llm.collective_rpc("weir_usage")[0]["sae_bytes"] == sae.nbytes
    while core.has_unfinished_requests():
        outputs += core.step()
    check(outputs[-1], [Edited(sae, asked)], oracle)
    assert idle(llm)
    loaded("used", sae)
    weir.set_global(llm, asked)
    try:
        with pytest.raises(weir.WeirError, match="clear that first") as e:
            weir.unload_sae(llm, "used")
        assert e.value.field == "name"
        (out,) = run(llm, [[]], [prompt(8, 771)])
        check(out, [Edited(sae, asked)], oracle)
    finally:
        weir.clear_global(llm)
    weir.unload_sae(llm, "used")
    assert idle(llm)


def test_a_transcoder_that_normalises_each_row(engine, loaded):
    """Its rows are encoded whole at `mlp_in`, and it writes at `mlp_out`."""
    llm, oracle = engine
    sae = loaded("it", transcoder("transcoder", 42, normalize_activations="layer_norm"))
    asked = [weir.SetFeature("it", f, value=3.0) for f in (2, 3, 4)]
    parts = [Elsewhere(sae, one) for one in asked]
    (out,) = run(llm, [asked], [prompt(12, 780)], [*EVERYTHING, weir.Capture("mlp_out", 1)])
    check(out, [*(part.writes for part in parts), *(part.reads for part in parts)], oracle)
    assert any(bool((part.activations > 0).any()) for part in parts)
