"""What `SetFeature` means for autoencoders of every architecture: the formulas, or a refusal by field."""

from __future__ import annotations

import numpy as np
import pytest

import vllm_weir as weir
from tests.support.sae_reference import AUTOENCODERS, D_IN, D_OUT, TRANSCODERS, Reference, rows, weights
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


def lowered(registry, width, feature, **target):
    """The one instruction of a `SetFeature`, its vectors, and where it is done."""
    found = registry.resolve(weir.SetFeature("it", feature, **target))
    (instruction,), vectors, *_ = found.lower((width,), lambda *_: pytest.fail("no vector is named"))
    return instruction, vectors, (found.hook, *found.layers)


@pytest.mark.parametrize("architecture", AUTOENCODERS)
def test_adding_to_an_activation_keeps_the_error(architecture):
    """In TopK to the activation after the selection, which is not made again."""
    registry, reference = registry_of(architecture)
    h = rows(12)
    was = reference.encode(h)
    for feature in range(0, 96, 7):
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


@pytest.mark.parametrize("architecture", TRANSCODERS)
def test_transcoders_have_it_where_they_write(architecture):
    registry, reference = registry_of(architecture)
    h = rows(8)
    features = reference.encode(h)
    before = reference.decode(features, h)
    for feature in (0, 40, 95):
        instruction, vectors, place = lowered(registry, D_OUT, feature, add=0.5)
        assert (instruction.kind, instruction.a, place) == (CONST, 0.5, WRITES)
        changed = features.copy()
        changed[:, feature] += 0.5
        difference = reference.decode(changed, h) - before
        assert np.abs(0.5 * vectors[instruction.u].astype(np.float64) - difference).max() <= EXACT


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
    for feature, target in ((0, {"value": 3.0}), (40, {"scale": -0.5}), (95, {"value": 0.0})):
        asked = weir.SetFeature("it", feature, **target)
        found = registry.resolve(asked)
        (held,), vectors, _, source = found.lower((D_OUT,), lambda *_: pytest.fail("no vector is named"))
        assert (found.hook, *found.layers) == WRITES and (source.hook, source.layer) == READS
        reads = source.instruction
        assert (held.kind, reads.kind) == (HELD, ACTIVATE)
        raw = h.double().numpy() @ vectors[reads.w].astype(np.float64) + reads.b
        was = np.where(raw > reads.hi, raw, 0.0)
        assert np.abs(was - features[:, feature]).max() <= EXACT
        changed = features.copy()
        changed[:, feature] = [asked.target(a) for a in features[:, feature]]
        got = (held.a * was + held.b)[:, None] * vectors[held.u].astype(np.float64)
        assert np.abs(got - (reference.decode(changed, h) - before)).max() <= EXACT


@pytest.mark.parametrize("target", [{"value": 3.0}, {"scale": 2.0}], ids=["value", "scale"])
def test_top_k_is_encoded_whole_where_it_acts(target):
    registry, _ = registry_of("topk", rescale_acts_by_decoder_norm=True)
    found = registry.resolve(weir.SetFeature("it", 7, **target))
    lowered = found.lower((D_IN,), lambda *_: pytest.fail("no vector is named"))
    encode, held = lowered.instructions
    key = registry.find("it", "name").key
    assert (encode.kind, encode.sae, encode.a) == (ENCODE, key, 7.0) and lowered.source is None
    assert (held.kind, held.a, held.b) == (HELD, *((-1.0, 3.0) if "value" in target else (1.0, 0.0)))
    (direction,) = lowered.rows.values()
    assert abs(float(np.linalg.norm(direction)) - 1) <= EXACT


def test_transcoders_of_normalised_rows_are_encoded_whole_where_they_read():
    registry, _ = registry_of("transcoder", normalize_activations="layer_norm")
    found = registry.resolve(weir.SetFeature("it", 7, value=1.0))
    (held,), _, _, source = found.lower((D_OUT,), lambda *_: pytest.fail("no vector is named"))
    assert held.kind == HELD and (source.hook, source.layer) == READS
    assert (source.instruction.kind, source.instruction.a) == (ENCODE, 7.0)


@pytest.mark.parametrize("target", [{"value": 1.0}, {"add": 1.0}], ids=["value", "add"])
def test_rows_that_are_normalised_by_their_own_length_are_refused(target):
    registry, _ = registry_of("standard", normalize_activations="layer_norm")
    with pytest.raises(WeirError, match="no fixed direction") as e:
        registry.resolve(weir.SetFeature("it", 4, **target, path="i"))
    assert e.value.field == "i.name"


def test_features_that_there_are_not():
    for architecture in ("jumprelu", "topk", "transcoder"):
        registry, _ = registry_of(architecture)
        with pytest.raises(WeirError, match="count from 0 to 95") as e:
            registry.resolve(weir.SetFeature("it", 96, add=1.0, path="i"))
        assert e.value.field == "i.feature"


def test_one_head_is_encoded_where_one_is_read():
    tensors = weights("topk", d_in=8)
    registry = SAERegistry()
    registry.put(LoadedSAE.new("it", weir.SAE.from_tensors("topk", ("z", 1), k=3, head=2, **tensors)))
    found = registry.resolve(weir.SetFeature("it", 1, value=1.0))
    encode, held = found.lower((4, 8), lambda *_: pytest.fail("no vector is named")).instructions
    assert (encode.start, encode.stop) == (held.start, held.stop) == (16, 24)


def test_one_head_is_changed_where_one_is_read():
    tensors = weights("topk", d_in=8)
    registry = SAERegistry()
    registry.put(LoadedSAE.new("it", weir.SAE.from_tensors("topk", ("z", 1), k=3, head=2, **tensors)))
    found = registry.resolve(weir.SetFeature("it", 1, add=1.0))
    (one,), vectors, *_ = found.lower((4, 8), lambda *_: pytest.fail("no vector is named"))
    assert (one.start, one.stop) == (16, 24)
    assert np.array_equal(vectors[one.u], tensors["W_dec"][1].numpy())


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
