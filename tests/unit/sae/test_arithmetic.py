"""Activations, reconstructions and feature responses against the formulas written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.properties import examples
from tests.support.sae_reference import (
    AUTOENCODERS,
    D_IN,
    D_OUT,
    D_SAE,
    TRANSCODERS,
    Reference,
    rows,
    weights,
    write_v6,
)
from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.sae.tensors import check_finite

EXACT = 1e-5
SITE = ("resid_post", 2)
OPTIONS = {"topk": {"k": 9}}
POINTWISE = [a for a in (*AUTOENCODERS, *TRANSCODERS) if a != "topk"]


def pair(architecture, **options):
    """The autoencoder and its reference."""
    options = {**OPTIONS.get(architecture, {}), **options}
    transcoder = architecture in TRANSCODERS
    if not transcoder:
        options.setdefault("apply_b_dec_to_input", True)
    tensors = weights(architecture)
    site = ("mlp_in", 1) if transcoder else SITE
    return weir.SAE.from_tensors(architecture, site, **tensors, **options), Reference(architecture, tensors, **options)


def assert_same_features(got, expected):
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy() > 0, expected > 0)
    assert np.abs(got.numpy() - expected).max() <= EXACT
    active = (expected > 0).mean()
    assert 0.02 < active < 0.9, "the test has to see active and inactive features"


@pytest.mark.parametrize("normalisation", ["none", "constant_norm_rescale", "layer_norm"])
@pytest.mark.parametrize("architecture", [*AUTOENCODERS, *TRANSCODERS])
def test_encode_and_decode(architecture, normalisation):
    sae, reference = pair(architecture, normalize_activations=normalisation)
    h = rows()
    features = sae.encode(h)
    assert_same_features(features, reference.encode(h))
    assert np.abs(sae.decode(features, h).numpy() - reference.decode(features.double().numpy(), h)).max() <= EXACT
    assert torch.equal(sae.reconstruct(h), sae.decode(features, h))


def test_a_skip_connection_needs_the_rows():
    sae, reference = pair("skip_transcoder")
    h = rows()
    features = sae.encode(h)
    with refused("rows", "W_skip @ row: decode"):
        sae.decode(features)
    without = features.double().numpy() @ reference.w["W_dec"] + reference.w["b_dec"]
    skipped = sae.decode(features, h).double().numpy() - without
    assert np.abs(skipped - h.double().numpy() @ reference.w["W_skip"].T).max() <= EXACT
    assert torch.equal(sae.decode(features, h), sae.reconstruct(h))


def test_row_normalisations_are_undone_with_the_rows():
    for normalisation in ("constant_norm_rescale", "layer_norm"):
        sae, _ = pair("standard", normalize_activations=normalisation)
        with refused("rows"):
            sae.decode(sae.encode(rows()))


@examples(60)
@given(st.sampled_from([*AUTOENCODERS, *TRANSCODERS]), st.integers(0, 2**31), st.integers(0, 6), st.integers(1, D_SAE))
def test_top_is_the_largest_of_encode(architecture, seed, n, k):
    sae, _ = pair(architecture)
    h = rows(n, seed)
    ids, values = sae.top(h, k)
    features = sae.encode(h)
    assert ids.shape == values.shape == (n, k) and ids.dtype == torch.int64
    assert torch.equal(features.gather(1, ids), values)
    assert torch.equal(values, features.sort(1, descending=True).values[:, :k])


def test_top_in_parts_is_the_same(monkeypatch):
    sae, _ = pair("jumprelu")
    whole = sae.top(rows(), 5)
    monkeypatch.setattr("vllm_weir.sae.autoencoder.MAX_DENSE", 7 * D_SAE)
    (ids, values), (ids_of_parts, values_of_parts) = whole, sae.top(rows(), 5)
    assert torch.equal(ids, ids_of_parts)
    torch.testing.assert_close(
        values_of_parts, values, rtol=1e-5, atol=1e-6
    )  # a product's last bits vary with its shape


@given(
    architecture=st.sampled_from([a for a in POINTWISE if a not in TRANSCODERS]),
    apply=st.booleans(),
    feature=st.integers(0, D_SAE - 1),
    target=st.floats(-8, 8),
    seed=st.integers(0, 2**31),
)
def test_setting_a_feature_keeps_the_error(architecture, apply, feature, target, seed):
    """h + (target - a) u is the reconstruction with the feature replaced, plus what was not reconstructed."""
    sae, reference = pair(architecture, apply_b_dec_to_input=apply)
    h = rows(8, seed)
    response = sae.feature_response(feature)
    a = response.activation(h.numpy())
    edited = h.double().numpy() + (target - a)[:, None] * response.u.astype(np.float64)
    assert np.abs(a - reference.encode(h)[:, feature]).max() <= EXACT
    assert np.abs(edited - reference.with_feature(h, feature, target)).max() <= EXACT


@pytest.mark.parametrize("architecture", POINTWISE)
def test_every_feature_responds_as_it_is_encoded(architecture):
    sae, _ = pair(architecture)
    h = rows(16)
    encoded = sae.encode(h).numpy()
    for feature in range(D_SAE):
        response = sae.feature_response(feature)
        assert response.w.dtype == response.u.dtype == np.float32 and response.theta >= 0
        assert response.w.shape == (D_IN,) and response.u.shape == (D_OUT if sae.config.is_transcoder else D_IN,)
        activation = response.activation(h.numpy())
        assert np.array_equal(activation > 0, encoded[:, feature] > 0)
        assert np.abs(activation - encoded[:, feature]).max() <= EXACT


def test_a_factor_of_the_input_is_in_the_response(tmp_path):
    tensors, factor = weights("jumprelu"), 0.31
    write_v6(tmp_path, "jumprelu", tensors, normalize_activations="expected_average_only_in", apply_b_dec_to_input=True)
    sae = weir.SAE.load(tmp_path, norm_scaling_factor=factor)
    # SAELens folds the factor into b_dec, too, which it then subtracts from rows that are not scaled.
    folded = {**tensors, "W_enc": factor * tensors["W_enc"], "W_dec": tensors["W_dec"] / factor}
    folded["b_dec"] = tensors["b_dec"] / factor
    scaled = Reference(
        "jumprelu",
        tensors,
        apply_b_dec_to_input=True,
        normalize_activations="expected_average_only_in",
        norm_scaling_factor=factor,
    )
    h = 3 * rows()
    assert_same_features(sae.encode(h), scaled.encode(h))
    assert np.abs(Reference("jumprelu", folded, apply_b_dec_to_input=True).encode(h) - scaled.encode(h)).max() <= EXACT
    response = sae.feature_response(5)
    edited = h.double().numpy() + (2.0 - response.activation(h.numpy()))[:, None] * response.u.astype(np.float64)
    assert np.abs(edited - scaled.with_feature(h, 5, 2.0)).max() <= EXACT


def test_decoder_direction_is_one_unit_of_a_feature():
    for architecture, options in (("topk", {"rescale_acts_by_decoder_norm": True}), ("gated", {})):
        sae, _ = pair(architecture, **options)
        features = torch.zeros(1, D_SAE)
        none = sae.decode(features)
        features[0, 7] = 1
        assert np.abs((sae.decode(features) - none)[0].numpy() - sae.decoder_direction(7)).max() <= EXACT


@pytest.mark.parametrize(
    ("architecture", "options", "field"),
    [
        ("topk", {}, "architecture"),
        ("standard", {"normalize_activations": "layer_norm"}, "normalize_activations"),
        ("gated", {"normalize_activations": "constant_norm_rescale"}, "normalize_activations"),
        ("transcoder", {"normalize_activations": "layer_norm"}, "normalize_activations"),
    ],
)
def test_responses_that_depend_on_more_than_a_product_are_refused(architecture, options, field):
    sae, _ = pair(architecture, **options)
    with refused(field):
        sae.feature_response(0)


@pytest.mark.parametrize("feature", [-1, D_SAE, 1.5, True, "0", None])
def test_features_that_do_not_exist(feature):
    sae, _ = pair("standard")
    for ask in (sae.feature_response, sae.decoder_direction):
        with refused("feature"):
            ask(feature)


def test_a_feature_with_nan_is_no_instruction():
    tensors = weights("standard")
    for name, at in (("W_enc", (0, 3)), ("W_dec", (3, 0)), ("b_enc", (3,))):
        broken = {**tensors, name: tensors[name].clone()}
        broken[name][at] = float("nan")
        sae = weir.SAE.from_tensors("standard", SITE, **broken)
        with pytest.raises(WeirError, match="feature 3"):
            sae.feature_response(3)
        sae.feature_response(4)


def test_heads():
    tensors = weights("standard", d_in=8)
    h = rows(5, width=24).unflatten(1, (3, 8))
    one = weir.SAE.from_tensors("standard", ("z", 1), head=2, **tensors)
    assert one.head == 2 and torch.equal(one.encode(h), one.encode(h[:, 2]))
    flat = weir.SAE.from_tensors("standard", ("z", 1), **weights("standard"))
    assert flat.head is None and torch.equal(flat.encode(h), flat.encode(h.flatten(1)))
    for sae, wrong in ((one, h[:, :2]), (flat, h[:, :2]), (flat, rows(5, width=23)), (flat, torch.zeros(24))):
        with refused("rows"):
            sae.encode(wrong)


def test_arrays_and_lists_are_taken_as_tensors_are():
    sae, _ = pair("standard")
    h = rows(4)
    features = sae.encode(h)
    for numbers in (h.numpy(), h.tolist()):
        assert torch.equal(sae.encode(numbers), features) and torch.equal(sae.top(numbers, 3)[0], sae.top(h, 3)[0])
        assert torch.equal(sae.reconstruct(numbers), sae.reconstruct(h))
    assert torch.equal(sae.decode(features.numpy()), sae.decode(features))
    for ask, field in ((sae.encode, "rows"), (sae.decode, "features")):
        for wrong in ("rows", None, [[1.0], [1.0, 2.0]]):
            with refused(field):
                ask(wrong)


def test_weights_that_would_give_nan_are_told_from_features_that_are_never_active():
    tensors = weights("jumprelu")
    for name, at in (("W_enc", (0, 3)), ("W_dec", (3, 0)), ("b_dec", (3,)), ("b_enc", (3,)), ("threshold", (3,))):
        for value in (float("nan"), float("inf")):
            broken = {**tensors, name: tensors[name].clone()}
            broken[name][at] = value
            if value == float("inf") and name in ("b_enc", "threshold"):
                check_finite(broken, "sae")
                continue
            with refused(f"sae.{name}"):
                check_finite(broken, "sae")


def test_half_precision_weights_are_read_in_float32():
    sae, _ = pair("jumprelu")
    half = sae.to(dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.nbytes * 2 == sae.nbytes and sae.dtype == torch.float32
    assert torch.equal(half.encode(rows()), half.to(dtype=torch.float32).encode(rows()))
    assert torch.equal(half.encode(rows().bfloat16()), half.encode(rows().bfloat16().float()))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"W_enc": torch.zeros(D_IN, D_SAE + 1)}, "W_dec"),
        ({"W_enc": torch.zeros(D_IN)}, "W_enc"),
        ({"b_enc": torch.zeros(D_SAE + 1)}, "b_enc"),
        ({"b_enc": torch.zeros(D_SAE, dtype=torch.int64)}, "b_enc"),
        ({"threshold": torch.zeros(D_SAE)}, "threshold"),
        ({"W_dec": torch.zeros(D_SAE, D_IN + 1), "b_dec": torch.zeros(D_IN + 1)}, "W_dec"),
        ({"unknown": 3}, "unknown"),
        ({"head": 1}, "head"),
        ({"out_site": ("mlp_out", 2)}, "out_site"),
        ({"normalize_activations": "whitening"}, "normalize_activations"),
        ({"rescale_acts_by_decoder_norm": True}, "rescale_acts_by_decoder_norm"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, field):
    with refused(field):
        weir.SAE.from_tensors("standard", SITE, **{**weights("standard"), **change})


def test_what_an_architecture_lacks_is_refused():
    for architecture in (*AUTOENCODERS, *TRANSCODERS):
        site = ("mlp_in", 1) if architecture in TRANSCODERS else SITE
        tensors = weights(architecture)
        for name in tensors:
            with refused(name):
                weir.SAE.from_tensors(
                    architecture, site, k=3, **{key: value for key, value in tensors.items() if key != name}
                )
    for k in (0, -1, D_SAE + 1, 2.5):
        with refused("k"):
            weir.SAE.from_tensors("topk", SITE, k=k, **weights("topk"))
    with refused("out_site"):
        weir.SAE.from_tensors("transcoder", ("resid_mid", 1), **weights("transcoder"))
    with refused("head"):
        weir.SAE.from_tensors("transcoder", ("z", 1), out_site=("attn_out", 1), head=2, **weights("transcoder"))
    with refused("architecture"):
        weir.SAE.from_tensors("temporal", SITE)


@pytest.mark.parametrize(
    "made",
    [
        lambda w: w,
        lambda w: w.astype(">f4"),
        lambda w: np.flip(np.flip(w).copy()),
        lambda w: np.asfortranarray(w.astype(np.float64)),
        lambda w: w.tolist(),
        lambda w: torch.tensor(w),
    ],
)
def test_weights_are_tensors_arrays_or_lists(made):
    """Read-only arrays, other byte orders and strides included, which torch itself does not take."""
    w = {name: np.float32(value) for name, value in Reference("jumprelu", weights("jumprelu")).w.items()}
    for one in w.values():
        one.setflags(write=False)
    expected = weir.SAE.from_tensors("jumprelu", ("resid_post", 1), **{k: torch.tensor(v) for k, v in w.items()})
    sae = weir.SAE.from_tensors("jumprelu", ("resid_post", 1), **{name: made(value) for name, value in w.items()})
    assert torch.equal(sae.encode(rows()), expected.encode(rows()))
    again = weir.SAE(sae.config, {name: made(value) for name, value in w.items()})
    assert torch.equal(again.reconstruct(rows()), expected.reconstruct(rows()))


def test_what_are_no_weights_is_named():
    w = {name: np.float32(value) for name, value in Reference("standard", weights("standard")).w.items()}
    site = ("resid_post", 1)
    for name, value, why in (
        ("W_enc", "a", "expected a tensor or an array of numbers, got str"),
        ("W_enc", np.array([["a"]]), "got ndarray of <U1"),
        ("W_enc", w["W_enc"].astype(np.int64), "expected floats, got torch.int64"),
        ("W_dec", w["W_dec"][1:], "expected shape"),
        ("W_other", w["W_enc"], "a standard SAE has no such tensor"),
    ):
        with refused(name, why):
            weir.SAE.from_tensors("standard", site, **{**w, name: value})
