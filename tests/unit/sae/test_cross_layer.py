"""Cross-layer transcoders: their blocks, what these write together, and the files in which they are published."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import vllm_weir as weir
from tests.support.machine import module, needs
from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.sae_registry import LoadedSAE
from vllm_weir.sae import transfer
from vllm_weir.sae.autoencoder import without_decoder
from vllm_weir.sae.cross_layer import block_key, split_key
from vllm_weir.sae.transfer import digest_of
from vllm_weir.worker.saes import WorkerSAEs

L, D, N = 4, 8, 24
EXACT = 1e-5
generator = torch.Generator().manual_seed(0)


def rand(*shape):
    return torch.randn(*shape, generator=generator) / 2


ROWS = {layer: 2 * rand(11, D) for layer in range(L)}


def circuit(threshold=True):
    """Weights as circuit-tracer names them, {file: tensors}."""
    files = {}
    for i in range(L):
        own = {f"W_enc_{i}": rand(N, D), f"b_enc_{i}": rand(N), f"b_dec_{i}": rand(D)}
        if threshold:
            own[f"threshold_{i}"] = rand(N).abs()
        files[f"W_enc_{i}.safetensors"] = own
        files[f"W_dec_{i}.safetensors"] = {f"W_dec_{i}": rand(N, L - i, D)}
    return files


def write(path, files, config=None):
    path.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, path / name)
    if config is not None:
        lines = {"model_name": "m", "model_kind": "cross_layer_transcoder"} | config
        (path / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return path


HOOKS = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}


def by_hand(files, skip=None):
    """What the files say of `ROWS`: ({block: features}, {block: reconstruction}), written out pair by pair."""
    w = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    features, out = {}, {}
    for i in range(L):
        pre = ROWS[i] @ w[f"W_enc_{i}"].T + w[f"b_enc_{i}"]
        features[i] = pre.relu() * (pre > w.get(f"threshold_{i}", torch.zeros(())))
    for later in range(L):
        out[later] = sum(features[i] @ w[f"W_dec_{i}"][:, later - i] for i in range(later + 1)) + w[f"b_dec_{later}"]
        if skip is not None:
            out[later] = out[later] + ROWS[later] @ skip[later]
    return features, out


def assert_is(sae, features, out):
    found = sae.encode(ROWS)
    assert list(found) == list(range(L)) and (features[1] > 0).any() and (features[1] == 0).any()
    for layer in range(L):
        assert (found[layer] - features[layer]).abs().max() <= EXACT
        assert torch.equal(sae.block(layer).encode(ROWS[layer]), found[layer])
    for layer, one in sae.decode(found, ROWS).items():
        assert (one - out[layer]).abs().max() <= EXACT


@pytest.mark.parametrize("threshold", [False, True])
def test_circuit_tracer(tmp_path, threshold):
    files = circuit(threshold)
    sae = weir.SAE.load(write(tmp_path / "clt", files, HOOKS))
    assert (sae.file_format, sae.layers, sae.name) == ("circuit_tracer", (0, 1, 2, 3), "clt")
    assert sae.architecture == "jumprelu_" * threshold + "transcoder" and "to block 3" in repr(sae)
    assert (sae.d_in, sae.d_sae, sae.d_out) == (D, N, D)
    assert_is(sae, *by_hand(files))
    block = sae.block(2)
    assert (block.site, block.out_site, block.config.writes) == (("mlp_in", 2), ("mlp_out", 2), 2)
    assert (block.decoder_direction(5) == files["W_dec_2.safetensors"]["W_dec_2"][5].numpy()).all()
    response = block.feature_response(5)
    assert response.u.shape == (2, D)
    assert abs(response.activation(ROWS[2].numpy()) - by_hand(files)[0][2][:, 5].numpy()).max() <= EXACT


def test_where_circuit_tracer_reads(tmp_path):
    """As config.yaml says; the stream before the MLP's norm where nothing does; before the norm's weight."""
    files = circuit()
    assert weir.SAE.load(write(tmp_path / "none", files)).block(1).site == ("resid_mid", 1)
    path = write(tmp_path / "other", files, HOOKS | {"feature_input_hook": "ln2.hook_normalized"})
    with refused("norm_weight", "before its weight"):
        weir.SAE.load(path)
    weight, bias = 1 + rand(L, D) / 4, rand(L, D)
    sae = weir.SAE.load(path, norm_weight=weight, norm_bias=bias)
    features, _ = by_hand(files)
    for layer in range(L):
        found = sae.block(layer).encode(ROWS[layer] * weight[layer] + bias[layer])
        assert (found - features[layer]).abs().max() <= 10 * EXACT
    with refused("norm_weight", r"\[4 blocks, d_in\]"):
        weir.SAE.load(path, norm_weight=weight[0])
    assert weir.SAE.load(path, norm_weight=1).block(3).site == ("mlp_in", 3)
    sae = weir.SAE.load(tmp_path / "none", site=("mlp_in", 0), out_site=("mlp_out", 0))
    assert [sae.block(n).site for n in sae.layers] == [("mlp_in", n) for n in range(L)]
    with refused("site", "first block is 0"):
        weir.SAE.load(tmp_path / "none", site=("mlp_in", 1))
    with refused("feature_input_hook", "not supported"):
        weir.SAE.load(write(tmp_path / "odd", files, HOOKS | {"feature_input_hook": "hook_odd"}))


def scope(skip=True):
    """Weights as Gemma Scope 2 names them, {file: tensors}, and the same as circuit-tracer's."""
    theirs, ours, skips = {}, {}, {}
    for i, (encoder, decoder) in enumerate(zip(*[iter(circuit().values())] * 2, strict=True)):
        w_dec = torch.cat([torch.zeros(N, i, D), decoder[f"W_dec_{i}"]], 1)
        own = {"w_enc": encoder[f"W_enc_{i}"].T.contiguous(), "w_dec": w_dec, "b_enc": encoder[f"b_enc_{i}"]}
        own |= {"b_dec": encoder[f"b_dec_{i}"], "threshold": encoder[f"threshold_{i}"]}
        if skip:
            own["affine_skip_connection"] = skips[i] = rand(D, D)
        theirs[f"params_layer_{i}.safetensors"] = own
        ours |= {f"W_enc_{i}.safetensors": encoder, f"W_dec_{i}.safetensors": decoder}
    return theirs, ours, skips or None


@pytest.mark.parametrize("skip", [False, True])
def test_gemma_scope_2(tmp_path, skip):
    theirs, ours, skips = scope(skip)
    path = write(tmp_path / "clt" / "width_262k_l0_medium_affine", theirs)
    (path / "config.json").write_text(json.dumps({"architecture": "jump_relu", "model_name": "gemma-v3-1b-pt"}))
    sae = weir.SAE.load(path)
    assert (sae.file_format, sae.layers) == ("gemma_scope_2", (0, 1, 2, 3))
    assert (sae.block(1).site, sae.block(1).out_site) == (("mlp_in", 1), ("mlp_out", 1))
    assert_is(sae, *by_hand(ours, skips))
    if skip:
        with refused("rows", "W_skip"):
            sae.decode(sae.encode(ROWS))
    sae.save(tmp_path / "saved")
    again = weir.SAE.load(tmp_path / "saved")
    assert again.file_format == "circuit_tracer" and digest_of(again) == digest_of(sae)
    assert_is(again, *by_hand(ours, skips))
    theirs["params_layer_2.safetensors"]["w_dec"][3, 1] = 1.0
    with refused("params_layer_2.safetensors", "at blocks before it"):
        weir.SAE.load(write(path, theirs))


def damaged(change):
    files = circuit()
    change(files)
    return files


@pytest.mark.parametrize(
    ("change", "field", "why"),
    [
        (lambda f: f.pop("W_dec_2.safetensors"), "path", "no W_dec_2.safetensors"),
        (lambda f: (f.pop("W_dec_2.safetensors"), f.pop("W_enc_2.safetensors")), "path", "none of block 2"),
        (
            lambda f: f["W_enc_1.safetensors"].pop("b_enc_1"),
            "W_enc_1.safetensors",
            r"b_enc_1 of shape \[24\], got none",
        ),
        (lambda f: f["W_enc_1.safetensors"].pop("threshold_1"), "W_enc_1.safetensors", "threshold_1"),
        (lambda f: f["W_enc_0.safetensors"].update(W_enc_0=rand(N)), "W_enc_0.safetensors", "a matrix W_enc_0"),
        (lambda f: f["W_enc_0.safetensors"].pop("b_dec_0"), "W_enc_0.safetensors", "a vector b_dec_0, got none"),
        (lambda f: f["W_enc_1.safetensors"]["threshold_1"].neg_(), "W_enc_1.safetensors", "negative activations"),
        (
            lambda f: f["W_dec_1.safetensors"].update(W_dec_1=rand(N, L, D)),
            "W_dec_1.safetensors",
            r"W_dec_1 of shape \[24, 3, 8\], got shape \[24, 4, 8\]",
        ),
        (
            lambda f: f["W_enc_2.safetensors"].update(W_enc_2=rand(N, D + 1)),
            "W_enc_2.safetensors",
            r"\[24, 8\], got shape \[24, 9\]",
        ),
    ],
)
def test_wrong_files_are_named_with_what_is_expected(tmp_path, change, field, why):
    with refused(field, why):
        weir.SAE.load(write(tmp_path, damaged(change), HOOKS))


def test_damage(tmp_path):
    files = circuit()
    for name in ("W_enc_1.safetensors", "W_dec_3.safetensors"):
        path = write(tmp_path / name, files, HOOKS) / name
        path.write_bytes(path.read_bytes()[:-40])
        with refused(name, "truncated, damaged"):
            weir.SAE.load(path.parent)
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        with refused(name, "Git LFS"):
            weir.SAE.load(path.parent)
    for text, why in (("a: [", "no YAML"), ("- a", "expected a mapping")):
        path = write(tmp_path / "yaml", files)
        (path / "config.yaml").write_text(text)
        with refused("config.yaml", why):
            weir.SAE.load(path)
    wrong, _, _ = scope()
    wrong["params_layer_1.safetensors"]["w_dec"] = rand(N, L - 1, D)
    with refused("params_layer_1.safetensors", r"w_dec of shape \[24, 4, 8\], got shape \[24, 3, 8\]"):
        weir.SAE.load(write(tmp_path / "scope", wrong))


def test_one_that_chooses_among_all_blocks_is_refused(tmp_path):
    """Its activations depend on blocks that have not run yet."""
    files = circuit(threshold=False)
    for tensors in files.values():
        for name in [name for name in tensors if name.startswith("b_")]:
            del tensors[name]
    files["W_dec_norm.safetensors"] = {"W_dec_norm": rand(L, N)}
    with refused("W_dec_norm.safetensors", "depends on later blocks"):
        weir.SAE.load(write(tmp_path, files))


def made(**change):
    files = circuit()
    weights = {
        "W_enc": [files[f"W_enc_{i}.safetensors"][f"W_enc_{i}"].T for i in range(L)],
        "W_dec": [files[f"W_dec_{i}.safetensors"][f"W_dec_{i}"] for i in range(L)],
    }
    for name in ("b_enc", "b_dec", "threshold"):
        weights[name] = [files[f"W_enc_{i}.safetensors"][f"{name}_{i}"] for i in range(L)]
    options = {"layers": range(L), "site": ("mlp_in", 0)} | change
    return weir.SAE.from_tensors("jumprelu_transcoder", **{**weights, **options}), files


def test_from_weights_by_block():
    sae, files = made()
    assert_is(sae, *by_hand(files))
    for change, field in (
        ({"W_enc": [rand(D, N)] * 3}, "W_enc"),
        ({"W_dec": [rand(N, L, D)] * L}, "W_dec_1"),
        ({"b_enc": [rand(N), rand(N), rand(N + 1), rand(N)]}, "b_enc_2"),
        ({"layers": [0, 1, 3, 4]}, "layers"),
        ({"layers": [1, 2, 3, 4]}, "layers"),
    ):
        with refused(field):
            made(**change)


def test_thresholds_below_0_are_saved_as_what_they_do(tmp_path):
    sae, _ = made(threshold=[rand(N) for _ in range(L)])
    sae.save(tmp_path)
    again = weir.SAE.load(tmp_path)
    assert all(torch.equal(again.encode(ROWS)[n], sae.encode(ROWS)[n]) for n in range(L))
    sae, _ = made(layers=[1, 2, 3, 4], site=("mlp_in", 1))
    with refused("architecture", "from block 0 on"):
        sae.save(tmp_path / "other")


def test_of_the_whole_one_block_is_taken():
    """Whatever is of one block says so; blocks that do not exist are refused."""
    sae, _ = made()
    for ask in (sae.feature_response, sae.decoder_direction):
        with refused("layer", "features at blocks 0 to 3"):
            ask(3)
    for ask, field in ((sae.encode, "rows"), (sae.decode, "features"), (lambda h: sae.top(h, 3), "rows")):
        with refused(field, "blocks 0 to 3"):
            ask(ROWS[0])
    for wrong in (-1, 4, 1.5, "1", True, None):
        with refused("layer"):
            sae.block(wrong)
    with refused("layer", "alone"):
        sae.block(1).block(1)
    with refused("features", "rows"):
        sae.decode({0: torch.zeros(3, N), 1: torch.zeros(4, N)})
    with refused("path", "with all others"):
        sae.block(1).save("/nowhere")
    only = sae.decode({1: sae.block(1).encode(ROWS[1])})
    assert list(only) == [1, 2, 3]


def test_it_travels_and_workers_keep_what_encodes(tmp_path):
    sae, _ = made()
    path = tmp_path / "one.safetensors"
    transfer.write(sae, path)
    again = transfer.read(path)
    assert digest_of(again) == digest_of(sae) != digest_of(made()[0])
    assert again.layers == sae.layers and torch.equal(again.block(2).encode(ROWS[2]), sae.block(2).encode(ROWS[2]))
    held = without_decoder(sae)
    assert held.nbytes == sum(
        sae.tensors[f"{name}_{n}"].nbytes for name in ("W_enc", "b_enc", "threshold") for n in range(L)
    )
    workers, loaded = WorkerSAEs(torch.device("cpu")), LoadedSAE.new("a/b#c/1", sae)
    assert workers.load(loaded.key, str(path)) == {"bytes": held.nbytes}
    block, key = loaded.block(2, "layer")
    assert key == block_key(loaded.key, 2) and split_key(key) == (loaded.key, 2)
    assert split_key(loaded.key) == (loaded.key, None) and split_key("plain#12") == ("plain#12", None)
    assert torch.equal(workers.hold("r", key).encode(ROWS[2]), block.encode(ROWS[2]))
    assert workers.find(key).site == ("mlp_in", 2) and workers.nbytes == held.nbytes
    workers.unload(loaded.key)
    assert workers.hold("r", key).site == ("mlp_in", 2), "a request that has begun keeps it"
    workers.release("r")
    assert workers.nbytes == 0
    with pytest.raises(WeirError, match="unloaded"):
        workers.hold("r", key)


@needs(module("circuit_tracer"))
def test_circuit_tracer_itself(tmp_path):
    """What it writes is read, and what is saved is read by it."""
    from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder, load_clt

    theirs = CrossLayerTranscoder(
        L, N, D, activation_function="jump_relu", lazy_decoder=False, device="cpu", dtype=torch.float32
    )
    for parameter in theirs.parameters():
        parameter.data = rand(*parameter.shape)
    theirs.activation_function.threshold.data.abs_()
    theirs.to_safetensors(tmp_path / "theirs")
    sae = weir.SAE.load(tmp_path / "theirs", site=("mlp_in", 0))
    sae.save(tmp_path / "ours")
    x = torch.stack(list(ROWS.values()))
    for one in (theirs, load_clt(tmp_path / "ours", dtype=torch.float32, lazy_decoder=False, device="cpu")):
        with torch.no_grad():
            features = one.encode(x)
            out = one.decode(features.to_sparse())
        assert (torch.stack(list(sae.encode(ROWS).values())) - features).abs().max() <= EXACT
        assert (torch.stack(list(sae.decode(sae.encode(ROWS)).values())) - out).abs().max() <= EXACT
    assert set(load_file(tmp_path / "ours" / "W_enc_1.safetensors")) == {"W_enc_1", "b_enc_1", "b_dec_1", "threshold_1"}
