"""`load_vector`: what each kind of file says, what the caller has to say, and what is refused."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

import vllm_weir as weir
from tests.support.sae_reference import weights, write_npz
from vllm_weir.errors import MissingFile, WeirError
from vllm_weir.experiments.vectors.load import load_vector
from vllm_weir.schema.gguf import write_gguf

A, B = np.float32([0.5, -1.0, 2.0]), np.float32([1.0, 0.25, -4.0])


def refused(field, path, **given):
    with pytest.raises(WeirError) as e:
        load_vector(path, **given)
    assert e.value.field == field, e.value
    return e.value.message


def same(found, expected):
    assert found.layers == tuple(sorted(expected))
    assert all(np.array_equal(found.vectors[layer], vector) for layer, vector in expected.items())


def control_vector(path, tensors, **metadata):
    path.write_bytes(write_gguf({"general.architecture": "controlvector", **metadata}, tensors))
    return path


def test_gguf_counts_blocks_from_0(tmp_path):
    path = control_vector(tmp_path / "v", {"direction.1": A, "direction.3": B}, **{"controlvector.model_hint": "llama"})
    found = load_vector(path)
    same(found, {1: A, 3: B})
    assert found.hook == "resid_post" and found.method == "gguf" and found.details == {"model_type": "llama"}
    assert "leaves block N, counted from 0: resid_post[N]" in found.convention


def test_gguf_says_its_layers_and_its_hook_point(tmp_path):
    path = control_vector(tmp_path / "v.gguf", {"direction.1": A})
    refused("layers", path, layers=2)
    refused("numbering", path, numbering="hidden_states")
    refused("hook", path, hook="mlp_out")
    same(load_vector(path, hook="resid_post", numbering="blocks"), {1: A})


@pytest.mark.parametrize(
    "names, hook",
    [
        (("direction.2", "direction.5"), "resid_post"),
        (("layer_2", "layer_5"), "resid_post"),
        (("2", "5"), "resid_post"),
        (("model.layers.2", "model.layers.5"), "resid_post"),
        (("transformer.h.2.mlp", "transformer.h.5.mlp"), "mlp_out"),
        (("model.layers.2.self_attn", "model.layers.5.self_attn"), "attn_out"),
        (("blocks.2.hook_resid_pre", "blocks.5.hook_resid_pre"), "resid_pre"),
        (("blocks.2.hook_mlp_out", "blocks.5.hook_mlp_out"), "mlp_out"),
        (("resid_mid.2", "resid_mid.5"), "resid_mid"),
        (("resid_mid[2]", "resid_mid[5]"), "resid_mid"),
    ],
)
def test_names_of_arrays_say_blocks_and_hook_points(tmp_path, names, hook):
    arrays = {names[0]: A, names[1]: B}
    save_file(arrays, tmp_path / "v.safetensors")
    np.savez(tmp_path / "v.npz", **arrays)
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, tmp_path / "v.pt")
    for name in ("v.safetensors", "v.npz", "v.pt"):
        found = load_vector(tmp_path / name)
        same(found, {2: A, 5: B})
        assert found.hook == hook and f"{hook}[N]" in found.convention
    refused("layers", tmp_path / "v.npz", layers=[2, 5])


def test_a_hook_point_is_given_only_where_none_is_said(tmp_path):
    save_file({"layer_2": A}, tmp_path / "a")
    save_file({"blocks.2.hook_resid_pre": A}, tmp_path / "b")
    assert load_vector(tmp_path / "a", hook="attn_out").hook == "attn_out"
    refused("hook", tmp_path / "b", hook="attn_out")
    refused("hook", tmp_path / "a", hook="nowhere")


@pytest.mark.parametrize(
    "name, hook",
    [
        ("mlp_out.layer.3", "mlp_out"),
        ("resid_pre_3", "resid_pre"),
        ("my_hook_mlp_out_3", "mlp_out"),
        ("mlp_pre_linear-3", "mlp_pre_linear"),
        ("happy.z_3", "z"),
    ],
)
def test_a_name_that_holds_another_hook_point_is_not_passed_over(tmp_path, name, hook):
    for i, arrays in enumerate(({name: A}, {name: A, f"{name[:-1]}4": B})):
        save_file(arrays, tmp_path / str(i))
        assert f"write {hook}.3" in refused(f"file.{name}", tmp_path / str(i))
    same(load_vector(tmp_path / "1", hook=hook), {3: A, 4: B})


def test_a_number_that_may_be_a_version_yields_to_the_block_given(tmp_path):
    save_file({"happy_v2": A}, tmp_path / "v")
    same(load_vector(tmp_path / "v"), {2: A})
    same(load_vector(tmp_path / "v", layers=7), {7: A})
    for name in ("layer_2", "2", "h.2", "resid_post_2", "resid_post.2"):
        save_file({name: A}, tmp_path / "w")
        refused("layers", tmp_path / "w", layers=7)


def test_names_of_hidden_states_need_their_numbering(tmp_path):
    save_file({"hidden_states.3": A}, tmp_path / "v")
    assert "leaves block N - 1" in refused("numbering", tmp_path / "v")
    same(load_vector(tmp_path / "v", numbering="blocks"), {3: A})
    same(load_vector(tmp_path / "v", numbering="hidden_states"), {2: A})


def test_hidden_states_are_numbered_from_the_embedding(tmp_path):
    save_file({"layer_1": A, "layer_4": B}, tmp_path / "v")
    found = load_vector(tmp_path / "v", numbering="hidden_states")
    same(found, {0: A, 3: B})
    assert "N - 1" in found.convention
    save_file({"layer_0": A, "layer_1": A}, tmp_path / "w")
    assert "embedding" in refused("file.0", tmp_path / "w", numbering="hidden_states")
    refused("numbering", tmp_path / "v", numbering="hidden_states", hook="mlp_out")
    refused("numbering", tmp_path / "v", numbering="layers")


@pytest.mark.parametrize("write", ["npy", "npz", "safetensors", "pt", "json"])
def test_one_vector_needs_its_block(tmp_path, write):
    path = tmp_path / f"v.{write}"
    {
        "npy": lambda: np.save(path, A),
        "npz": lambda: np.savez(path, A),
        "safetensors": lambda: save_file({"vector": A}, path),
        "pt": lambda: torch.save(torch.from_numpy(A), path),
        "json": lambda: path.write_text(json.dumps(A.tolist())),
    }[write]()
    assert "give layers=" in refused("layers", path)
    same(load_vector(path, layers=7), {7: A})
    same(load_vector(path, layers=[7], numbering="hidden_states"), {6: A})
    refused("layers", path, layers=[1, 2])
    refused("layers", path, layers=-1)


def test_what_is_no_layer_and_no_vector(tmp_path):
    np.save(tmp_path / "v.npy", A)
    refused("layers", tmp_path / "v.npy", layers=1.5)
    torch.save(["happy"], tmp_path / "w.pt")
    assert "got a name" in refused("file", tmp_path / "w.pt", layers=1)


def test_rows_get_their_blocks_in_order(tmp_path):
    np.save(tmp_path / "v.npy", np.stack([A, B]))
    np.savez(tmp_path / "v.npz", A, B)
    torch.save([torch.from_numpy(A), torch.from_numpy(B)], tmp_path / "v.pt")
    for name in ("v.npy", "v.npz", "v.pt"):
        same(load_vector(tmp_path / name, layers=[5, 1]), {5: A, 1: B})
        assert "2 vectors" in refused("layers", tmp_path / name)
        refused("layers", tmp_path / name, layers=[1, 1])


def test_numpy_numbers_arrays_without_names_and_not_blocks(tmp_path):
    np.savez(tmp_path / "v.npz", *([A] * 11 + [B]))
    found = load_vector(tmp_path / "v.npz", layers=range(20, 32))
    same(found, {**dict.fromkeys(range(20, 31), A), 31: B})


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda path: control_vector(path, {"direction.2": A}), {2: A}),  # the content decides, not the name
        (lambda path: control_vector(path, {"direction.0": A, "direction.1": B}), {0: A, 1: B}),  # of repeng
        (lambda path: save_torch({"layer.3": torch.tensor(A).bfloat16()}, path), {3: A}),
        (lambda path: torch.save({3: torch.tensor(A).bfloat16(), 4: torch.tensor(B)}, path), {3: A, 4: B}),
        *(
            (lambda path, name=name: save_file({name: A}, path), {3: A})
            for name in ("resid_post_3", "happy_z_3", "quiz.3", "residual_3", "behaviour_pattern_3")
        ),
    ],
)
def test_keys_that_say_blocks_and_no_other_hook_point(tmp_path, write, expected):
    write(tmp_path / "v.safetensors")
    found = load_vector(tmp_path / "v.safetensors")
    same(found, expected)
    assert found.hook == "resid_post"


def test_no_block_is_negative(tmp_path):
    torch.save({-1: torch.tensor(A)}, tmp_path / "w.pt")
    refused("file.-1", tmp_path / "w.pt")


def test_steering_vectors_fields_name_the_hook_point(tmp_path):
    for layer_type, hook in (("decoder_block", "resid_post"), ("self_attn", "attn_out"), ("mlp", "mlp_out")):
        torch.save({"layer_activations": {2: torch.tensor(A)}, "layer_type": layer_type}, tmp_path / "v")
        found = load_vector(tmp_path / "v")
        same(found, {2: A})
        assert found.hook == hook and f"{layer_type} module" in found.convention
    torch.save({"layer_activations": {2: torch.tensor(A)}, "layer_type": "input_layernorm"}, tmp_path / "v")
    assert "depends on the model" in refused("file.layer_type", tmp_path / "v")
    assert load_vector(tmp_path / "v", hook="attn_in").hook == "attn_in"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_code_of_a_file_runs(tmp_path):
    class Evil:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    torch.save({"layer_1": Evil()}, tmp_path / "v.pt")
    (tmp_path / "v.pkl").write_bytes(pickle.dumps(Evil()))
    np.save(tmp_path / "v.npy", np.array([Evil()], object), allow_pickle=True)
    np.savez(tmp_path / "v.npz", layer_1=np.array([Evil()], object))
    for name in ("v.pt", "v.pkl", "v.npy", "v.npz"):
        refused("file", tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "arrays, field",
    [
        ({"a": A, "b": B}, "file.a"),
        ({"layer_1": A, "b": B}, "file.b"),
        ({"layer_1": A, "layers.1": B}, "file.layers.1"),
        ({"layer_1": A, "resid_pre.2": B}, "file"),
        ({"blocks.1.hook_nothing": A}, "file.blocks.1.hook_nothing"),
        ({"model.layers.1.input_layernorm": A}, "file.model.layers.1.input_layernorm"),
        ({"layer_1": A, "layer_2": B[:2]}, "directions.vectors"),
        ({"layer_1": A * np.nan}, "directions.vectors.1"),
        ({"layer_1": np.stack([A, B])}, "directions.vectors.1"),
    ],
)
def test_arrays_that_are_no_directions(tmp_path, arrays, field):
    save_file(arrays, tmp_path / "v")
    refused(field, tmp_path / "v")


def test_what_is_no_file_of_vectors(tmp_path):
    refused("path", 3)
    with pytest.raises(MissingFile):
        load_vector(tmp_path / "none")
    (tmp_path / "v").write_bytes(b"")
    refused("file", tmp_path / "v")
    (tmp_path / "v").write_bytes(b"PK\x03\x04 and no more")
    refused("file", tmp_path / "v")
    (tmp_path / "folder").mkdir()
    refused("path", tmp_path / "folder")


def test_a_feature_of_an_autoencoder(tmp_path):
    path = weir.demo_sae()
    sae = weir.SAE.load(path)
    found = load_vector(path, feature=5)
    same(found, {sae.site.layer: sae.decoder_direction(5)})
    assert found.hook == sae.site.hook and found.method == "sae" and found.details["feature"] == 5
    assert "row of W_dec" in found.convention
    assert "give feature=" in refused("feature", path)
    refused("feature", path, feature=sae.d_sae)
    refused("layers", path, feature=5, layers=3)
    assert load_vector(path, feature=5, hook="resid_pre", layers=1).layers == (1,)


def test_a_feature_of_gemma_scope_needs_its_place(tmp_path):
    file = write_npz(tmp_path, weights("jumprelu"))
    for path in (tmp_path, file):
        assert "give hook= and one block in layers=" in refused("layers", path, feature=5)
        assert load_vector(path, feature=5, hook="resid_post", layers=2).layers == (2,)
        assert load_vector(path, feature=5, hook="mlp_in", layers=2).hook == "mlp_out"  # a transcoder's


def test_rows_for_the_embedding_and_each_block(tmp_path):
    """persona_vectors: [blocks + 1, d], of which row N leaves block N - 1."""
    rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    torch.save(rows, tmp_path / "evil_response_avg_diff.pt")
    read = load_vector(tmp_path / "evil_response_avg_diff.pt", numbering="hidden_states")
    assert (read.hook, read.layers) == (
        "resid_post",
        (0, 1, 2, 3),
    ) and "the embedding's, is left out" in read.convention
    for layer in read.layers:
        assert np.array_equal(read.vectors[layer], rows[layer + 1].numpy())
    with pytest.raises(WeirError, match="numbering='hidden_states' if there is one for the embedding"):
        load_vector(tmp_path / "evil_response_avg_diff.pt")
