"""Features of sparse autoencoders: read on the device, they equal what the autoencoder says of captured rows."""

from __future__ import annotations

import json

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import BOUND, assert_nothing_is_held, prompts, sampling
from tests.support.measure import close_logits, rel_err
from tests.support.sae_reference import weights
from vllm_weir.errors import WeirError
from vllm_weir.util.top import top_values

pytestmark = pytest.mark.engine("small")
D = 128
SAES = {
    "mid": ("jumprelu", ("resid_post", 1), 256),
    "late": ("topk", ("resid_post", 3), 96),
    "same": ("standard", ("resid_post", 1), 64),
    "wide": ("standard", ("mlp_post", 2), 160),
}


@pytest.fixture
def llm(llm):
    loaded = {info.name for info in weir.saes(llm)}
    for name, sae in autoencoders(llm).items():
        if name not in loaded:
            weir.load_sae(llm, name, sae)
    yield llm
    for info in weir.saes(llm):
        weir.unload_sae(llm, info.name)


def autoencoders(llm):
    shape = {(v.hook, v.layer): v.shape for v in weir.sites(llm)}
    made = {}
    for seed, (name, (architecture, site, d_sae)) in enumerate(SAES.items()):
        tensors = weights(architecture, seed, int(torch.tensor(shape[site]).prod()), d_sae)
        made[name] = weir.SAE.from_tensors(
            architecture, site, name=name, k=8 if architecture == "topk" else 0, **tensors
        )
    return made


def rows_of(llm, prompt, max_tokens):
    """Rows of all the autoencoders' sites, by a request of their own."""
    capture = [weir.Capture(hook, layer) for _, (hook, layer), _ in SAES.values()]
    return llm.generate([prompt], weir.params(sampling(max_tokens), capture=capture), use_tqdm=False)[0].activations


def check(got, sae, asked, acts):
    at = acts.positions_of(*sae.site)
    here = torch.isin(at, got.positions)
    dense = sae.encode(acts[sae.site][here])
    assert got.ids.shape == got.values.shape == (len(got), len(asked.ids or ()) or asked.top_k)
    assert (got.ids.dtype, got.values.dtype) == (torch.int64, torch.float32)
    # Each value is the autoencoder's own, and the values are its largest.
    # A sum of products is held to the lengths of the row and of the encoder's columns.
    room = BOUND * float(acts[sae.site][here].flatten(1).norm(dim=1).max() * sae.tensors["W_enc"].norm(dim=0).max())
    assert torch.allclose(got.values, dense.gather(1, got.ids), rtol=0, atol=room)
    if asked.ids:
        assert got.ids.tolist() == [list(asked.ids)] * len(got)
    else:
        assert torch.allclose(got.values, top_values(dense, asked.top_k)[1], rtol=0, atol=room)
        ties = got.values[:, 1:] == got.values[:, :-1]
        assert (got.ids[:, 1:] > got.ids[:, :-1])[ties].all()


def test_a_batch_in_which_everybody_asks_for_other_features(llm):
    """Chunks of prompts, hits of the prefix cache, decoding, neighbours that ask for nothing; twice."""
    saes, texts = autoencoders(llm), prompts()
    kinds = [
        [weir.Features("mid", top_k=5)],
        [weir.Features("late"), weir.Features("mid", ids=[7, 3, 250]), weir.Features("same", top_k=64)],
        [weir.Features("wide", top_k=9, positions="last_prompt"), weir.Features("late", top_k=2, positions="all")],
        [],
        [weir.Features("mid", top_k=5, positions="generated")],
    ]
    asked = [kinds[i % 5] for i in range(len(texts))]
    plain = [llm.generate([text], sampling(6), use_tqdm=False)[0].outputs[0].token_ids for text in texts]
    for _ in range(2):
        batch = [weir.params(sampling(6), features=one) if one else sampling(6) for one in asked]
        outs = llm.generate(texts, batch, use_tqdm=False)
        for text, out, wanted, tokens in zip(texts, outs, asked, plain, strict=True):
            assert out.outputs[0].token_ids == tokens
            if not wanted:
                assert out.features is None
                continue
            assert set(out.features) == {one.name for one in wanted} and not out.activations.sites
            acts = rows_of(llm, text, 6)
            for one in wanted:
                P = len(text["prompt_token_ids"])
                at = {"last_prompt": [P - 1], "generated": range(P, P + 5)}.get(one.positions.kind, range(P + 5))
                assert out.features[one.name].positions.tolist() == list(at)
                check(out.features[one.name], saes[one.name], one, acts)
    del outs, out, acts
    for name in SAES:
        weir.unload_sae(llm, name)
    assert_nothing_is_held(llm)


def test_beside_rows_and_projections(llm):
    """Then the rows leave the device, and the features are the same."""
    saes, (text,) = autoencoders(llm), prompts([40])
    features = [weir.Features("mid", top_k=5), weir.Features("wide", ids=[1, 2], positions="last_prompt")]
    alone = llm.generate([text], weir.params(sampling(4), features=features), use_tqdm=False)[0]
    for capture in (weir.Capture("resid_post", 1), weir.Capture("resid_post", 0, project=torch.ones(2, D))):
        (out,) = llm.generate([text], weir.params(sampling(4), features=features, capture=capture), use_tqdm=False)
        assert [tuple(site) for site in out.activations.sites] == [("resid_post", capture.layers[0])]
        acts = rows_of(llm, text, 4)
        for one in features:
            check(out.features[one.name], saes[one.name], one, acts)
            assert torch.equal(out.features[one.name].positions, alone.features[one.name].positions)
            assert rel_err(out.features[one.name].values, alone.features[one.name].values) <= 10 * BOUND


def test_an_intervention_is_seen(llm):
    (text,) = prompts([9])
    v = torch.randn(D, generator=torch.Generator().manual_seed(3))
    steer = weir.Add(v, 1, 3.0)
    feature = weir.Features("mid", top_k=4)
    both = weir.params(sampling(1), features=feature, interventions=steer)
    rows = weir.params(sampling(1), capture=weir.Capture("resid_post", 1), interventions=steer)
    out, steered = llm.generate([text, text], [both, rows], use_tqdm=False)
    check(out.features["mid"], autoencoders(llm)["mid"], feature, steered.activations)


@pytest.mark.parametrize(
    ("features", "field"),
    [
        (weir.Features("none"), "features[0].name"),
        (weir.Features("same", top_k=65), "features[0].top_k"),
        ([weir.Features("mid"), weir.Features("same", ids=[64])], "features[1].ids"),
    ],
)
def test_refusals(llm, features, field):
    with pytest.raises(WeirError) as e:
        llm.generate(prompts([4]), weir.params(sampling(1), features=features), use_tqdm=False)
    assert e.value.field == field


def test_before_interventions_is_refused(llm):
    capture = weir.Capture("resid_post", 1, before=True)
    with pytest.raises(WeirError) as e:
        llm.generate(
            prompts([4]), weir.params(sampling(1), features=weir.Features("mid"), capture=capture), use_tqdm=False
        )
    assert e.value.field == "features[0]"


def reference_logprobs(llm, rows):
    """What the checkpoint's own norm and unembedding say of rows, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llm.llm_engine.model_config.model).double()
    with torch.no_grad():
        return model.lm_head(model.model.norm(rows.double())).log_softmax(-1)


def reference_unembedding(llm):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(llm.llm_engine.model_config.model).lm_head.weight.detach().float()


def rows_of_stream(llm, text):
    rows = weir.params(sampling(3), capture=weir.Capture("resid_post"))
    return llm.generate([text], rows, use_tqdm=False)[0].activations


def check_lens(got, logprobs):
    assert close_logits(got.logprobs, logprobs.gather(1, got.token_ids), logprobs)
    assert close_logits(got.logprobs, logprobs.topk(got.logprobs.shape[1]).values, logprobs)
    assert got.token_ids.dtype == torch.int64 and got.logprobs.dtype == torch.float32


def test_the_logit_lens(llm, truth):
    """Of all blocks, in one batch with features; the last block's is the model's own distribution."""
    texts = prompts([40, 5, 17, 33])
    lens, feature = weir.Lens(top_k=7), weir.Features("mid", top_k=3)
    asked = [
        weir.params(sampling(4, logprobs=1), lens=lens),
        weir.params(sampling(4), features=feature),
        weir.params(sampling(4), lens=weir.Lens(layers=[2], top_k=3, positions="last_prompt"), features=feature),
        sampling(4),
    ]
    outs = llm.generate(texts, asked, use_tqdm=False)
    assert sorted(outs[0].lens) == [0, 1, 2, 3] and sorted(outs[2].lens) == [2]
    assert not outs[1].lens and outs[3].lens is None
    for text, out in zip(texts[:3], outs, strict=False):
        rows = weir.params(sampling(4), capture=weir.Capture("resid_post"))
        acts = llm.generate([text], rows, use_tqdm=False)[0].activations
        for layer, got in out.lens.items():
            at = torch.isin(acts.positions, got.positions)
            check_lens(got, reference_logprobs(llm, acts["resid_post", layer][at]))
    assert outs[2].lens[2].positions.tolist() == [16] and len(outs[2].features["mid"]) == 17 + 3
    first = outs[0].lens[3]
    (chosen,) = outs[0].outputs[0].logprobs[0].items()
    at = first.positions.tolist().index(39)
    assert first.token_ids[at, 0] == chosen[0]
    assert close_logits(first.logprobs[at, 0], chosen[1].logprob, truth.logits(texts[0]["prompt_token_ids"])[-1])


def test_the_tuned_lens(llm, tmp_path):
    generator = torch.Generator().manual_seed(1)
    state = {f"{i}.weight": torch.randn(D, D, generator=generator) / D for i in range(4)}
    state |= {f"{i}.bias": torch.randn(D, generator=generator) / 9 for i in range(4)}
    torch.save(state, tmp_path / "params.pt")
    (tmp_path / "config.json").write_text(json.dumps({"d_model": D, "num_hidden_layers": 4, "bias": True}))
    (text,) = prompts([12])
    lens = weir.Lens("tuned", path=tmp_path, top_k=5)
    (out,) = llm.generate([text], weir.params(sampling(3), lens=lens), use_tqdm=False)
    rows = weir.params(sampling(3), capture=weir.Capture("resid_post"))
    acts = llm.generate([text], rows, use_tqdm=False)[0].activations
    for layer, got in out.lens.items():
        h = acts["resid_post", layer]
        if layer < 3:  # translator i is for what enters block i
            h = h + h @ state[f"{layer + 1}.weight"].T + state[f"{layer + 1}.bias"]
        check_lens(got, reference_logprobs(llm, h))


def test_a_tuned_lens_that_does_not_fit_is_refused_before_the_request_enters(llm, tmp_path):
    (tmp_path / "params.pt").touch()
    for config in (None, "{", {"d_model": D + 1, "num_hidden_layers": 4}, {"d_model": D, "num_hidden_layers": 3}):
        if config is not None:
            (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        with pytest.raises(WeirError) as e:
            asked = weir.params(sampling(1), lens=weir.Lens("tuned", path=tmp_path))
            llm.generate(prompts([4]), asked, use_tqdm=False)
        assert e.value.field == "lens.path"


def jacobian_lens(path, layers=(0, 1, 2)):
    generator = torch.Generator().manual_seed(2)
    matrices = {k: (torch.randn(D, D, generator=generator) / D**0.5).half() for k in layers}
    torch.save({"J": matrices, "n_prompts": 3, "source_layers": list(layers), "d_model": D}, path)
    return matrices


def test_the_jacobian_lens(llm, tmp_path):
    """By its path and by its name, beside features: logits of transformers of J h; the last block is as it is."""
    matrices = jacobian_lens(tmp_path / "j.pt")
    lens = weir.load_lens(llm, "j", tmp_path / "j.pt")
    assert weir.list_lenses(llm)["j"] == {"kind": "jacobian", "layers": [0, 1, 2], "d_model": D, "n_prompts": 3}
    (text,) = prompts([12])
    asked = [weir.Lens("jacobian", path=tmp_path / "j.pt", top_k=5), weir.Lens(name="j", tokens=[9, 4, 300])]
    features = weir.Features("mid", top_k=3)
    outs = llm.generate([text] * 2, [weir.params(sampling(3), lens=one, features=features) for one in asked],
                        use_tqdm=False)  # fmt: skip
    acts = rows_of_stream(llm, text)
    for layer in range(4):
        h = acts["resid_post", layer].double()
        expected = reference_logprobs(llm, h if layer == 3 else h @ matrices[layer].double().T)
        check_lens(outs[0].lens[layer], expected)
        chosen = outs[1].lens[layer]
        assert chosen.token_ids.tolist() == [[9, 4, 300]] * len(h)
        assert close_logits(chosen.logprobs, expected[:, [9, 4, 300]], expected)
        assert torch.equal(outs[0].features["mid"].values, outs[1].features["mid"].values)
    weight = reference_unembedding(llm)
    for layer in range(4):
        direction = weight[7] if layer == 3 else matrices[layer].float().T @ weight[7]
        assert rel_err(lens.direction(7, layer), direction) <= BOUND
    with pytest.raises(WeirError, match="token ids count from 0"):
        lens.direction(10**6, 1)
    weir.unload_lens(llm, "j")
    with pytest.raises(WeirError, match="no lens is named 'j'; none is") as e:
        llm.generate([text], weir.params(sampling(1), lens=asked[1]), use_tqdm=False)
    assert e.value.field == "lens.name"


def test_a_direction_raises_what_the_lens_reads(llm, tmp_path):
    """Added behind the block, it is what the lens reads more of, there and nowhere before."""
    jacobian_lens(tmp_path / "j.pt")
    lens = weir.load_lens(llm, "j", tmp_path / "j.pt")
    direction = lens.direction(7, 1)
    steps = [weir.Add(direction / direction.norm(), layers=[1], scale=scale) for scale in (0, 30)]
    asked = weir.Lens(name="j", layers=[0, 1], tokens=[7], positions="last_prompt")
    outs = llm.generate(prompts([9]) * 2, [weir.params(sampling(1), lens=asked, interventions=[one]) for one in steps],
                        use_tqdm=False)  # fmt: skip
    before, after = ({k: float(one.logprobs[0, 0]) for k, one in out.lens.items()} for out in outs)
    assert after[1] > before[1] + 1 and after[0] == before[0]
    weir.unload_lens(llm, "j")


def test_the_logit_lens_at_other_points(llm):
    (text,) = prompts([12])
    for hook in ("resid_pre", "attn_out", "resid_mid", "mlp_out"):
        (out,) = llm.generate([text], weir.params(sampling(2), lens=weir.Lens(hook=hook, top_k=4)), use_tqdm=False)
        (rows,) = llm.generate([text], weir.params(sampling(2), capture=weir.Capture(hook)), use_tqdm=False)
        assert sorted(out.lens) == [0, 1, 2, 3]
        for layer, got in out.lens.items():
            check_lens(got, reference_logprobs(llm, rows.activations[hook, layer]))


def test_fitted_lenses_that_do_not_fit_are_refused_before_the_request_enters(llm, tmp_path):
    jacobian_lens(tmp_path / "some.pt", (0, 2))
    (tmp_path / "text.pt").write_text("this is no lens, as everybody can see")
    torch.save({"J": {0: torch.zeros(D, D)}, "target_layer": 2}, tmp_path / "early.pt")
    wrong = {
        "lens.path": [
            dict(kind="jacobian", path=tmp_path / "gone.pt"),
            dict(kind="jacobian", path=tmp_path / "text.pt"),
            dict(kind="jacobian", path=tmp_path / "early.pt"),
            dict(kind="tuned", path=tmp_path / "some.pt"),
        ],
        "lens.layers": [dict(kind="jacobian", path=tmp_path / "some.pt")],
        "lens.tokens": [dict(tokens=[10**6])],
        "lens.name": [dict(name="nobody")],
    }
    for field, cases in wrong.items():
        for case in cases:
            with pytest.raises(WeirError) as e:
                llm.generate(prompts([4]), weir.params(sampling(1), lens=weir.Lens(**case)), use_tqdm=False)
            assert e.value.field == field, case
    some = weir.Lens("jacobian", path=tmp_path / "some.pt", layers=[0, 2, 3])
    (out,) = llm.generate(prompts([4]), weir.params(sampling(1), lens=some), use_tqdm=False)
    assert sorted(out.lens) == [0, 2, 3]


@pytest.mark.parametrize(("architecture", "options"), [("abstopk", {"k": 8}), ("matching_pursuit", {"k": 6})])
def test_activations_that_take_the_whole_row(llm, architecture, options):
    """The most active are the largest by absolute value where activations have signs; chosen ones keep theirs."""
    sae = weir.SAE.from_tensors(architecture, ("resid_post", 2), **weights(architecture, 3, D, 96), **options)
    weir.load_sae(llm, "signed", sae)
    (text,) = prompts([30])
    (rows,) = llm.generate([text], weir.params(sampling(4), capture=weir.Capture("resid_post", 2)), use_tqdm=False)
    dense = sae.encode(rows.activations["resid_post", 2])
    room = BOUND * float(rows.activations["resid_post", 2].norm(dim=1).max())
    for asked in (weir.Features("signed", top_k=10), weir.Features("signed", ids=[9, 2, 40])):
        (out,) = llm.generate([text], weir.params(sampling(4), features=asked), use_tqdm=False)
        found = out.features["signed"]
        assert (found.values - dense.gather(1, found.ids)).abs().max() <= room
        if asked.ids is None:
            largest = dense.abs().sort(1, descending=True).values[:, :10]
            assert (found.values.abs() - largest).abs().max() <= room
            assert bool((found.values < 0).any()) == (architecture == "abstopk")


def beside(llm, tmp_path):
    """Lenses of all kinds, their labels, and what each reads of rows by block."""
    matrices = jacobian_lens(tmp_path / "j.pt")
    weir.load_lens(llm, "j", tmp_path / "j.pt")
    return [
        ("logit", weir.Lens(top_k=3), lambda layer, rows: rows["resid_post", layer]),
        ("logit:attn_out", weir.Lens(hook="attn_out", top_k=2), lambda layer, rows: rows["attn_out", layer]),
        (
            "j",
            weir.Lens(name="j", layers=[1, 2], tokens=[9, 4], positions="last_prompt"),
            lambda layer, rows: rows["resid_post", layer][10:11] @ matrices[layer].float().T,
        ),
    ]


@pytest.mark.parametrize("capture", [False, True])
def test_several_lenses_beside_features_and_rows(llm, tmp_path, capture):
    """Each is what it is alone, and so are the rows, whichever points and positions they are of."""
    captures = [weir.Capture("resid_post", [0, 2], positions="generated"), weir.Capture("z", 1, heads=[1])]
    captures += [weir.Capture("attn_out"), weir.Capture("pattern", 1)]
    asked, (text,) = beside(llm, tmp_path), prompts([11])
    features = weir.Features("mid", top_k=3)
    more = {"capture": captures} if capture else {}
    params = weir.params(sampling(4), lens=[lens for _, lens, _ in asked], features=features, **more)
    every = weir.params(sampling(4), capture=[weir.Capture("resid_post"), weir.Capture("attn_out")])
    alone = [weir.params(sampling(4), capture=captures), weir.params(sampling(4), features=features)]
    out, all_rows, rows, read = llm.generate([text] * 4, [params, every, *alone], use_tqdm=False)
    assert list(out.lens) == [label for label, *_ in asked]
    for label, lens, of in asked:
        assert sorted(out.lens[label]) == ([1, 2] if lens.name else [0, 1, 2, 3])
        for layer, got in out.lens[label].items():
            expected = reference_logprobs(llm, of(layer, all_rows.activations))
            assert len(got) == len(expected) == (1 if lens.name else 14)
            assert close_logits(got.logprobs, expected.gather(1, got.token_ids), expected)
            if not lens.name:
                check_lens(got, expected)
    assert (out.features["mid"].values - read.features["mid"].values).abs().max() <= 1e-5 * D
    if not capture:
        assert not out.activations
    else:
        assert out.activations.sites == rows.activations.sites and out.receipt.captured == rows.receipt.captured
        for site in rows.activations.sites:
            assert torch.equal(out.activations.positions_of(*site), rows.activations.positions_of(*site))
            same_or_nan = torch.nan_to_num(out.activations[site]), torch.nan_to_num(rows.activations[site])
            assert rel_err(*same_or_nan) <= BOUND
    weir.unload_lens(llm, "j")


@pytest.mark.parametrize(
    "more",
    [{"project": torch.ones(2, D)}, {"reduce": "mean"}, {"compress": "full8"}, {"dtype": "bfloat16"}, {"layers": 3}],
)
def test_a_lens_beside_rows_that_come_back_changed(llm, more):
    """As means, products, compressed or of fewer blocks: what they are without the lens."""
    capture = weir.Capture("resid_post", **more)
    asked = [weir.params(sampling(3), capture=capture, **lens) for lens in ({}, {"lens": weir.Lens(top_k=2)})]
    without, beside = llm.generate(prompts([11]) * 2, asked, use_tqdm=False)
    assert without.activations.sites == beside.activations.sites
    for site in without.activations.sites:
        # The codes of values near the edge of a step may differ by one.
        off = rel_err(without.activations[site].float(), beside.activations[site].float())
        assert off <= (1e-2 if "compress" in more else BOUND)
    assert sorted(beside.lens) == [0, 1, 2, 3] and all(len(one) == 13 for one in beside.lens.values())


def test_lenses_that_cannot_be_told_apart_are_refused():
    for lenses, field in (
        ([weir.Lens(), weir.Lens(top_k=3)], "lens[1]"),
        ([weir.Lens("jacobian", path="a"), weir.Lens("jacobian", path="b")], "lens[1]"),
        ([weir.Lens(name=str(n)) for n in range(17)], "lens"),
        ([weir.Lens(), {"layers": "none"}], "lens[1].layers"),
    ):
        with pytest.raises(WeirError) as e:
            weir.params(sampling(1), lens=lenses)
        assert e.value.field == field


def test_one_request_for_all_that_can_be_asked_together(llm, tmp_path):
    """One site as rows, in another dtype and as a mean, features and a lens read off it, probes, and doses.

    Each is what a request gives that asks for it alone.
    """
    (text,) = prompts([20])
    draw = torch.Generator().manual_seed(8)
    directions = torch.randn(3, D, generator=draw)
    common = {"interventions": weir.Add(torch.randn(D, generator=draw), layers=0, scale=0.2)}

    def stored(name, **fields):
        return weir.Capture("resid_post", 1, sink={"filesystem": {"url": str(tmp_path / name)}}, **fields)

    captures = {
        "rows": weir.Capture("resid_post", 1),
        "reduced": weir.Capture("resid_post", 2, reduce="max"),
        "projected": weir.Capture("mlp_out", 0, project=directions),
        "half": stored("half", dtype="float16"),
        "mean": stored("mean", reduce="mean", positions="prompt"),
    }
    others = {
        "features": weir.Features("mid", top_k=4),
        "lens": weir.Lens(layers=[1, 3], top_k=3),
        "probes": weir.Probe("p", torch.randn(2, D, generator=draw), layer=2),
    }

    def ask(**fields):
        llm.reset_prefix_cache()
        (out,) = llm.generate([text], weir.params(sampling(5), **common, **fields), use_tqdm=False)
        return out

    together = ask(capture=list(captures.values()), **others, dose=True, tag="together")
    receipt = together.receipt
    assert receipt.tag == "together" and receipt.interventions[0].relative_dose > 0
    alone = ask(capture=[captures["rows"], captures["reduced"], captures["projected"]])
    assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert together.activations.sites == alone.activations.sites and len(alone.activations.sites) == 3
    for site in alone.activations.sites:
        assert together.activations[site].shape == alone.activations[site].shape
        assert rel_err(together.activations[site], alone.activations[site]) <= BOUND
    rows = together.activations["resid_post", 1]
    assert len(receipt.files) == 2
    half, mean = ([*weir.load(tmp_path / name).values()] for name in ("half", "mean"))
    assert torch.equal(half[0]["resid_post", 1], rows.to(torch.float16))
    assert rel_err(mean[0]["resid_post", 1], rows[: receipt.prompt_tokens].mean(dim=0, keepdim=True)) <= BOUND
    check(together.features["mid"], autoencoders(llm)["mid"], others["features"], together.activations)
    by_lens = ask(lens=others["lens"]).lens
    assert sorted(together.lens) == sorted(by_lens) == [1, 3]
    for layer, read in by_lens.items():
        assert together.lens[layer].token_ids.tolist() == read.token_ids.tolist()
        assert rel_err(together.lens[layer].logprobs, read.logprobs) <= BOUND
    assert rel_err(together.scores["p"], ask(probes=others["probes"]).scores["p"]) <= BOUND
    dose = ask(dose=True).receipt.interventions[0].relative_dose
    assert receipt.interventions[0].relative_dose == pytest.approx(dose, rel=1e-5)
