"""Chats whose text vLLM's parsers take apart: rows and scores are those of all tokens, whole and streamed."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.engine.common import directory, oracle, sampling
from tests.engine.serving import CHAT, WEIR, rows_of, running
from tests.support.machine import engine_processes, needs
from tests.support.measure import rel_err

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), needs(engine_processes)]
CLOSE_OTHERS = True
BOUND = 1e-5
G = 9
CALL = '{"name":"w20","arguments":{"x":1}}'
TOOL = {"type": "function", "function": {"name": "w20", "parameters": {"type": "object", "properties": {}}}}
ARGS = ["--dtype", "float32", "--max-model-len", "128", "--enforce-eager", "--kv-cache-memory-bytes", "33554432"]
ARGS += ["--served-model-name", "demo", "--host", "127.0.0.1"]
ARGS += ["--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def greedy(truth, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(G):
        ids.append(int(truth.points.points(ids)[1][-1].argmax()))
    return ids


@pytest.fixture(scope="module")
def thinker(root):
    """A model whose answer to some prompt reads: a thought, then a call of a tool. (directory, tokens of both)."""
    truth = oracle(directory(root))
    for word in range(5, 100):
        ids = greedy(truth, [word, word + 1])
        spoken = ids[4:8]
        if len({*ids[:4], *spoken}) == len({*ids[:4]}) + 4:
            break
    target = root / "thinker"
    shutil.copytree(directory(root), target)
    text = (target / "tokenizer.json").read_text()
    unused = next(n for n in range(200, 300) if n not in ids)
    names = ("</think>", "<tool_call>", CALL, "</tool_call>", "<think>")
    for token, name in zip((*spoken, unused), names, strict=True):
        text = text.replace(json.dumps(f"w{token}"), json.dumps(name))
    (target / "tokenizer.json").write_text(text)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target, ids


@pytest.fixture(scope="module")
def server(thinker, tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    with running(log, WEIR, forked=True, model=str(thinker[0]), args=ARGS) as client:
        yield client


def vector(seed: int = 0) -> torch.Tensor:
    return torch.randn(128, generator=torch.Generator().manual_seed(seed))


def body(ids, stream: bool = False):
    asked = weir.params(
        sampling(G), capture=weir.Capture("resid_post", 1), probes=weir.Probe("p", vector(), layer=2)
    ).extra_args["weir"]
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"w{ids[0]} w{ids[1]}"}],
        "tools": [TOOL],
        "max_tokens": G,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "weir": {**asked, "response": {"stream": stream}},
    }


def check(root, server, tmp_path, ids, choice) -> None:
    """Rows and scores at every position but the last token's."""
    rows, _ = oracle(directory(root)).points.points(ids[:-1])
    found = rows_of(server, choice, tmp_path)
    assert rel_err(found["resid_post", 1], rows["resid_post", 1]) <= BOUND
    assert choice["weir"]["receipt"]["generated_tokens"] == G
    assert len(values_of(choice)) == len(ids) - 1
    check_scores(root, ids, values_of(choice))


def values_of(choice) -> np.ndarray:
    return np.asarray(choice["weir"]["scores"]["p"]["values"]).reshape(-1)


def scores_of(root, ids) -> tuple[np.ndarray, np.ndarray]:
    """The scores, and the sums of magnitudes that they are computed from."""
    rows, _ = oracle(directory(root)).points.points(ids[:-1])
    x, v = rows["resid_post", 2].double(), vector().double()
    return (x @ v).numpy(), (x.abs() @ v.abs()).numpy()


def check_scores(root, ids, found) -> None:
    """The first of the scores are these."""
    wanted, size = (of_all[: len(found)] for of_all in scores_of(root, ids))
    assert (np.abs(found - wanted) <= BOUND * size).all()


def test_whole_answers(root, server, thinker, tmp_path):
    ids = thinker[1]
    answer = server.post(CHAT, json=body(ids)).raise_for_status().json()["choices"][0]
    message = answer["message"]
    assert message["reasoning"].split() == [f"w{ids[2]}", f"w{ids[3]}"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "w20" and json.loads(call["function"]["arguments"]) == {"x": 1}
    check(root, server, tmp_path, ids, answer)


def test_streams(root, server, thinker, tmp_path):
    """Tokens that a parser holds back, or swallows, have their scores in a later event."""
    ids = thinker[1]
    thought, called, scores, last = "", "", [], None
    with server.stream("POST", CHAT, json=body(ids, stream=True)) as events:
        for line in events.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"] or [None]
            if choice is None:
                continue
            thought += choice["delta"].get("reasoning") or ""
            for call in choice["delta"].get("tool_calls") or ():
                called += call["function"].get("name") or ""
            if "weir" in choice:
                last = choice
                if choice.get("finish_reason") is None:
                    scores += values_of(choice).tolist()
    assert thought.split() == [f"w{ids[2]}", f"w{ids[3]}"] and called == "w20"
    check(root, server, tmp_path, ids, last)
    assert scores
    check_scores(root, ids, np.asarray(scores))


def test_stops_while_it_thinks(root, server, thinker):
    """A rule ends the answer where its token's score says so, whatever the parser made of it."""
    ids = thinker[1]
    wanted, _ = scores_of(root, ids)
    where = int(np.argmax(wanted[2:6]))  # of the generated tokens, the first whose score is above the threshold
    asked = body(ids)
    asked["weir"]["stop_when"] = [f"p > {wanted[2 + where] - 1e-4}"]
    del asked["weir"]["capture"]
    answer = server.post(CHAT, json=asked).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == where + 1
