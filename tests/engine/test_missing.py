"""Where Weir cannot be loaded, whatever the reason, requests with its keys are refused with it; never passed over."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.engine.common import directory, oracle
from tests.engine.missing_child import KEYS, PROMPTS
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
