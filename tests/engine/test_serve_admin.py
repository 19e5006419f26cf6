"""`weir serve` with two API-server processes and two data-parallel engines: what one process is told, the other knows,
both engines do it, and all count together."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client import multiprocess
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.serve_cases import PROMPTS, D
from tests.engine.serving import ADMIN, ADMIN_KEY, API_KEY, WEIR, body, running
from tests.support.machine import engine_processes, needs, ranks
from tests.support.measure import eventually
from vllm_weir.results.activations import Activations

pytestmark = [pytest.mark.engine, pytest.mark.thorough, pytest.mark.timeout(1200), needs(engine_processes, ranks(2))]
CLOSE_OTHERS = True

LAYER, G, BOUND = 3, 4, 1e-5
CLOSE = 1e-3
"""How far logprobs of the same request may be apart, which are differences of logits ten times their size; what is
steered here differs by a hundred times as much."""
V = np.random.default_rng(0).normal(size=D).astype(np.float32)
PROMPT = PROMPTS[0]
CAPTURE = {"hook": "resid_post", "layers": [LAYER], "positions": "all"}


class Server:
    """Every request on a connection of its own, so that either process may get it."""

    def __init__(self, url: str, counts: str) -> None:
        self.url, self.counts = url, counts

    def __call__(self, method: str, path: str, admin: bool = True, **more) -> httpx.Response:
        headers = {"Authorization": f"Bearer {API_KEY}"} | (ADMIN if admin else {})
        headers |= more.pop("headers", {})
        with httpx.Client(base_url=self.url, timeout=120) as client:
            return client.request(method, path, headers=headers, **more)

    def done(self, method: str, path: str, **more) -> dict:
        response = self(method, path, **more)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, weir_object: dict | None = None, **more) -> dict:
        asked = {"weir": {"v": 1, **weir_object}} if weir_object is not None else {}
        made = body(max_tokens=G, logprobs=1, **asked, **more)
        return self.done("POST", "/v1/completions", json=made)["choices"][0]

    def rows(self, tmp_path, **weir_object) -> np.ndarray:
        """resid_post[LAYER], [rows, D]."""
        choice = self.complete({"capture": [CAPTURE], "response": {"inline_bytes": 1 << 20}, **weir_object})
        file = tmp_path / "rows.safetensors"
        file.write_bytes(base64.b64decode(choice["weir"]["activations"]["b64"]))
        return Activations.load(file)["resid_post", LAYER].numpy().copy()  # the file is mapped

    def metrics(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for family in text_string_to_metric_families(self("GET", "/metrics").text):
            for sample in family.samples:
                if sample.name.startswith("weir_") and not sample.name.endswith("_created"):
                    assert sample.labels["model_name"] == "demo", sample
                    key = sample.name + ":".join(["", *(v for k, v in sample.labels.items() if k == "reason")])
                    out[key] = out.get(key, 0) + sample.value
        return out

    def finished_by_engine(self) -> dict[str, float]:
        """Engine -> requests that it has finished."""
        out: dict[str, float] = {}
        for family in text_string_to_metric_families(self("GET", "/metrics").text):
            for sample in family.samples:
                if sample.name == "vllm:request_success_total":
                    out[sample.labels["engine"]] = out.get(sample.labels["engine"], 0) + sample.value
        return out

    def by_process(self, name: str) -> list[float]:
        """A counter's value in each API-server process."""
        values = []
        for file in map(str, Path(self.counts).glob("counter_*.db")):
            families = multiprocess.MultiProcessCollector.merge([file])
            values.append(sum(s.value for f in families for s in f.samples if s.name == name))
        return values


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder, counts = tmp_path_factory.mktemp("serve"), tmp_path_factory.mktemp("counts")
    env = {"WEIR_ADMIN_KEY": ADMIN_KEY, "PROMETHEUS_MULTIPROC_DIR": str(counts)}
    more = ["--api-server-count", "2", "--data-parallel-size", "2"]
    sinks = {"archive": {"filesystem": {"url": str(folder / "archive")}}}
    more += ["--additional-config", json.dumps({"weir": {"sinks": sinks}})]
    with running(folder / "log", WEIR, *more, env=env, forked=True) as client:
        yield Server(str(client.base_url), str(counts))


def test_what_one_process_is_told_the_other_knows(server):
    """Each PUT is seen by every later request, whichever process gets it; and both processes got some."""
    for k in range(12):
        digest = server.done("PUT", "/v1/vectors/number", json=(V * (k + 1)).tolist())["digest"]
        for _ in range(6):
            (info,) = server.done("GET", "/v1/vectors")["vectors"]
            assert info["digest"] == digest
    assert server("DELETE", "/v1/vectors/number").status_code == 204
    assert all(server.done("GET", "/v1/vectors") == {"vectors": []} for _ in range(6))
    before, count = server.by_process("weir_errors_total"), 60
    for _ in range(count):
        bad = {"model": "demo", "prompt": "x", "weir": {"v": 1, "modules": ["gone"]}}
        response = server("POST", "/v1/completions", json=bad)
        assert response.status_code == 400 and response.json()["error"]["param"] == "modules[0]", response.text
    after = server.by_process("weir_errors_total")
    assert len(after) == 2 and all(after), after
    assert sum(after) - sum(before) == count and server.metrics()["weir_errors_total:refused"] == sum(after)


def test_names_and_modules_steer_by_their_newest_meaning(server, tmp_path):
    plain = server.rows(tmp_path)
    size = np.abs(plain).max()
    for k in (1.0, -2.0, 3.0):
        server.done("PUT", "/v1/vectors/happy", json={"vector": (k * V).tolist()})
        module = {"name": "cheer", "vectors": {"post_mlp": {str(LAYER): {"vector": {"ref": "happy"}, "scale": 0.5}}}}
        server.done("POST", "/v1/steering/modules/register", json=module)
        add = {"op": "add", "vector": {"ref": "happy"}, "layers": [LAYER], "positions": "prompt"}
        for weir_object, change in (
            ({"interventions": [add]}, k),
            ({"modules": [{"name": "cheer", "scale": 4}]}, 2 * k),
        ):
            for _ in range(2):
                prompt = server.rows(tmp_path, **weir_object)[: len(plain) - G + 1]
                assert np.abs(prompt - plain[: len(prompt)] - change * V).max() < BOUND * size
    assert server.done("POST", "/v1/steering/modules/unregister", json={"name": "cheer"})["modules"] == []
    assert server("DELETE", "/v1/vectors/happy").status_code == 204
    assert np.abs(server.rows(tmp_path) - plain).max() < BOUND * size


def test_steering_of_every_request(server, tmp_path):
    """Plain requests on either process give the logprobs of requests that ask for the same; then none does again."""
    v = (3 * V).tolist()
    own = [
        {"op": "add", "vector": v, "layers": [LAYER], "scale": 0.5},
        {"op": "add", "vector": v, "layers": [1], "positions": "generated"},
    ]
    plain, wanted = server.complete(), server.complete({"interventions": own})
    rows = server.rows(tmp_path)
    asked = {
        "vectors": {"resid_post": {str(LAYER): {"vector": v, "scale": 0.5}}},
        "decode_vectors": {"resid_post": {"1": v}},
    }
    made = server.done("POST", "/v1/steering/set", json=asked)
    assert made == {"status": "ok", "hook_points": ["resid_post"], "layers_updated": [1, LAYER]}
    assert not np.allclose(plain["logprobs"]["token_logprobs"], wanted["logprobs"]["token_logprobs"], atol=0.1)
    for _ in range(6):
        found = server.complete()
        assert "weir" not in found and found["text"] == wanted["text"]
        ours, theirs = (c["logprobs"]["token_logprobs"] for c in (found, wanted))
        assert np.abs(np.array(ours) - theirs).max() < CLOSE
    assert np.abs(server.rows(tmp_path)[0] - rows[0] - 1.5 * V).max() < BOUND * np.abs(rows).max()
    active = server.done("GET", "/v1/steering")["active_layers"]
    assert active[str(LAYER)]["resid_post"]["norm"] == pytest.approx(1.5 * np.linalg.norm(V), rel=1e-5)
    assert set(active["1"]["resid_post"]) == {"decode_norm", "clamps"}, "as the fork's"
    server.done("POST", "/v1/steering/clear")
    for _ in range(4):
        found = server.complete()["logprobs"]["token_logprobs"]
        assert np.abs(np.array(found) - plain["logprobs"]["token_logprobs"]).max() < CLOSE


def test_a_mark_finds_its_rows_in_whichever_process_they_are(server):
    weir_object = {"v": 1, "capture": [CAPTURE | {"sink": "archive", "keep": "marked"}]}
    asked = body(prompt=[PROMPT, PROMPT], max_tokens=G, weir=weir_object)
    for _ in range(12):
        answer = server.done("POST", "/v1/completions", json=asked)["id"]
        told = server.done("POST", "/v1/marks", json={"id": answer, "metadata": {"n": 1}})
        assert told["sinks"] == [{"sink": "archive", "state": "written"}] * 2 and not told["gone"]
        again = server("POST", "/v1/marks", json={"id": answer})
        assert again.status_code == 404 and "was marked already" in again.text
        assert server("POST", "/v1/marks", json={"id": f"{answer}x"}).status_code == 404


def test_both_engines_read_and_steer(server, tmp_path):
    """Requests at the same time are shared out between the engines, and each gets its own rows from its own."""
    before = server.finished_by_engine()
    plain = server.rows(tmp_path)[0]

    def moved(k: int) -> float:
        add = {"op": "add", "vector": V.tolist(), "layers": [LAYER], "scale": float(k)}
        (folder := tmp_path / str(k)).mkdir()
        return np.abs(server.rows(folder, interventions=[add])[0] - plain - k * V).max()

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(moved, range(-16, 16))) < BOUND * 16 * np.abs(V).max()
    after = server.finished_by_engine()
    assert sorted(after) == ["0", "1"] and all(after[e] - before.get(e, 0) >= 4 for e in after), (before, after)
    assert sum(after.values()) - sum(before.values()) == 33


def test_named_probes_score_on_both_engines(server):
    """Each version of a probe is that of every later request, in either process and on either engine; then it is gone.

    The reference is a projection, which no registry is asked for.
    """
    weight, name = V / 16, f"resid_post.{LAYER}"
    products = CAPTURE | {"project": [weight.tolist()]}
    before = server.finished_by_engine()

    def off(k: float) -> float:
        found = server.complete({"probes": ["mood"], "capture": [products]})["weir"]["scores"]
        assert found["mood"]["positions"] == found["positions"] and len(found["positions"]) > G
        wanted = k * np.array(found["sites"][name])
        return np.abs(np.array(found["mood"]["values"]) - wanted - 0.5).max() / np.abs(wanted).max()

    for k in (1.0, -2.0, 3.0):
        fields = {"kind": "linear", "weight": (k * weight).tolist(), "bias": 0.5, "layer": LAYER}
        server.done("PUT", "/v1/probes/mood", json=fields)
        with ThreadPoolExecutor(16) as pool:
            assert max(pool.map(off, [k] * 16)) <= 1e-4
    after = server.finished_by_engine()
    assert all(after[e] - before.get(e, 0) >= 8 for e in ("0", "1")), (before, after)
    watch = {"weight": weight.tolist(), "layer": LAYER, "everyone": True, "alert": -1e9}
    server.done("PUT", "/v1/probes/watch", json=watch)
    for _ in range(8):  # of every request, in the metrics of whichever process got it
        server.complete()

    def counted() -> list[float]:
        families = list(text_string_to_metric_families(server("GET", "/metrics").text))
        names = ("sequences_total", "alerts_total", "score_count")
        return [sum(s.value for f in families for s in f.samples if s.name == f"weir_probe_{name}") for name in names]

    eventually(counted, [8, 8, 8 * G], 30)
    assert server("DELETE", "/v1/probes/watch").status_code == 204
    add = {"op": "add", "vector": V.tolist(), "layers": [4], "when": {"probe": "mood", "above": 0.5}}
    for _ in range(4):  # a gate looks the name up, too
        found = server.complete({"interventions": [add]})["weir"]
        fired = sum(score > 0.5 for (score,) in found["scores"]["mood"]["values"])
        assert found["receipt"]["gates"][0]["fired"] == fired
    assert server("DELETE", "/v1/probes/mood").status_code == 204
    for _ in range(6):
        gone = {"model": "demo", "prompt": PROMPT, "weir": {"v": 1, "probes": ["mood"]}}
        assert server("POST", "/v1/completions", json=gone).status_code == 400


def test_metrics(server, tmp_path):
    """Counters of both processes add up to what was done."""
    before = server.metrics()
    add = {"op": "add", "vector": V.tolist(), "layers": [1, 2], "positions": "prompt"}
    again = {"op": "add", "vector": (2 * V).tolist(), "layers": [2], "positions": "sampled"}
    rows = 0
    for k in range(6):
        rows += len(server.rows(tmp_path, interventions=[add, again] if k % 2 else []))
    choice = server.complete({"capture": [{**CAPTURE, "layers": "all"}], "response": {"inline_bytes": 0}})
    length, big = rows // 6, choice["weir"]["activations"]["bytes"]
    after = server.metrics()
    change = {k: after[k] - before.get(k, 0) for k in after}
    assert change["weir_rows_captured_total"] == rows + 6 * length
    assert change["weir_bytes_out_total"] == (rows + 6 * length) * D * 4
    # The same prompt again: keys and values of steered blocks may come from the cache, never more than whole blocks.
    assert 0 < change["weir_steered_tokens_total"] <= 3 * length
    assert change["weir_rows_dropped_total"] == change["weir_errors_total:refused"] == 0
    eventually(lambda: server.metrics()["weir_spool_bytes"] >= big, True, 30)  # gauges follow within a second or two
    assert big >= 6 * length * D * 4
    after = server.metrics()
    assert 0 <= after["weir_buffer_fill"] <= 1 and after["weir_requests_waiting"] == 0
