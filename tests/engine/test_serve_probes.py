"""Probes over HTTP: scores beside their tokens, stops, gates, and metrics."""

from __future__ import annotations

import numpy as np
import pytest

import vllm_weir as weir
from tests.engine.serve_cases import PROMPTS, D
from tests.engine.serving import add, choices, events, post, rows_of
from tests.support.machine import engine_processes, needs
from tests.support.measure import eventually

pytestmark = [pytest.mark.engine("server"), pytest.mark.timeout(900), needs(engine_processes)]

LAYER, G, BIAS = 2, 12, 0.5
WEIGHT = (np.random.default_rng(3).standard_normal(D) / 16).astype(np.float32)
FIELDS = {"kind": "linear", "weight": WEIGHT.tolist(), "bias": BIAS, "layer": LAYER}
PROBE = FIELDS | {"name": "own"}
ROWS = {"hook": "resid_post", "layers": [LAYER], "positions": "all"}
PRODUCTS = ROWS | {"project": [WEIGHT.tolist()]}
SAME = {"max_tokens": G}


@pytest.fixture(scope="module")
def client(weir_server):
    return weir_server.http


@pytest.fixture
def kept(weir_server):
    """Keep probes for the time of a test."""
    names = []

    def keep(name, **fields):
        names.append(name)
        return weir_server.admin("PUT", f"/v1/probes/{name}", json=fields).raise_for_status().json()

    yield keep
    for name in set(names):
        weir_server.admin("DELETE", f"/v1/probes/{name}")


def weir_of(client, **weir_object):
    return post(client, weir={"v": 1, **weir_object}, **SAME)["choices"][0]["weir"]


def test_scores_are_the_products_of_the_rows(client, kept, tmp_path):
    """By name and by value, beside rows and beside a capture that projects."""
    kept("mood", **FIELDS)
    (choice,) = post(client, weir={"v": 1, "probes": ["mood", PROBE], "capture": [ROWS]}, **SAME)["choices"]
    rows = rows_of(client, choice, tmp_path)["resid_post", LAYER].double().numpy()
    wanted, bound = rows @ WEIGHT + BIAS, 1e-5 * (np.abs(rows) @ np.abs(WEIGHT) + BIAS)
    beside = weir_of(client, probes=["mood", PROBE], capture=[PRODUCTS])["scores"]
    assert len(wanted) > G and len(beside["positions"]) == len(wanted)
    products = np.array(beside["sites"][f"resid_post.{LAYER}"])[:, 0] + BIAS
    assert (np.abs(products - wanted) <= bound).all()
    for scores in (choice["weir"]["scores"], beside):
        for name in ("mood", "own"):
            assert scores[name]["positions"] == beside["positions"]
            assert (np.abs(np.array(scores[name]["values"])[:, 0] - wanted) <= bound).all()
    assert "scores" not in weir_of(client, capture=[ROWS | {"positions": "last_prompt"}])


def test_a_score_comes_with_its_token(client):
    asked = {"v": 1, "probes": [PROBE], "response": {"stream": True}}
    chunks = choices(events(client, return_token_ids=True, weir=asked, **SAME))
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
    assert len(tokens) + len(chunks[-1]["token_ids"]) == G
    assert values == whole["values"][: len(values)]
    assert whole["positions"] == list(range(prompt_len + G - 1))


def test_a_rule_stops_at_its_token(client):
    free = post(client, return_token_ids=True, weir={"v": 1, "probes": [PROBE]}, **SAME)["choices"][0]
    prompt_len = free["weir"]["receipt"]["prompt_tokens"]
    scores = np.array(free["weir"]["scores"]["own"]["values"])[prompt_len:, 0]
    threshold = float(np.sort(scores)[-3])
    last = int(np.argmax(scores > threshold))
    asked = {"v": 1, "probes": [PROBE], "stop_when": f"own > {threshold}"}
    stopped = post(client, return_token_ids=True, weir=asked, **SAME)["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "probe:own")
    assert stopped["token_ids"] == free["token_ids"][: last + 1]
    chunks = choices(events(client, return_token_ids=True, weir=asked | {"response": {"stream": True}}, **SAME))
    assert [token for chunk in chunks for token in chunk["token_ids"]] == stopped["token_ids"]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", "probe:own")


@pytest.mark.parametrize("place", [{}, {"hook": "resid_pre", "layers": [LAYER + 1]}], ids=["later", "the same tap"])
def test_a_gate_acts_where_its_probe_fires(client, kept, place):
    kept("mood", **FIELDS)
    gated = add(4, vector=[0.0] * (D - 1) + [4.0], scale=1.0, when={"probe": "mood", "above": 0.5}) | place
    found = weir_of(client, interventions=[gated])
    gate, scores = found["receipt"]["gates"][0], found["scores"]["mood"]
    fired = [at for at, (score,) in zip(scores["positions"], scores["values"], strict=True) if score > 0.5]
    assert (gate["probe"], gate["fired"]) == ("mood", len(fired)) and 0 < len(fired) < gate["of"]
    assert [position for first, end in gate["spans"] for position in range(first, end)] == fired


def test_a_probe_of_everyone_goes_to_the_metrics(weir_server, client, kept):
    plain = post(client, **SAME)["choices"][0]
    fields = {"weight": WEIGHT.tolist(), "layer": LAYER}
    told = kept("watch", **fields, activation="sigmoid", everyone=True, alert=0.0)
    assert told["positions"] == "sampled"
    for _ in range(6):
        answer = post(client, **SAME)
        assert answer["choices"][0]["text"] == plain["text"] and "weir" not in answer["choices"][0]
    assert list(weir_of(client, probes=[PROBE])["scores"]) == ["own"]

    def metric(name, **labels):
        return weir_server.metric(f"weir_probe_{name}", probe="watch", **labels)

    eventually(lambda: metric("sequences_total"), 7, 30)
    assert metric("alerts_total") == 7
    assert metric("score_count", output="0") == metric("score_bucket", output="0", le="+Inf") == 7 * G
    assert kept("watch", **fields)["everyone"] is False
    post(client, **SAME)
    assert metric("sequences_total") == 7


def test_the_client(weir_server):
    """Administration, scores, streams and stops with the objects of the library."""
    given = {"temperature": 0, "ignore_eos": True} | SAME
    with weir_server.client() as mine:
        assert mine.probes.put("mood", weir.Probe("mood", WEIGHT, BIAS, layer=LAYER))["outputs"] == 1
        assert [one["name"] for one in mine.probes.list()["probes"]] == ["mood"]
        scores = mine.generate(PROMPTS[0], probes="mood", **given).scores["mood"]
        chunks = list(mine.stream(PROMPTS[0], probes=["mood"], **given))
        rows = [row for chunk in chunks if chunk.scores is not None for row in chunk.scores["mood"].tolist()]
        assert rows == chunks[-1].result.scores["mood"].tolist() == scores.tolist()
        stopped = mine.generate(PROMPTS[0], stop_when="mood > -1e9", **given)
        assert (stopped.finish_reason, stopped.stop_reason, len(stopped.token_ids)) == ("stop", "probe:mood", 1)
        mine.probes.delete("mood")
        with pytest.raises(weir.WeirError) as e:
            mine.generate(PROMPTS[0], probes="mood", **given)
        assert e.value.field == "probes[0]"
