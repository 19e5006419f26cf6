"""Autoencoders whose activations take the whole row: TopK transcoders, AbsTopK, matching pursuit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.support.sae_reference import CHOOSING, D_IN, D_SAE, Reference, rows, weights, write_v6
from tests.unit.refusals import refused

EXACT = 1e-5
PURSUIT = "matching_pursuit"
EVERY = [*CHOOSING, PURSUIT]


def site_of(architecture):
    return ("mlp_in", 1) if "transcoder" in architecture else ("resid_post", 2)


def pair(architecture, seed=0, **options):
    tensors, options = weights(architecture, seed), {"k": 9} | options
    sae = weir.SAE.from_tensors(architecture, site_of(architecture), **tensors, **options)
    return sae, Reference(architecture, tensors, **options)


@pytest.mark.parametrize("normalisation", ["none", "constant_norm_rescale", "layer_norm"])
@pytest.mark.parametrize("architecture", EVERY)
def test_encode_and_decode(architecture, normalisation):
    """Also with b_dec taken out of the row, where that is asked for; activations keep their signs in AbsTopK."""
    for apply in (False, True)[: 1 if "transcoder" in architecture else 2]:
        sae, reference = pair(architecture, normalize_activations=normalisation, apply_b_dec_to_input=apply)
        h = rows()
        features, expected = sae.encode(h), reference.encode(h)
        assert np.array_equal(features.numpy() != 0, expected != 0) and 0.02 < (expected != 0).mean() < 0.5
        assert np.abs(features.numpy() - expected).max() <= EXACT
        assert bool((features < 0).any()) == ("abs" in architecture)
        assert np.abs(sae.decode(features, h).numpy() - reference.decode(features.double().numpy(), h)).max() <= EXACT
        assert torch.equal(sae.reconstruct(h), sae.decode(features, h))


def test_decoder_norms_in_abs_top_k():
    sae, reference = pair("abstopk", rescale_acts_by_decoder_norm=True)
    h = rows()
    assert np.abs(sae.encode(h).numpy() - reference.encode(h)).max() <= EXACT
    assert not torch.equal(sae.encode(h), pair("abstopk")[0].encode(h))


def test_the_most_active_of_signed_features_are_the_largest_by_absolute_value():
    sae, _ = pair("abstopk")
    features = sae.encode(rows())
    ids, values = sae.top(rows(), 12)
    assert torch.equal(features.gather(1, ids), values) and bool((values < 0).any())
    assert torch.equal(values.abs(), features.abs().sort(1, descending=True).values[:, :12])


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1},
        {"k": 40},
        {"k": 40, "stop_on_duplicate_support": True},
        {"k": 0, "residual_threshold": 2.0},
        {"k": 0, "stop_on_duplicate_support": True, "residual_threshold": 0.5},
    ],
    ids=str,
)
def test_matching_pursuit_ends_where_it_is_told(options):
    """After k steps (d_in of them if k is 0), at a step that adds no feature, or where little is left."""
    sae, reference = pair(PURSUIT, apply_b_dec_to_input=True, **options)
    h = rows(60)
    features, expected = sae.encode(h).numpy(), reference.encode(h)
    assert np.array_equal(features != 0, expected != 0) and np.abs(features - expected).max() <= EXACT
    active = (expected != 0).sum(1)
    assert (active == 1).all() if options["k"] == 1 else len(set(active)) > 1
    assert active.max() <= (options["k"] or D_IN)


@pytest.mark.parametrize("architecture", EVERY)
def test_one_feature_is_no_function_of_a_product(architecture):
    sae, _ = pair(architecture)
    assert sae.config.encodes_rows
    with refused("architecture", "depends on all its other features"):
        sae.feature_response(0)
    none, features = torch.zeros(1, D_SAE), torch.zeros(1, D_SAE)
    features[0, 7] = -1.0 if "abs" in architecture else 1.0
    h = rows(1)
    moved = sae.decode(features, h) - sae.decode(none, h)
    assert (moved[0] - features[0, 7] * torch.from_numpy(sae.decoder_direction(7))).abs().max() <= EXACT


@pytest.mark.parametrize("architecture", EVERY)
def test_what_is_saved_is_loaded(tmp_path, architecture):
    options = {"residual_threshold": 0.25, "stop_on_duplicate_support": True} if architecture == PURSUIT else {}
    sae, _ = pair(architecture, **options)
    sae.save(tmp_path)
    again = weir.SAE.load(tmp_path)
    assert torch.equal(again.reconstruct(rows()), sae.reconstruct(rows()))
    for name in ("architecture", "site", "out_site", "k", *options):
        assert getattr(again.config, name) == getattr(sae.config, name), name


def test_files_of_saelens(tmp_path):
    """AbsTopK as TopK; matching pursuit without an encoder, and with SAELens's bounds where it says none."""
    tensors = weights("abstopk")
    sae = weir.SAE.load(write_v6(tmp_path / "abs", "abstopk", tensors, k=5, rescale_acts_by_decoder_norm=True))
    reference = Reference("abstopk", tensors, k=5, rescale_acts_by_decoder_norm=True)
    assert np.abs(sae.encode(rows()).numpy() - reference.encode(rows())).max() <= EXACT
    given = {"residual_threshold": 0.5, "max_iterations": 6, "stop_on_duplicate_support": False}
    for path, entries, expected in (
        ("given", given, {"k": 6, "residual_threshold": 0.5, "stop_on_duplicate_support": False}),
        ("none", {"max_iterations": None}, {"k": 0, "residual_threshold": 0.01, "stop_on_duplicate_support": True}),
    ):
        tensors = weights(PURSUIT)
        file = write_v6(tmp_path / path, PURSUIT, tensors, apply_b_dec_to_input=True, **entries)
        sae = weir.SAE.load(file)
        assert {name: getattr(sae.config, name) for name in expected} == expected
        reference = Reference(PURSUIT, tensors, apply_b_dec_to_input=True, **expected)
        assert np.abs(sae.encode(rows()).numpy() - reference.encode(rows())).max() <= EXACT
        assert (sae.d_in, sae.d_sae, sae.d_out) == (D_IN, D_SAE, D_IN)


@pytest.mark.parametrize(
    ("entries", "given", "field"),
    [
        ({"normalize_activations": "expected_average_only_in"}, {"norm_scaling_factor": 0.5}, "norm_scaling_factor"),
        ({}, {"center_rows": True}, "center_rows"),
        ({}, {"norm_weight": torch.full((D_IN,), 2.0)}, "norm_weight"),
        ({}, {"norm_weight": 1, "norm_bias": torch.ones(D_IN)}, "norm_bias"),
        ({"metadata": {"hook_name": "blocks.1.ln2.hook_normalized"}}, {}, "norm_weight"),
        ({"max_iterations": 2.5}, {}, "k"),
        ({"residual_threshold": -1.0}, {}, "residual_threshold"),
        ({"residual_threshold": "x"}, {}, "residual_threshold"),
        ({"stop_on_duplicate_support": 1}, {}, "stop_on_duplicate_support"),
    ],
)
def test_what_matching_pursuit_cannot_do_is_refused(tmp_path, entries, given, field):
    """Nothing can be folded into an encoder that is the decoder."""
    path = write_v6(tmp_path, PURSUIT, weights(PURSUIT), **entries)
    with refused(field):
        weir.SAE.load(path, **given)


def test_fields_of_other_architectures_are_refused():
    for name, value in (
        ("residual_threshold", 0.1),
        ("stop_on_duplicate_support", True),
        ("layers", [2]),
        ("writes", 2),
    ):
        with refused("layers" if name == "writes" else name):
            weir.SAE.from_tensors("standard", ("resid_post", 2), **weights("standard"), **{name: value})
    for k in (0, -1, D_SAE + 1):
        with refused("k"):
            weir.SAE.from_tensors("abstopk", ("resid_post", 2), k=k, **weights("abstopk"))
    with refused("W_enc", "no such tensor"):
        weir.SAE.from_tensors(PURSUIT, ("resid_post", 2), **weights(PURSUIT), W_enc=torch.zeros(D_IN, D_SAE))
