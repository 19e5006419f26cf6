"""`SetFeature` on engines: against transformers with the same edit in a hook, in batches, and what is refused."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.sae_cases import D_HEAD, ENGINE, EVERYTHING, FEATURES, D, Edited, loading, random_sae, run, transcoder
from tests.support.engines import close_all, get_llm
from tests.support.measure import alike
from tests.support.sae_reference import weights
from tests.support.steered import check, directory, idle, prompt, sampling, truth, usage

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
ARCHITECTURES = ("standard", "gated", "jumprelu", "batchtopk")
TOP_K = 8
SITES = [("resid_post", 1), ("resid_pre", 2), ("attn_in", 0), ("mlp_in", 1), ("mlp_post", 2), ("z", 1), ("q", 0)]


@pytest.fixture(scope="module", autouse=True)
def close_engines():
    yield
    close_all()


@pytest.fixture(scope="module")
def engine():
    return get_llm(directory(), **ENGINE), truth(directory())


def with_nan(sae):
    sae.tensors["W_enc"][0, 3] = float("nan")
    return sae


@pytest.fixture
def loaded(engine):
    with loading(engine[0]) as load:
        yield load


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_it_is_the_model_with_the_edit_in_a_hook(engine, loaded, architecture, site):
    llm, oracle = engine
    seed = SITES.index(site)
    sae = loaded("it", random_sae(architecture, site, seed, apply_b_dec_to_input=seed % 2 == 0))
    asked = [
        weir.SetFeature("it", 3, value=4.0),
        weir.SetFeature("it", 5, value=0.0, positions="prompt"),
        weir.SetFeature("it", 7, scale=-2.0),
        weir.SetFeature("it", 11, add=1.5, positions=[2, -1]),
    ]
    found = run(llm, [[one] for one in asked], [prompt(12, seed * 10 + k) for k in range(4)])
    on = []
    for out, one in zip(found, asked, strict=True):
        edit = Edited(sae, one)
        check(out, [edit], oracle)
        on += edit.active
        assert out.receipt.steered == ({sae.site: len(edit.active)},)
    assert 5 < sum(on) < len(on) - 5, "features are active on some rows"


@pytest.mark.parametrize("site", [("resid_post", 1), ("mlp_post", 2), ("z", 1)], ids=str)
def test_adding_to_a_feature_of_top_k(engine, loaded, site):
    """The reference selects with the row as it was, and adds to what it selected."""
    llm, oracle = engine
    sae = loaded("topk", random_sae("topk", site, 21, k=TOP_K, apply_b_dec_to_input=True))
    asked = [weir.SetFeature("topk", 3, add=2.5), weir.SetFeature("topk", 9, add=-4.0, positions="generated")]
    found = run(llm, [[one] for one in asked], [prompt(12, 210 + k) for k in range(2)])
    for out, one in zip(found, asked, strict=True):
        edit = Edited(sae, one)
        check(out, [edit], oracle)
        assert out.receipt.steered == ({sae.site: len(edit.active)},)


def test_adding_to_a_feature_of_a_transcoder(engine, loaded):
    """Its decoder's row is added at the point that it writes, beside an autoencoder of the point that it reads."""
    llm, _ = engine
    sae = loaded("transcoder", transcoder("skip_transcoder"))
    loaded("reads", random_sae("jumprelu", ("mlp_in", 1), 23))
    alone = weir.SetFeature("reads", 2, value=4.0)
    both = [weir.SetFeature("transcoder", 6, add=3.0), alone]
    captures = [[weir.Capture("mlp_out", 1, before=before)] for before in (True, False)]
    before, after = (run(llm, [both], [prompt(11, 220)], one)[0] for one in captures)
    change = after.activations["mlp_out", 1] - before.activations["mlp_out", 1]
    wanted = 3.0 * sae.tensors["W_dec"][6]
    assert (change - wanted).abs().max() <= 1e-5 * after.activations["mlp_out", 1].abs().max()
    assert after.receipt.steered == ({("mlp_out", 1): len(change)}, {("mlp_in", 1): len(change)})
    added = weir.Add(sae.tensors["W_dec"][6], 1, 3.0, hook="mlp_out")
    same = run(llm, [[added, alone]], [prompt(11, 220)])[0]
    (out,) = run(llm, [both], [prompt(11, 220)])
    assert out.outputs[0].token_ids == same.outputs[0].token_ids
    assert all(alike(out.activations[site], same.activations[site]) for site in same.activations.sites)


def test_one_head_of_z(engine, loaded):
    llm, oracle = engine
    sae = loaded("head", random_sae("jumprelu", ("z", 2), d_in=D_HEAD, head=2))
    asked = weir.SetFeature("head", 9, value=5.0)
    (out,) = run(llm, [[asked]], [prompt(9, 3)], [*EVERYTHING, weir.Capture("z", 2)])
    check(out, [Edited(sae, asked)], oracle)
    (plain,) = run(llm, [[]], [prompt(9, 3)], [weir.Capture("z", 2)])
    heads = zip(out.activations["z", 2][:9].unbind(1), plain.activations["z", 2][:9].unbind(1), strict=True)
    assert [alike(*pair) for pair in heads] == [True, True, False, True]


def test_the_row_is_the_decoded_features_and_the_error(engine, loaded):
    """The row at the hook point itself, by `SAE.encode` and `SAE.decode`."""
    llm, _ = engine
    sae = loaded("gated", random_sae("gated", ("resid_post", 2)))
    here = [weir.Capture("resid_post", 2), weir.Capture("resid_post", 2, before=True)]
    for feature in range(8):
        before, after = (
            run(llm, [[weir.SetFeature("gated", feature, value=2.5)]], [prompt(20, 4)], one)[0].activations
            for one in (here[1], here[0])
        )
        h, got = before["resid_post", 2].float(), after["resid_post", 2].float()
        features = sae.encode(h)
        error = h - sae.decode(features)
        features[:, feature] = 2.5
        wanted = sae.decode(features) + error
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_sixteen_requests_of_one_batch_set_sixteen_features(engine, loaded):
    """Each gets its own, and those beside them get the bits that they have alone."""
    llm, oracle = engine
    sae = loaded("many", random_sae("jumprelu", ("resid_post", 1), 5))
    plain_params = sampling(6, logprobs=3)
    plain_prompts = [prompt(10 + k, 200 + k) for k in range(4)]
    alone = [llm.generate(one, plain_params, use_tqdm=False)[0] for one in plain_prompts]
    asked = [weir.SetFeature("many", 5 * f, value=3.0 + f / 4) for f in range(16)]
    prompts = [prompt(6 + k, 100 + k) for k in range(16)]
    params = [weir.params(sampling(), capture=EVERYTHING, interventions=one) for one in asked]
    mixed = llm.generate([*prompts, *plain_prompts], [*params, *[plain_params] * 4], use_tqdm=False)
    for out, one in zip(mixed, asked, strict=False):
        check(out, [Edited(sae, one)], oracle)
    for out, before in zip(mixed[16:], alone, strict=True):
        assert out.outputs[0].token_ids == before.outputs[0].token_ids
        got, wanted = (
            [{t: x.logprob for t, x in step.items()} for step in o.outputs[0].logprobs] for o in (out, before)
        )
        assert alike(got, wanted)
    assert usage(llm)["programs"] == 0


def test_several_autoencoders_and_other_interventions_compose_in_order(engine, loaded):
    llm, oracle = engine
    first = loaded("first", random_sae("standard", ("resid_post", 1), 1))
    second = loaded("second", random_sae("gated", ("resid_post", 1), 2))
    third = loaded("third", random_sae("batchtopk", ("mlp_in", 2), 3))
    v = torch.randn(D, generator=torch.Generator().manual_seed(0))
    a, b, c = (weir.SetFeature(*x, value=3.0) for x in (("first", 4), ("second", 8), ("third", 15)))
    again = weir.SetFeature("first", 4, scale=0.5)
    add, clamp = weir.Add(v, 1), weir.Clamp(v, 1, value=-2.0)
    references = {id(x): Edited(s, x) for x, s in ((a, first), (b, second), (c, third), (again, first))}
    orders = [[a, add, b, clamp, c], [add, b, a, c], [b, clamp, again, a], [c, again, again]]
    found = run(llm, orders, [prompt(14, 30 + k) for k in range(4)])
    for out, order in zip(found, orders, strict=True):
        check(out, [references.get(id(x), x) for x in order], oracle)
    assert [(one.name, one.site, one.d_sae) for one in weir.saes(llm)] == [
        ("first", ("resid_post", 1), FEATURES),
        ("second", ("resid_post", 1), FEATURES),
        ("third", ("mlp_in", 2), FEATURES),
    ]
    assert usage(llm)["sae_bytes"] == sum(one.bytes for one in weir.saes(llm)) > 0


def test_every_request_may_have_a_feature_set(engine, loaded):
    """What is set for all goes on after its autoencoder is unloaded."""
    llm, oracle = engine
    sae = loaded("all", random_sae("jumprelu", ("resid_post", 0), 7))
    asked = weir.SetFeature("all", 2, value=6.0)
    weir.set_global(llm, asked)
    try:
        weir.unload_sae(llm, "all")
        (out,) = run(llm, [[]], [prompt(8, 50)])
        check(out, [Edited(sae, asked)], oracle)
    finally:
        weir.clear_global(llm)


def test_blocks_of_the_cache_are_shared_where_the_same_is_done(engine, loaded):
    llm, _ = engine
    loaded("keys", random_sae("standard", ("resid_post", 1), 9))
    loaded("others", random_sae("standard", ("resid_post", 1), 10))

    def cached(asked, seed):
        out = llm.generate(prompt(100, seed), weir.params(sampling(2), interventions=asked), use_tqdm=False)[0]
        return out.num_cached_tokens

    set_three = weir.SetFeature("keys", 6, value=3.0)
    assert cached(set_three, 60) == 0
    assert cached(set_three, 60) == 96
    for other in (
        [],
        weir.SetFeature("keys", 6, value=3.5),
        weir.SetFeature("keys", 7, value=3.0),
        weir.SetFeature("keys", 6, scale=3.0),
        weir.SetFeature("others", 6, value=3.0),
    ):
        assert cached(other, 60) == 0, other
    from_the_end = weir.SetFeature("keys", 6, value=1.0, positions="-20:")
    assert cached(from_the_end, 60) == 64, "blocks before the first position that changes are those of plain requests"


def test_names_are_loaded_once_and_unloaded(engine, loaded):
    llm, oracle = engine
    before = random_sae("standard", ("resid_post", 1), 11)
    after = random_sae("standard", ("resid_post", 1), 12)
    loaded("name", before)
    with pytest.raises(weir.WeirError, match="unload it") as e:
        weir.load_sae(llm, "name", after)
    assert e.value.field == "name"
    asked = weir.SetFeature("name", 1, value=4.0)
    engine_core = llm.llm_engine
    engine_core.add_request("running", prompt(7, 70), weir.params(sampling(5), capture=EVERYTHING, interventions=asked))
    outputs = [*engine_core.step()]
    weir.unload_sae(llm, "name")
    loaded("name", after)  # the request that runs goes on with what it was admitted with
    while engine_core.has_unfinished_requests():
        outputs += engine_core.step()
    check(outputs[-1], [Edited(before, asked)], oracle)
    (out,) = run(llm, [[asked]], [prompt(7, 70)])
    check(out, [Edited(after, asked)], oracle)
    weir.unload_sae(llm, "name")
    with pytest.raises(weir.WeirError, match="no autoencoder is loaded as 'name'; none is") as e:
        run(llm, [[asked]], [prompt(7, 71)])
    assert e.value.field == "interventions[0].name"
    with pytest.raises(weir.WeirError, match="no autoencoder"):
        weir.unload_sae(llm, "name")
    assert idle(llm) and weir.saes(llm) == []


def test_what_is_loaded_may_be_a_path(engine, loaded, tmp_path):
    llm, oracle = engine
    sae = random_sae("jumprelu", ("resid_post", 1), 13)
    sae.save(tmp_path / "sae")
    loaded("path", tmp_path / "sae")
    asked = weir.SetFeature("path", 1, value=4.0)
    (out,) = run(llm, [[asked]], [prompt(7, 72)])
    check(out, [Edited(sae, asked)], oracle)


@pytest.mark.parametrize(
    ("sae", "error", "at"),
    [
        (random_sae("standard", ("resid_post", 9)), "4 blocks", "sae.site"),
        (random_sae("standard", ("pattern", 1)), "derived", "sae.site"),
        (random_sae("standard", ("resid_post", 1), d_in=64), "reads 64 values, and a row .* has 128", "sae.d_in"),
        (random_sae("standard", ("z", 1), d_in=32), "a row of z.* has 128", "sae.d_in"),
        (random_sae("standard", ("z", 1), head=1), "a head of z.* has 32", "sae.d_in"),
        (random_sae("standard", ("z", 1), d_in=32, head=4), "head 4, and z.* has 4", "sae.head"),
        (transcoder("transcoder", d_out=64), "reconstructs 64 values, and a row of mlp_out.* has 128", "sae.d_out"),
        (with_nan(random_sae("jumprelu", ("resid_post", 1))), "NaN", "sae.W_enc"),
        (torch.ones(3), "expected an SAE", "sae"),
        ("/nowhere", "does not exist", "path"),
    ],
)
def test_what_does_not_fit_the_engine_is_not_loaded(engine, sae, error, at):
    llm, _ = engine
    with pytest.raises(weir.WeirError, match=error) as e:
        weir.load_sae(llm, "x", sae)
    assert e.value.field == at and weir.saes(llm) == [] and usage(llm)["sae_bytes"] == 0


def test_what_cannot_be_set_is_refused_by_field(engine, loaded):
    llm, _ = engine
    loaded("topk", random_sae("topk", ("resid_post", 1), k=8))
    loaded("length", random_sae("standard", ("resid_post", 1), normalize_activations="layer_norm"))
    loaded("transcoder", transcoder("transcoder"))
    fine = weights("standard", 0, D, FEATURES)
    fine["W_dec"] *= 1e3
    loaded("fine", weir.SAE.from_tensors("standard", ("resid_post", 1), **fine))
    for asked, error, at in (
        (weir.SetFeature("length", 1, value=1), "layer_norm", "name"),
        (weir.SetFeature("transcoder", FEATURES, add=1), "count from 0 to 95", "feature"),
        (weir.SetFeature("fine", FEATURES, value=1), "count from 0 to 95", "feature"),
        (weir.SetFeature("fine", 1, value=3e38), "make it smaller", "value"),
        (weir.SetFeature("nobody", 1, value=1), "loaded are fine, length, topk, transcoder", "name"),
    ):
        with pytest.raises(weir.WeirError, match=error) as e:
            run(llm, [[weir.Add(torch.ones(D), 0), asked.to_json()]], [prompt(5, 80)])
        assert e.value.field == f"interventions[1].{at}"


def test_memory_is_bounded(engine):
    close_all()
    sae = random_sae("standard", ("resid_post", 1), 14)
    llm = get_llm(directory(), **ENGINE, additional_config={"weir": {"sae_bytes": 2 * sae.nbytes}})
    weir.load_sae(llm, "a", sae)
    weir.load_sae(llm, "b", sae)
    with pytest.raises(weir.WeirError, match=f"{sae.nbytes} bytes, and {2 * sae.nbytes} of the {2 * sae.nbytes}") as e:
        weir.load_sae(llm, "c", sae)
    assert e.value.field == "settings.sae_bytes"
    weir.unload_sae(llm, "a")
    weir.load_sae(llm, "c", sae)
    assert [one.name for one in weir.saes(llm)] == ["b", "c"]
