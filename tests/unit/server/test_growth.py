"""Whatever a client of `weir serve` makes longer costs in proportion: every list, text and object of every route."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import save

import vllm_weir as weir
from tests.support import machine
from tests.support.growth import FOLD, grown, grows, places
from tests.support.hook_functions import probe_and_steer
from tests.support.sae_reference import weights
from tests.unit.admin_app import ADMIN, FACTS, D, Server, Workers, app_of, serving
from vllm_weir.compat.vllm_lens.request import to_weir
from vllm_weir.schema import keys
from vllm_weir.schema.intervention_base import MAX_INTERVENTIONS, Intervention
from vllm_weir.server.context import current_response

pytestmark = machine.needs(machine.module("vllm"))  # the wrapper of the routes is a patch of vLLM's
SIZE = 512
ROW = [0.5] * D
B64 = {"b64": base64.b64encode(np.ones(D, np.float32).tobytes()).decode(), "dtype": "float32", "shape": [D]}
PACKED = {
    "dtype": "float32", "shape": [1, D], "layer_indices": [1], "data": B64["b64"], "scales": [1.0],
}  # fmt: skip
CLAMPED = {k: v for k, v in PACKED.items() if k != "scales"} | {"bounds": [[0.0, None]], "strengths": [1.0]}
TIERS = {
    "vectors": {"resid_post": {"1": ROW, "2": {"vector": ROW, "scale": 0.5}}, "resid_pre": PACKED},
    "decode_vectors": {"post_mlp": {"1": B64}},
    "clamps": {"resid_post": {"1": [{"vector": ROW, "min": 0.0}]}, "resid_pre": CLAMPED},
}
ADD = {"op": "add", "vector": ROW, "layers": [1, 2], "positions": [1, 2], "hook": "resid_post"}
HOOK = {"op": "hook", "name": "steer", "args": {"w": ROW, "scale": 2.0}, "layers": [1], "positions": [1, 2]}
PROBE = {"kind": "linear", "name": "own", "weight": [ROW, ROW], "bias": [0.1, 0.2], "layer": 0, "positions": [1, 2]}
WEIR = {
    "v": 1,
    "capture": [{"hook": "resid_post", "layers": [0, 1], "positions": [0, 1], "project": [ROW]}, {"hook": "resid_pre"}],
    "interventions": [
        ADD | {"when": {"probe": "own", "above": 0.5, "output": 0}},
        {"op": "clamp", "direction": ROW, "layers": [1], "min": 0.0, "positions": {"token_ids": [5]}},
        {"op": "replace", "values": {"1": ROW, "2": B64}, "positions": "1:3"},
        {"op": "set_feature", "name": "mood", "feature": 1, "value": 2.0},
    ],
    "probes": [PROBE, {"kind": "mlp", "name": "two", "w_in": [ROW], "b_in": [0.1], "w_out": [1.0], "layer": 1}],
    "stop_when": ["own[0] > 9"],
    "modules": ["known", {"name": "known"}],
    "response": {"inline_bytes": 0},
}
READ = {"v": 1, "features": [{"name": "mood", "ids": [1, 2], "positions": [1]}]}
LENS_VECTOR = {"activations": [ROW, ROW], "layer_indices": [0, 1], "position_indices": [0, 1], "scale": 1.0}
CHATS: dict[str, Any] = {
    "weir": {"weir": WEIR},
    "features": {"weir": READ},
    "hooks": {
        "weir": {
            "v": 1,
            "hooks": [
                "steer",
                {"name": "steer", "args": {"w": B64, "scale": 2.0}, "layers": [1], "positions": [1, 2]},
                {"name": "steer", "args": {"w": ROW}, "when": {"probe": "own", "above": 0.5, "output": 0}},
            ],
            "probes": [PROBE],
            "response": {"values": "b64"},
        }
    },
    "a lens": {"weir": {"v": 1, "lens": {"layers": [1], "top_k": 3, "positions": [1]}}},
    "as text": {"vllm_xargs": {"weir": json.dumps(WEIR), "mine": "x"}},
    "vllm-lens": {"extra_args": {"output_residual_stream": [0, 1], "apply_steering_vectors": [LENS_VECTOR]}},
    "the fork": {"steering_name": "known", **{f"steering_{k}": TIERS[k] for k in ("vectors", "clamps")}},
    "a LoRA": {"lora_request": {"lora_name": "x", "lora_path": "/x"}},
    "plain": {"mine": {"a": [1]}, "extra_body": {"b": "c"}, "extra_args": {"d": "e"}, "vllm_xargs": {"f": "g"}},
}
JSON = "application/json"
BODIES: dict[str, tuple[str, str, Any]] = {
    "a vector": ("PUT", "/v1/vectors/a", {"vector": [ROW, ROW]}),
    "directions": ("PUT", "/v1/vectors/a", {"directions": {"1": ROW, "2": B64}}),
    "a probe": ("PUT", "/v1/probes/a", {k: v for k, v in PROBE.items() if k != "name"}),
    "a probe of everyone": (
        "PUT", "/v1/probes/a",
        {"weight": ROW, "layer": 1, "everyone": True, "alert": [0.5], "buckets": [0.1, 0.9], "activation": "sigmoid"},
    ),
    "an autoencoder": ("PUT", "/v1/saes/a", {"path": "/nowhere", "site": ["resid_post", 1]}),
    "a module": ("POST", "/v1/steering/modules/register", {"name": "m", **TIERS, "interventions": [ADD]}),
    "no module": ("POST", "/v1/steering/modules/unregister", {"name": "m"}),
    "steering": ("POST", "/v1/steering/set", {"vectors": {"resid_post": {"1": ROW}}, "interventions": [ADD, HOOK]}),
    "no steering": ("POST", "/v1/steering/clear", {"target": "main"}),
    "a mark": ("POST", "/v1/marks", {"id": "cmpl-1", "metadata": {"a": ["b"]}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Server:
    folder = tmp_path_factory.mktemp("serve")
    sae = weir.SAE.from_tensors("jumprelu", ("resid_post", 1), **weights("jumprelu", 0, D, 12))
    sae.save(folder / "sae")
    with serving(folder, engine=Workers(sae.nbytes), facts=replace(FACTS, no_lens="")) as (server,):
        client = TestClient(app_of(server), headers=ADMIN)
        client.put("/v1/saes/mood", json={"path": str(folder / "sae")}).raise_for_status()
        module = {"name": "known", "vectors": {"resid_post": {"1": ROW}}}
        client.post("/v1/steering/modules/register", json=module).raise_for_status()
        hook = weir.Hook(probe_and_steer, layers=[1, 2], args={"w": ROW, "scale": 3.0})
        server.frontend.names.register_hook("steer", hook)
        yield server


@pytest.fixture(scope="module")
def http(server) -> TestClient:
    with TestClient(app_of(server), headers=ADMIN) as client:
        yield client


class OpenAIServingCompletion:
    """Stands for vLLM's, with an engine that only admits."""

    refused = ""

    def __init__(self, server: Server) -> None:
        self.engine_client = SimpleNamespace(_weir_server=server)
        self.models = SimpleNamespace(is_base_model=lambda name: True, lora_requests={})

    def create_error_response(self, message: str, **_more: Any) -> None:
        self.refused = message

    async def create_completion(self, request: Any) -> None:
        builder = current_response.get()
        if builder is not None:
            frontend = self.engine_client._weir_server.frontend
            frontend.names.refresh()
            tracker, _ = frontend.admit("r", to_weir(builder.request.extra_args, by_client=True), [5] * 40, 40, 8)
            builder.held.add(frontend.store, tracker.pending)


def ask(server: Server, asked: dict[str, Any]) -> str:
    """A request for a completion, as vLLM has parsed it: why it is refused, or ""."""
    from vllm_weir.patches import server as patches

    keys.meant.cache_clear()
    server.frontend._cache.clear()
    known = {"vllm_xargs": asked.get("vllm_xargs"), "use_beam_search": False, "max_tokens": 8, "n": 1, "model": "demo"}
    body = {name: value for name, value in asked.items() if name != "vllm_xargs"}
    create = patches.create(OpenAIServingCompletion.create_completion, SimpleNamespace(serving_refusal=None))
    serving = OpenAIServingCompletion(server)
    asyncio.run(create(serving, SimpleNamespace(model_extra=body, **known)))
    assert len(serving.refused) < 4000, "nor does the answer grow"
    return serving.refused


def check(bodies: Callable[[int], Any], send: Callable[[Any], Any], size: int = SIZE) -> str:
    small, large = bodies(size), bodies(FOLD * size)
    send(small)  # what is imported and cached once
    return grows(lambda: send(small), lambda: send(large))


def too_dear(seed: Any, send: Callable[[Any], Any]) -> dict[str, str]:
    """Each place of a body whose growth costs too much, and how."""
    found = {".".join(map(str, at)): check(lambda n, at=at: grown(seed, at, n), send) for at in places(seed)}
    return {place: how for place, how in found.items() if how}


@pytest.mark.parametrize("name", CHATS)
def test_a_request(server, name):
    refused = ask(server, CHATS[name])
    assert bool(refused) == (name == "a LoRA"), f"what grows is served as it is: {refused}"
    assert too_dear(CHATS[name], lambda asked: ask(server, asked)) == {}


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=pytest.mark.thorough) if k == "a module" else k for k in BODIES]
)
def test_a_route_of_weir_s(http, name):
    method, path, seed = BODIES[name]

    def send(body: str) -> None:
        answer = http.request(method, path, content=body, headers={"Content-Type": JSON})
        assert answer.status_code < 500, answer.text
        assert answer.status_code < 400 or len(answer.text) < 4000, "nor does the answer grow"

    found = {
        ".".join(map(str, at)): check(lambda n, at=at: json.dumps(grown(seed, at, n)), send) for at in places(seed)
    }
    assert {place: how for place, how in found.items() if how} == {}


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("/v1/vectors/a", lambda n: save({f"direction.{k}": np.ones(D, np.float32) for k in range(n)})),
        ("/v1/vectors/a", lambda n: save({"a": np.ones((n, D), np.float32)})),
        ("/v1/probes/a", lambda n: save({"weight": np.ones((n, D), np.float32)})),
        ("/v1/probes/a", lambda n: save({f"weight{k}": np.ones(D, np.float32) for k in range(n)})),
        ("/v1/vectors/a", lambda n: b"GGUF" + b"\x03\0\0\0" + b"\0" * 8 * n),
        ("/v1/vectors/a", lambda n: b"{" * n),
        ("/v1/probes/a", lambda n: b"[" * n),
        ("/v1/vectors/a", lambda n: json.dumps([ROW] * n).encode()),
    ],
)
def test_a_file_that_is_sent(http, path, file):
    def send(data: bytes) -> None:
        assert http.put(path, content=data, headers={"Content-Type": "application/octet-stream"}).status_code < 500

    assert check(file, send) == ""


def test_queries_headers_and_names(http):
    kept = f"/v1/activations/{'a' * 32}"
    sent: dict[str, Callable[[int], Any]] = {
        "buckets": lambda n: http.put("/v1/probes/a", content=b"x", params={"bucket": ["0.5"] * n}),
        "ranges": lambda n: http.get(kept, headers={"Range": "bytes=" + ",".join(["0-1"] * n)}),
        "a name": lambda n: http.get(f"/v1/vectors/{'a' * n}"),
        "an id": lambda n: http.get(f"/v1/activations/{'a' * n}"),
        "a key": lambda n: http.delete("/v1/vectors/a", headers={"X-Weir-Admin-Key": "k" * n}),
        "a format": lambda n: http.get("/v1/vectors/a", params={"format": "x" * n}),
        "a target": lambda n: http.get("/v1/steering/layers", params={"target": "x" * n}),
        "a type": lambda n: http.put("/v1/vectors/a", content=b"x", headers={"Content-Type": "x" * n}),
    }
    found = {name: check(lambda n: n, send, 256) for name, send in sent.items()}  # in what a URL and headers hold
    assert {name: how for name, how in found.items() if how} == {}


@pytest.mark.parametrize(
    "asked",
    [
        {"weir": {"v": 1, "interventions": [ADD] * 5000}},
        {"steering_vectors": {"resid_post": {str(k): ROW for k in range(5000)}}},
        {"decode_steering_clamps": {"resid_post": {"1": [{"vector": ROW, "value": 1.0}] * 5000}}},
        {"steering_vectors": {"resid_post": PACKED | {
            "shape": [5000, 1], "layer_indices": [1] * 5000, "scales": None,
            "data": base64.b64encode(np.ones(5000, np.float32).tobytes()).decode(),
        }}},
        {"extra_args": {"apply_steering_vectors": [LENS_VECTOR | {"position_indices": None}] * 5000}},
        {"extra_args": {"apply_steering_vectors": [
            {"activations": [[0.5]] * 5000, "layer_indices": [1] * 5000, "position_indices": list(range(5000))}
        ]}},
    ],
    ids=["own", "tiers", "clamps", "packed", "vllm-lens", "layers of vllm-lens"],
)  # fmt: skip
def test_no_more_interventions_are_made_than_a_request_may_have(server, monkeypatch, asked):
    made, refused, original = [], [], Intervention.__post_init__
    monkeypatch.setattr(Intervention, "__post_init__", lambda one: (made.append(1), original(one))[1])
    monkeypatch.setattr(
        OpenAIServingCompletion, "create_error_response", lambda _self, message, **_more: refused.append(message)
    )
    ask(server, asked)
    assert refused and "interventions in one request" in refused[0] and len(made) <= MAX_INTERVENTIONS + 1, refused
