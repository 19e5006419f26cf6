"""Files of SAELens 5 and 6 and of Gemma Scope: what they say is done, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.sae_reference import (
    AUTOENCODERS,
    D_IN,
    D_SAE,
    TRANSCODERS,
    Reference,
    rows,
    weights,
    write_npz,
    write_v5,
    write_v6,
)
from tests.unit.refusals import refused
from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.sae import transfer
from vllm_weir.sae.transfer import digest_of

EXACT = 1e-5


def assert_like(sae, reference, h, seen=None):
    """Compare activations and reconstructions of rows `h`, of which the reference sees `seen`."""
    seen = h if seen is None else seen
    features = sae.encode(h)
    expected = reference.encode(seen)
    assert np.array_equal(features.numpy() > 0, expected > 0) and 0.02 < (expected > 0).mean() < 0.9
    assert np.abs(features.numpy() - expected).max() <= EXACT
    assert np.abs(sae.reconstruct(h).numpy() - reference.decode(features.double().numpy(), seen)).max() <= EXACT


def not_loaded(field, path, **given):
    with refused(field) as e:
        weir.SAE.load(path, **given)
    return e.value


SAES = ("standard", "gated", "jumprelu", "topk")


@pytest.mark.parametrize(
    ("write", "written", "architecture"),
    [
        *((write_v5, one, one) for one in SAES),
        # Version 5 called a TopK SAE "standard" as well, and told them apart by the activation function.
        (write_v5, "standard", "topk"),
        *((write_v6, one, one) for one in (*SAES, *TRANSCODERS)),
    ],
)
def test_files_of_saelens(tmp_path, write, written, architecture):
    tensors, options = weights(architecture), {"k": 9} if architecture == "topk" else {}
    if write is write_v5:
        options["apply_b_dec_to_input"] = True
    elif architecture == "topk":
        options["rescale_acts_by_decoder_norm"] = True
    path = write(tmp_path / written, written, tensors, **options)
    sae = weir.SAE.load(path)
    sites = ("mlp_in", 1), ("mlp_out", 1)
    assert (sae.site, sae.out_site) == (sites if architecture in TRANSCODERS else (("resid_post", 2),) * 2)
    assert (sae.architecture, sae.d_in, sae.d_sae, sae.name) == (architecture, D_IN, D_SAE, written)
    assert sae.head is None and weir.SAE.load(path, name="mine").name == "mine"
    assert_like(sae, Reference(architecture, tensors, **options), rows())


@pytest.mark.parametrize("rescale", [False, True])
def test_batch_top_k_as_it_is_trained(tmp_path, rescale):
    """A checkpoint of training has one threshold, and with `rescale` in units of activations times decoder norms."""
    tensors = weights("standard")
    path = write_v6(
        tmp_path,
        "matryoshka_batchtopk" if rescale else "batchtopk",
        {**tensors, "topk_threshold": torch.tensor(0.21, dtype=torch.float64)},
        k=20.0,
        rescale_acts_by_decoder_norm=rescale,
    )
    sae = weir.SAE.load(path)
    norms = tensors["W_dec"].norm(dim=1) if rescale else torch.ones(D_SAE)
    expected = {
        "W_enc": tensors["W_enc"] * norms,
        "b_enc": tensors["b_enc"] * norms,
        "W_dec": tensors["W_dec"] / norms[:, None],
        "b_dec": tensors["b_dec"],
        "threshold": torch.full((D_SAE,), 0.21),
    }
    assert sae.architecture == "batchtopk"
    assert_like(sae, Reference("batchtopk", expected), rows())


@pytest.mark.parametrize("architecture", [*AUTOENCODERS, *TRANSCODERS])
def test_what_is_saved_is_loaded(tmp_path, architecture):
    site = ("mlp_in", 1) if architecture in TRANSCODERS else ("resid_mid", 3)
    given = {"k": 5, "rescale_acts_by_decoder_norm": True} if architecture == "topk" else {}
    sae = weir.SAE.from_tensors(architecture, site, **weights(architecture), **given, metadata={"model_name": "tiny"})
    sae.save(tmp_path / "one")
    sae.save(tmp_path / "one")  # again, over itself
    back = weir.SAE.load(tmp_path / "one")
    written = sorted((tmp_path / "one").iterdir())
    assert [p.name for p in written] == ["cfg.json", "sae_weights.safetensors"]
    assert written[0].stat().st_mode == written[1].stat().st_mode, "as readable as other files"
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        sae.save(tmp_path / "file" / "below")
    assert (back.site, back.out_site, back.head) == (sae.site, sae.out_site, sae.head)
    assert back.architecture == ("jumprelu" if architecture == "batchtopk" else architecture)
    assert back.config.metadata["model_name"] == "tiny" and digest_of(back) == digest_of(sae)
    assert torch.equal(back.encode(rows()), sae.encode(rows()))
    assert torch.equal(back.reconstruct(rows()), sae.reconstruct(rows()))
    sae.to(dtype=torch.float16).save(tmp_path / "half")
    assert weir.SAE.load(tmp_path / "half").dtype == torch.float16


def test_labels_of_features(tmp_path):
    """They are saved and loaded, cross to other processes, and are no part of what an autoencoder computes."""
    plain = weir.SAE.from_tensors("jumprelu", ("resid_post", 3), **weights("jumprelu"))
    said = {2: "happy", 0: "sea · ship"}
    sae = weir.SAE.from_tensors("jumprelu", ("resid_post", 3), labels=said, **weights("jumprelu"))
    sae.save(tmp_path / "one")
    transfer.write(sae, tmp_path / "file")
    for back in (weir.SAE.load(tmp_path / "one"), transfer.read(tmp_path / "file"), sae.renamed("other")):
        assert back.labels == said and digest_of(back) == digest_of(plain)
    plain.save(tmp_path / "one")
    assert weir.SAE.load(tmp_path / "one").labels == {}
    for wrong in (
        '{"-1": "a"}',
        '{"1.5": "a"}',
        '{"1": ""}',
        '{"1": 2}',
        '{"1": "%s"}' % ("x" * 201),
        '{"999": "a"}',
        "[]",
    ):
        (tmp_path / "one" / "labels.json").write_text(wrong)
        with pytest.raises(WeirError, match="labels"):
            weir.SAE.load(tmp_path / "one")


def test_features_of_the_shipped_one_have_labels():
    sae = weir.SAE.load(weir.demo_sae())
    record = json.loads(Path(weir.demo_sae(), "training.json").read_text())
    for mood, found in record["moods"].items():
        assert sae.labels[found["feature"]].startswith(f"{mood} stories: ")
    assert len(sae.labels) >= sae.d_sae - record["held_out"]["dead_features"]


HOOKS = ["resid_pre", "attn_in", "q", "v", "z", "attn_out", "resid_mid", "mlp_in", "mlp_post", "mlp_out", "resid_post"]


@pytest.mark.parametrize("hook", [*HOOKS, "embed", "final_norm"])
def test_every_site_is_saved_by_transformer_lens_name(tmp_path, hook):
    layer = 0 if hook in ("embed", "final_norm") else 7
    sae = weir.SAE.from_tensors("standard", (hook, layer), **weights("standard"))
    sae.save(tmp_path)
    if hook == "mlp_in":
        assert json.loads((tmp_path / "cfg.json").read_text())["metadata"]["hook_name"] == "blocks.7.mlp.hook_in"
    assert weir.SAE.load(tmp_path).site == (hook, layer)


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("blocks.3.hook_resid_pre", ("resid_pre", 3)),
        ("blocks.3.attn.hook_z", ("z", 3)),
        ("blocks.3.hook_mlp_out", ("mlp_out", 3)),
        ("blocks.12.mlp.hook_post", ("mlp_post", 12)),
        ("blocks.3.hook_in", ("resid_pre", 3)),
        ("hook_embed", ("embed", 0)),
    ],
)
def test_hook_names(tmp_path, name, site):
    tensors = weights("standard")
    assert weir.SAE.load(write_v6(tmp_path / "6", "standard", tensors, metadata={"hook_name": name})).site == site
    assert weir.SAE.load(write_v5(tmp_path / "5", "standard", tensors, hook_name=name, hook_layer=site[1])).site == site
    # Names of versions 2 and 3.
    old = write_v5(tmp_path / "3", "standard", tensors, hook_point=name, hook_point_layer=site[1])
    cfg = json.loads((old / "cfg.json").read_text())
    for key in ("hook_name", "hook_layer", "architecture", "activation_fn_str", "normalize_activations"):
        del cfg[key]
    (old / "cfg.json").write_text(json.dumps(cfg))
    assert weir.SAE.load(old).site == site


def test_a_head(tmp_path):
    tensors = weights("standard", d_in=8)
    z = {"hook_name": "blocks.1.attn.hook_z", "hook_layer": 1, "hook_head_index": 2}
    sae = weir.SAE.load(write_v5(tmp_path / "one", "standard", tensors, **z))
    assert sae.head == 2 and sae.site == ("z", 1) and sae.d_in == 8
    h = rows(6, width=24).unflatten(1, (3, 8))
    assert_like(sae, Reference("standard", tensors), h[:, 2])
    sae.save(tmp_path / "saved")
    assert weir.SAE.load(tmp_path / "saved").head == 2
    flat = weir.SAE.load(write_v5(tmp_path / "all", "standard", weights("standard"), **{**z, "hook_head_index": None}))
    assert flat.head is None
    assert_like(flat, Reference("standard", weights("standard")), h.flatten(1))
    flat.save(tmp_path / "flat")
    assert json.loads((tmp_path / "flat" / "cfg.json").read_text())["reshape_activations"] == "hook_z"
    not_loaded("hook_head_index", write_v5(tmp_path / "no", "standard", tensors, hook_head_index=2))
    not_loaded("hook_head_index", write_v5(tmp_path / "negative", "standard", tensors, **{**z, "hook_head_index": -1}))
    of_one_head = {"hook_name": "blocks.1.attn.hook_z", "hook_head_index": 2}
    not_loaded("hook_head_index", write_v6(tmp_path / "t", "transcoder", weights("transcoder"), metadata=of_one_head))


def test_names_that_mean_two_things(tmp_path):
    tensors, transcoder = weights("standard"), weights("transcoder")
    mlp_in = {"hook_name": "blocks.4.hook_mlp_in"}
    path = write_v6(tmp_path / "before", "standard", tensors, metadata=mlp_in)
    assert "resid_mid" in not_loaded("hook_name", path).message
    assert weir.SAE.load(path, site=("resid_mid", 4)).site == ("resid_mid", 4)
    after = {**mlp_in, "hf_hook_name": "model.layers.4.pre_feedforward_layernorm.output"}
    assert weir.SAE.load(write_v6(tmp_path / "after", "standard", tensors, metadata=after)).site == ("mlp_in", 4)
    # SAELens's own name of the inputs of Gemma Scope 2's transcoders.
    assert weir.SAE.load(write_v6(tmp_path / "gemma", "transcoder", transcoder, metadata=mlp_in)).site == ("mlp_in", 4)
    path = write_v6(tmp_path / "odd", "standard", tensors, metadata={"hook_name": "transformer.h.3"})
    not_loaded("hook_name", path)
    assert weir.SAE.load(path, site="resid_post.3").site == ("resid_post", 3)
    not_loaded("hook_layer", write_v5(tmp_path / "layer", "standard", tensors, hook_layer=1))


@pytest.mark.parametrize("architecture", ["gated", "jumprelu_skip_transcoder"])
def test_rows_before_the_norms_weight(tmp_path, architecture):
    torch.manual_seed(0)
    tensors = weights(architecture)
    apply = architecture == "gated"
    path = write_v6(
        tmp_path / "a",
        architecture,
        tensors,
        metadata={"hook_name": "blocks.3.ln2.hook_normalized"},
        apply_b_dec_to_input=apply,
    )
    assert "norm_weight" in not_loaded("norm_weight", path).message
    not_loaded("norm_weight", path, site=("mlp_in", 3))
    weight, bias = 1.5 + 0.2 * torch.randn(D_IN), 0.4 * torch.randn(D_IN)
    sae = weir.SAE.load(path, norm_weight=weight, norm_bias=bias)
    assert sae.site == ("mlp_in", 3)
    reference = Reference(architecture, tensors, apply_b_dec_to_input=apply)
    h = rows()
    features = sae.encode(h * weight + bias)
    assert np.array_equal(features.numpy() > 0, reference.encode(h) > 0)
    assert np.abs(features.numpy() - reference.encode(h)).max() <= EXACT
    expected = torch.from_numpy(reference.decode(reference.encode(h), h))
    if apply:  # an autoencoder, which reconstructs what it reads
        expected = expected * weight + bias
        active = int(features[0].argmax())
        edited = h.double() + (3 - features[:, active, None]) * tensors["W_dec"][active]
        response = sae.feature_response(active)
        change = (3 - features[:, active, None]) * torch.from_numpy(response.u)
        assert torch.allclose(h * weight + bias + change, (edited * weight + bias).float(), atol=1e-4)
        assert np.array_equal(sae.decoder_direction(active), response.u)
    assert (sae.reconstruct(h * weight + bias) - expected).abs().max() < 2e-5
    as_it_is = weir.SAE.load(path, norm_weight=1)
    assert_like(as_it_is, reference, h)
    not_loaded("norm_weight", path, norm_weight=torch.zeros(D_IN))
    not_loaded("norm_weight", path, norm_weight=torch.ones(D_IN + 1))
    not_loaded("norm_bias", write_v6(tmp_path / "b", "standard", weights("standard")), norm_bias=1)


def test_norms_of_the_decoder_are_those_of_the_file(tmp_path):
    """A TopK SAE that chooses by them: before the norm's weight is multiplied into the decoder."""
    torch.manual_seed(0)
    tensors, topk = weights("topk"), {"k": 9, "rescale_acts_by_decoder_norm": True, "apply_b_dec_to_input": True}
    path = write_v6(tmp_path / "a", "topk", tensors, metadata={"hook_name": "blocks.3.ln1.hook_normalized"}, **topk)
    weight, bias = 1.5 + 0.2 * torch.randn(D_IN), 0.4 * torch.randn(D_IN)
    sae, reference = weir.SAE.load(path, norm_weight=weight, norm_bias=bias), Reference("topk", tensors, **topk)
    h = rows()
    acts = reference.encode(h)
    assert np.abs(sae.encode(h * weight + bias).numpy() - acts).max() <= EXACT
    expected = torch.from_numpy(reference.decode(acts, h)) * weight + bias
    assert (sae.reconstruct(h * weight + bias) - expected).abs().max() < 2e-5
    sae.save(tmp_path / "saved")
    saved = weir.SAE.load(tmp_path / "saved")
    assert saved.site == ("attn_in", 3)
    assert torch.equal(saved.reconstruct(h * weight + bias), sae.reconstruct(h * weight + bias))


@pytest.mark.parametrize("architecture", ["jumprelu", "skip_transcoder"])
def test_rows_are_centred_before_the_norms_weight(tmp_path, architecture):
    """What a LayerNorm returns before its weight is centred already, so there `center_rows` changes nothing."""
    torch.manual_seed(0)
    path = write_v6(
        tmp_path, architecture, weights(architecture), metadata={"hook_name": "blocks.3.ln2.hook_normalized"}
    )
    norm = {"norm_weight": 1.5 + 0.2 * torch.randn(D_IN), "norm_bias": 0.4 * torch.randn(D_IN)}
    x = rows()
    h = (x - x.mean(1, keepdim=True)) * norm["norm_weight"] + norm["norm_bias"]
    plain, centred = weir.SAE.load(path, **norm), weir.SAE.load(path, **norm, center_rows=True)
    assert (plain.encode(h) - centred.encode(h)).abs().max() <= EXACT
    assert (plain.reconstruct(h) - centred.reconstruct(h)).abs().max() <= 2e-5


def test_centred_streams(tmp_path):
    tensors = weights("standard")
    path = write_v5(
        tmp_path,
        "standard",
        tensors,
        apply_b_dec_to_input=True,
        model_from_pretrained_kwargs={"center_writing_weights": True},
    )
    assert "LayerNorm" in not_loaded("model_from_pretrained_kwargs.center_writing_weights", path).message
    h, reference = rows(), Reference("standard", tensors, apply_b_dec_to_input=True)
    assert_like(weir.SAE.load(path, center_rows=False), reference, h)
    sae = weir.SAE.load(path, center_rows=True)
    assert_like(sae, reference, h + 3, h - h.mean(1, keepdim=True))
    a = sae.feature_response(4).activation((h + 3).numpy())
    assert np.abs(a - reference.encode(h - h.mean(1, keepdim=True))[:, 4]).max() <= EXACT


def test_the_factor_of_the_input(tmp_path):
    tensors, factor = weights("gated"), 0.3
    entries = {"normalize_activations": "expected_average_only_in", "apply_b_dec_to_input": True}
    path = write_v6(tmp_path / "6", "gated", tensors, **entries)
    assert "norm_scaling_factor" in not_loaded("normalize_activations", path).message
    reference = Reference("gated", tensors, **entries, norm_scaling_factor=factor)
    assert_like(weir.SAE.load(path, norm_scaling_factor=factor), reference, 3 * rows())
    (path / "activation_scaler.json").write_text(json.dumps({"scaling_factor": factor, "has_whitening": False}))
    assert_like(weir.SAE.load(path), reference, 3 * rows())
    (path / "activation_scaler.json").write_text(json.dumps({"scaling_factor": None, "has_whitening": True}))
    not_loaded("activation_scaler.json.has_whitening", path)
    for wrong in (0, -1.0, float("nan"), "2", True):
        not_loaded(
            "norm_scaling_factor", write_v6(tmp_path / "w", "gated", tensors, **entries), norm_scaling_factor=wrong
        )
    # Versions before 3 wrote a bool.
    old = write_v5(tmp_path / "old", "standard", weights("standard"), normalize_activations=True)
    not_loaded("normalize_activations", old)
    not_loaded(
        "norm_scaling_factor", write_v5(tmp_path / "n", "standard", weights("standard")), norm_scaling_factor=2.0
    )


@pytest.mark.parametrize("name", ["scaling_factor", "finetuning_scaling_factor"])
def test_factors_of_fine_tuning(tmp_path, name):
    tensors, factors = weights("jumprelu"), 1 + 0.2 * torch.rand(D_SAE)
    path = write_v5(tmp_path / "a", "jumprelu", {**tensors, name: factors}, finetuning_scaling_factor=True)
    assert_like(weir.SAE.load(path), Reference("jumprelu", tensors, factors=factors.double().numpy()), rows())
    not_loaded("finetuning_scaling_factor", write_v5(tmp_path / "b", "jumprelu", {**tensors, name: factors}))
    ones = write_v5(tmp_path / "c", "jumprelu", {**tensors, name: torch.ones(D_SAE)})
    assert_like(weir.SAE.load(ones), Reference("jumprelu", tensors), rows())


def test_gemma_scope(tmp_path):
    tensors = weights("jumprelu")
    path = write_npz(tmp_path / "layer_20" / "average_l0_71", tensors)
    assert "site" in not_loaded("site", path).message
    for place in (path, path.parent):
        sae = weir.SAE.load(place, site=("resid_post", 20))
        assert sae.architecture == "jumprelu" and sae.site == ("resid_post", 20) and sae.name == "average_l0_71"
        assert_like(sae, Reference("jumprelu", tensors), rows())
    z = weir.SAE.load(path, site=("z", 20))
    assert torch.equal(z.encode(rows().unflatten(1, (3, 8))), sae.encode(rows()))


def test_gemma_scope_transcoders(tmp_path):
    tensors = weights("jumprelu_transcoder")
    path = write_npz(tmp_path, tensors)
    message = not_loaded("norm_weight", path, site=("mlp_in", 5)).message
    assert "norm_weight=1 if" in message and ".save(directory)" in message
    reference, weight = Reference("jumprelu_transcoder", tensors), 1 + torch.rand(D_IN)
    as_it_is = weir.SAE.load(path, site=("mlp_in", 5), norm_weight=1)
    assert as_it_is.architecture == "jumprelu_transcoder" and as_it_is.out_site == ("mlp_out", 5)
    assert_like(as_it_is, reference, rows())
    folded = weir.SAE.load(path, site=("mlp_in", 5), norm_weight=weight)
    assert_like(folded, reference, rows() * weight, rows())
    folded.save(tmp_path / "folded")
    assert_like(weir.SAE.load(tmp_path / "folded"), reference, rows() * weight, rows())


@pytest.mark.parametrize(
    ("entries", "field"),
    [
        ({"architecture": "temporal"}, "architecture"),
        ({"architecture": 3}, "architecture"),
        ({"normalize_activations": "covariance_whitening"}, "normalize_activations"),
        ({"activation_fn_str": "tanh-relu"}, "activation_fn"),
        ({"activation_fn_kwargs": {"k": 3, "postact_fn": "identity"}}, "activation_fn_kwargs"),
        ({"activation_fn_str": "topk"}, "k"),
        ({"activation_fn_str": "topk", "architecture": "jumprelu"}, "activation_fn"),
        ({"reshape_activations": "hook_z"}, "reshape_activations"),
        ({"reshape_activations": "flatten"}, "reshape_activations"),
        ({"apply_b_dec_to_input": "yes"}, "apply_b_dec_to_input"),
        ({"d_in": D_IN + 1}, "d_in"),
        ({"d_sae": "many"}, "d_sae"),
        ({"d_sae": D_SAE + 1}, "d_sae"),
        ({"dtype": "int8"}, "dtype"),
        ({"hook_name": None}, "hook_name"),
        ({"hook_name": "blocks.2.hook_nothing"}, "hook_name"),
        ({"metadata": []}, "metadata"),
        ({"metadata": 3}, "metadata"),
        ({"model_from_pretrained_kwargs": 3}, "model_from_pretrained_kwargs"),
    ],
)
def test_entries_that_are_not_supported_are_named(tmp_path, entries, field):
    path = write_v5(tmp_path, "standard", weights("standard"), **entries)
    if entries == {"metadata": []}:  # empty, as good as missing
        weir.SAE.load(path)
        return
    not_loaded(field, path)


def test_changed_values_of_heads_are_refused(tmp_path):
    z = {"hook_name": "blocks.2.attn.hook_z", "model_from_pretrained_kwargs": {"fold_value_biases": True}}
    not_loaded(
        "model_from_pretrained_kwargs.fold_value_biases", write_v5(tmp_path, "standard", weights("standard"), **z)
    )


def test_files_that_are_missing_or_damaged(tmp_path):
    with pytest.raises(MissingFile):
        weir.SAE.load(tmp_path / "nowhere")
    with pytest.raises(MissingFile):
        weir.SAE.load(tmp_path)
    path = write_v6(tmp_path / "a", "standard", weights("standard"))
    whole = (path / "sae_weights.safetensors").read_bytes()
    for cut in (0, 4, 100, len(whole) - 1):
        (path / "sae_weights.safetensors").write_bytes(whole[:cut])
        not_loaded("sae_weights.safetensors", path)
    (path / "sae_weights.safetensors").unlink()
    with pytest.raises(MissingFile):
        weir.SAE.load(path)
    (path / "cfg.json").write_text("{")
    not_loaded("cfg.json", path)
    (path / "cfg.json").write_text("[]")
    not_loaded("cfg.json", path)
    (tmp_path / "weights.pt").write_bytes(b"x")
    not_loaded("path", tmp_path / "weights.pt", site=("resid_post", 1))


def test_no_pickle_is_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was executed",))

    np.savez(tmp_path / "params.npz", W_enc=np.array([Bomb()], dtype=object))
    not_loaded("params.npz", tmp_path, site=("resid_post", 1))
    whole = write_npz(tmp_path / "b", weights("jumprelu")).read_bytes()
    (tmp_path / "params.npz").write_bytes(whole[: len(whole) // 2])
    not_loaded("params.npz", tmp_path, site=("resid_post", 1))


def test_unknown_and_missing_tensors_are_named(tmp_path):
    tensors = weights("standard")
    not_loaded("b_gate", write_v6(tmp_path / "a", "standard", {**tensors, "b_gate": torch.zeros(D_SAE)}))
    del tensors["b_enc"]
    not_loaded("b_enc", write_v6(tmp_path / "b", "standard", tensors))


def test_dtypes(tmp_path):
    path = write_v6(tmp_path, "standard", weights("standard"), dtype="torch.bfloat16")
    assert weir.SAE.load(path).dtype == torch.bfloat16
    assert weir.SAE.load(path, dtype="float32").dtype == torch.float32
    assert weir.SAE.load(path, dtype=torch.float16).dtype == torch.float16
    not_loaded("dtype", path, dtype="int4")


junk = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)  # fmt: skip
keys = st.sampled_from(
    [
        "architecture", "d_in", "d_sae", "dtype", "hook_name", "hook_layer", "hook_head_index", "activation_fn",
        "activation_fn_kwargs", "apply_b_dec_to_input", "normalize_activations", "metadata", "k", "hook_point",
        "finetuning_scaling_factor", "reshape_activations", "model_from_pretrained_kwargs",
        "rescale_acts_by_decoder_norm",
    ]
)  # fmt: skip


@given(st.dictionaries(keys, junk, max_size=3))
def test_any_configuration_is_loaded_or_refused(tmp_path_factory, entries):
    path = write_v5(tmp_path_factory.getbasetemp() / "junk", "standard", weights("standard"), **entries)
    try:
        sae = weir.SAE.load(path)
    except WeirError as e:
        assert e.field
    else:
        assert sae.encode(rows(2)).shape == (2, D_SAE)


def test_what_is_no_path():
    with refused("path"):
        weir.SAE.load(3)
