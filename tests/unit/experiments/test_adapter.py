"""LoRA adapters that experiments run under: what is read of their files, and what they add to a model."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import adapter
from tests.support.models import make_model
from tests.unit.refusals import refused
from vllm_weir.experiments.adapter import Adapter


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    where = make_model("llama", "a", tmp_path_factory.mktemp("model"))
    return where, AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)


@pytest.fixture
def made(network, tmp_path):
    return tmp_path, adapter(network[0], tmp_path)


def change(where, **config):
    file = where / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def added(where, model):
    """What an adapter adds to each weight that it changes, and whether the model is what it was afterwards."""
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with Adapter.parse(where).merged(model):
        found = {name: weight - before[name] for name, weight in model.named_parameters()}
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    return {name: delta for name, delta in found.items() if delta.any()}


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({}, 2.0),
        ({"lora_alpha": 2}, 0.5),
        ({"use_rslora": True}, 8 / math.sqrt(4)),
        ({"alpha_pattern": {"down_proj": 4, "q_proj": 4}}, 1.0),
        ({"rank_pattern": {r"model.layers.\d+.*": 2}}, 4.0),
    ],
)
def test_the_product_is_scaled_by_pefts_rules(network, made, config, factor):
    change(made[0], **config)
    found = added(made[0], network[1])
    assert set(found) == set(made[1])
    for name, delta in found.items():
        torch.testing.assert_close(delta, made[1][name] * factor / 2, rtol=1e-4, atol=1e-6)


def test_the_digest_is_of_the_contents(made, tmp_path_factory):
    one = Adapter.parse(made[0])
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for file in made[0].iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    (elsewhere / "README.md").write_text("not of the adapter")
    same = Adapter.parse(str(elsewhere))
    assert same.digest == one.digest and same.name == elsewhere.name
    assert one.engine_options == {"enable_lora": True, "max_lora_rank": 8}
    change(elsewhere, lora_alpha=3)
    assert Adapter.parse(elsewhere).digest != one.digest
    assert Adapter.parse(None) is None


def test_what_no_twin_can_have_is_refused(network, made):
    where, model = made[0], network[1]
    file, tensors = where / "adapter_model.safetensors", load_file(where / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj"
    cases = [
        ({f"{name}.lora_A.weight": None}, "one of the two matrices of model.layers.1.mlp.down_proj"),
        ({f"{name}.lora_magnitude_vector": torch.ones(3)}, "lora_magnitude_vector, which is no matrix"),
        ({f"{name}.lora_B.weight": torch.ones(3, 4)}, r"are \[3, 192\], the twin's \[128, 192\]"),
        ({f"base_model.model.vision.up.lora_{k}.weight": torch.ones(4, 4) for k in "AB"}, "for vision.up, which the"),
    ]
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for changes, said in cases:
        save_file({k: v for k, v in (tensors | changes).items() if v is not None}, file)
        with pytest.raises(Exception, match=said) as e, Adapter.parse(where).merged(model):
            pass
        assert e.value.field == "lora"
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    save_file(tensors, file)
    change(where, use_dora=True)
    with refused("lora", "the twin takes no adapter with use_dora"), Adapter.parse(where).merged(model):
        pass
    for wrong in (7, b"path", where / "nothing"):
        with refused("lora"):
            Adapter.parse(wrong)
