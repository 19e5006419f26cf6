"""Probes over HTTP, on a server of two processes: scores beside their tokens, stops, gates, and metrics."""

from __future__ import annotations

import json

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import vllm_weir as weir
from tests.engine.serving import ADMIN_KEY, API_KEY, WEIR, running
from tests.engine.test_serve_processes import fresh
from tests.support.machine import engine_processes, needs
from tests.support.measure import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), needs(engine_processes)]
CLOSE_OTHERS = True

PROMPT = "Anna walked to the harbor in the morning ."
LAYER, G = 2, 12
WEIGHT = (np.random.default_rng(3).standard_normal(256) / 16).astype(np.float32)
ADMIN = {"X-Weir-Admin-Key": ADMIN_KEY}
PROBE = {"kind": "linear", "name": "own", "weight": WEIGHT.tolist(), "bias": 0.5, "layer": LAYER}
PRODUCTS = {"hook": "resid_post", "layers": [LAYER], "positions": "all", "project": [WEIGHT.tolist()]}
"""The same numbers by another way, the bias left out."""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    log = tmp_path_factory.mktemp("probes") / "log"
    more = ["--weir-admin-key", ADMIN_KEY, "--api-server-count", "2"]
    with running(log, WEIR, *more, forked=True) as found:
        yield found
    assert "Traceback" not in log.read_text()


def body(**more):
    return {"model": "demo", "prompt": PROMPT, "max_tokens": G, "temperature": 0, "ignore_eos": True} | more


def ask(client, code=200, path="/v1/completions", **more):
    with fresh(client) as one:
        got = one.post(path, json=body(**more))
    assert got.status_code == code, got.text[:2000]
    return got.json()


def put(client, name, **fields):
    with fresh(client) as one:
        return one.put(f"/v1/probes/{name}", json=fields, headers=ADMIN)


@pytest.fixture
def kept(client):
    """Keep probes for the time of a test."""
    names = []

    def keep(name, **fields):
        names.append(name)
        return put(client, name, **fields).raise_for_status().json()

    yield keep
    for name in names:
        client.delete(f"/v1/probes/{name}", headers=ADMIN)


def weir_of(client, **weir_object):
    return ask(client, weir={"v": 1, **weir_object})["choices"][0]["weir"]


def test_scores_are_the_products_of_the_rows(client, kept):
    """Of both processes, by name and by value, beside a capture that projects."""
    kept("mood", **{key: value for key, value in PROBE.items() if key != "name"})
    for _ in range(6):
        found = weir_of(client, probes=["mood", PROBE], capture=[PRODUCTS])["scores"]
        wanted = np.array(found["sites"][f"resid_post.{LAYER}"])[:, 0] + 0.5
        assert len(wanted) > G
        for name in ("mood", "own"):
            assert found[name]["positions"] == found["positions"]
            assert np.abs(np.array(found[name]["values"])[:, 0] - wanted).max() <= 1e-4
    assert "scores" not in weir_of(client, capture=[{"hook": "resid_post", "layers": [1], "positions": "last_prompt"}])


def events(client, **more):
    with client.stream("POST", "/v1/completions", json=body(stream=True, return_token_ids=True, **more)) as got:
        lines = [line[6:] for line in got.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


def test_a_score_comes_with_its_token(client):
    asked = {"v": 1, "probes": [PROBE], "response": {"stream": True}}
    chunks = events(client, weir=asked)
    whole = chunks[-1]["weir"]["scores"]["own"]
    prompt_len = chunks[-1]["weir"]["receipt"]["prompt_tokens"]
    tokens, positions, values = [], [], []
    for chunk in chunks[:-1]:
        tokens += chunk["token_ids"]
        scores = chunk.get("weir", {}).get("scores", {}).get("own", {"positions": [], "values": []})
        positions += scores["positions"]
        values += scores["values"]
        # Every token that is here has its own score, and no later one has.
        assert positions == list(range(prompt_len + len(tokens)))
    assert len(tokens) >= G // 2
    assert values == whole["values"][: len(values)]
    assert whole["positions"] == list(range(prompt_len + G - 1))


def test_a_rule_stops_at_its_token(client):
    free = ask(client, return_token_ids=True, weir={"v": 1, "probes": [PROBE]})["choices"][0]
    prompt_len = free["weir"]["receipt"]["prompt_tokens"]
    scores = np.array(free["weir"]["scores"]["own"]["values"])[prompt_len:, 0]
    threshold = float(np.sort(scores)[-3])
    last = int(np.argmax(scores > threshold))
    asked = {"v": 1, "probes": [PROBE], "stop_when": f"own > {threshold}"}
    stopped = ask(client, return_token_ids=True, weir=asked)["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "probe:own")
    assert stopped["token_ids"] == free["token_ids"][: last + 1]
    chunks = events(client, weir=asked | {"response": {"stream": True}})
    assert [token for chunk in chunks for token in chunk["token_ids"]] == stopped["token_ids"]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", "probe:own")


def test_a_gate_acts_where_its_probe_fires(client, kept):
    kept("mood", **{key: value for key, value in PROBE.items() if key != "name"})
    add = {"op": "add", "vector": [0.0] * 255 + [4.0], "layers": [4], "when": {"probe": "mood", "above": 0.5}}
    found = weir_of(client, interventions=[add])
    gate = found["receipt"]["gates"][0]
    fired = [
        position
        for position, (score,) in zip(*(found["scores"]["mood"][key] for key in ("positions", "values")), strict=True)
        if score > 0.5
    ]
    assert (gate["probe"], gate["fired"]) == ("mood", len(fired)) and 0 < len(fired) < gate["of"]
    assert [position for first, end in gate["spans"] for position in range(first, end)] == fired


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"probes": ["nobody"]}, "probes[0]"),
        ({"probes": [PROBE | {"weight": [1.0]}]}, "probes[0].weight"),
        ({"probes": [PROBE | {"name": "sites"}]}, "probes[0].name"),
        ({"probes": [PROBE], "stop_when": "own"}, "stop_when"),
        ({"stop_when": "nobody > 1"}, "stop_when"),
    ],
)
def test_what_is_refused(client, asked, param):
    assert ask(client, 400, weir={"v": 1, **asked})["error"]["param"].startswith(param)


def metric(client, name, **labels):
    """The sum over both processes."""
    text = client.get("/metrics").text
    wanted = {"probe": "watch", **labels}.items()
    families = text_string_to_metric_families(text)
    return sum(s.value for f in families for s in f.samples if s.name == name and wanted <= s.labels.items())


def test_a_probe_of_everyone_goes_to_the_metrics(client, kept):
    plain = ask(client)["choices"][0]
    told = kept("watch", weight=WEIGHT.tolist(), layer=LAYER, activation="sigmoid", everyone=True, alert=0.0)
    assert told["positions"] == "sampled"
    for _ in range(6):
        answer = ask(client)
        assert answer["choices"][0]["text"] == plain["text"] and "weir" not in answer["choices"][0]
    asked = weir_of(client, probes=[PROBE])
    assert list(asked["scores"]) == ["own"]
    eventually(lambda: metric(client, "weir_probe_sequences_total"), 7, 30)
    assert metric(client, "weir_probe_alerts_total") == 7
    assert metric(client, "weir_probe_score_count", output="0") == 7 * G
    assert metric(client, "weir_probe_score_bucket", output="0", le="+Inf") == 7 * G
    told = kept("watch", weight=WEIGHT.tolist(), layer=LAYER)
    assert told["everyone"] is False
    ask(client)
    assert metric(client, "weir_probe_sequences_total") == 7


def test_the_client(client):
    """Administration, scores, streams and stops with the objects of the library."""
    probe = weir.Probe("mood", WEIGHT, 0.5, layer=LAYER)
    with weir.Client(str(client.base_url), api_key=API_KEY, admin_key=ADMIN_KEY) as mine:
        assert mine.probes.put("mood", probe)["outputs"] == 1
        assert [one["name"] for one in mine.probes.list()["probes"]] == ["mood"]
        given = {"max_tokens": G, "temperature": 0, "ignore_eos": True}
        out = mine.generate(PROMPT, probes="mood", **given)
        scores = out.scores["mood"]
        chunks = list(mine.stream(PROMPT, probes=["mood"], **given))
        rows = [row for chunk in chunks if chunk.scores is not None for row in chunk.scores["mood"].tolist()]
        assert rows == chunks[-1].result.scores["mood"].tolist()
        assert np.abs(np.array(rows) - scores.numpy()).max() <= 1e-4
        stopped = mine.generate(PROMPT, stop_when="mood > -1e9", **given)
        assert (stopped.finish_reason, stopped.stop_reason, len(stopped.token_ids)) == ("stop", "probe:mood", 1)
        mine.probes.delete("mood")
        with pytest.raises(weir.WeirError) as e:
            mine.generate(PROMPT, probes="mood", **given)
        assert e.value.field == "probes[0]"
