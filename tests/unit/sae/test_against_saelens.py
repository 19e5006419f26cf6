"""`weir.SAE` against SAELens itself, where it is installed (``pip install sae-lens``)."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.support.machine import module, needs
from tests.support.sae_reference import TRANSCODERS, rows, weights, write_v5, write_v6

pytestmark = needs(module("sae_lens"))

EXACT = 1e-5
ARCHITECTURES = ["standard", "gated", "jumprelu", "topk", "abstopk", "matching_pursuit", *TRANSCODERS]


def options(architecture):
    k = {"k": 9, "rescale_acts_by_decoder_norm": True} if "topk" in architecture else {}
    if architecture == "matching_pursuit":
        k = {"max_iterations": 9}
    return {**k, "apply_b_dec_to_input": architecture not in TRANSCODERS}


def loaded(path):
    from sae_lens import SAE

    return SAE.load_from_disk(path)


@torch.no_grad()
def assert_equal(sae, theirs, h):
    features, expected = sae.encode(h), theirs.encode(h)
    assert torch.equal(features != 0, expected != 0) and 0.02 < (expected != 0).float().mean() < 0.9
    assert (features - expected).abs().max() <= EXACT
    assert (sae.reconstruct(h) - theirs(h)).abs().max() <= EXACT


@pytest.mark.parametrize("normalisation", ["none", "constant_norm_rescale", "layer_norm"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_file(tmp_path, architecture, normalisation):
    path = write_v6(
        tmp_path, architecture, weights(architecture), normalize_activations=normalisation, **options(architecture)
    )
    assert_equal(weir.SAE.load(path), loaded(path), rows(200))


@pytest.mark.parametrize("architecture", ["standard", "gated", "jumprelu", "topk"])
def test_the_same_file_of_version_5(tmp_path, architecture):
    k = {"k": 9} if architecture == "topk" else {}
    path = write_v5(tmp_path, architecture, weights(architecture), apply_b_dec_to_input=True, **k)
    assert_equal(weir.SAE.load(path), loaded(path), rows(200))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saelens_loads_what_is_saved(tmp_path, architecture):
    given = {} if architecture in TRANSCODERS else {"apply_b_dec_to_input": True}
    given |= {"k": 7} if architecture in ("topk", "abstopk", "matching_pursuit") else {}
    site = ("mlp_in", 1) if architecture in TRANSCODERS else ("resid_post", 2)
    sae = weir.SAE.from_tensors(architecture, site, **weights(architecture), **given)
    sae.save(tmp_path)
    theirs = loaded(tmp_path)
    assert theirs.cfg.metadata.hook_name == f"blocks.{'1.mlp.hook_in' if site[1] == 1 else '2.hook_resid_post'}"
    assert_equal(sae, theirs, rows(200))


def test_a_factor_of_the_input_is_folded_as_saelens_folds_it(tmp_path):
    for architecture in ("standard", "gated", "jumprelu", "topk"):
        path = write_v6(
            tmp_path / architecture,
            architecture,
            weights(architecture),
            normalize_activations="expected_average_only_in",
            **options(architecture),
        )
        theirs = loaded(path)
        theirs.fold_activation_norm_scaling_factor(0.4)
        assert_equal(weir.SAE.load(path, norm_scaling_factor=0.4), theirs, 2 * rows(200))


@pytest.mark.parametrize("rescale", [False, True])
def test_batch_top_k(tmp_path, rescale):
    """What training saves for inference, a JumpReLU SAE, and its own checkpoint are the same to us."""
    from sae_lens import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
    from sae_lens.saes.sae import SAEMetadata

    tensors = weights("standard")
    d_in, d_sae = tensors["W_enc"].shape
    cfg = BatchTopKTrainingSAEConfig(d_in=d_in, d_sae=d_sae, k=20, rescale_acts_by_decoder_norm=rescale)
    cfg.metadata = SAEMetadata(hook_name="blocks.2.hook_resid_post", model_name="tiny")
    training = BatchTopKTrainingSAE(cfg)
    training.load_state_dict({**tensors, "topk_threshold": torch.tensor(0.21, dtype=torch.float64)})
    training.save_model(tmp_path / "training")
    training.save_inference_model(tmp_path / "inference")
    theirs = loaded(tmp_path / "inference")
    ours = [weir.SAE.load(tmp_path / name) for name in ("training", "inference")]
    assert [sae.architecture for sae in ours] == ["batchtopk", "jumprelu"]
    for sae in ours:
        assert_equal(sae, theirs, rows(200))


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["standard", "gated", "jumprelu"])
def test_setting_a_feature_is_use_error_term(tmp_path, architecture):
    path = write_v6(tmp_path, architecture, weights(architecture), apply_b_dec_to_input=True)
    sae, theirs, h = weir.SAE.load(path), loaded(path), rows(50)
    theirs._use_error_term = True
    for feature in range(0, sae.d_sae, 7):

        def set_feature(acts, hook, feature=feature):
            acts[:, feature] = 3.5
            return acts

        expected = theirs.run_with_hooks(h, fwd_hooks=[("hook_sae_acts_post", set_feature)])
        response = sae.feature_response(feature)
        change = (3.5 - torch.from_numpy(response.activation(h.numpy())))[:, None] * torch.from_numpy(response.u)
        assert (h + change - expected).abs().max() <= EXACT
        assert change.abs().max() > 0.1
