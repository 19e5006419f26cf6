"""Autoencoders as other projects publish them: each project's own arithmetic, on files in its own form."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import vllm_weir as weir
from tests.unit.refusals import refused

D, N, K = 8, 24, 3
generator = torch.Generator().manual_seed(0)


def rand(*shape):
    return torch.randn(*shape, generator=generator) / 2


ROWS, BIG = rand(11, D) * 2, 1e-5


def topk(pre, k=K):
    values, ids = pre.relu().topk(k)
    return torch.zeros_like(pre).scatter(1, ids, values)


def check(sae, site, architecture, file_format, features, out):
    assert (sae.site, sae.architecture, sae.file_format) == (site, architecture, file_format)
    assert (sae.encode(ROWS) - features).abs().max() <= BIG
    assert (features > 0).any() and (features == 0).any()
    assert (sae.decode(features, ROWS) - out).abs().max() <= BIG


def test_sparsify(tmp_path):
    """EleutherAI: relu(W (x - b_dec) + b), the k largest."""
    folder = tmp_path / "layers.5"
    folder.mkdir()
    W, b, W_dec, b_dec = rand(N, D), rand(N), rand(N, D), rand(D)
    cfg = {"d_in": D, "expansion_factor": N // D, "k": K, "activation": "topk", "transcode": False}
    (folder / "cfg.json").write_text(json.dumps(cfg))
    save_file({"encoder.weight": W, "encoder.bias": b, "W_dec": W_dec, "b_dec": b_dec}, folder / "sae.safetensors")
    features = topk((ROWS - b_dec) @ W.T + b)
    check(weir.SAE.load(folder), ("resid_post", 5), "topk", "sparsify", features, features @ W_dec + b_dec)
    for wrong in ({"activation": "groupmax"}, {"skip_connection": True}):
        (folder / "cfg.json").write_text(json.dumps(cfg | wrong))
        with refused(next(iter(wrong)), "supported"):
            weir.SAE.load(folder)
    (folder / "cfg.json").write_text(json.dumps(cfg))
    other = folder.rename(tmp_path / "h.5.mlp")
    with refused("hook_name", "pass site="):
        weir.SAE.load(other)
    assert weir.SAE.load(other, site=("mlp_out", 5)).site == ("mlp_out", 5)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_transcoders_of_sparsify(tmp_path, signed, skip):
    """EleutherAI: of the MLP's input to its output; signed ones keep the k largest by absolute value."""
    folder = tmp_path / "layers.5.mlp"
    folder.mkdir()
    w = {"encoder.weight": rand(N, D), "encoder.bias": rand(N), "W_dec": rand(N, D), "b_dec": rand(D)}
    if skip:
        w["W_skip"] = rand(D, D)
    cfg = {"d_in": D, "k": K, "activation": "topk", "transcode": True, "skip_connection": skip, "signed": signed}
    (folder / "cfg.json").write_text(json.dumps(cfg))
    save_file(w, folder / "sae.safetensors")
    pre = ROWS @ w["encoder.weight"].T + w["encoder.bias"]
    ids = pre.abs().topk(K).indices
    features = torch.zeros_like(pre).scatter(1, ids, pre.gather(1, ids)) if signed else topk(pre)
    out = features @ w["W_dec"] + w["b_dec"] + (ROWS @ w["W_skip"].T if skip else 0)
    name = "abs" * signed + "topk_" + "skip_" * skip + "transcoder"
    sae = weir.SAE.load(folder)
    check(sae, ("mlp_in", 5), name, "sparsify", features, out)
    assert sae.out_site == ("mlp_out", 5)
    other = folder.rename(tmp_path / "layers.5.attn")
    with refused("hook_name", "pass site="):
        weir.SAE.load(other)
    save_file({"W_dec": w["W_dec"]} | {"encoder.weight": rand(N + 1, D)}, other / "sae.safetensors")
    with refused("b_dec", "missing"):
        weir.SAE.load(other, site=("mlp_in", 5))


def linear(**more):
    return {"encoder.weight": rand(N, D), "encoder.bias": rand(N), "decoder.weight": rand(D, N)} | more


def dictionaries():
    """Class of dictionary_learning -> its state, entries of the trainer, architecture here, features and output."""
    w = linear(bias=rand(D))
    pre = (ROWS - w["bias"]) @ w["encoder.weight"].T + w["encoder.bias"]
    yield "AutoEncoder", w, {}, "standard", pre.relu(), w["bias"]
    w = linear(**{"decoder.bias": rand(D)})
    yield (
        "AutoEncoderNew",
        w,
        {},
        "standard",
        (ROWS @ w["encoder.weight"].T + w["encoder.bias"]).relu(),
        w["decoder.bias"],
    )
    w = linear(decoder_bias=rand(D), r_mag=rand(N), gate_bias=rand(N), mag_bias=rand(N))
    del w["encoder.bias"]
    x = (ROWS - w["decoder_bias"]) @ w["encoder.weight"].T
    features = (x + w["gate_bias"] > 0) * (w["r_mag"].exp() * x + w["mag_bias"]).relu()
    yield "GatedAutoEncoder", w, {}, "gated", features, w["decoder_bias"]
    w = {"W_enc": rand(D, N), "b_enc": rand(N), "W_dec": rand(N, D), "b_dec": rand(D), "threshold": rand(N).abs()}
    pre = ROWS @ w["W_enc"] + w["b_enc"]
    yield "JumpReluAutoEncoder", w, {}, "jumprelu", (pre * (pre > w["threshold"])).relu(), w["b_dec"]
    w = linear(b_dec=rand(D), threshold=torch.tensor(0.7), k=torch.tensor(K))
    pre = (ROWS - w["b_dec"]) @ w["encoder.weight"].T + w["encoder.bias"]
    yield "AutoEncoderTopK", w, {"k": K}, "topk", topk(pre), w["b_dec"]
    yield "BatchTopKSAE", w, {"k": K}, "jumprelu", pre.relu() * (pre.relu() > 0.7), w["b_dec"]
    untrained = w | {"threshold": torch.tensor(-1.0)}
    yield "BatchTopKSAE", untrained, {"k": K}, "jumprelu", pre.relu(), w["b_dec"]
    m = {"W_enc": rand(D, N), "b_enc": rand(N), "W_dec": rand(N, D), "b_dec": rand(D), "threshold": torch.tensor(0.5)}
    pre = (ROWS - m["b_dec"]) @ m["W_enc"] + m["b_enc"]
    yield "MatryoshkaBatchTopKSAE", m, {"k": K}, "jumprelu", pre.relu() * (pre.relu() > 0.5), m["b_dec"]


@pytest.mark.parametrize("case", dictionaries(), ids=lambda case: case[0])
def test_dictionary_learning(tmp_path, case):
    name, state, trainer, architecture, features, bias = case
    torch.save(state, tmp_path / "ae.pt")
    trainer |= {"dict_class": name, "layer": 7, "submodule_name": "resid_post_layer_7", "lm_name": "m"}
    (tmp_path / "config.json").write_text(json.dumps({"trainer": trainer, "buffer": {}}))
    W_dec = state["W_dec"] if "W_dec" in state else state["decoder.weight"].T
    check(weir.SAE.load(tmp_path), ("resid_post", 7), architecture, "dictionary_learning", features,
          features @ W_dec + bias)  # fmt: skip


def test_dictionary_learning_says_what_it_lacks(tmp_path):
    torch.save(linear(bias=rand(D)), tmp_path / "ae.pt")
    trainer = {"dict_class": "AutoEncoder", "layer": 7, "submodule_name": "mlp_layer_7"}
    (tmp_path / "config.json").write_text(json.dumps({"trainer": trainer}))
    with refused("hook_name", "pass site="):
        weir.SAE.load(tmp_path)
    assert weir.SAE.load(tmp_path, site=("mlp_out", 7)).site == ("mlp_out", 7)
    (tmp_path / "config.json").write_text(json.dumps({"trainer": trainer | {"dict_class": "CrossCoder"}}))
    with refused("dict_class", "'CrossCoder' is not supported"):
        weir.SAE.load(tmp_path)
    with refused("ae.pt", "config.json beside it"):
        weir.SAE.load(_alone(tmp_path))


def _alone(tmp_path):
    (tmp_path / "alone").mkdir()
    torch.save({"W_enc": rand(D, N)}, tmp_path / "alone" / "ae.pt")
    return tmp_path / "alone" / "ae.pt"


def test_llama_scope(tmp_path):
    """Rows times sqrt(d) / their mean norm; a threshold in units of rows that are not scaled."""
    (tmp_path / "checkpoints").mkdir()
    w = linear(**{"decoder.bias": rand(D)})
    save_file({name: one.contiguous() for name, one in w.items()}, tmp_path / "checkpoints" / "final.safetensors")
    cfg = {"d_model": D, "d_sae": N, "jump_relu_threshold": 0.4, "hook_point_in": "blocks.9.hook_resid_post",
           "hook_point_out": "blocks.9.hook_resid_post", "dataset_average_activation_norm": {"in": 4.0}}  # fmt: skip
    (tmp_path / "hyperparams.json").write_text(json.dumps(cfg))
    factor = D**0.5 / 4
    pre = factor * ROWS @ w["encoder.weight"].T + w["encoder.bias"]
    features = pre.relu() * (pre > 0.4 * factor)
    out = (features @ w["decoder.weight"].T + w["decoder.bias"]) / factor
    check(weir.SAE.load(tmp_path), ("resid_post", 9), "jumprelu", "llama_scope", features, out)
    (tmp_path / "hyperparams.json").write_text(json.dumps(cfg | {"hook_point_out": "blocks.9.hook_mlp_out"}))
    with refused("hook_point_out", "not supported"):
        weir.SAE.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "site", "out"),
    [("resid_post", ("resid_post", 12), None), ("mlp_out", ("mlp_out", 12), None),
     ("transcoder", ("mlp_in", 12), ("mlp_out", 12))],
)  # fmt: skip
def test_gemma_scope_2(tmp_path, kind, site, out):
    folder = tmp_path / kind / "layer_12_width_16k_l0_medium"
    folder.mkdir(parents=True)
    w = {"w_enc": rand(D, N), "w_dec": rand(N, D), "b_enc": rand(N), "b_dec": rand(D), "threshold": rand(N).abs()}
    skip = torch.zeros(D, D)
    if out:
        w["affine_skip_connection"] = skip = rand(D, D)
    (folder / "config.json").write_text(json.dumps({"architecture": "jump_relu", "model_name": "gemma-v3-4b-pt"}))
    save_file(w, folder / "params.safetensors")
    pre = ROWS @ w["w_enc"] + w["b_enc"]
    features = pre.relu() * (pre > w["threshold"])
    sae = weir.SAE.load(folder)
    name = "jumprelu_skip_transcoder" if out else "jumprelu"
    check(sae, site, name, "gemma_scope_2", features, features @ w["w_dec"] + w["b_dec"] + ROWS @ skip)
    assert sae.out_site == (out or site)
    save_file(w | {"w_dec": rand(N, 2, D)}, folder / "params.safetensors")
    with refused("w_dec", "give the directory"):
        weir.SAE.load(folder)


def test_qwen_scope(tmp_path):
    folder = tmp_path / "SAE-Res-Qwen3-1.7B-Base-W32K-L0_3"
    folder.mkdir()
    w = {"W_enc": rand(N, D), "W_dec": rand(D, N), "b_enc": rand(N), "b_dec": rand(D)}
    torch.save(w, folder / "layer4.sae.pt")
    features = topk(ROWS @ w["W_enc"].T + w["b_enc"])
    sae = weir.SAE.load(folder / "layer4.sae.pt")
    check(sae, ("resid_post", 4), "topk", "qwen_scope", features, features @ w["W_dec"].T + w["b_dec"])
    torch.save(w, tmp_path / "layer4.sae.pt")
    with refused("k", "does not say how many"):
        weir.SAE.load(tmp_path / "layer4.sae.pt")


@pytest.mark.parametrize("names", [("encoder_linear", "decoder_linear"), ("encoder", "decoder")])
def test_linear_layers(tmp_path, names):
    """Goodfire, and OpenMOSS for DeepSeek R1."""
    w = {f"{names[0]}.weight": rand(N, D), f"{names[0]}.bias": rand(N), f"{names[1]}.weight": rand(D, N)}
    w[f"{names[1]}.bias"] = rand(D)
    path = tmp_path / "Llama-3.1-8B-Instruct-SAE-l19.pth"
    torch.save(w, path)
    features = (ROWS @ w[f"{names[0]}.weight"].T + w[f"{names[0]}.bias"]).relu()
    out = features @ w[f"{names[1]}.weight"].T + w[f"{names[1]}.bias"]
    check(weir.SAE.load(path), ("resid_post", 19), "standard", "linear_layers", features, out)


@pytest.mark.parametrize("threshold", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_circuit_tracer(tmp_path, threshold, skip):
    w = {"W_enc": rand(N, D), "W_dec": rand(N, D), "b_enc": rand(N), "b_dec": rand(D)}
    if skip:
        w["W_skip"] = rand(D, D)
    if threshold:
        w["activation_function.threshold"] = rand(N).abs()
    path = tmp_path / "layer_6.safetensors"
    save_file(w, path)
    pre = ROWS @ w["W_enc"].T + w["b_enc"]
    features = pre.relu() * (pre > w.get("activation_function.threshold", torch.zeros(())))
    out = features @ w["W_dec"] + w["b_dec"] + (ROWS @ w["W_skip"].T if skip else 0)
    name = "jumprelu_" * threshold + "skip_" * skip + "transcoder"
    sae = weir.SAE.load(path)
    check(sae, ("mlp_in", 6), name, "circuit_tracer", features, out)
    assert sae.out_site == ("mlp_out", 6)
    hooks = {"feature_input_hook": "hook_resid_mid", "feature_output_hook": "hook_mlp_out"}
    (tmp_path / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in hooks.items()))
    assert weir.SAE.load(path).site == ("resid_mid", 6)
    save_file({"W_enc_6": w["W_enc"], "b_enc_6": w["b_enc"]}, path)
    with refused("layer_6.safetensors", "give the directory"):
        weir.SAE.load(path)


def test_what_is_saved_again_is_of_saelens(tmp_path):
    w = linear(**{"decoder.bias": rand(D)})
    torch.save(w, tmp_path / "x-l3.pt")
    sae = weir.SAE.load(tmp_path / "x-l3.pt")
    sae.save(tmp_path / "saved")
    again = weir.SAE.load(tmp_path / "saved")
    assert (again.file_format, again.site) == ("saelens", sae.site)
    assert torch.equal(again.encode(ROWS), sae.encode(ROWS))


def test_what_is_none_of_these_is_refused_with_their_names(tmp_path):
    with refused("path", "sparsify, dictionary_learning, llama_scope"):
        weir.SAE.load(tmp_path)
    (tmp_path / "a.bin").touch()
    with refused("path", "circuit_tracer"):
        weir.SAE.load(tmp_path / "a.bin")
