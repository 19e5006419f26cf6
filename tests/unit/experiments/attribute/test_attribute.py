"""`attribute` on a checkpoint alone: the twin verifies, files round-trip, and wrong arguments name their field."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.support.sae_reference import weights
from tests.unit.refusals import refused
from vllm_weir.errors import WeirError

HAPPY = "Tom went to the garden. Tom grinned happily, for the garden was lovely. Tom was so"
SAD = "Tom went to the garden. Tom frowned sadly, for the garden was awful. Tom was so"
METRIC = weir.logit_diff(" happy", " sad")


@pytest.fixture(scope="module")
def network():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(weir.demo_model(), dtype=torch.float32)


@pytest.fixture(scope="module")
def result():
    return weir.attribute(weir.demo_model(), HAPPY, SAD, metric=METRIC, top_k=6)


def ids(text):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(weir.demo_model()).encode(text)


def test_the_twin_verifies_where_there_is_no_engine(result):
    assert result.verified_by == "twin" and result.engine_baseline is None and result.twin_error is None
    assert result.baseline.clean > 0 > result.baseline.corrupt
    assert len(result.top) == len(result.verified) == 6
    assert [v.place for v in result.verified] == [t.place for t in result.top]
    at = result.grid.sel(hook=result.top[0].site.hook, layer=result.top[0].site.layer, position=result.top[0].position)
    assert at == result.top[0].estimate and abs(at) == np.abs(result.grid.array).max()
    assert "verified by the twin" in repr(result) and result.table().startswith("place")


@pytest.mark.parametrize(("hook", "heads"), [("mlp_out", None), ("resid_pre", None), ("z", "all")])
def test_integrated_gradients(network, hook, heads):
    """Against gradients taken with torch alone; they add up to the effect of putting all rows in."""
    steps, layer, chosen = 4, 3, [8, 9, 15, 19]
    asked = {"metric": lambda x: x[5] - x[9], "hooks": hook, "layers": layer, "heads": heads, "top_k": 0}
    found = weir.attribute(
        network, ids(HAPPY), ids(SAD), positions=chosen, method="integrated_gradients", steps=steps, **asked
    )
    assert (found.method, found.steps) == ("integrated_gradients", steps)
    block = network.model.layers[layer]
    module = {"mlp_out": block.mlp, "resid_pre": block, "z": block.self_attn.o_proj}[hook]
    seen, put, live = [], [], []

    def act(rows):
        seen.append(rows.detach().clone())
        if not put:
            return rows
        new = rows.detach().clone()
        new[0, chosen] = put[-1]
        live.append(new.requires_grad_(True))
        return new

    if hook == "mlp_out":
        handle = module.register_forward_hook(lambda m, a, out: act(out))
    else:
        handle = module.register_forward_pre_hook(lambda m, a: (act(a[0]), *a[1:]))

    def metric(text):
        logits = network(input_ids=torch.tensor([ids(text)])).logits[0, -1]
        return logits[5] - logits[9]

    with torch.no_grad():
        metric(HAPPY), metric(SAD)
    clean, corrupt = (rows[0, chosen] for rows in seen)
    total = torch.zeros_like(corrupt)
    for k in range(steps):
        put.append(corrupt + (k + 0.5) / steps * (clean - corrupt))
        total += torch.autograd.grad(metric(SAD), live[-1])[0][0, chosen]
    with torch.no_grad():
        put.append(clean)
        after = metric(SAD)
        put.clear()
        effect = float(after - metric(SAD))
    handle.remove()
    wanted = ((clean - corrupt) * total / steps).unflatten(1, (4 if heads else 1, -1)).sum(2).numpy()
    got = found.grid.array.reshape(wanted.shape)
    assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()
    fine = weir.attribute(
        network, ids(HAPPY), ids(SAD), positions=chosen, method="integrated_gradients", steps=64, **asked
    )
    assert fine.grid.array.sum() == pytest.approx(effect, rel=1e-2, abs=1e-3)
    first = weir.attribute(network, ids(HAPPY), ids(SAD), positions=chosen, **asked)
    assert abs(first.grid.array.sum() - effect) > 2 * abs(fine.grid.array.sum() - effect)
    assert (first.method, first.steps) == ("gradient", 1)


def autoencoder(architecture="jumprelu", site=("resid_post", 2), name="s", d_sae=40, **more):
    tensors = weights(architecture, 3, 256, d_sae)
    return weir.SAE.from_tensors(architecture, site, name=name, labels={7: "seven"}, **tensors, **more)


@pytest.mark.parametrize("method", ["gradient", "integrated_gradients"])
def test_features(network, method):
    """Against torch, where the block's rows are the features decoded and an error that is kept."""
    sae, chosen, every = autoencoder(), [8, 9, 15, 19], 4 * 40
    asked = {"hooks": "resid_post", "layers": 2, "positions": chosen, "top_k": 0, "method": method, "steps": None}
    asked |= {"steps": 4} if method == "integrated_gradients" else {}
    found = weir.attribute(
        network, ids(HAPPY), ids(SAD), metric=lambda x: x[5] - x[9], saes=sae, top_features=every, **asked
    )
    got, seen, state = found.features["s"], [], {}

    def act(module, args, out):
        rows = (out if torch.is_tensor(out) else out[0]).clone()
        if "put" not in state:
            seen.append(rows[0, chosen])
            return None
        features, error = state["put"]
        rows[0, chosen] = features @ sae.tensors["W_dec"] + error
        return rows if torch.is_tensor(out) else (rows, *out[1:])

    def metric(text):
        logits = network(input_ids=torch.tensor([ids(text)])).logits[0, -1]
        return logits[5] - logits[9]

    handle = network.model.layers[2].register_forward_hook(act)
    with torch.no_grad():
        metric(HAPPY), metric(SAD)
    clean, corrupt = (sae.encode(rows) for rows in seen)
    errors = [rows - features @ sae.tensors["W_dec"] for rows, features in zip(seen, (clean, corrupt), strict=True)]
    steps = 4 if method == "integrated_gradients" else 1
    total = torch.zeros_like(clean)
    error_total = torch.zeros_like(errors[0])
    for k in range(steps):
        share = (k + 0.5) / steps if steps > 1 else 0.0
        live = (corrupt + share * (clean - corrupt)).requires_grad_(True)
        error = (errors[1] + share * (errors[0] - errors[1])).requires_grad_(True)
        state["put"] = live, error
        of_features, of_error = torch.autograd.grad(metric(SAD), [live, error])
        total, error_total = total + of_features / steps, error_total + of_error / steps
    handle.remove()
    wanted = (clean - corrupt) * total
    for one in got.top:
        at = chosen.index(one.position)
        assert one.estimate == pytest.approx(float(wanted[at, one.feature]), abs=1e-4 * float(wanted.abs().max()))
        assert one.activation == pytest.approx(float(corrupt[at, one.feature]), abs=1e-4)
        assert one.put_in == pytest.approx(float(clean[at, one.feature]), abs=1e-4)
        assert one.label == ("seven" if one.feature == 7 else "") and one.token == found.tokens[one.position]
    assert len(got.top) == int((wanted != 0).sum())
    sizes = [abs(one.estimate) for one in got.top]
    assert sizes == sorted(sizes, reverse=True) and got.positions == tuple(chosen)
    wanted_errors = ((errors[0] - errors[1]) * error_total).sum(1).numpy()
    whole = found.grid.array.reshape(-1)
    size = np.abs(np.stack([whole, got.totals, got.errors])).max()
    assert np.abs(got.errors - wanted_errors).max() <= 1e-4 * size
    # Decoders are affine: features and error are the whole row.
    assert np.abs(np.add(got.totals, got.errors) - whole).max() <= 1e-4 * size


def test_features_of_a_point_that_is_not_asked_about(tmp_path):
    asked = {"metric": METRIC, "hooks": "mlp_out", "layers": [1], "top_k": 0}
    saes = {"a": autoencoder(), "b": autoencoder("topk", ("resid_pre", 4), k=5)}
    found = weir.attribute(weir.demo_model(), HAPPY, SAD, saes=saes, top_features=3, **asked)
    alone = weir.attribute(weir.demo_model(), HAPPY, SAD, **asked)
    assert np.array_equal(found.grid.array, alone.grid.array) and alone.features == {}
    assert [len(found.features[name].top) for name in ("a", "b")] == [3, 3]
    assert found.features["b"].site == saes["b"].site
    again = weir.Attribution.load(found.save(tmp_path / "a.npz"))
    assert again.features == found.features


def test_autoencoders_that_are_refused():
    skip = weights("skip_transcoder", 3, 256, 40)
    cases = [
        ("saes", 3, "expected a weir.SAE, a list"),
        ("saes[0]", [3], "weir.SAE.load"),
        ("saes[1]", [autoencoder(), autoencoder()], "two autoencoders are named"),
        ("saes[0]", [autoencoder(normalize_activations="layer_norm")], "scales each row"),
        ("saes[x]", {"x": weir.SAE.from_tensors("skip_transcoder", ("mlp_in", 1), **skip)}, "is a transcoder"),
        ("saes", autoencoder(site=("resid_post", 99)), "resid_post"),
        ("saes", autoencoder(site=("mlp_post", 1)), "encodes rows of 256 numbers"),
    ]
    for name, saes, words in cases:
        with pytest.raises(WeirError, match=words) as e:
            weir.attribute(weir.demo_model(), HAPPY, SAD, metric=METRIC, saes=saes, top_k=0)
        assert e.value.field == name
    with pytest.raises(WeirError) as e:
        weir.attribute(weir.demo_model(), HAPPY, SAD, metric=METRIC, saes=autoencoder(), top_features=0)
    assert e.value.field == "top_features"


def test_same_prompts_have_nothing_to_attribute():
    same = weir.attribute(weir.demo_model(), SAD, SAD, metric=METRIC)
    assert not same.grid.array.any() and same.top == () and same.verified == ()


def test_noise_is_denoise_with_the_prompts_exchanged():
    noise = weir.attribute(weir.demo_model(), HAPPY, SAD, metric=METRIC, mode="noise", top_k=2)
    denoise = weir.attribute(weir.demo_model(), SAD, HAPPY, metric=METRIC, top_k=2)
    assert np.array_equal(noise.grid.array, denoise.grid.array)
    assert [v.effect for v in noise.verified] == pytest.approx([v.effect for v in denoise.verified])
    assert tuple(noise.baseline) == pytest.approx(tuple(reversed(denoise.baseline)))


def test_heads_add_up_to_their_row(network, tmp_path):
    heads = weir.attribute(network, ids(HAPPY), ids(SAD), metric=lambda x: x[5] - x[9], hooks="z", heads="all")
    whole = weir.attribute(network, ids(HAPPY), ids(SAD), metric=lambda x: x[5] - x[9], hooks="z")
    assert heads.grid.axes["head"] == (0, 1, 2, 3) and heads.top[0].head is not None
    assert np.allclose(heads.grid.array.sum(-1), whole.grid.array, rtol=1e-9, atol=1e-12)
    some = weir.attribute(
        network, ids(HAPPY), ids(SAD), metric=lambda x: x[5] - x[9], hooks="z", heads=[2, 0], layers=[4], positions=-1
    )
    assert np.array_equal(some.grid.array, heads.grid.array[:, 4:5, -1:, [2, 0]])
    pages = [result.plot(tmp_path / "a.html")[0].read_text() for result in (heads, some)]
    assert ">4.2<" in pages[0] and ">head 2<" not in pages[0]
    assert ">head 2<" in pages[1] and ">4.2<" not in pages[1]


def test_positions_and_layers_choose_a_part_of_the_grid(result):
    part = weir.attribute(weir.demo_model(), HAPPY, SAD, metric=METRIC, layers=[1, 4], positions="8:16:2", top_k=0)
    assert part.grid.axes["layer"] == (1, 4) and part.grid.axes["position"] == (8, 10, 12, 14)
    assert np.array_equal(part.grid.array, result.grid.array[:, [1, 4]][:, :, 8:16:2])


def test_files_round_trip(result, tmp_path):
    again = weir.Attribution.load(result.save(tmp_path / "a.npz"))
    assert np.array_equal(again.grid.array, result.grid.array) and again.grid.axes == result.grid.axes
    for name in (
        "top",
        "verified",
        "verified_by",
        "baseline",
        "engine_baseline",
        "mode",
        "metric",
        "tokens",
        "method",
        "steps",
    ):
        assert getattr(again, name) == getattr(result, name), name
    (tmp_path / "b.npz").write_bytes(b"no archive")
    for path in (tmp_path / "b.npz", tmp_path / "c.npz"):
        with refused("path", "cannot read"):
            weir.Attribution.load(path)
    with pytest.raises(WeirError, match="cannot write"):
        result.save(tmp_path / "no folder" / "a.npz")


def test_pictures(result, tmp_path):
    paths = result.plot(tmp_path / "a.png")
    assert [p.name for p in paths] == ["a.resid_pre.png", "a.attn_out.png", "a.mlp_out.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
    (page,) = result.plot(tmp_path / "b.html", hook="mlp_out")
    text = page.read_text()
    assert "<svg" in text and f"{result.grid.sel(hook='mlp_out', layer=5, position=19):.4g}" in text
    with pytest.raises(WeirError, match="there is no 'z'"):
        result.plot(tmp_path / "c.png", hook="z")
    figure = result.plot()
    assert len([axis for axis in figure.axes if axis.images]) == 3 and figure._repr_png_().startswith(b"\x89PNG")
    html = result._repr_html_()
    assert html.count("<table") == 4 and f"{result.grid.sel(hook='mlp_out', layer=5, position=19):.4g}" in html
    assert all(f">{v.effect:+.4f}<" in html for v in result.verified)


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        (dict(hooks="mlp_pre"), "hooks[0]", "cannot be captured|can be captured but not changed"),
        (dict(hooks=["z", "embed"]), "hooks[1]", "none"),
        (dict(hooks=["z", "nonsense"]), "hooks[1]", "unknown hook point"),
        (dict(hooks=["z", "hook_z"]), "hooks[1]", "named twice"),
        (dict(hooks=[]), "hooks", "expected a hook point"),
        (dict(layers=[6]), "layers", "block 6 does not exist"),
        (dict(heads="all"), "heads", "resid_pre, attn_out, mlp_out has no heads"),
        (dict(hooks=["z", "k"], heads="all"), "heads", "number of heads differs"),
        (dict(hooks="z", heads=[4]), "attribute.heads", "head 4 does not exist"),
        (dict(positions="generated"), "positions", "selects none"),
        (dict(mode="both"), "mode", "unknown mode 'both'"),
        (dict(top_k=-1), "top_k", "an int from 0"),
        (dict(method="ig"), "method", "unknown method 'ig'"),
        (dict(steps=4), "steps", "only integrated_gradients"),
        (dict(method="integrated_gradients", steps=0), "steps", "from 1 to 1024, got 0"),
        (dict(method="integrated_gradients", steps=1.5), "steps", "from 1 to 1024"),
        (dict(metric="happy"), "metric", "expected weir.logit_diff"),
        (dict(metric=weir.logit_diff(" happy sad", " sad")), "metric.a", "tokens"),
        (dict(metric=weir.logit_diff(" happy", " zebra")), "metric.b", "' zebra' is no token of the model"),
        (dict(metric=weir.logit_diff("happy", "sad")), "metric.a", "did you mean ' happy'?"),
        (dict(metric=weir.logit_diff(" sad", " sad")), "metric.b", "the same token"),
        (dict(metric=weir.logit_diff(3, 5000)), "metric.b", "token 5000 does not exist"),
        (dict(clean="Tom"), "corrupt", "so their positions do not correspond"),
        (dict(clean=[1, 2, 99999], corrupt=[1, 2, 3]), "clean", "token 99999 does not exist"),
        (dict(clean=[1, 2, 3], corrupt=[1, 2, 99999]), "corrupt", "token 99999 does not exist"),
        (dict(device="cuda:99"), "device", "torch cannot use"),
        (dict(device="nowhere"), "device", "torch cannot use"),
        (dict(clean=[]), "clean", "no tokens"),
        (dict(clean={"a": 1}), "clean", "a prompt is a text, a list of messages"),
        (dict(model=3), "model", "expected a vllm.LLM, the path"),
        (dict(llm=3), "llm", "expected a vllm.LLM, got int"),
    ],
)
def test_wrong_arguments_name_their_field(arguments, field, message):
    given = dict(model=weir.demo_model(), clean=HAPPY, corrupt=SAD, metric=METRIC) | arguments
    with refused(field, message):
        weir.attribute(**given)


def test_a_loaded_model_takes_token_ids_and_stays_where_it_is(network):
    with refused("clean", "no tokenizer"):
        weir.attribute(network, HAPPY, SAD, metric=lambda x: x[5])
    with pytest.raises(WeirError, match="stays where it is"):
        weir.attribute(network, ids(HAPPY), ids(SAD), metric=lambda x: x[5], device="cpu")
