"""Inspect AI's provider ``weir/<model>`` against a server: vllm-lens's examples, Weir's keys, LoRA, a whole eval."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import CachePolicy, ChatMessageUser, GenerateConfig, get_model
from inspect_ai.model._cache import CacheEntry
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import solver

import vllm_weir as weir
from tests.engine.serve_cases import ADAPTER, MAX_TOKENS, MESSAGES, cases, lens_vector
from tests.engine.test_client_server import bits
from tests.support.machine import engine_processes, needs
from vllm_weir import SteeringVector
from vllm_weir.integrations.inspect_ai import server_body

pytestmark = [pytest.mark.engine("server"), pytest.mark.timeout(900), needs(engine_processes)]
INPUT = [ChatMessageUser(content=MESSAGES[0]["content"])]


@pytest.fixture(scope="module")
def model(weir_server):
    return get_model(f"weir/{weir_server.model}", base_url=f"{weir_server.url}/v1", api_key=weir_server.api_key)


@pytest.fixture
def told(offline_answers) -> dict:
    return json.loads((offline_answers / "told.json").read_text())


def ask(model, max_tokens: int = MAX_TOKENS, **extra_body):
    config = GenerateConfig(temperature=0.0, max_tokens=max_tokens, extra_body=extra_body)
    return asyncio.run(model.generate(INPUT, config=config))


def check(output, name: str, told: dict, offline: Path, key: str = "activations") -> None:
    """The output is what the offline engine gave, to the byte."""
    expected = told[name]
    assert output.completion == expected["text"]
    assert output.metadata["token_ids"] == expected["token_ids"]
    assert output.metadata["prompt_token_ids"] == expected["prompt_token_ids"]
    assert json.loads(json.dumps(output.metadata["receipt"].to_dict())) == expected["receipt"]
    assert bits(output.metadata[key]) == bits(weir.Activations.load(offline / f"{name}.safetensors"))


@pytest.mark.parametrize("name", [name for name in cases() if name != "adapter"])
def test_weirs_keys_give_the_bytes_of_the_offline_engine(model, told, offline_answers, name):
    response = {"inline_bytes": 0 if name in ("capture", "steer") else 8 << 20}
    output = ask(model, weir=cases()[name] | {"response": response})
    check(output, name, told, offline_answers, "scores" if name == "scores" else "activations")
    assert ("scores" in output.metadata) == (name == "scores")


def test_wire_form_and_json_text_are_understood_too(model, told, offline_answers):
    wire = {"v": 1, "capture": [c.to_json() for c in cases()["capture"]["capture"]]}
    for site_request in (wire, json.dumps(wire)):
        check(ask(model, weir=site_request), "capture", told, offline_answers)
    check(ask(model, extra_args={"weir": wire}), "capture", told, offline_answers)


def test_an_adapter_is_loaded_and_used(model, told, offline_answers):
    case = {k: v for k, v in cases()["adapter"].items() if k != "model"}
    request = {"lora_name": ADAPTER, "lora_int_id": 1, "lora_path": str(offline_answers / "adapter")}
    check(ask(model, weir=case, lora_request=request), "adapter", told, offline_answers)


def test_vllm_lens_first_example(model, told, offline_answers):
    """Extracting activations: as in vllm-lens's README, with only the prefix of the model changed."""
    extraction_activation_layers = [1, 3]
    capture_config = GenerateConfig(
        temperature=0.0,
        max_tokens=1,
        extra_body={
            "extra_args": {"output_residual_stream": extraction_activation_layers},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    output = asyncio.run(model.generate(INPUT, config=capture_config))
    residual_stream = output.metadata["activations"]["residual_stream"]
    offline = weir.Activations.load(offline_answers / "lens.safetensors")["residual_stream"]
    prompt = len(told["lens"]["prompt_token_ids"])
    assert residual_stream.shape == (2, prompt, 256)
    assert torch.equal(residual_stream, offline[:, :prompt])
    assert type(output.metadata["activations"]) is dict

    longer = ask(model, extra_args={"output_residual_stream": [3, 1]})
    assert torch.equal(longer.metadata["activations"]["residual_stream"], offline)
    both = ask(model, extra_args={"output_residual_stream": [1, 3]}, weir={"capture": [weir.Capture("attn_out", 2)]})
    assert torch.equal(both.metadata["activations"]["residual_stream"], offline)
    assert both.metadata["activations"]["attn_out", 2].shape == (prompt + MAX_TOKENS - 1, 256)
    every = ask(model, 1, extra_args={"output_residual_stream": True})
    assert every.metadata["activations"]["residual_stream"].shape == (6, prompt, 256)


def test_vllm_lens_s_queries_and_keys(model, offline_answers):
    """Alone, beside the stream, and beside steering, whose key makes the server answer in Weir's form, too."""
    offline = weir.Activations.load(offline_answers / "lens.safetensors")["residual_stream"]
    alone = ask(model, extra_args={"output_qk": [1, 3], "activations_transport": "binary"}).metadata["activations"]
    assert list(alone) == ["attn_q", "attn_k", "qk_layers", "qk_meta"] and alone["qk_layers"] == [1, 3]
    pattern = weir.attention_patterns(alone, 3)
    assert pattern.shape[1] == offline.shape[1] and (pattern.sum(-1) - 1).abs().max() < 1e-5
    both = ask(model, extra_args={"output_qk": "[1, 3]", "output_residual_stream": [1, 3]}).metadata["activations"]
    assert torch.equal(both["residual_stream"], offline) and torch.equal(both["attn_q"], alone["attn_q"])
    nothing = weir.Add(torch.zeros(256), layers=5)
    steered = ask(model, extra_args={"output_qk": True}, weir={"interventions": [nothing]}).metadata["activations"]
    assert steered["qk_layers"] == list(range(6)) and torch.equal(steered["attn_k"][[1, 3]], alone["attn_k"])
    with pytest.raises(weir.WeirError, match="q_rot and k_rot there"):
        server_body({"extra_args": {"output_qk": [1]}, "weir": {"capture": [weir.Capture("resid_post", 1)]}})


def test_vllm_lens_second_example(model, told, offline_answers):
    """Steering with an activation oracle: as in vllm-lens's README; ``SteeringVector`` comes from vllm_weir."""
    given = lens_vector()
    steering = SteeringVector(
        activations=given.activations,
        layer_indices=[given.layer_indices[0]],
        scale=given.scale,
        norm_match=True,
        position_indices=[given.position_indices[0]],
    )
    messages = [ChatMessageUser(content=MESSAGES[0]["content"])]
    oracle_config = GenerateConfig(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        extra_body={
            "extra_args": {"apply_steering_vectors": [steering]},
            "lora_request": {
                "lora_name": ADAPTER,
                "lora_int_id": 1,
                "lora_path": str(offline_answers / "adapter"),
            },
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    response = asyncio.run(model.generate(messages, config=oracle_config))
    assert response.completion == told["oracle"]["text"]
    assert response.metadata["receipt"].steered == ({weir.Site("resid_post", given.layer_indices[0]): 1},)
    oracle_config.extra_body["weir"] = {"capture": [weir.Capture(layers=[2, 3])]}
    again = asyncio.run(model.generate(messages, config=oracle_config))
    check(again, "oracle", told, offline_answers)


def test_vllm_xargs_may_hold_the_keys_as_well():
    """The rows that they asked for came, and were dropped."""
    for value in ("[1, 3]", [1, 3]):
        body, lens, alone = server_body({"vllm_xargs": {"output_residual_stream": value, "other": 1}})
        assert lens is not None and lens.layers == (1, 3) and alone
        assert body["weir"]["capture"][0]["layers"] == [1, 3] and body["vllm_xargs"] == {"other": 1}
    for extra, field in (
        ({"vllm_xargs": {"apply_hooks": "[]"}}, "apply_hooks"),
        ({"vllm_xargs": {"weir": "{}"}, "weir": {}}, "weir"),
        ({"vllm_xargs": {"output_residual_stream": True}, "extra_args": {"output_residual_stream": [1]}}, "vllm_xargs"),
        ({"extra_args": "[1]"}, "extra_args"),
    ):
        with pytest.raises(weir.WeirError, match=field):
            server_body(extra)


def test_the_cache_tells_vectors_apart():
    """Both were `[0. 0. 0. ... 0. 0. 0.]` to it, and the second was answered with what the first had said."""

    def key(place: int, op: type = weir.Add) -> str:
        vector = torch.zeros(4096)
        vector[place] = 1.0
        config = GenerateConfig(extra_body={"weir": {"interventions": [op(vector, layers=3)]}})
        return CacheEntry(None, config, INPUT, "m", CachePolicy(), None, []).key

    assert key(100) == key(100) != key(200)
    assert key(100, weir.Ablate) != key(200, weir.Ablate)


def test_hooks_by_name(model):
    """Their values are in the metadata, and what the cache goes by has their args."""
    w = torch.randn(256, generator=torch.Generator().manual_seed(3)) / 8
    use = weir.Use("steer", args={"w": w}, layers=[2])
    output = ask(model, weir={"hooks": [use, "watch"], "interventions": []})
    assert output.metadata["values"]["probe"].shape == output.metadata["values"]["norm"].shape[:1]
    assert output.metadata["saved"]["last"]["row"].shape == (256,)

    def key(w: torch.Tensor) -> str:
        config = GenerateConfig(extra_body={"weir": {"hooks": [weir.Use("steer", args={"w": w})]}})
        return CacheEntry(None, config, INPUT, "m", CachePolicy(), None, []).key

    assert key(w) == key(w.clone()) != key(w.flip(0))


def test_choices_each_have_their_own(model):
    config = GenerateConfig(temperature=1.0, seed=3, num_choices=2, max_tokens=4)
    config.extra_body = {"weir": {"capture": [weir.Capture(layers=3)]}}
    output = asyncio.run(model.generate(INPUT, config=config))
    each = output.metadata["choices"]
    assert len(output.choices) == len(each) == 2
    assert each[0]["token_ids"] != each[1]["token_ids"]
    for found in each:
        P = len(output.metadata["prompt_token_ids"])
        assert found["activations"].token_ids.tolist()[P:] == found["token_ids"][:-1]
    assert output.metadata["activations"] is each[0]["activations"]


def test_refusals(model):
    for extra_body, said in (
        ({"weir": {"capture": [weir.Capture(layers=99)]}}, "block 99 does not exist"),
        ({"weir": {"captures": []}}, "weir.captures"),
        ({"extra_args": {"apply_hooks": ["code"]}}, "code never comes"),
        ({"weir": {"hooks": [weir.Hook(lambda rows, ctx: rows)]}}, "--weir-hook"),
        ({"extra_args": {"weir": {"v": 1}}, "weir": {"v": 1}}, "given twice"),
        ({"lora_request": {"lora_name": "nobody", "lora_path": "/nowhere"}}, "nowhere"),
    ):
        with pytest.raises(Exception, match=said):
            ask(model, **extra_body)


def test_a_whole_eval_with_its_log(weir_server, tmp_path, monkeypatch):
    """`inspect eval`: the solver has the tensors, and the log can be written and read without them."""
    monkeypatch.setenv("WEIR_BASE_URL", f"{weir_server.url}/v1")
    monkeypatch.setenv("WEIR_API_KEY", weir_server.api_key)
    seen = []

    @solver
    def probing():
        async def solve(state, generate):
            extra_body = {
                "weir": {"capture": [weir.Capture(layers=3, project=torch.ones(256))]},
                "extra_args": {"apply_steering_vectors": [lens_vector()]},
            }
            config = GenerateConfig(temperature=0.0, max_tokens=4, extra_body=extra_body)
            state.output = await get_model().generate(state.messages, config=config)
            scores = state.output.metadata["scores"]
            seen.append(scores["resid_post", 3])
            state.metadata["probe"] = scores["resid_post", 3][-1].item()
            return state

        return solve

    @scorer(metrics=[accuracy()])
    def probe():
        async def score(state, target):
            return Score(value=state.metadata["probe"] != 0)

        return score

    samples = [Sample(input=f"{name} was happy.", target="") for name in ("Tom", "Anna", "Mia")]
    task = Task(dataset=samples, solver=probing(), scorer=probe(), name="probing")
    (log,) = eval(
        task, model=f"weir/{weir_server.model}", log_dir=str(tmp_path), display="none", log_model_api=True,
        score_display=False,
    )  # fmt: skip
    assert log.status == "success" and log.results.scores[0].metrics["accuracy"].value == 1.0
    assert len(seen) == 3 and all(len(rows) >= 8 for rows in seen)
    again = read_eval_log(log.location)
    event = next(e for e in again.samples[0].events if e.event == "model")
    assert "b64" in json.dumps(event.call.request) and len(json.dumps(event.call.request)) < 2000
    assert "(1368 characters)" in json.dumps(event.call.request)
    assert event.output.metadata["receipt"]["complete"] is True
