"""What `SetFeature` means for autoencoders of every architecture: the formulas, or a refusal by field."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.support.sae_reference import AUTOENCODERS, D_IN, D_OUT, TRANSCODERS, Reference, rows, weights
from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.sae_registry import LoadedSAE, SAERegistry
from vllm_weir.schema.instructions import ACTIVATE, CONST, ENCODE, FEATURE, HELD

EXACT = 1e-5
OPTIONS = {"topk": {"k": 9}}
SITE, READS, WRITES = ("resid_post", 2), ("mlp_in", 1), ("mlp_out", 1)


def registry_of(architecture, **options):
    """A registry with one autoencoder, and its reference."""
    options = {**OPTIONS.get(architecture, {}), **options}
    tensors = weights(architecture)
    site = READS if architecture in TRANSCODERS else SITE
    registry = SAERegistry()
    registry.put(LoadedSAE.new("it", weir.SAE.from_tensors(architecture, site, **tensors, **options)))
    return registry, Reference(architecture, tensors, **options)


def unnamed(*_):
    pytest.fail("no vector is named")


def lowered(registry, width, feature, **target):
    """The one instruction of a `SetFeature`, its vectors, and where it is done."""
    found = registry.resolve(weir.SetFeature("it", feature, **target))
    (instruction,), vectors, *_ = found.lower((width,), unnamed)
    return instruction, vectors, (found.hook, *found.layers)


def of_one_head():
    """A registry with an autoencoder of one head, and its decoder."""
    tensors, registry = weights("topk", d_in=8), SAERegistry()
    registry.put(LoadedSAE.new("it", weir.SAE.from_tensors("topk", ("z", 1), k=3, head=2, **tensors)))
    return registry, tensors["W_dec"]


@pytest.mark.parametrize("architecture", AUTOENCODERS)
def test_adding_to_an_activation_keeps_the_error(architecture):
    """In TopK to the activation after the selection, which is not made again."""
    registry, reference = registry_of(architecture)
    h = rows(12)
    was = reference.encode(h)
    for feature in range(0, 96, 19):
        instruction, vectors, place = lowered(registry, D_IN, feature, add=1.75)
        assert (instruction.kind, instruction.a, place) == (CONST, 1.75, SITE)
        got = h.double().numpy() + 1.75 * vectors[instruction.u].astype(np.float64)
        wanted = [reference.with_feature(h[k : k + 1], feature, was[k, feature] + 1.75)[0] for k in range(len(h))]
        assert np.abs(got - wanted).max() <= EXACT


def test_decoder_norms_of_top_k_are_in_the_direction():
    registry, reference = registry_of("topk", rescale_acts_by_decoder_norm=True)
    h = rows(1)
    instruction, vectors, _ = lowered(registry, D_IN, 5, add=-2.0)
    wanted = reference.with_feature(h, 5, reference.encode(h)[0, 5] - 2.0)
    assert np.abs(h.double().numpy() - 2.0 * vectors[instruction.u].astype(np.float64) - wanted).max() <= EXACT


@pytest.mark.parametrize("architecture", [one for one in AUTOENCODERS if one != "topk"])
def test_values_and_factors_are_one_instruction(architecture):
    """BatchTopK, too: its selection is a threshold once it is trained."""
    registry, _ = registry_of(architecture)
    for target, numbers in (({"value": 3.0}, (-1.0, 3.0)), ({"scale": 3.0}, (2.0, 0.0))):
        instruction, _, place = lowered(registry, D_IN, 4, **target)
        assert (instruction.kind, (instruction.a, instruction.b), place) == (FEATURE, numbers, SITE)


@pytest.mark.parametrize("architecture", TRANSCODERS)
def test_transcoders_read_an_activation_and_use_it_where_they_write(architecture):
    registry, reference = registry_of(architecture)
    h = rows(8)
    features = reference.encode(h)
    before = reference.decode(features, h)
    for feature, target in (
        (0, {"value": 3.0}), (40, {"scale": -0.5}), (95, {"value": 0.0}), (0, {"add": 0.5}), (95, {"add": 0.5}),
    ):  # fmt: skip
        asked = weir.SetFeature("it", feature, **target)
        found = registry.resolve(asked)
        (move,), vectors, _, source, _ = found.lower((D_OUT,), unnamed)
        was = features[:, feature]
        if "add" in target:
            assert (move.kind, move.a) == (CONST, 0.5)
            got = move.a * vectors[move.u].astype(np.float64)
        else:
            reads = source.instruction
            assert (move.kind, reads.kind, source.hook, source.layer) == (HELD, ACTIVATE, *READS)
            raw = h.double().numpy() @ vectors[reads.w].astype(np.float64) + reads.b
            read = np.where(raw > reads.hi, raw, 0.0)
            assert np.abs(read - was).max() <= EXACT
            got = (move.a * read + move.b)[:, None] * vectors[move.u].astype(np.float64)
        assert (found.hook, *found.layers) == WRITES
        changed = features.copy()
        changed[:, feature] = [asked.target(a) for a in was]
        assert np.abs(got - (reference.decode(changed, h) - before)).max() <= EXACT


@pytest.mark.parametrize("target", [{"value": 3.0}, {"scale": 2.0}], ids=["value", "scale"])
def test_top_k_is_encoded_whole_where_it_acts(target):
    registry, _ = registry_of("topk", rescale_acts_by_decoder_norm=True)
    found = registry.resolve(weir.SetFeature("it", 7, **target))
    lowered = found.lower((D_IN,), unnamed)
    encode, held = lowered.instructions
    key = registry.find("it", "name").key
    assert (encode.kind, encode.key, encode.a) == (ENCODE, key, 7.0) and lowered.source is None
    assert (held.kind, held.a, held.b) == (HELD, *((-1.0, 3.0) if "value" in target else (1.0, 0.0)))
    (direction,) = lowered.rows.values()
    assert abs(float(np.linalg.norm(direction)) - 1) <= EXACT


def test_transcoders_of_normalised_rows_are_encoded_whole_where_they_read():
    registry, _ = registry_of("transcoder", normalize_activations="layer_norm")
    found = registry.resolve(weir.SetFeature("it", 7, value=1.0))
    (held,), _, _, source, _ = found.lower((D_OUT,), unnamed)
    assert held.kind == HELD and (source.hook, source.layer) == READS
    assert (source.instruction.kind, source.instruction.a) == (ENCODE, 7.0)


@pytest.mark.parametrize("target", [{"value": 1.0}, {"add": 1.0}], ids=["value", "add"])
def test_rows_that_are_normalised_by_their_own_length_are_refused(target):
    registry, _ = registry_of("standard", normalize_activations="layer_norm")
    with refused("i.name", "no fixed direction"):
        registry.resolve(weir.SetFeature("it", 4, **target, path="i"))


@pytest.mark.parametrize("architecture", ["jumprelu", "topk", "transcoder"])
def test_features_that_there_are_not(architecture):
    registry, _ = registry_of(architecture)
    with refused("i.feature", "count from 0 to 95"):
        registry.resolve(weir.SetFeature("it", 96, add=1.0, path="i"))


def test_one_head_is_encoded_and_changed_where_one_is_read():
    registry, decoder = of_one_head()
    encode, held = registry.resolve(weir.SetFeature("it", 1, value=1.0)).lower((4, 8), unnamed).instructions
    (one,), vectors, *_ = registry.resolve(weir.SetFeature("it", 1, add=1.0)).lower((4, 8), unnamed)
    assert {(step.start, step.stop) for step in (encode, held, one)} == {(16, 24)}
    assert np.array_equal(vectors[one.u], decoder[1].numpy())


def test_one_that_the_workers_may_still_have_is_not_forgotten():
    registry = SAERegistry()
    registry.put(loaded := LoadedSAE.new("it", weir.SAE.from_tensors("topk", ("z", 1), k=3, **weights("topk"))))
    with pytest.raises(OSError), registry.removed("it") as removed:
        assert removed is loaded
        with pytest.raises(WeirError, match="no autoencoder is loaded"):
            registry.find("it", "name")
        with pytest.raises(WeirError, match="unload it, or choose another"), registry.claimed("it"):
            pass
        raise OSError("a worker has ended")
    assert registry.find("it", "name") is loaded
    with registry.removed("it"):
        pass
    with pytest.raises(WeirError, match="none is"):
        registry.find("it", "name")
    with registry.claimed("it"):
        pass


@pytest.mark.parametrize("architecture", [one for one in AUTOENCODERS if one != "topk"])
@pytest.mark.parametrize("subtracts", [False, True])
def test_what_is_set_is_read_back(architecture, subtracts):
    """By the autoencoder's own arithmetic in float64; what is set otherwise is the decoder's part alone."""
    registry, reference = registry_of(architecture, apply_b_dec_to_input=subtracts)
    h = rows(12)
    was, tried = reference.encode(h), 0
    for feature in range(96):
        response = registry.find("it", "").sae.feature_response(feature)
        if not response.w.astype(np.float64) @ response.u > 0.1 * np.linalg.norm(response.w) * np.linalg.norm(
            response.u
        ):
            continue
        for value in (0.0, response.theta + 0.5, 6.0):
            instruction, vectors, place = lowered(registry, D_IN, feature, value=value, read_back=True)
            assert (instruction.kind, place) == (FEATURE, SITE)
            u, w = (vectors[one].astype(np.float64) for one in (instruction.u, instruction.w))
            p = h.double().numpy() @ w + instruction.lo
            act = np.where(p > instruction.hi, p, 0.0)
            after = h.double().numpy() + (instruction.a * act + instruction.b)[:, None] * u
            read = reference.encode(torch.from_numpy(after))[:, feature]
            assert np.abs(read - value).max() <= EXACT * (1 + np.abs(after).max() * np.abs(w).sum())
            if value == 0.0:
                assert np.array_equal(after[was[:, feature] == 0], h.double().numpy()[was[:, feature] == 0])
            tried += 1
    assert tried > 20


@pytest.mark.parametrize("architecture", ["topk", *TRANSCODERS])
def test_what_other_features_or_another_row_decide_is_not_read_back(architecture):
    registry, _ = registry_of(architecture)
    with refused("i.read_back", "no function of this change alone"):
        registry.resolve(weir.SetFeature("it", 4, value=1.0, read_back=True, path="i"))


def test_what_the_encoder_cannot_read_is_refused():
    registry, _ = registry_of("jumprelu")
    responses = [registry.find("it", "").sae.feature_response(feature) for feature in range(96)]
    blind = next(f for f, one in enumerate(responses) if one.w @ one.u < 0)
    with refused("i.read_back", "reads -.* of each unit that its decoder adds"):
        registry.resolve(weir.SetFeature("it", blind, value=6.0, read_back=True, path="i"))
    high = next(f for f, one in enumerate(responses) if one.theta > 0.5)
    with refused("i.value", "above its threshold"):
        registry.resolve(weir.SetFeature("it", high, value=0.5, read_back=True, path="i"))


def cross_layer(count=3):
    """A registry with a cross-layer transcoder, and the weights of each block."""
    blocks = [weights("jumprelu_transcoder", seed) for seed in range(count)]
    generator = torch.Generator().manual_seed(0)
    for layer, one in enumerate(blocks):
        one["W_dec"] = torch.randn(len(one["W_dec"]), count - layer, D_OUT, generator=generator)
    tensors = {name: [one[name] for one in blocks] for name in blocks[0]}
    sae = weir.SAE.from_tensors("jumprelu_transcoder", ("mlp_in", 0), layers=range(count), **tensors)
    registry = SAERegistry()
    registry.put(LoadedSAE.new("it", sae))
    return registry, blocks


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_cross_layer_transcoder_writes_at_every_later_block(layer):
    """At each by its own decoder; the activation is read once, where the block reads."""
    registry, blocks = cross_layer()
    found = registry.resolve(weir.SetFeature("it", 7, layer=layer, value=2.5))
    assert found.source_site == ("mlp_in", layer)
    parts = found.by_layer(3, unnamed)
    assert [part.layers for part in parts] == [(n,) for n in range(layer, 3)]
    sources = set()
    for part, direction in zip(parts, blocks[layer]["W_dec"][7], strict=True):
        lowered = part.lower((D_OUT,), unnamed)
        (instruction,) = lowered.instructions
        assert (instruction.kind, instruction.a, instruction.b) == (HELD, -1.0, 2.5)
        assert (lowered.rows[instruction.u] == direction.numpy()).all()
        sources.add(lowered.source)
    ((hook, at, reads),) = sources
    assert (hook, at, reads.kind) == ("mlp_in", layer, ACTIVATE)
    assert (lowered.rows[reads.w] == blocks[layer]["W_enc"][:, 7].numpy()).all()
    added = registry.resolve(weir.SetFeature("it", 7, layer=layer, add=1.5)).by_layer(3, unnamed)
    kinds = [[one.kind for one in part.lower((D_OUT,), unnamed).instructions] for part in added]
    assert kinds == [[CONST]] * (3 - layer)


def test_which_block_of_a_cross_layer_transcoder():
    registry, _ = cross_layer()
    for asked, field, why in (
        ({}, "layer", "features at blocks 0 to 2; say which"),
        ({"layer": 3}, "layer", "blocks are 0 to 2, got 3"),
        ({"layer": 1, "read_back": True}, "read_back", "leave it out"),
    ):
        with refused(f"intervention.{field}", why):
            registry.resolve(weir.SetFeature("it", 7, value=1.0, **asked))
    plain, _ = registry_of("jumprelu")
    assert plain.resolve(weir.SetFeature("it", 7, value=1.0, layer=2)).layers == (2,)
    with refused("intervention.layer", "at block 2, got 1"):
        plain.resolve(weir.SetFeature("it", 7, value=1.0, layer=1))
    for wrong in (-1, 1.5, "1", True, [1]):
        with refused("intervention.layer"):
            weir.SetFeature("it", 7, value=1.0, layer=wrong)
    asked = weir.SetFeature("it", 7, value=1.0, layer=2)
    assert asked.to_json()["layer"] == 2 and weir.SetFeature.from_json(asked.to_json()) == asked
    features = weir.Features("it", layers=[2, 0])
    assert features.to_json()["layers"] == [0, 2] and weir.Features.from_json(features.to_json()) == features
    assert "layers" not in weir.Features("it").to_json()


@pytest.mark.parametrize("error", [False, True])
def test_a_reconstruction_leaves_the_error_out_unless_it_is_asked_for(error):
    registry, _ = registry_of("jumprelu")
    found = registry.resolve(weir.Reconstruct("it", error=error))
    assert len(found.lower((D_IN,), unnamed).instructions) == (not error)
