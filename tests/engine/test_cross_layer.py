"""Cross-layer transcoders in an engine: a feature is read at one block and written at that one and all later ones.

Against transformers with hooks that do the same; who is beside such a request keeps its bits.
"""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import BOUND
from tests.engine.sae_cases import BLOCKS, EVERYTHING, FEATURES, checked, cross_layer, loading, run
from tests.support.steered import chunks, idle, prompt, same_answers, sampling, usage

pytestmark = pytest.mark.engine("steering")
INSIDE = [*EVERYTHING, weir.Capture("mlp_in"), weir.Capture("mlp_out")]


@pytest.fixture
def loaded(llm):
    with loading(llm) as load:
        yield load


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("jumprelu_transcoder", {}),
        pytest.param("skip_transcoder", {}, marks=pytest.mark.thorough),
        ("topk_transcoder", {"k": 24}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_it_is_the_model_with_the_change_at_every_later_block(engine, loaded, architecture, options):
    """Features of every block, several positions, and several features of one request; in one batch."""
    llm, oracle = engine
    sae = loaded("clt", cross_layer(architecture, 7, **options))
    asked = [
        [weir.SetFeature("clt", 3, layer=0, value=4.0)],
        [weir.SetFeature("clt", 5, layer=1, value=0.0, positions="prompt")],
        [weir.SetFeature("clt", 7, layer=2, scale=-2.0, positions="generated")],
        [weir.SetFeature("clt", 11, layer=1, add=1.5, positions=[2, 5, -1])],
        [weir.SetFeature("clt", 13, layer=3, value=2.0, positions={"token_ids": list(range(5, 260))})],
        [weir.SetFeature("clt", 2, layer=0, value=2.0), weir.SetFeature("clt", 2, layer=2, scale=3.0, positions="4:")],
    ]
    found = run(llm, asked, [prompt(12, 10 + k) for k in range(6)], INSIDE)
    on = []
    for out, some in zip(found, asked, strict=True):
        on += checked(out, some, {"clt": sae}, oracle)
        for steered, one in zip(out.receipt.steered, some, strict=True):
            assert set(steered) == {("mlp_out", layer) for layer in range(one.layer, BLOCKS)}
            assert len(set(steered.values())) == 1 and min(steered.values()) > 0
    assert 3 < sum(on) < len(on) - 3, "features are active on some rows"


def test_who_is_beside_it_keeps_its_bits(engine, loaded):
    llm, oracle = engine
    sae = loaded("clt", cross_layer(seed=5))
    asked = [[weir.SetFeature("clt", 6 * k, layer=k % BLOCKS, value=1.0 + k)] for k in range(8)]
    params, plain = [weir.params(sampling(), capture=INSIDE, interventions=one) for one in asked], sampling(logprobs=3)
    texts = [prompt(6 + k, 100 + k) for k in range(12)]
    stock = llm.generate(texts, plain, use_tqdm=False)
    llm.reset_prefix_cache()  # the steps have the same shapes again
    mixed = llm.generate(texts, [*params, *[plain] * 4], use_tqdm=False)
    for out, one in zip(mixed, asked, strict=False):
        checked(out, one, {"clt": sae}, oracle)
    assert same_answers(mixed[8:], stock[8:])
    assert usage(llm)["programs"] == 0


def test_prompts_in_chunks_and_the_cache(engine, loaded):
    llm, oracle = engine
    sae = loaded("clt", cross_layer(seed=38))
    asked = weir.SetFeature("clt", 9, layer=1, scale=0.0, positions="4:")
    with chunks(llm, 7):
        found = run(llm, [[asked]] * 3, [prompt(23 + k, 740 + k) for k in range(3)], INSIDE)
    for out in found:
        checked(out, [asked], {"clt": sae}, oracle)

    def cached(*asked):
        params = weir.params(sampling(2), interventions=[*asked])
        return llm.generate(prompt(100, 760), params, use_tqdm=False)[0].num_cached_tokens

    first = weir.SetFeature("clt", 6, layer=1, value=3.0)
    assert (cached(first), cached(first)) == (0, 96)
    assert cached(weir.SetFeature("clt", 6, layer=2, value=3.0)) == 0


def test_under_a_gate_and_with_its_dose(engine, loaded):
    llm, oracle = engine
    sae = loaded("clt", cross_layer(seed=7))
    w = torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
    probe = weir.Probe("p", w, [0.0], "resid_pre", 1)
    asked = weir.SetFeature("clt", 8, layer=1, value=5.0, when=weir.When("p", above=0.0))
    params = weir.params(sampling(), capture=INSIDE, interventions=asked, probes=[probe], dose=True)
    (out,) = llm.generate([prompt(30, 750)], params, use_tqdm=False)
    fired = (out.scores["p"][:, 0] > 0).nonzero()[:, 0].tolist()
    assert 3 < len(fired) < 30
    checked(out, [weir.SetFeature("clt", 8, layer=1, value=5.0, positions=fired)], {"clt": sae}, oracle)
    (receipt,) = out.receipt.interventions
    assert set(receipt.relative_dose_by_layer) == {1, 2, 3} and receipt.acted == len(fired)


def test_it_reads_the_stream_between_attention_and_mlp(llm, loaded):
    """Where circuit-tracer's read: the change is that of the activation of `resid_mid`."""
    sae = loaded("clt", cross_layer(seed=3, hook="resid_mid"))
    asked = weir.SetFeature("clt", 4, layer=2, value=3.0)
    (out,) = run(llm, [[asked]], [prompt(14, 311)], [weir.Capture("resid_mid", 2), weir.Capture("mlp_out", [2, 3])])
    (before,) = run(llm, [[asked]], [prompt(14, 311)], [weir.Capture("mlp_out", [2, 3], before=True)])
    a = sae.block(2).encode(out.activations["resid_mid", 2])[:, 4]
    assert 0 < (a > 0).sum() < len(a)
    for layer, direction in zip((2, 3), sae.block(2).decoder_direction(4), strict=True):
        wanted = before.activations["mlp_out", layer] + (3.0 - a)[:, None] * torch.from_numpy(direction)
        assert (out.activations["mlp_out", layer] - wanted).abs().max() <= BOUND * wanted.abs().max()


def test_features_are_by_block(llm, loaded):
    """Of all blocks and of some, the most active and chosen ones, on the workers and beside rows."""
    sae = loaded("clt", cross_layer(seed=9))
    loaded("one", sae.block(2))
    text = prompt(15, 90)
    (rows,) = run(llm, [[]], [text], weir.Capture("mlp_in"))
    for capture in ({}, {"capture": weir.Capture("resid_post", 1)}):
        asked = [weir.Features("clt", top_k=5), weir.Features("one", ids=[7, 3])]
        (out,) = llm.generate([text], weir.params(sampling(), features=asked, **capture), use_tqdm=False)
        found = out.features["clt"]
        assert list(found) == [0, 1, 2, 3]
        for layer, one in found.items():
            ids, values = sae.block(layer).top(rows.activations["mlp_in", layer], 5)
            assert one.positions.tolist() == list(range(len(ids))) and torch.equal(one.ids, ids)
            assert (one.values - values).abs().max() <= BOUND * values.abs().max()
        alone = sae.block(2).encode(rows.activations["mlp_in", 2])[:, [7, 3]]
        assert (out.features["one"].values - alone).abs().max() <= BOUND * alone.abs().max()
    asked = weir.Features("clt", ids=[7, 3], layers=[1, 3], positions="last_prompt")
    (out,) = llm.generate([text], weir.params(sampling(), features=asked), use_tqdm=False)
    assert list(out.features["clt"]) == [1, 3]
    for layer, one in out.features["clt"].items():
        wanted = sae.block(layer).encode(rows.activations["mlp_in", layer][14:15])[:, [7, 3]]
        assert (one.values - wanted).abs().max() <= BOUND * wanted.abs().max().clamp(min=1)


def test_workers_hold_what_encodes_alone(llm, loaded):
    """Decoders of all pairs of blocks are most of it, and a feature that is set needs one row of them."""
    sae = loaded("clt", cross_layer(seed=9))
    encoders = sum(
        sae.tensors[f"{name}_{layer}"].nbytes for name in ("W_enc", "b_enc", "threshold") for layer in range(4)
    )
    (info,) = weir.saes(llm)
    assert info.bytes == usage(llm)["sae_bytes"] == encoders < sae.nbytes / 2
    assert (info.layers, info.site, info.d_sae) == ((0, 1, 2, 3), ("mlp_in", 0), FEATURES)
    weir.unload_sae(llm, "clt")
    assert idle(llm) and usage(llm)["sae_bytes"] == 0


def test_what_cannot_be_done_is_refused_by_field(llm, loaded):
    loaded("clt", cross_layer())
    loaded("one", cross_layer().block(1))
    v = {"value": 1.0}
    for asked, error, at in (
        (weir.SetFeature("clt", 3, **v), "features at blocks 0 to 3; say which", "layer"),
        (weir.SetFeature("clt", 3, layer=4, **v), "blocks are 0 to 3, got 4", "layer"),
        (weir.SetFeature("one", 3, layer=2, **v), "at block 1, got 2", "layer"),
        (weir.SetFeature("clt", FEATURES, layer=1, **v), "count from 0 to 95", "feature"),
        (weir.SetFeature("clt", 3, layer=1, read_back=True, **v), "leave it out", "read_back"),
    ):
        with pytest.raises(weir.WeirError, match=error) as e:
            run(llm, [[asked.to_json()]], [prompt(5, 80)])
        assert e.value.field == f"interventions[0].{at}"
    twice = [weir.SetFeature("clt", 3, layer=1, **v)] * 2
    with pytest.raises(weir.WeirError, match="put add after value or scale"):
        run(llm, [twice], [prompt(5, 80)])
    for features, at in ((weir.Features("clt", layers=4), "layers"), (weir.Features("one", layers=[1, 2]), "layers")):
        with pytest.raises(weir.WeirError, match="block") as e:
            llm.generate([prompt(5, 80)], weir.params(sampling(), features=features), use_tqdm=False)
        assert e.value.field == f"features[0].{at}"


def test_one_of_more_blocks_than_the_model_has_is_not_loaded(llm):
    sae = cross_layer()
    tensors = {name: [sae.tensors[f"{name}_3"]] * 2 for name in ("W_enc", "b_enc", "threshold", "b_dec")}
    tensors["W_dec"] = [sae.tensors["W_dec_2"], sae.tensors["W_dec_3"]]
    shifted = weir.SAE.from_tensors("jumprelu_transcoder", ("mlp_in", 3), layers=[3, 4], **tensors)
    with pytest.raises(weir.WeirError, match="up to block 4, and the model has 4") as e:
        weir.load_sae(llm, "x", shifted)
    assert e.value.field == "sae.layers" and weir.saes(llm) == []
