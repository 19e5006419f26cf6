"""Other ways to serve: several API-server processes that share results, LoRAs, and plain vLLM without Weir's routes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file

import vllm_weir as weir
from tests.engine.serving import PLAIN, WEIR, running
from tests.support.machine import engine_processes, needs
from tests.support.zygote import forking

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), needs(engine_processes)]
CLOSE_OTHERS = True

BODY = {"model": "demo", "prompt": "Anna walked to the harbor", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
WISH = {"v": 1, "capture": [{"hook": "resid_post", "layers": [2], "positions": "all"}]}
LORA = ["--enable-lora", "--max-lora-rank", "8"]


def adapter(where):
    """A rank-4 adapter of the shipped model's down projections."""
    config = json.loads((where.parent / "config.json").read_text())
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        path = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        tensors[f"{path}.lora_A.weight"] = torch.randn(4, config["intermediate_size"], generator=generator) / 8
        tensors[f"{path}.lora_B.weight"] = torch.randn(config["hidden_size"], 4, generator=generator) / 8
    where.mkdir()
    save_file(tensors, where / "adapter_model.safetensors")
    kind = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"], "bias": "none"}
    kind |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": weir.demo_model(), "lora_dropout": 0.0}
    (where / "adapter_config.json").write_text(json.dumps(kind))
    return where


@pytest.fixture
def lora(tmp_path):
    (tmp_path / "config.json").write_text((Path(weir.demo_model()) / "config.json").read_text())
    return adapter(tmp_path / "adapter")


def ask(client, code=200, **more):
    got = client.post("/v1/completions", json=BODY | more)
    assert got.status_code == code, got.text[:2000]
    return got.json()


def rows(tmp_path, data):
    path = tmp_path / "rows.safetensors"
    path.write_bytes(data)
    return weir.Activations.load(path)["resid_post", 2]


def unadapted(tmp_path, data):
    """What transformers computes for the same tokens without an adapter."""
    from transformers import AutoModelForCausalLM

    path = tmp_path / "rows.safetensors"
    path.write_bytes(data)
    ids = weir.Activations.load(path).token_ids
    model = AutoModelForCausalLM.from_pretrained(weir.demo_model(), dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids[None], output_hidden_states=True).hidden_states[3][0]


def fresh(client):
    """A client of the same server with connections of its own, which another process may take."""
    return httpx.Client(base_url=client.base_url, headers=client.headers, timeout=60)


def test_two_processes_share_results_and_serve_loras(tmp_path, lora):
    log = tmp_path / "log"
    env = {"WEIR_SERVE_DIRECTORY": str(tmp_path), "VLLM_LOGGING_LEVEL": "INFO"}
    more = ["--api-server-count", "2", *LORA, "--lora-modules", f"tiny={lora}"]
    with running(log, WEIR, *more, env=env) as client:
        site_request = WISH | {"response": {"inline_bytes": 0}}
        homes = list(tmp_path.glob("weir-serve-*"))
        assert len(homes) == 1
        for _ in range(12):
            with fresh(client) as one, fresh(client) as other, fresh(client) as third:
                url = ask(one, weir=site_request)["choices"][0]["weir"]["activations"]["url"]
                assert rows(tmp_path, other.get(url).raise_for_status().content).shape[1] == 256
                assert third.delete(url).status_code == 204
                assert one.get(url).status_code == 404
        named = ask(client, weir=WISH, lora_request={"lora_name": "tiny", "lora_int_id": 5})
        assert named["model"] == "tiny"
        same = ask(client, weir=WISH, model="tiny")["choices"][0]["weir"]["activations"]
        adapted = rows(tmp_path, base64.b64decode(named["choices"][0]["weir"]["activations"]["b64"]))
        assert torch.equal(adapted, rows(tmp_path, base64.b64decode(same["b64"])))
        # Against transformers, not against another answer of this server.
        assert (adapted - unadapted(tmp_path, base64.b64decode(same["b64"]))).abs().max() > 1e-2
        assert ask(client, lora_request={"lora_name": "tiny", "lora_path": str(lora)})["model"] == "tiny"
        for bad in ({"lora_name": "tiny", "lora_path": "/etc"}, {"lora_name": "other", "lora_path": str(lora)}):
            assert ask(client, 400, lora_request=bad)["error"]["param"].startswith("lora_request.lora_")
    assert len(set(re.findall(r"Started server process \[(\d+)\]", log.read_text()))) == 2
    assert not list(tmp_path.glob("weir-serve-*"))


def test_plain_vllm_honours_keys_and_says_what_it_lacks(tmp_path, lora):
    env = {"WEIR_SERVE_INLINE_BYTES": "20000", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} | forking()
    with running(tmp_path / "log", PLAIN, *LORA, env=env) as client:
        assert client.get("/v1/weir/info").status_code == 404
        small = ask(client, weir=WISH | {"response": {"inline_bytes": 0}})["choices"][0]["weir"]
        found = rows(tmp_path, base64.b64decode(small["activations"]["b64"]))
        assert len(found) == small["receipt"]["captured"]["resid_post.2"]
        every = {"v": 1, "capture": [{"hook": "resid_post", "positions": "all"}]}
        large = ask(client, weir=every)["choices"][0]["weir"]
        assert "b64" not in large["activations"] and "id" not in large["activations"]
        assert "`weir serve`" in large["activations"]["error"] and large["activations"]["bytes"] > 20000
        assert large["receipt"]["complete"]
        assert ask(client, 400, weir={"v": 3})["error"]["param"] == "weir.v"
        loaded = ask(client, lora_request={"lora_name": "mine", "lora_path": str(lora)}, weir=WISH)
        assert loaded["model"] == "mine" and "weir" in loaded["choices"][0]
        assert ask(client, lora_request={"lora_name": "mine"})["model"] == "mine"


def test_a_killed_server_starts_again_clean(tmp_path):
    """Only what was under way is lost; what the dead server had kept for its clients is cleared up."""
    env = {"WEIR_SERVE_DIRECTORY": str(tmp_path)} | forking()
    kept = WISH | {"response": {"inline_bytes": 0}}
    with contextlib.suppress(httpx.TransportError), running(tmp_path / "log", WEIR, env=env) as client:
        before = ask(client, weir=WISH)["choices"][0]
        url = ask(client, weir=kept)["choices"][0]["weir"]["activations"]["url"]
        alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
        (server,) = [p for p in alive if str(client.base_url.port) in p.cmdline()]
        with client.stream(
            "POST",
            "/v1/completions",
            json=BODY | {"max_tokens": 200, "prompt": [BODY["prompt"]] * 32, "stream": True, "weir": WISH},
        ) as got:
            lines = got.iter_lines()
            assert next(lines).startswith("data: ")
            os.killpg(server.pid, signal.SIGKILL)
            for _ in lines:
                pass
        pytest.fail("the stream ended as if the server had lived")
    assert len(list(tmp_path.glob("weir-serve-*"))) == 1
    with running(tmp_path / "log", WEIR, env=env, forked=True) as client:
        assert len(list(tmp_path.glob("weir-serve-*"))) == 1
        assert client.get(url).status_code == 404
        again = ask(client, weir=WISH)["choices"][0]
        assert again["text"] == before["text"]
        same, other = (rows(tmp_path, base64.b64decode(c["weir"]["activations"]["b64"])) for c in (again, before))
        assert torch.equal(same, other)
    assert not list(tmp_path.glob("weir-serve-*"))
