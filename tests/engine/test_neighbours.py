"""Requests without keys get the same bits: beside capturing requests, without any, and without the plugin."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import asking, directory, prompts, same_rows, sampling, verify
from tests.support.steered import generated
from tests.support.zygote import ROOT, zygote
from vllm_weir.worker.tap import op

pytestmark = pytest.mark.engine("default")


def run(model_dir: Path, out: Path, *words: str, **env: str) -> list:
    env = {k: v for k, v in os.environ.items() if not k.startswith("WEIR_")} | env
    done = zygote().run(["-m", "tests.engine.workload", str(model_dir), str(out), *words], env, ROOT, out.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_tokens_and_logprobs_are_bit_identical(root, tmp_path):
    model_dir = directory(root)
    idle = run(model_dir, tmp_path / "idle.json")
    beside = run(model_dir, tmp_path / "beside.json", "capture")
    without = run(model_dir, tmp_path / "without.json", WEIR_DISABLE="1")
    assert len(idle) == 20 and all(len(tokens) == 16 and numbers for _, tokens, _, numbers in idle)
    assert beside == idle
    assert without == idle


def test_rows_do_not_depend_on_who_is_in_the_batch(llm, truth):
    batch = prompts([20, 31, 7, 64, 1, 50, 33, 12])
    params, wanted = asking("all", truth.num_layers)
    together = llm.generate(batch, params, use_tqdm=False)
    for prompt, out in list(zip(batch, together))[-2:]:
        verify(out, wanted, truth)
        (alone,) = llm.generate(prompt, params, use_tqdm=False)
        assert alone.outputs[0].token_ids == out.outputs[0].token_ids
        same_rows(out.activations, alone.activations)
    plain = sampling(4)
    mixed = llm.generate(batch, [plain if i % 2 else params for i in range(8)], use_tqdm=False)
    assert [out.activations is None for out in mixed] == [bool(i % 2) for i in range(8)]
    with pytest.raises(weir.WeirError):
        llm.generate(batch, weir.params(plain, capture=weir.Capture(layers=9)), use_tqdm=False)


def test_taps_are_not_asked_in_a_pass_without_wishes(llm, monkeypatch):
    """Nor are those that no request of a step wants: an eager pass pays for the taps that act alone."""
    asked = []
    act = op._act
    monkeypatch.setattr(op, "_act", lambda usual, *tensors: asked.append(1) or act(usual, *tensors))

    def ops(params) -> int:
        asked.clear()
        llm.generate(prompts([5]), params, use_tqdm=False)
        return len(asked)

    assert ops(sampling(3)) == 0
    one = weir.Capture("resid_post", [2])
    assert ops(weir.params(sampling(3), capture=one)) == 3, "one tap in each of three passes"
    assert ops(weir.params(sampling(3), capture=weir.Capture("resid_post", [2], "prompt"))) == 1
    assert ops(sampling(3)) == 0


def test_what_is_called_between_steps_is_nobody_s(llm):
    """A part of the model that a user runs by itself is not steered by what the last step was steered by."""
    engine, x = llm.llm_engine, torch.ones(8, llm.llm_engine.model_config.get_hidden_size())

    def called(model) -> torch.Tensor:
        with torch.inference_mode():
            return model.model.layers[0].mlp(x).clone()

    (before,) = llm.apply_model(called)
    v = torch.full(x.shape[1:], 5.0)
    steered = weir.params(sampling(8), interventions=[weir.Add(v, 0, hook="mlp_out")], capture=weir.Capture("mlp_out"))
    engine.add_request("steered", prompts([8])[0], steered)
    outs = []
    while engine.has_unfinished_requests():
        outs = engine.step()
        (between,) = llm.apply_model(called)
        assert torch.equal(between, before)
    assert outs[0].receipt.complete and sum(outs[0].receipt.steered[0].values()) == 15


@pytest.mark.parametrize("path", ["layers.1", "layers.2.mlp"])
def test_a_module_that_was_replaced_has_no_tap_and_says_so(llm, path):
    """Its rows would be what the ring held before, and nothing would be steered."""
    parent, _, name = path.rpartition(".")
    captured = weir.params(sampling(3), capture=[weir.Capture(), weir.Capture("mlp_out")])
    steered = weir.params(sampling(3), interventions=[weir.Add(torch.ones(128), 1, hook="mlp_out")])

    def put(model, module=None) -> torch.nn.Module:
        before = model.model.get_submodule(path)
        model.model.get_submodule(parent)._modules[name] = copy.deepcopy(before) if module is None else module
        return before

    (before,) = llm.apply_model(put)
    try:
        for params in (captured, steered):
            with pytest.raises(weir.WeirError, match=f"{path} of the model was replaced"):
                generated(llm, prompts([5]), params)
        (plain,) = llm.generate(prompts([5]), sampling(3), use_tqdm=False)
    finally:
        llm.apply_model(lambda model: put(model, before))
    (out,) = llm.generate(prompts([5]), captured, use_tqdm=False)
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids and len(out.activations["mlp_out", 2]) == 7
