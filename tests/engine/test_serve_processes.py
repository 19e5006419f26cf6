"""Other ways to serve: several API-server processes that share results, LoRAs, and plain vLLM without Weir's routes."""

from __future__ import annotations

import contextlib
import os
import re
import signal

import httpx
import psutil
import pytest
import torch

import vllm_weir as weir
from tests.engine.serve_cases import make_adapter
from tests.engine.serving import COMPLETIONS, LORA, PLAIN, WEIR, body, post, rows_of, running
from tests.support.machine import engine_processes, needs
from tests.support.zygote import forking

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), needs(engine_processes)]
CLOSE_OTHERS = True

ASKED = {"v": 1, "capture": [{"hook": "resid_post", "layers": [2], "positions": "all"}]}
BY_REFERENCE = ASKED | {"response": {"inline_bytes": 0}}
SITE = ("resid_post", 2)


@pytest.fixture
def lora(tmp_path):
    return make_adapter(tmp_path / "adapter")


@pytest.fixture
def folder(tmp_path):
    """Where rows are kept that a test reads."""
    (tmp_path / "read").mkdir()
    return tmp_path / "read"


def unadapted(acts):
    """What transformers computes for the same tokens without an adapter."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weir.demo_model(), dtype=torch.float32).eval()
    with torch.no_grad():
        return model(acts.token_ids[None], output_hidden_states=True).hidden_states[3][0]


def fresh(client):
    """A client of the same server with connections of its own, which another process may take."""
    return httpx.Client(base_url=client.base_url, headers=client.headers, timeout=60)


@pytest.mark.thorough
def test_two_processes_share_results_and_serve_loras(tmp_path, lora, folder):
    log = tmp_path / "log"
    env = {"WEIR_SERVE_DIRECTORY": str(tmp_path), "VLLM_LOGGING_LEVEL": "INFO"} | forking()
    more = ["--api-server-count", "2", *LORA, "--lora-modules", f"tiny={lora}"]
    more += ["--weir-hook", "watch=tests.support.served_hooks:watch"]
    with running(log, WEIR, *more, env=env) as client:
        assert len(list(tmp_path.glob("weir-serve-*"))) == 1
        for _ in range(12):
            with fresh(client) as one, fresh(client) as other, fresh(client) as third:
                url = post(one, weir=BY_REFERENCE)["choices"][0]["weir"]["activations"]["url"]
                assert other.get(url).raise_for_status().content
                assert third.delete(url).status_code == 204
                assert one.get(url).status_code == 404
                hooked = post(other, weir={"v": 1, "hooks": [{"name": "watch", "layers": [2]}]})["choices"][0]
                assert len(hooked["weir"]["values"]["norm"]["values"]) > 6 and hooked["weir"]["saved"]["last"]
        named = post(client, weir=ASKED, lora_request={"lora_name": "tiny", "lora_int_id": 5})
        assert named["model"] == "tiny"
        same = post(client, weir=ASKED, model="tiny")
        adapted, again = (rows_of(client, answer["choices"][0], folder) for answer in (named, same))
        assert torch.equal(adapted[SITE], again[SITE])
        # Against transformers, not against another answer of this server.
        assert (adapted[SITE] - unadapted(again)).abs().max() > 1e-2
        assert post(client, lora_request={"lora_name": "tiny", "lora_path": str(lora)})["model"] == "tiny"
        for bad in ({"lora_name": "tiny", "lora_path": "/etc"}, {"lora_name": "other", "lora_path": str(lora)}):
            assert post(client, code=400, lora_request=bad)["error"]["param"].startswith("lora_request.lora_")
    assert len(set(re.findall(r"Started server process \[(\d+)\]", log.read_text()))) == 2
    assert not list(tmp_path.glob("weir-serve-*"))


def test_plain_vllm_honours_keys_and_says_what_it_lacks(tmp_path, lora, folder):
    env = {"WEIR_SERVE_INLINE_BYTES": "20000", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with running(tmp_path / "log", PLAIN, *LORA, env=env, forked=True) as client:
        assert client.get("/v1/weir/info").status_code == 404
        (small,) = post(client, weir=BY_REFERENCE)["choices"]
        assert len(rows_of(client, small, folder)[SITE]) == small["weir"]["receipt"]["captured"]["resid_post.2"]
        every = {"v": 1, "capture": [{"hook": "resid_post", "positions": "all"}]}
        large = post(client, weir=every)["choices"][0]["weir"]
        assert "b64" not in large["activations"] and "id" not in large["activations"]
        assert "`weir serve`" in large["activations"]["error"] and large["activations"]["bytes"] > 20000
        assert large["receipt"]["complete"]
        assert post(client, code=400, weir={"v": 3})["error"]["param"] == "weir.v"
        loaded = post(client, lora_request={"lora_name": "mine", "lora_path": str(lora)}, weir=ASKED)
        assert loaded["model"] == "mine" and "weir" in loaded["choices"][0]
        assert post(client, lora_request={"lora_name": "mine"})["model"] == "mine"


@pytest.mark.thorough
def test_a_killed_server_starts_again_clean(tmp_path, folder):
    """Only what was under way is lost; what the dead server had kept for its clients is cleared up."""
    env = {"WEIR_SERVE_DIRECTORY": str(tmp_path)} | forking()
    with contextlib.suppress(httpx.TransportError), running(tmp_path / "log", WEIR, env=env) as client:
        (choice,) = post(client, weir=ASKED)["choices"]
        before, text = rows_of(client, choice, folder), choice["text"]
        url = post(client, weir=BY_REFERENCE)["choices"][0]["weir"]["activations"]["url"]
        alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
        (server,) = [p for p in alive if str(client.base_url.port) in p.cmdline()]
        many = body(prompt=["Anna walked to the harbor"] * 32, max_tokens=200, stream=True, weir=ASKED)
        with client.stream("POST", COMPLETIONS, json=many) as got:
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
        (again,) = post(client, weir=ASKED)["choices"]
        assert again["text"] == text
        assert torch.equal(rows_of(client, again, folder)[SITE], before[SITE])
    assert not list(tmp_path.glob("weir-serve-*"))
