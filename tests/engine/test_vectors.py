"""Vectors from other systems' files: the steered engine equals transformers with hooks as those systems set them."""

from __future__ import annotations

import json

import pytest
import torch

import vllm_weir as weir
from tests.support.measure import rel_err, rounding
from tests.support.steered import directory, prompt, sampling, tokens, truth, vectors
from vllm_weir.schema.gguf import write_gguf

pytestmark = pytest.mark.engine("steering")
BOUND = rounding()
LENGTH, SCALE = 24, 1.5


def hooked(change):
    """Rows of each block's output and the next token where `change` gives {module: function of its output}."""
    model = truth(directory()).model
    rows = {}

    def changing(function):
        return lambda m, a, out: (function(out[0]), *out[1:]) if isinstance(out, tuple) else function(out)

    def keeping(layer):
        def hook(module, args, out):
            rows[layer] = (out[0] if isinstance(out, tuple) else out)[0].clone()

        return hook

    handles = [model.get_submodule(name).register_forward_hook(changing(f)) for name, f in change.items()]
    handles += [block.register_forward_hook(keeping(n)) for n, block in enumerate(model.model.layers)]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([tokens(LENGTH)]), use_cache=False).logits[0, -1]
    finally:
        for handle in handles:
            handle.remove()
    return rows, int(logits.argmax())


def check(llm, interventions, change):
    params = weir.params(sampling(1), capture=weir.Capture("resid_post"), interventions=interventions)
    (out,) = llm.generate([prompt(LENGTH)], params, use_tqdm=False)
    rows, token = hooked(change)
    assert max(rel_err(out.activations["resid_post", n], row) for n, row in rows.items()) <= BOUND
    assert out.outputs[0].token_ids[0] == token
    plain, _ = hooked({})
    assert max(rel_err(plain[n], row) for n, row in rows.items()) > 1000 * BOUND, "steering is seen"


def test_a_control_vector_is_added_as_repeng_and_llama_cpp_add_it(llm, tmp_path):
    """repeng's ``ControlModule`` wraps ``model.layers[N]`` for direction N; llama.cpp adds after block N."""
    v = vectors(1)
    given = {f"direction.{n}": v(128).numpy() for n in (1, 3)}
    (tmp_path / "v.gguf").write_bytes(write_gguf({"general.architecture": "controlvector"}, given))
    steer = weir.load_vector(tmp_path / "v.gguf").add(SCALE)
    change = {f"model.layers.{n}": lambda h, n=n: h + SCALE * torch.from_numpy(given[f"direction.{n}"]) for n in (1, 3)}
    check(llm, steer, change)


def test_a_steering_vector_is_added_as_steering_vectors_adds_it(llm, tmp_path):
    v = vectors(2)
    given = {n: v(128) for n in (0, 2)}
    torch.save({"layer_activations": given, "layer_type": "mlp"}, tmp_path / "v.pt")
    steer = weir.load_vector(tmp_path / "v.pt").add(SCALE)
    check(llm, steer, {f"model.layers.{n}.mlp": lambda h, n=n: h + SCALE * given[n] for n in given})


def test_an_intervention_of_pyreft_changes_rows_as_pyreft_does(llm, tmp_path):
    """LoReFT: ``h + R^T (W h + b - R h)`` at the output of ``model.layers[2]``, at every position."""
    v = vectors(3)
    rotation, weight, bias = torch.linalg.qr(v(128, 3))[0], 0.3 * v(3, 128), 3 * v(3)
    key = "layer_2_comp_block_output_unit_pos_nunit_1#0"
    torch.save({"weight": weight, "bias": bias, "rotate_layer": rotation}, tmp_path / f"intkey_{key}.bin")
    config = {
        "intervention_types": ["<class 'pyreft.interventions.LoreftIntervention'>"],
        "representations": [[2, "block_output", "pos", 1]],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loreft = lambda h: h + (h @ weight.T + bias - h @ rotation) @ rotation.T
    check(llm, weir.load_reft(tmp_path), {"model.layers.2": loreft})


def test_a_feature_of_an_autoencoder_is_added_where_it_reads(tmp_path):
    """W_dec[f] at the output of the block that the SAE reads."""
    sae = weir.SAE.load(weir.demo_sae())
    found = weir.load_vector(weir.demo_sae(), feature=3)
    assert found.layers == (sae.site.layer,) and found.hook == sae.site.hook
    assert torch.equal(found.vector(sae.site.layer), sae.tensors["W_dec"][3].float())
