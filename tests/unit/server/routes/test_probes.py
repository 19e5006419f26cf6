"""Routes of probes: kept for every process, scoring every request if asked, and what is refused by field."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import save

import vllm_weir as weir
from tests.unit.admin_app import ADMIN, LAYERS, D, app_of, serving
from tests.unit.scored import Worker
from vllm_weir.errors import WeirError
from vllm_weir.schema.keys import PROJECTED_KEYS
from vllm_weir.server.metrics import SHARES

WEIGHT = [0.5, -1.0, 0.0, 0.0, 0.25, 0.0, 0.0, 2.0]
LINEAR = {"weight": WEIGHT, "bias": 0.5, "layer": 2, "activation": "sigmoid"}
MLP = {"kind": "mlp", "w_in": [WEIGHT] * 3, "b_in": 0.0, "w_out": [[1.0] * 3] * 2, "layer": 1}
ATTENTION = {"kind": "attention", "query": [WEIGHT] * 2, "value": [WEIGHT] * 2, "bias": 1.0, "layer": 0}
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def pair(tmp_path):
    """Two processes of one server."""
    with serving(tmp_path, 2) as servers:
        yield [TestClient(app_of(server), headers=ADMIN) for server in servers], servers


def admitted(server, weir_object=None):
    """What becomes of a request."""
    extra = {} if weir_object is None else {"weir": {"v": 1, **weir_object}}
    tracker, engine_request = server.frontend.admit("r", extra, PROMPT, len(PROMPT), 8)
    return tracker, engine_request


def refused(response, param, code=400):
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (code, param), response.text
    return error["message"]


@pytest.mark.parametrize("body", [LINEAR, MLP, ATTENTION], ids=["linear", "mlp", "attention"])
def test_what_one_process_keeps_the_other_serves(pair, body):
    (one, other), servers = pair
    told = one.put("/v1/probes/mood", json=body).raise_for_status().json()
    outputs = 2 if body is MLP else 1
    assert (told["name"], told["kind"], told["outputs"]) == ("mood", body.get("kind", "linear"), outputs)
    assert told["everyone"] is False and "alert" not in told and told["bytes"] > 0
    assert other.get("/v1/probes").json() == {"probes": [told]}
    for server in servers:
        (probe,) = admitted(server, {"probes": ["mood"]})[0].pending.admitted.probes
        assert (probe.name, probe.site, probe.outputs) == ("mood", ("resid_post", body["layer"]), outputs)
    content = other.get("/v1/probes/mood").json()
    again = one.put("/v1/probes/again", json={**content, "name": "again"}).raise_for_status().json()
    assert again == told | {"name": "again"}
    assert one.delete("/v1/probes/mood").status_code == 204
    refused(other.get("/v1/probes/mood"), "name", 404)
    refused(other.delete("/v1/probes/mood"), "name", 404)
    with pytest.raises(WeirError, match="registered are again") as e:
        admitted(servers[1], {"probes": ["mood"]})
    assert e.value.field == "probes[0]"


@pytest.mark.parametrize("media", ["application/vnd.safetensors", "application/octet-stream"])
@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_files_that_probes_save(pair, tmp_path, media, suffix):
    if suffix == "json" and media != "application/octet-stream":
        media = "application/json"
    (one, other), servers = pair
    probe = weir.MLPProbe(
        "x", np.ones((3, D)), np.arange(3.0), [1.0, 2.0, 3.0], layer=3, hidden="gelu", smooth=("max",)
    )
    path = tmp_path / f"probe.{suffix}"
    probe.save(path)
    data = path.read_bytes()
    if suffix == "json":
        data = json.dumps({key: value for key, value in json.loads(data).items() if key != "name"}).encode()
    one.put("/v1/probes/mlp", content=data, headers={"Content-Type": media}).raise_for_status()
    written = other.get("/v1/probes/mlp", params={"format": "safetensors"}).raise_for_status().content
    (tmp_path / "back.safetensors").write_bytes(written)
    back = weir.load_probe(tmp_path / "back.safetensors")
    assert back.to_json() == probe.to_json() | {"name": "mlp"}
    resolved = [admitted(server, {"probes": ["mlp"]})[0].pending.admitted.probes for server in servers]
    assert resolved[0] == resolved[1]


def test_a_vector_may_be_a_registered_one(pair):
    (one, other), servers = pair
    one.put("/v1/vectors/happy", json=WEIGHT).raise_for_status()
    told = other.put("/v1/probes/mood", json=LINEAR | {"weight": {"ref": "happy"}}).raise_for_status().json()
    assert told["outputs"] == 1 and told["bytes"] == 4 * D
    one.delete("/v1/vectors/happy")
    (probe,) = admitted(servers[0], {"probes": ["mood"]})[0].pending.admitted.probes
    other.put("/v1/probes/twin", json=LINEAR).raise_for_status()
    (twin,) = admitted(servers[0], {"probes": ["twin"]})[0].pending.admitted.probes
    assert probe.rows == twin.rows


def test_a_probe_of_everyone_scores_plain_requests(pair):
    """At the last prompt token and later, so that hits of the prefix cache reach as far as without it."""
    (one, other), servers = pair
    assert not servers[1].frontend.universal
    told = one.put("/v1/probes/mood", json=LINEAR | {"everyone": True, "alert": 0.9}).raise_for_status().json()
    assert (told["positions"], told["alert"], told["buckets"]) == ("sampled", 0.9, list(SHARES))
    for server in servers:
        assert server.frontend.universal
        tracker, engine_request = admitted(server)
        request = tracker.pending.admitted
        assert [probe.name for probe in request.probes] == ["mood"] and request.told == 0
        assert engine_request.first_position == len(PROMPT) - 1
        view = tracker.view([1, 2, 3], False, "stop", 0)
        assert view.scores() is None and not view.asked
    own = {"probes": [LINEAR | {"kind": "linear", "name": "own"}]}
    request = admitted(servers[1], own)[0].pending.admitted
    assert [probe.name for probe in request.probes] == ["own", "mood"] and request.told == 1
    request = admitted(servers[1], {"probes": ["mood"]})[0].pending.admitted
    assert [probe.name for probe in request.probes] == ["mood"] and request.told == 1
    other.put("/v1/probes/mood", json=LINEAR).raise_for_status()
    assert not any(server.frontend.universal for server in servers)


@pytest.mark.parametrize(
    "asked", [None, {"probes": ["mood"]}, {"probes": [LINEAR | {"kind": "linear", "name": "own"}]}]
)
def test_its_scores_go_to_the_metrics(pair, asked):
    (one, _), servers = pair
    one.put(
        "/v1/probes/mood", json=LINEAR | {"everyone": True, "alert": 0.9, "buckets": [0.25, 0.5]}
    ).raise_for_status()
    server = servers[1]
    metrics, worker = server.frontend.observer, Worker(server.frontend.store)

    def value(name, **labels):
        return server._registry.get_sample_value(name, {"model_name": "", "probe": "mood", **labels})

    for scores, alerts in (([0.1, 0.3, 0.5], 0), ([0.2, 0.91, 0.6], 1)):
        tracker, _ = admitted(server, asked)
        request = tracker.pending.admitted
        index = [probe.name for probe in request.probes].index("mood")
        values = np.zeros((len(PROMPT) + 2, request.cells.reported), np.float32)
        values[len(PROMPT) - 1 :, request.cells.scores[index]] = scores
        worker.send(("r", 0, values), reported=request.cells.reported)
        worker.reopen("r")
        view = tracker.view([1, 2, 3], False, "stop", 0)
        metrics.finished(view)
        assert value("weir_probe_alerts_total") == alerts
        names = [] if view.scores() is None else list(view.scores())
        assert names == ([] if asked is None else ["mood"] if asked["probes"] == ["mood"] else ["own"])
    assert value("weir_probe_sequences_total") == 2
    assert value("weir_probe_score_count", output="0") == 6
    assert [value("weir_probe_score_bucket", output="0", le=le) for le in ("0.25", "0.5", "+Inf")] == [2, 4, 6]


def test_a_file_scores_everyone_by_the_query(pair, tmp_path):
    (one, _), _ = pair
    weir.Probe("x", np.ones((2, D)), layer=1, activation="softmax").save(tmp_path / "p.safetensors")
    data, headers = (tmp_path / "p.safetensors").read_bytes(), {"Content-Type": "application/safetensors"}
    query = {"everyone": True, "alert": [0.5, 0.75], "bucket": [0.1, 0.2]}
    told = one.put("/v1/probes/x", content=data, headers=headers, params=query).raise_for_status().json()
    assert (told["alert"], told["buckets"], told["positions"]) == ([0.5, 0.75], [0.1, 0.2], "sampled")
    assert refused(one.put("/v1/probes/x", json=LINEAR, params={"everyone": True}), "everyone")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([1.0], "body"),
        ({}, "weight"),
        (LINEAR | {"weight": [1.0] * 3}, "weight"),
        (LINEAR | {"weight": {"ref": "nobody"}}, "weight"),
        (LINEAR | {"layer": LAYERS}, "layer"),
        (LINEAR | {"hook": "nothing"}, "hook"),
        (LINEAR | {"hook": "pattern"}, "hook"),
        (LINEAR | {"kind": "cubic"}, "kind"),
        (LINEAR | {"activation": "cosine"}, "activation"),
        (LINEAR | {"bias": [1.0, 2.0]}, "bias"),
        (LINEAR | {"smooth": ["ema", 2]}, "smooth[1]"),
        (LINEAR | {"positions": "nowhere"}, "positions"),
        (LINEAR | {"name": "other"}, "name"),
        (LINEAR | {"more": 1}, "more"),
        (LINEAR | {"everyone": "yes"}, "everyone"),
        (LINEAR | {"alert": 0.9}, "alert"),
        (LINEAR | {"buckets": [1.0]}, "buckets"),
        (LINEAR | {"everyone": True, "alert": "high"}, "alert"),
        (LINEAR | {"everyone": True, "alert": True}, "alert"),
        (LINEAR | {"everyone": True, "alert": [0.1, 0.2]}, "alert"),
        (MLP | {"everyone": True, "alert": 0.5}, "alert"),
        (MLP | {"everyone": True, "alert": [None, "x"]}, "alert[1]"),
        (LINEAR | {"everyone": True, "buckets": []}, "buckets"),
        (LINEAR | {"everyone": True, "buckets": 0.5}, "buckets"),
        (LINEAR | {"everyone": True, "buckets": [0.5, 0.5]}, "buckets"),
        (LINEAR | {"everyone": True, "buckets": [0.5, None]}, "buckets[1]"),
        (LINEAR | {"everyone": True, "buckets": [k / 65 for k in range(65)]}, "buckets"),
        (LINEAR | {"everyone": True, "positions": {"token_ids": [1]}}, "positions"),
        (LINEAR | {"everyone": True, "positions": {"modality": "image"}}, "positions"),
        (LINEAR | {"everyone": True, "hook": "embed", "layer": 0}, "hook"),
    ],
)
def test_what_cannot_be_kept(pair, body, param):
    (one, other), _ = pair
    refused(one.put("/v1/probes/mood", json=body), param)
    assert other.get("/v1/probes").json() == {"probes": []}


@pytest.mark.parametrize(
    ("data", "media", "param"),
    [
        (b"{", "application/json", "body"),
        (b"nothing", "application/safetensors", "probe"),
        (save({"weight": np.ones(D, np.float32)}), "application/safetensors", "layer"),
        (b"GGUF", "application/gguf", "Content-Type"),
    ],
)
def test_files_that_are_no_probes(pair, data, media, param):
    (one, _), _ = pair
    refused(one.put("/v1/probes/mood", content=data, headers={"Content-Type": media}), param)


@pytest.mark.parametrize("name", [*PROJECTED_KEYS, "a b", "-x", "0123456789abcdef" * 2])
def test_names_that_cannot_be(pair, name):
    refused(pair[0][0].put(f"/v1/probes/{name}", json=LINEAR), "name")


def test_room_is_bounded(tmp_path):
    with serving(tmp_path, vectors=2, vector_bytes=1 << 10) as (server,):
        client = TestClient(app_of(server), headers=ADMIN)
        client.put("/v1/vectors/v", json=WEIGHT).raise_for_status()
        client.put("/v1/probes/p", json=LINEAR).raise_for_status()
        assert "WEIR_SERVE_VECTORS" in refused(client.put("/v1/probes/q", json=LINEAR), "name")
        client.delete("/v1/vectors/v").raise_for_status()
        wide = {"weight": np.random.default_rng(0).normal(size=(32, D)).tolist(), "layer": 0}
        assert "WEIR_SERVE_VECTOR_BYTES" in refused(client.put("/v1/probes/q", json=wide), "name")


def test_a_probe_that_gates_every_request_stays(pair):
    (one, other), _ = pair
    one.put("/v1/probes/mood", json=LINEAR | {"layer": 1}).raise_for_status()
    steer = {"op": "add", "vector": WEIGHT, "layers": [3], "when": {"probe": "mood", "above": 0.5}}
    other.post("/v1/steering/set", json={"interventions": [steer]}).raise_for_status()
    assert "gated by 'mood'" in refused(other.delete("/v1/probes/mood"), "name")
    assert one.put("/v1/probes/mood", json=LINEAR | {"layer": 3}).status_code == 400, "it would come too late"
    one.put("/v1/probes/mood", json=LINEAR | {"layer": 2}).raise_for_status()
    one.post("/v1/steering/clear").raise_for_status()
    assert other.delete("/v1/probes/mood").status_code == 204
