"""Vectors of repeng, steering-vectors, pyreft and llama.cpp's `gguf`, with those libraries' own code."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import torch

from tests.support.machine import module, needs
from vllm_weir.errors import WeirError
from vllm_weir.experiments.directions import Directions
from vllm_weir.experiments.vectors.load import load_vector
from vllm_weir.experiments.vectors.reft import load_reft

D, LAYERS = 64, 4


@pytest.fixture
def repeng(monkeypatch):
    monkeypatch.setattr(np, "float_", np.float64, raising=False)  # repeng 0.4 names what numpy 2 has not
    import repeng

    return repeng


@pytest.fixture
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=D, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=100)).eval()


def vectors(layers):
    rng = np.random.default_rng(0)
    return {layer: rng.standard_normal(D).astype(np.float32) for layer in layers}


@torch.no_grad()
def logits(model):
    return model(torch.arange(1, 30)[None]).logits


@torch.no_grad()
def logits_of(model, found: Directions, scale):
    """Logits with ``scale * vector`` added where Weir adds it: at `resid_post`, what leaves a block; or its parts."""
    where = {"resid_post": "model.layers.{}", "attn_out": "model.layers.{}.self_attn", "mlp_out": "model.layers.{}.mlp"}

    def adding(vector):
        def hook(module, args, out):
            return (out[0] + scale * vector, *out[1:]) if isinstance(out, tuple) else out + scale * vector

        return hook

    modules = [model.get_submodule(where[found.hook].format(layer)) for layer in found.layers]
    handles = [m.register_forward_hook(adding(found.vector(layer))) for m, layer in zip(modules, found.layers)]
    try:
        return logits(model)
    finally:
        for handle in handles:
            handle.remove()


@needs(module("repeng"))
@pytest.mark.parametrize("layers", [(1, 3), (0, 2)])
def test_what_repeng_writes(tmp_path, repeng, layers):
    theirs = repeng.ControlVector("llama", vectors(layers))
    theirs.export_gguf(tmp_path / "v.gguf")
    torch.save(theirs, tmp_path / "v.pt")
    for name in ("v.gguf", "v.pt"):
        found = load_vector(tmp_path / name)
        assert found.layers == layers and found.hook == "resid_post" and found.details["model_type"] == "llama"
        assert all(np.array_equal(found.vectors[layer], theirs.directions[layer]) for layer in layers)


@needs(module("repeng"))
def test_repeng_reads_what_is_saved(tmp_path, repeng):
    ours = Directions(vectors=vectors((1, 3)), details={"model_type": "llama"})
    ours.save(tmp_path / "v.gguf")
    for theirs in (repeng.ControlVector.import_gguf(tmp_path / "v.gguf"), ours.to_repeng()):
        assert theirs == repeng.ControlVector("llama", dict(ours.vectors))
    assert ours.to_repeng("qwen3").model_type == "qwen3"
    with pytest.raises(WeirError, match="not to mlp_out"):
        Directions("mlp_out", vectors=vectors((1,))).to_repeng()


@needs(module("repeng"))
@pytest.mark.parametrize("layers", [(1, 3), (0, 2)])
def test_repeng_adds_where_the_loaded_vector_is_added(tmp_path, repeng, model, layers):
    theirs = repeng.ControlVector("llama", vectors(layers))
    theirs.export_gguf(tmp_path / "v.gguf")
    ours = logits_of(model, load_vector(tmp_path / "v.gguf"), 1.5)
    plain = logits(model)
    controlled = repeng.ControlModel(model, list(layers))
    controlled.set_control(theirs, 1.5)
    assert (logits(controlled) - ours).abs().max() <= 1e-5 < (plain - ours).abs().max()


@needs(module("steering_vectors"))
@pytest.mark.parametrize("layer_type", ["decoder_block", "self_attn", "mlp"])
def test_steering_vectors_adds_where_the_loaded_vector_is_added(tmp_path, model, layer_type):
    from steering_vectors import SteeringVector

    theirs = SteeringVector({n: torch.from_numpy(v) for n, v in vectors((0, 3)).items()}, layer_type)
    torch.save(theirs, tmp_path / "v.pt")
    found, plain = load_vector(tmp_path / "v.pt"), logits(model)
    assert found.layers == (0, 3) and found.method == "steering-vectors"
    ours = logits_of(model, found, 1.5)
    with theirs.apply(model, multiplier=1.5):
        assert (logits(model) - ours).abs().max() <= 1e-5 < (plain - ours).abs().max()


@needs(module("gguf"))
def test_llama_cpps_reader_reads_what_is_saved(tmp_path):
    import gguf

    ours = Directions(vectors=vectors((1, 3)))
    ours.save(tmp_path / "v.gguf", model_hint="llama")
    reader = gguf.GGUFReader(tmp_path / "v.gguf")
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert reader.get_field("controlvector.model_hint").contents() == "llama"
    assert reader.get_field("controlvector.layer_count").contents() == 2
    assert {t.name: t.tensor_type for t in reader.tensors} == dict.fromkeys(
        ("direction.1", "direction.3"), gguf.GGMLQuantizationType.F32
    )
    assert all(np.array_equal(t.data, ours.vectors[int(t.name[-1])]) for t in reader.tensors)


@needs(module("pyvene"), module("pyreft"))
@pytest.mark.parametrize("kind", ["Loreft", "Noreft", "Consreft", "Direft", "Nodireft", "Lobireft"])
def test_pyreft_changes_rows_as_what_is_loaded_does(tmp_path, monkeypatch, model, kind):
    import pyvene

    file = importlib.util.find_spec("pyreft").submodule_search_locations[0] + "/interventions.py"
    spec = importlib.util.spec_from_file_location("pyreft.interventions", file)  # without its trainers' needs
    interventions = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, interventions)
    spec.loader.exec_module(interventions)
    made = getattr(interventions, f"{kind}Intervention")
    options = dict(embed_dim=D, low_rank_dimension=3, dtype=torch.float32, add_bias=True)
    one = {"layer": 2, "component": "block_output", "low_rank_dimension": 3, "intervention": made(**options)}
    theirs = pyvene.IntervenableModel(pyvene.IntervenableConfig([one]), model)
    theirs.save(str(tmp_path / "v"))
    h = torch.randn(20, D)
    with torch.no_grad():
        wanted = one["intervention"](h)
    if kind == "Lobireft":
        found = load_vector(tmp_path / "v")
        assert found.layers == (2,)
        ours = h + found.vector(2)
    else:
        (found,) = load_reft(tmp_path / "v")
        assert found.layers == (2,) and found.hook == "resid_post"
        W, rotation, b = (torch.from_numpy(getattr(found, name).array.copy()) for name in ("W", "R", "b"))
        ours = h + (h @ W.T + b - h @ rotation.T) @ rotation
    assert (ours - wanted).abs().max() <= 1e-5 < (h - wanted).abs().max()
