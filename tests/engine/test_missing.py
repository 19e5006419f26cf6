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
from tests.support.engines import close_all
from tests.support.machine import engine_processes, needs
from tests.support.without import declared
from tests.support.zygote import ROOT, zygote

pytestmark = pytest.mark.engine("default")
THOROUGH = pytest.mark.thorough
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


FAST = "zstandard"
"""The package that the fast tier tries."""
MODULES = [pytest.param(module, marks=[] if module == FAST else THOROUGH) for module in declared()]


@pytest.mark.parametrize("module", MODULES)
def test_a_missing_package_is_the_reason_of_every_refusal(root, tmp_path, module):
    found = child(directory(root), tmp_path, "missing", module)
    if module in IDLE:
        assert found["weir"] == found["text"] == ["served", 8] and found["http"] == {}
        return
    why = f"No module named '{module}'; install it (pip install {'pyzmq' if module == 'zmq' else module})"
    refused(found, directory(root), why, "list")
    refused_over_http(found["http"], why)


NOT_LOADED = "VLLM_PLUGINS is 'another' and leaves it out"
PROCESSES = [THOROUGH, needs(engine_processes)]
CASES = [
    # What is missing where the worker runs is told by it; without the plugin there, plain requests alone are served.
    pytest.param(("core", FAST), {}, f"No module named '{FAST}'; install it (pip install {FAST})", marks=PROCESSES),
    pytest.param(("bare",), {}, NOT_LOADED, marks=PROCESSES),
    pytest.param(("renamed",), {}, "get_computed_blocks", marks=THOROUGH),
    # An error of Weir's own, a plugin that vLLM does not load, and one that is switched off.
    pytest.param(("broken",), {}, "ZeroDivisionError: of our own making", marks=THOROUGH),
    pytest.param(("plain",), {"VLLM_PLUGINS": "another"}, NOT_LOADED, marks=THOROUGH),
    pytest.param(("plain",), {"WEIR_DISABLE": "1"}, "WEIR_DISABLE"),
]


@pytest.mark.parametrize(("mode", "env", "why"), CASES)
def test_whatever_the_reason_it_is_that_of_every_refusal(root, tmp_path, mode, env, why):
    found = child(directory(root), tmp_path, *mode, **env)
    whole = mode[0] in ("broken", "plain")  # nothing of Weir works: not its functions, nor a server
    refused(found, directory(root), why, *["list"] * whole)
    if whole:
        refused_over_http(found["http"], why)


@pytest.mark.thorough
@needs(engine_processes)
def test_an_async_engine_refuses_likewise(root, tmp_path):
    found = child(directory(root), tmp_path, "async", FAST)
    assert found.pop("plain") == ["served", 4] and set(found) == set(KEYS)
    for state, field, message in found.values():
        assert state == "refused" and field == "weir" and f"No module named '{FAST}'" in message


@pytest.mark.thorough
def test_an_engine_without_a_place_for_the_guard_does_not_start_at_the_second_attempt_either(root, tmp_path):
    for said in child(directory(root), tmp_path, "unguarded"):
        assert "Weir cannot guard this vLLM" in said and "OutputProcessor.add_request" in said


def test_a_scheduler_without_weir_fails_the_request(llm, monkeypatch):
    """Its cache would hand what is steered to others; only the process that schedules knows."""
    from vllm.v1.core.sched.scheduler import Scheduler

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "add_request", Scheduler.add_request.__wrapped__)
        for asked in ({"capture": weir.Capture()}, {"interventions": weir.Add([1.0] * 128, 1)}):
            with pytest.raises(weir.WeirError, match="does not work in the engine core: it was not loaded there"):
                out = llm.generate(PROMPTS, weir.params(sampling(4), **asked), use_tqdm=False)[0]
                out.activations.positions.tolist()
    (out, _) = llm.generate(PROMPTS, weir.params(sampling(4), capture=weir.Capture()), use_tqdm=False)
    assert out.receipt.complete and out.activations.positions.tolist() == list(range(8))


@pytest.mark.thorough
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
        routes = [("completions", body), ("completions", body | {"stream": True}), ("chat/completions", chat)]
        keys = [{"weir": weir_object}, {"vllm_xargs": {"weir": json.dumps(weir_object)}}, {"steering_name": "happy"}]
        for route, about in routes:
            for more in keys:
                got = client.post(f"/v1/{route}", json=about | more)
                assert got.status_code == 400 and got.json()["error"]["param"] == "weir", got.text
                assert "zstandard" in got.text and "pip install zstandard" in got.text
        for route in ("/v1/weir/info", "/v1/steering", "/v1/activations/x"):
            got = client.get(route)
            assert got.status_code == 503 and "pip install zstandard" in got.json()["error"]["message"]
