"""A stream of rows from a real engine: they are those of transformers, and a killed trainer misses none of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import BOUND, prompts, sampling
from tests.support.measure import rel_err
from tests.support.steered import idle
from tests.unit.refusals import refused

pytestmark = pytest.mark.engine("default")
TRAINER = Path(__file__).parents[1] / "unit" / "streaming" / "trainer.py"


def test_rows_come_in_the_order_of_requests_and_are_those_of_transformers(llm, truth):
    asked = prompts([9, 3, 40, 5, 7, 12])
    params = weir.params(sampling(3), capture=weir.Capture("resid_post", [0, 2], "all"))
    with weir.stream_rows(llm, ((prompt, params) for prompt in asked), batch_size=16) as rows:
        batches = list(rows)
        assert rows.wait(60)
    owners = torch.cat([batch.requests for batch in batches])
    tokens = torch.cat([batch.token_ids for batch in batches])
    for number, prompt in enumerate(asked):
        mine = owners == number
        ids, n = tokens[mine].tolist(), len(prompt["prompt_token_ids"])
        assert ids[:n] == list(prompt["prompt_token_ids"]) and len(ids) == n + 2
        stream = truth.rows(ids, [("resid_post", 0), ("resid_post", 2)])
        for layer in (0, 2):
            found = torch.cat([batch.rows["resid_post", layer] for batch in batches])[mine]
            assert rel_err(found, stream["resid_post", layer]) < BOUND
    assert idle(llm)


def test_a_killed_trainer_goes_on_while_the_engine_runs(llm, tmp_path):
    params = weir.params(sampling(1), capture=weir.Capture("resid_post", 1, "prompt"))
    asked = prompts([5 + n % 9 for n in range(120)])
    checkpoint = tmp_path / "checkpoint.json"
    requests = ((prompt, params) for prompt in asked)
    with weir.stream_rows(llm, requests, batch_size=32, address="tcp://127.0.0.1:0", ahead_bytes=200_000) as rows:
        command = [sys.executable, str(TRAINER), rows.address, rows.token, str(checkpoint), "2"]
        trainer = subprocess.Popen([*command, "0.02"])
        while not checkpoint.exists():
            assert trainer.poll() is None
            time.sleep(0.01)
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        subprocess.run([*command, "0"], check=True, timeout=300)
        assert rows.wait(60)
    state = json.loads(checkpoint.read_text())
    assert state["requests"] == {str(n): list(prompt["prompt_token_ids"]) for n, prompt in enumerate(asked)}
    assert idle(llm)


def test_a_request_that_captures_nothing_or_is_refused_ends_the_stream(llm):
    (prompt,) = prompts([9])
    bad = weir.params(sampling(1), capture=weir.Capture("resid_post", 99))
    for params, reason in ((sampling(1), "captures nothing to memory"), (bad, "block 99")):
        with weir.stream_rows(llm, [(prompt, params)]) as rows, refused("stream", reason):
            list(rows)
    assert not llm.llm_engine.has_unfinished_requests() and idle(llm)
