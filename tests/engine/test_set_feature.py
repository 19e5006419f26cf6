"""`SetFeature` on autoencoders and transcoders: against transformers with the same edit in a hook, in batches, and what
is refused. TopK's rows are encoded whole inside the tap; a transcoder reads what the MLP is given and changes what it
adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import BOUND, directory
from tests.engine.sae_cases import (
    D_HEAD,
    EVERYTHING,
    FEATURES,
    D,
    checked,
    loading,
    random_sae,
    run,
    transcoder,
)
from tests.support.engines import get_llm
from tests.support.measure import alike
from tests.support.named import ENGINES
from tests.support.sae_reference import CHOOSING, TRANSCODERS, weights
from tests.support.steered import chunks, idle, prompt, same_answers, sampling, usage

pytestmark = pytest.mark.engine("steering")
SITES = [("resid_post", 1), ("resid_pre", 2), ("attn_in", 0), ("mlp_in", 1), ("mlp_post", 2), ("z", 1), ("q", 0)]
FAST = {  # every architecture and every site once
    *zip(("standard", "gated", "standard", "gated", "jumprelu", "batchtopk", "jumprelu"), SITES, strict=True),
    *((name, ("mlp_in", 1)) for name in TRANSCODERS),
    *(("topk", site) for site in (SITES[0], SITES[5])),
    *(("abstopk", SITES[0]), ("matching_pursuit", SITES[0]), ("topk_transcoder", SITES[3])),
}
INSIDE = [*EVERYTHING, weir.Capture("mlp_in", 1), weir.Capture("mlp_out", 1)]
WRITES = ("mlp_out", 1)


def coder(architecture: str, site: tuple[str, int] = ("resid_post", 1), seed: int = 0, **options: Any) -> weir.SAE:
    """An autoencoder of a site, or a transcoder from `mlp_in` to `mlp_out`."""
    if architecture in ("topk", "matching_pursuit", *CHOOSING):
        options = {"k": 24} | options
    if "transcoder" in architecture:
        return transcoder(architecture, seed, **options)
    return random_sae(architecture, site, seed, **options)


def grid() -> list[Any]:
    every = [(name, site) for name in ("standard", "gated", "jumprelu", "batchtopk", "topk") for site in SITES]
    every += [(name, ("mlp_in", 1)) for name in (*TRANSCODERS, *CHOOSING) if "transcoder" in name]
    every += [(name, ("resid_post", 1)) for name in ("abstopk", "matching_pursuit")]
    return [
        pytest.param(*one, marks=() if one in FAST else pytest.mark.thorough, id=f"{one[0]}-{one[1][0]}")
        for one in every
    ]


EACH = pytest.mark.parametrize("architecture", ["jumprelu", "topk", "transcoder"])
"""The three ways of doing it: features alone, rows encoded whole, and a row read elsewhere."""


@pytest.fixture
def loaded(llm):
    with loading(llm) as load:
        yield load


@pytest.mark.parametrize(("architecture", "site"), grid())
def test_it_is_the_model_with_the_edit_in_a_hook(engine, loaded, architecture, site):
    """Several features and positions in one batch, on rows where the feature is active and where it is not."""
    llm, oracle = engine
    seed = SITES.index(site)
    options = {} if "transcoder" in architecture else {"apply_b_dec_to_input": seed % 2 == 0}
    sae = loaded("it", coder(architecture, site, seed, **options))
    asked = [
        weir.SetFeature("it", 3, value=4.0),
        weir.SetFeature("it", 5, value=0.0, positions="prompt"),
        weir.SetFeature("it", 7, scale=-2.0, positions="generated"),
        weir.SetFeature("it", 11, add=1.5, positions=[2, 5, -1]),
        weir.SetFeature("it", 13, value=2.0, positions={"token_ids": list(range(5, 260))}),
        weir.SetFeature("it", 9, add=-4.0, positions="generated"),
    ]
    found = run(llm, [[one] for one in asked], [prompt(12, seed * 10 + k) for k in range(6)], INSIDE)
    where = sae.out_site if sae.config.is_transcoder else sae.site
    on = []
    for out, one in zip(found, asked, strict=True):
        active = checked(out, [one], {"it": sae}, oracle)
        assert out.receipt.steered == ({where: len(active)},) and out.receipt.interventions[0].op == "set_feature"
        on += active
    assert 3 < sum(on) < len(on) - 3, "features are active on some rows"
    assert found[0].receipt.steered == ({where: 17},)


@pytest.mark.parametrize("architecture", ["jumprelu", "topk"])
def test_one_head_of_z(engine, loaded, architecture):
    llm, oracle = engine
    sae = loaded("head", coder(architecture, ("z", 2), 31, d_in=D_HEAD, head=2))
    asked = weir.SetFeature("head", 9, value=5.0)
    (out,) = run(llm, [[asked]], [prompt(9, 3)], [*EVERYTHING, weir.Capture("z", 2)])
    checked(out, [asked], {"head": sae}, oracle)
    (plain,) = run(llm, [[]], [prompt(9, 3)], [weir.Capture("z", 2)])
    heads = zip(out.activations["z", 2][:9].unbind(1), plain.activations["z", 2][:9].unbind(1), strict=True)
    assert [alike(*pair) for pair in heads] == [True, True, False, True]


def test_the_row_is_the_decoded_features_and_the_error(llm, loaded):
    """The row at the hook point itself, by `SAE.encode` and `SAE.decode`."""
    sae = loaded("gated", coder("gated", ("resid_post", 2)))
    asked = [[weir.SetFeature("gated", feature, value=2.5)] for feature in range(8)]
    runs = [
        run(llm, asked, [prompt(20, 4)] * 8, weir.Capture("resid_post", 2, before=first)) for first in (True, False)
    ]
    for feature, (before, after) in enumerate(zip(*runs, strict=True)):
        h, got = (out.activations["resid_post", 2][:20].float() for out in (before, after))
        features = sae.encode(h)
        error = h - sae.decode(features)
        features[:, feature] = 2.5
        wanted = sae.decode(features) + error
        assert (got - wanted).abs().max() <= BOUND * wanted.abs().max()


def test_the_value_is_read_back(llm, loaded):
    """Features one by one in a batch, on rows where each is active and where it is not."""
    sae = loaded("back", coder("jumprelu", ("resid_post", 2), 3))
    responses = [sae.feature_response(feature) for feature in range(FEATURES)]
    seen = [one for one in range(FEATURES) if responses[one].w @ responses[one].u > 0.1][:6]
    assert len(seen) == 6
    asked = [[weir.SetFeature("back", feature, value=6.0, read_back=True)] for feature in seen]
    found = run(llm, asked, [prompt(20, 4)] * 6, weir.Capture("resid_post", 2))
    for feature, out in zip(seen, found, strict=True):
        rows = out.activations["resid_post", 2].float()
        size = rows.norm(dim=1).max() * float((responses[feature].w ** 2).sum()) ** 0.5
        assert (sae.encode(rows)[:, feature] - 6.0).abs().max() <= BOUND * size
        assert out.receipt.steered == ({("resid_post", 2): len(rows)},)


def test_a_row_in_which_the_feature_is_positive_and_not_among_the_largest(llm, loaded):
    """Its activation is 0, so the whole value is added; without the selection it would be less."""
    sae = loaded("few", coder("topk", ("resid_post", 2), 30, k=4))
    (plain,) = run(llm, [[]], [prompt(20, 600)], [weir.Capture("resid_post", 2, before=True)])
    h = plain.activations["resid_post", 2]
    pre = h @ sae.tensors["W_enc"] + sae.tensors["b_enc"]
    chosen = sae.encode(h)
    feature = int(((pre > 0.2) & (chosen == 0)).sum(0).argmax())
    assert bool(((pre[:20, feature] > 0.2) & (chosen[:20, feature] == 0)).any())
    asked = weir.SetFeature("few", feature, value=3.0, positions="prompt")
    (out,) = run(llm, [[asked]], [prompt(20, 600)], [weir.Capture("resid_post", 2)])
    wanted = h[:20] + (3.0 - chosen[:20, feature])[:, None] * sae.tensors["W_dec"][feature]
    assert (out.activations["resid_post", 2][:20] - wanted).abs().max() <= BOUND * wanted.abs().max()


def test_adding_to_a_feature_of_a_transcoder_adds_its_decoders_row(llm, loaded):
    """At the point that it writes, beside an autoencoder of the point that it reads."""
    sae = loaded("transcoder", coder("skip_transcoder"))
    loaded("reads", coder("jumprelu", ("mlp_in", 1), 23))
    alone = weir.SetFeature("reads", 2, value=4.0)
    both = [weir.SetFeature("transcoder", 6, add=3.0), alone]
    captures = [[weir.Capture("mlp_out", 1, before=before)] for before in (True, False)]
    before, after = (run(llm, [both], [prompt(11, 220)], one)[0] for one in captures)
    change = after.activations["mlp_out", 1] - before.activations["mlp_out", 1]
    wanted = 3.0 * sae.tensors["W_dec"][6]
    assert (change - wanted).abs().max() <= BOUND * after.activations["mlp_out", 1].abs().max()
    assert after.receipt.steered == ({WRITES: len(change)}, {("mlp_in", 1): len(change)})
    added = weir.Add(sae.tensors["W_dec"][6], 1, 3.0, hook="mlp_out")
    same, out = (run(llm, [asked], [prompt(11, 220)])[0] for asked in ([added, alone], both))
    assert out.outputs[0].token_ids == same.outputs[0].token_ids
    # To the bit: both are the same instruction, in steps of the same shapes.
    assert all(torch.equal(out.activations[site], same.activations[site]) for site in same.activations.sites)


def test_the_activation_is_that_of_what_the_mlp_is_given(engine, loaded):
    """After all interventions at `mlp_in`, wherever they stand in the list."""
    llm, oracle = engine
    sae = loaded("it", coder("jumprelu_transcoder", seed=4))
    loaded("reads", coder("jumprelu", ("mlp_in", 1), 24))
    v = torch.randn(D, generator=torch.Generator().manual_seed(0))
    asked = weir.SetFeature("it", 6, value=3.0)
    first, later = weir.Add(v, 1, hook="mlp_in"), weir.Add(-v, 1, hook="mlp_out")
    orders = [[first, asked, later], [asked, first, later]]
    found = run(llm, orders, [prompt(14, 310)] * 2, INSIDE)
    for out, order in zip(found, orders, strict=True):
        checked(out, order, {"it": sae}, oracle)
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids
    sites = [weir.Capture("mlp_in", 1), weir.Capture("mlp_out", 1, before=True)], INSIDE[-2:]
    before, after = (run(llm, [[asked]], [prompt(14, 311)], one)[0].activations for one in sites)
    a = sae.encode(before["mlp_in", 1])[:, 6]
    wanted = before["mlp_out", 1] + (3.0 - a)[:, None] * sae.tensors["W_dec"][6]
    assert (after["mlp_out", 1] - wanted).abs().max() <= BOUND * wanted.abs().max()


@pytest.mark.parametrize("whole", [False, True], ids=["features alone", "rows whole"])
def test_interventions_compose_in_order(engine, loaded, whole):
    """Each sees the row as the one before has left it, also another feature of the same autoencoder."""
    llm, oracle = engine
    kinds = ("topk", "topk", "gated", "topk") if whole else ("standard", "gated", "batchtopk", "jumprelu")
    sites = [("resid_post", 1)] * 3 + [("resid_pre", 2)]
    names = ("first", "second", "third", "before")
    saes = {n: loaded(n, coder(kind, site, 32 + k)) for k, (n, kind, site) in enumerate(zip(names, kinds, sites))}
    v = torch.randn(D, generator=torch.Generator().manual_seed(0))
    a, b = weir.SetFeature("first", 4, value=3.0), weir.SetFeature("second", 8, scale=3.0)
    c, d = weir.SetFeature("third", 15, value=2.0), weir.SetFeature("before", 16, value=-1.0)
    again, other = weir.SetFeature("first", 4, scale=0.5), weir.SetFeature("first", 5, value=2.0)
    add, clamp = weir.Add(v, 1), weir.Clamp(v, 1, value=-2.0)
    orders = [[a, add, b, clamp, c], [add, b, d, a, c], [b, clamp, again, a], [a, again, other, other], [d, add, c, a]]
    for out, order in zip(run(llm, orders, [prompt(14, 620 + k) for k in range(5)]), orders, strict=True):
        checked(out, order, saes, oracle)
    listed = {(one.name, one.site, one.d_sae) for one in weir.saes(llm)}
    assert listed == {(name, site, FEATURES) for name, site in zip(names, sites, strict=True)}
    assert usage(llm)["sae_bytes"] == sum(one.bytes for one in weir.saes(llm)) > 0


@EACH
def test_each_of_a_batch_gets_its_own(engine, loaded, architecture):
    """And those beside them get the bits that they have where nobody asks for anything."""
    llm, oracle = engine
    saes = {"many": loaded("many", coder(architecture, seed=5)), "other": loaded("other", coder("jumprelu", seed=37))}
    asked = [[weir.SetFeature("many", 6 * k + j, value=1.0 + j) for j in range(1 + k % 3)] for k in range(12)]
    asked += [[weir.SetFeature("other", 5 * k, value=3.0 + k / 4)] for k in range(4)]
    params, plain = [weir.params(sampling(), capture=INSIDE, interventions=one) for one in asked], sampling(logprobs=3)
    texts = [prompt(6 + k, 100 + k) for k in range(20)]
    stock = llm.generate(texts, plain, use_tqdm=False)
    llm.reset_prefix_cache()  # the steps have the same shapes again
    mixed = llm.generate(texts, [*params, *[plain] * 4], use_tqdm=False)
    for out, one in zip(mixed, asked, strict=False):
        checked(out, one, saes, oracle)
    assert same_answers(mixed[16:], stock[16:])
    assert usage(llm)["programs"] == 0


@EACH
def test_prompts_in_chunks(engine, loaded, architecture):
    llm, oracle = engine
    sae = loaded("it", coder(architecture, seed=38))
    asked = weir.SetFeature("it", 9, scale=0.0, positions="4:")
    with chunks(llm, 7):
        found = run(llm, [[asked]] * 3, [prompt(23 + k, 740 + k) for k in range(3)], INSIDE)
    for out in found:
        checked(out, [asked], {"it": sae}, oracle)


@EACH
def test_under_a_gate_and_with_its_dose(engine, loaded, architecture):
    """The gate's probe reads before the row is changed; a transcoder's, between the activation and the change."""
    llm, oracle = engine
    sae = loaded("it", coder(architecture, ("resid_post", 2), 7))
    hook, width = ("mlp_post", 192) if sae.config.is_transcoder else ("resid_post", D)
    w = torch.randn(width, generator=torch.Generator().manual_seed(1))
    probe = weir.Probe("p", w[None], [0.0], hook, 1)
    asked = weir.SetFeature("it", 8, value=5.0, when=weir.When("p", above=0.0))
    params = weir.params(sampling(), capture=INSIDE, interventions=asked, probes=[probe], dose=True)
    (out,) = llm.generate([prompt(30, 750)], params, use_tqdm=False)
    fired = (out.scores["p"][:, 0] > 0).nonzero()[:, 0].tolist()
    assert 3 < len(fired) < 30
    checked(out, [weir.SetFeature("it", 8, value=5.0, positions=fired)], {"it": sae}, oracle)
    (receipt,) = out.receipt.interventions
    layer = 1 if sae.config.is_transcoder else 2
    assert receipt.op == "set_feature" and receipt.acted == len(fired) and receipt.relative_dose_by_layer[layer] > 0


@EACH
def test_blocks_of_the_cache_are_shared_where_the_same_is_done(llm, loaded, architecture):
    """Also among requests whose other probes give a transcoder's activations other places."""
    keys = loaded("keys", coder(architecture, seed=40))
    if architecture == "topk":
        loaded("others", coder("topk", seed=40, k=25))  # with the same weights
    else:  # with the same decoder
        w = keys.tensors["W_enc"].clone()
        w[:, 6] += 1.0
        tensors = dict(keys.tensors) | {"W_enc": w}
        loaded("others", weir.SAE.from_tensors(architecture, tuple(keys.site), **tensors))

    def cached(asked, **more):
        params = weir.params(sampling(2), interventions=asked, **more)
        return llm.generate(prompt(100, 760), params, use_tqdm=False)[0].num_cached_tokens

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
        weir.SetFeature("others", 6, value=3.0),
    ):
        assert cached(other) == 0, other
    if architecture != "transcoder":
        from_the_end = weir.SetFeature("keys", 6, value=1.0, positions="-20:")
        assert cached(from_the_end) == 64, "blocks before the first position that changes are those of plain requests"


@EACH
def test_what_goes_on_without_its_autoencoder(engine, loaded, architecture):
    """A running request keeps what it was admitted with; so does what all undergo, unless its rows are read whole."""
    llm, oracle = engine
    before, after = coder(architecture, seed=11), coder(architecture, seed=12)
    loaded("name", before)
    with pytest.raises(weir.WeirError, match="unload it") as e:
        weir.load_sae(llm, "name", after)
    assert e.value.field == "name"
    asked = weir.SetFeature("name", 1, value=4.0)
    core = llm.llm_engine
    core.add_request("running", prompt(7, 770), weir.params(sampling(5), capture=INSIDE, interventions=asked))
    outputs = [*core.step()]
    weir.unload_sae(llm, "name")
    if architecture == "topk":
        assert llm.collective_rpc("weir_usage")[0]["sae_bytes"] == before.nbytes
    else:
        loaded("name", after)
    while core.has_unfinished_requests():
        outputs += core.step()
    checked(outputs[-1], [asked], {"name": before}, oracle)
    if architecture == "topk":
        assert idle(llm)
        loaded("name", after)
    (out,) = run(llm, [[asked]], [prompt(7, 70)], INSIDE)
    checked(out, [asked], {"name": after}, oracle)
    weir.set_global(llm, asked)
    try:
        if architecture == "topk":
            with pytest.raises(weir.WeirError, match="clear that first") as e:
                weir.unload_sae(llm, "name")
            assert e.value.field == "name"
        else:
            weir.unload_sae(llm, "name")
        (out,) = run(llm, [[]], [prompt(8, 771)], INSIDE)
        checked(out, [asked], {"name": after}, oracle)
    finally:
        weir.clear_global(llm)
    if architecture == "topk":
        weir.unload_sae(llm, "name")
    with pytest.raises(weir.WeirError, match="no autoencoder is loaded as 'name'; none is") as e:
        run(llm, [[asked]], [prompt(7, 71)])
    assert e.value.field == "interventions[0].name"
    with pytest.raises(weir.WeirError, match="no autoencoder"):
        weir.unload_sae(llm, "name")
    assert idle(llm) and weir.saes(llm) == []


def test_what_is_loaded_may_be_a_path(engine, loaded, tmp_path):
    llm, oracle = engine
    sae = coder("jumprelu", seed=13)
    sae.save(tmp_path / "sae")
    loaded("path", tmp_path / "sae")
    asked = weir.SetFeature("path", 1, value=4.0)
    (out,) = run(llm, [[asked]], [prompt(7, 72)])
    checked(out, [asked], {"path": sae}, oracle)


def test_a_transcoder_that_normalises_each_row(engine, loaded):
    """Its rows are encoded whole at `mlp_in`, and it writes at `mlp_out`."""
    llm, oracle = engine
    sae = loaded("it", coder("transcoder", seed=42, normalize_activations="layer_norm"))
    asked = [weir.SetFeature("it", f, value=3.0) for f in (2, 3, 4)]
    (out,) = run(llm, [asked], [prompt(12, 780)], INSIDE)
    assert any(checked(out, asked, {"it": sae}, oracle))


def test_a_feature_that_was_changed_before_is_not_set_again(engine, loaded):
    """By a transcoder, which reads its activation once."""
    llm, oracle = engine
    sae = loaded("it", coder("transcoder", seed=10))
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
    (out,) = run(llm, [asked], [prompt(9, 361)], INSIDE)
    checked(out, asked, {"it": sae}, oracle)


def with_nan() -> weir.SAE:
    sae = coder("jumprelu")
    sae.tensors["W_enc"][0, 3] = float("nan")
    return sae


@pytest.mark.parametrize(
    ("make", "error", "at"),
    [
        (lambda: coder("standard", ("resid_post", 9)), "4 blocks", "sae.site"),
        (lambda: coder("standard", ("pattern", 1)), "derived", "sae.site"),
        (lambda: coder("standard", d_in=64), "reads 64 values, and a row .* has 128", "sae.d_in"),
        (lambda: coder("standard", ("z", 1), d_in=32), "a row of z.* has 128", "sae.d_in"),
        (lambda: coder("standard", ("z", 1), head=1), "a head of z.* has 32", "sae.d_in"),
        (lambda: coder("standard", ("z", 1), d_in=32, head=4), "head 4, and z.* has 4", "sae.head"),
        (lambda: coder("transcoder", d_out=64), "reconstructs 64 values, and a row of mlp_out.* has 128", "sae.d_out"),
        (with_nan, "NaN", "sae.W_enc"),
        (lambda: torch.ones(3), "expected an SAE", "sae"),
        (lambda: "/nowhere", "does not exist", "path"),
    ],
)
def test_what_does_not_fit_the_engine_is_not_loaded(llm, make, error, at):
    with pytest.raises(weir.WeirError, match=error) as e:
        weir.load_sae(llm, "x", make())
    assert e.value.field == at and weir.saes(llm) == [] and usage(llm)["sae_bytes"] == 0


def test_what_cannot_be_set_is_refused_by_field(llm, loaded):
    loaded("topk", coder("topk", k=8))
    loaded("length", coder("standard", normalize_activations="layer_norm"))
    loaded("transcoder", coder("transcoder"))
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


def test_memory_is_bounded(root):
    sae = coder("standard", seed=14)
    settings = {"additional_config": {"weir": {"sae_bytes": 2 * sae.nbytes}}}
    llm = get_llm(directory(root), **ENGINES["steering"].arguments, **settings)
    weir.load_sae(llm, "a", sae)
    weir.load_sae(llm, "b", sae)
    with pytest.raises(weir.WeirError, match=f"{sae.nbytes} bytes, and {2 * sae.nbytes} of the {2 * sae.nbytes}") as e:
        weir.load_sae(llm, "c", sae)
    assert e.value.field == "settings.sae_bytes"
    weir.unload_sae(llm, "a")
    weir.load_sae(llm, "c", sae)
    assert [one.name for one in weir.saes(llm)] == ["b", "c"]
