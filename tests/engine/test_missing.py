"""Where Weir cannot be loaded, whatever the reason, requests with its keys are refused with it; never passed over."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import vllm_weir as weir
from tests.engine.common import directory, oracle, sampling
from tests.engine.missing_child import KEYS, PROMPTS
from tests.engine.serving import PLAIN, running
from tests.support.engines import close_all, get_llm
from tests.support.machine import engine_processes, needs
from tests.support.without import declared
from tests.support.zygote import ROOT, zygote

pytestmark = pytest.mark.engine
IDLE = ("rich", "typer")
"""What only the command needs."""


def child(model_dir: Path, folder: Path, mode: str, module: str = "", **env: str) -> Any:
    env = {k: v for k, v in os.environ.items() if not k.startswith("WEIR_")} | env
    more = [module] if module else []
    done = zygote().run(["-m", "tests.engine.missing_child", str(model_dir), mode, *more], env, ROOT, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("FOUND ")]
    return json.loads(line[6:])


def refused(found: dict[str, Any], model_dir: Path, why: str, *others: str) -> None:
    """Plain requests are as ever; every way to ask anything of Weir, and these `others`, say `why`."""
    truth = oracle(model_dir)
    assert found["tokens"] == [truth.greedy(p["prompt_token_ids"], 4) for p in PROMPTS] and found["goes_on"]
    for name in (*KEYS, "sites", *others):
        state, field, message = found[name]
        assert state == "refused" and field and why in message, (name, found[name])


def refused_over_http(found: dict[str, Any], why: str) -> None:
    assert len(found) == 17
    for name, (code, field, message) in found.items():
        assert code == 400 and field == "weir" and why in message, (name, found[name])


@pytest.mark.parametrize("module", declared())
def test_a_missing_package_is_the_reason_of_every_refusal(root, tmp_path, module):
    found = child(directory(root), tmp_path, "missing", module)
    if module in IDLE:
        assert found["weir"] == found["text"] == ["served", 8] and found["http"] == {}
        return
    why = f"No module named '{module}'; install it (pip install {'pyzmq' if module == 'zmq' else module})"
    refused(found, directory(root), why, "list")
    refused_over_http(found["http"], why)


@needs(engine_processes)
def test_what_is_missing_where_the_worker_runs_is_told_by_it(root, tmp_path):
    found = child(directory(root), tmp_path, "core", "zstandard")
    refused(found, directory(root), "No module named 'zstandard'; install it (pip install zstandard)")


def test_a_worker_that_does_not_load_the_plugin_serves_plain_requests_alone(root, tmp_path):
    refused(child(directory(root), tmp_path, "bare"), directory(root), "VLLM_PLUGINS is 'another' and leaves it out")


@needs(engine_processes)
def test_an_async_engine_refuses_likewise(root, tmp_path):
    found = child(directory(root), tmp_path, "async", "zstandard")
    assert found.pop("plain") == ["served", 4] and set(found) == set(KEYS)
    for state, field, message in found.values():
        assert state == "refused" and field == "weir" and "No module named 'zstandard'" in message


def test_an_error_of_weir_s_own_is_the_reason_of_every_refusal(root, tmp_path):
    found = child(directory(root), tmp_path, "broken")
    refused(found, directory(root), "ZeroDivisionError: of our own making", "list")
    refused_over_http(found["http"], "ZeroDivisionError: of our own making")


def test_a_plugin_that_vllm_does_not_load_is_no_reason_to_pass_requests_over(root, tmp_path):
    found = child(directory(root), tmp_path, "plain", VLLM_PLUGINS="another")
    refused(found, directory(root), "VLLM_PLUGINS is 'another' and leaves it out", "list")
    refused_over_http(found["http"], "VLLM_PLUGINS is 'another' and leaves it out")


def test_an_engine_without_a_place_for_the_guard_does_not_start_at_the_second_attempt_either(root, tmp_path):
    for said in child(directory(root), tmp_path, "unguarded"):
        assert "Weir cannot guard this vLLM" in said and "OutputProcessor.add_request" in said


def test_a_scheduler_without_weir_fails_the_request(root, monkeypatch):
    """Its cache would hand what is steered to others; only the process that schedules knows."""
    llm = get_llm(directory(root))
    from vllm.v1.core.sched.scheduler import Scheduler

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "add_request", Scheduler.add_request.__wrapped__)
        for asked in ({"capture": weir.Capture()}, {"interventions": weir.Add([1.0] * 128, 1)}):
            with pytest.raises(weir.WeirError, match="does not work in the engine core: it was not loaded there"):
                out = llm.generate(PROMPTS, weir.params(sampling(4), **asked), use_tqdm=False)[0]
                out.activations.positions.tolist()
    (out, _) = llm.generate(PROMPTS, weir.params(sampling(4), capture=weir.Capture()), use_tqdm=False)
    assert out.receipt.complete and out.activations.positions.tolist() == list(range(8))


@pytest.mark.timeout(1500)
def test_a_server_without_a_package_serves_and_says_why_it_does_not(tmp_path):
    """A real one, whose processes all lack it; its plain requests are answered."""
    lines = ["import sys", "from tests.support.zygote import fork_instead_of_spawn"]
    lines += ["fork_instead_of_spawn()  # the other processes come sooner", "sys.modules['zstandard'] = None"]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])
    body = {"model": "demo", "prompt": "Anna walked", "max_tokens": 2, "temperature": 0}
    close_all()
    with running(tmp_path / "log", PLAIN, env={"PYTHONPATH": path, "VLLM_PLUGINS": "weir"}) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        weir_object = {"v": 1, "capture": [{"hook": "resid_post"}]}
        chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for route, about in (
            ("completions", body),
            ("completions", body | {"stream": True}),
            ("chat/completions", chat),
        ):
            for more in (
                {"weir": weir_object},
                {"vllm_xargs": {"weir": json.dumps(weir_object)}},
                {"steering_name": "happy"},
            ):
                got = client.post(f"/v1/{route}", json=about | more)
                assert got.status_code == 400 and got.json()["error"]["param"] == "weir", got.text
                assert "zstandard" in got.text and "pip install zstandard" in got.text
        for route in ("/v1/weir/info", "/v1/steering", "/v1/activations/x"):
            got = client.get(route)
            assert got.status_code == 503 and "pip install zstandard" in got.json()["error"]["message"]
