"""Routes that change what a server keeps: bodies, answers, refusals, keys, and that other processes see it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save
from safetensors.torch import save as save_torch

from tests.support.machine import mounted, needs, tmpfs
from tests.unit.admin_app import ADMIN, KEY, LAYERS, NEURONS, PART_FACTS, D, app_of, serving
from vllm_weir.compat.http import known_names, translate
from vllm_weir.compat.rhizonymph import modules
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.schema.keys import asks
from vllm_weir.schema.vector_files import read_vectors
from vllm_weir.server.request import WeirRequest

V = [0.5, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0]
OTHER = [1.0] * D


def packed(layer, vector):
    """The fork's form of a vector at a block."""
    data = base64.b64encode(np.float32(vector).tobytes()).decode()
    return {"dtype": "float32", "shape": [1, D], "layer_indices": [layer], "data": data}


def gguf(directions, architecture=b"controlvector", kind=0, version=3, extra=()):
    """A control vector as llama.cpp and repeng write it."""
    dtype = "<f4" if kind == 0 else "<f2"

    def text(value):
        return struct.pack("<Q", len(value)) + value

    keys = [text(b"general.architecture") + struct.pack("<I", 8) + text(architecture)]
    keys += [text(b"controlvector.model_hint") + struct.pack("<I", 8) + text(b"llama")]
    keys += [text(b"controlvector.layer_count") + struct.pack("<II", 4, len(directions)), *extra]
    entries, blob = [], b""
    for name, values in directions.items():
        entries.append(text(name.encode()) + struct.pack("<IQIQ", 1, len(values), kind, len(blob)))
        blob += np.asarray(values, dtype).tobytes()
        blob += b"\0" * (-len(blob) % 32)
    head = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(keys)) + b"".join(keys + entries)
    return head + b"\0" * (-len(head) % 32) + blob


@pytest.fixture
def pair(tmp_path):
    """Two processes of one server."""
    with serving(tmp_path, 2) as servers:
        yield [TestClient(app_of(s), headers=ADMIN) for s in servers], servers


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """Two processes of one server that only refuse."""
    with serving(tmp_path_factory.mktemp("serve"), 2) as servers:
        yield [TestClient(app_of(s), headers=ADMIN) for s in servers]


def lowered(server, weir_object):
    """What a request would undergo: (hook, layers, positions, scale x vector of additions)."""
    server.frontend.names.refresh()
    admitted = admit(
        {"weir": {"v": 1, **weir_object}},
        server.frontend.engine.capabilities,
        True,
        server.frontend.names.vectors.find,
        server.frontend.names.always,
        module=server.frontend.names.vectors.module,
    )
    return [
        (m.hook, m.layers, m.positions.to_json(), [(admitted.rows[i.u] * i.a).tolist() for i in m.instructions])
        for m in admitted.effective
    ]


def refused(response, code=400, param=None):
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (code, code), response.text
    assert error["message"] and (param is None or error["param"] == param), error
    return error["message"]


def test_a_vector_is_kept_used_and_forgotten_in_every_process(pair):
    (one, two), servers = pair
    made = one.put("/v1/vectors/happy", json=V)
    assert made.status_code == 200, made.text
    info = made.json()
    assert info["shape"] == [D] and info["refs"] == ["happy"] and info["layers"] == [] and info["bytes"] == 4 * D
    assert info["norms"] == [pytest.approx(np.linalg.norm(V))]
    assert two.get("/v1/vectors").json() == {"vectors": [info]}
    content = two.get("/v1/vectors/happy").json()
    assert {k: content[k] for k in info} == info
    assert np.frombuffer(base64.b64decode(content["vector"]["b64"]), "<f4").tolist() == V
    file = two.get("/v1/vectors/happy", params={"format": "safetensors"})
    assert file.headers["content-type"] == "application/vnd.safetensors"
    assert read_vectors(file.content, "safetensors", "v")[None].array.tolist() == V
    weir_object = {"interventions": [{"op": "add", "vector": {"ref": "happy"}, "layers": [1]}]}
    for server in servers:
        assert lowered(server, weir_object) == [("resid_post", (1,), "all", [V])]
    assert lowered(
        servers[1], {"interventions": [{**weir_object["interventions"][0], "vector": {"ref": info["digest"]}}]}
    )
    assert two.put("/v1/vectors/happy", json={"vector": OTHER}).json()["digest"] != info["digest"]
    assert lowered(servers[0], weir_object) == [("resid_post", (1,), "all", [OTHER])]
    assert one.delete("/v1/vectors/happy").status_code == 204
    assert two.get("/v1/vectors").json() == {"vectors": []}
    refused(two.get("/v1/vectors/happy"), 404, "name")
    refused(two.delete("/v1/vectors/happy"), 404, "name")
    with pytest.raises(WeirError, match="no vector is registered under 'happy'"):
        lowered(servers[1], weir_object)


CHANGES = [
    ("put", "/v1/vectors/other", OTHER),
    ("delete", "/v1/vectors/happy", None),
    ("post", "/v1/steering/set", {"vectors": {"resid_post": {"0": OTHER}}}),
    ("post", "/v1/steering/clear", {}),
    ("post", "/v1/steering/modules/register", {"name": "n", "vectors": {"resid_post": {"1": OTHER}}}),
    ("post", "/v1/steering/modules/unregister", {"name": "m"}),
]


@needs(tmpfs)
def test_a_full_disk_refuses_changes_and_nothing_else(tmp_path):
    """Each is answered with 507 and changes nothing; no file stays behind, and with room again all is taken."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, 64 << 10), serving(disk) as (server,):
        client = TestClient(app_of(server), headers=ADMIN)
        client.put("/v1/vectors/happy", json=V)
        client.post("/v1/steering/modules/register", json={"name": "m", "vectors": {"resid_post": {"1": V}}})
        before, ballast = server.names.read(), disk / "ballast"
        ballast.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        files = sorted(disk.rglob("*"))
        for method, path, body in CHANGES:
            message = refused(client.request(method, path, json=body), 507)
            assert "No space left on device" in message and str(disk) not in message
            assert server.names.read() is before and sorted(disk.rglob("*")) == files
        assert [v["name"] for v in client.get("/v1/vectors").json()["vectors"]] == ["happy"]
        ballast.unlink()
        for method, path, body in CHANGES:
            assert client.request(method, path, json=body).status_code in (200, 204)
        assert client.get("/v1/steering/modules").json()["modules"] == ["n"]


LAYERED = {
    "application/json": json.dumps({"directions": {"1": V, "3": OTHER}}).encode(),
    "application/vnd.safetensors": save({"direction.1": np.float32(V), "direction.3": np.float32(OTHER)}),
    "application/safetensors": save_torch({"l1": torch.tensor(V).bfloat16(), "l3": torch.tensor(OTHER).bfloat16()}),
    "application/gguf": gguf({"direction.1": V, "direction.3": OTHER}),
    "application/x-gguf; x=y": gguf({"direction.3": OTHER, "direction.1": V}, kind=1, version=2),
    "application/octet-stream": gguf({"direction.1": V, "direction.3": OTHER}),
    # The length of its header begins with a blank, as JSON may.
    "application/octet-stream; blank": save(
        {"direction.1": np.float32(V), "direction.3": np.float32(OTHER)}, {"a": "x" * 108}
    ),
}


@pytest.mark.parametrize("media", LAYERED)
def test_directions_of_blocks_are_a_module_and_each_has_a_name(pair, media):
    (one, two), servers = pair
    made = one.put("/v1/vectors/mood", content=LAYERED[media], headers={"Content-Type": media})
    assert made.status_code == 200, made.text
    assert made.json()["layers"] == [1, 3] and made.json()["refs"] == ["mood[1]", "mood[3]"]
    assert made.json()["shape"] == [2, D]
    assert set(two.get("/v1/vectors/mood").json()["directions"]) == {"1", "3"}
    back = two.get("/v1/vectors/mood", params={"format": "safetensors"}).content
    assert {k: v.array.tolist() for k, v in read_vectors(back, "safetensors", "v").items()} == {1: V, 3: OTHER}
    expected = [("resid_post", (1,), "all", [V]), ("resid_post", (3,), "all", [OTHER])]
    assert lowered(servers[1], {"modules": ["mood"]}) == expected
    twice = lowered(servers[1], {"modules": [{"name": "mood", "scale": 2}]})
    assert [m[3][0] for m in twice] == [[2 * x for x in V], [2 * x for x in OTHER]]
    weir_object = {"interventions": [{"op": "add", "vector": "mood[3]", "layers": [0]}]}
    assert lowered(servers[1], weir_object) == [("resid_post", (0,), "all", [OTHER])]
    with pytest.raises(WeirError, match=r'"modules": \["mood"\]') as caught:
        lowered(servers[1], {"interventions": [{"op": "add", "vector": {"ref": "mood"}, "layers": [0]}]})
    assert caught.value.field == "interventions[0].vector"


@pytest.mark.parametrize("format", ["json", "safetensors"])
@pytest.mark.parametrize("content", [V, [V, OTHER], {"directions": {"1": V, "3": OTHER}}])
def test_what_is_read_back_can_be_kept_again(pair, content, format):
    (one, two), _ = pair
    assert one.put("/v1/vectors/first", json=content).status_code == 200
    answer = two.get("/v1/vectors/first", params={"format": format})
    media = {"Content-Type": answer.headers["content-type"]}
    again = two.put("/v1/vectors/second", content=answer.content, headers=media)
    assert again.status_code == 200, again.text
    assert again.json()["digest"] == one.get("/v1/vectors/first").json()["digest"]


def test_a_dash_parts_a_name_from_its_block():
    tensors = {"layer-1": np.float32(V), "layer-3": np.float32(OTHER)}
    assert sorted(read_vectors(save(tensors), "safetensors", "v")) == [1, 3]


JSON, SAFE, GGUF = "application/json", "application/vnd.safetensors", "application/gguf"
BAD = [
    (JSON, b"[1, 2", "vector"),
    (JSON, b"\xff\xfe", "vector"),
    (JSON, b"", "vector"),
    (JSON, b"[" * 100_000, "vector"),
    (JSON, json.dumps(V[:-1]).encode(), "vector"),
    (JSON, json.dumps([*V[:-1], "x"]).encode(), "vector"),
    (JSON, b"[NaN, 0, 0, 0, 0, 0, 0, 0]", "vector"),
    (JSON, b"[1e400, 0, 0, 0, 0, 0, 0, 0]", "vector"),
    (JSON, b"[" + b"9" * 4000 + b", 0, 0, 0, 0, 0, 0, 0]", "vector"),
    (JSON, b'{"ref": "happy"}', "vector"),
    (JSON, b'"happy"', "vector"),
    (JSON, b'{"vector": "happy"}', "vector.vector"),
    (JSON, b'{"directions": {}}', "vector.directions"),
    (JSON, b'{"directions": {"1": "happy"}}', "vector.directions.1"),
    (JSON, json.dumps({"directions": {"a": V}}).encode(), "vector.directions.a"),
    (JSON, json.dumps({"directions": {"1": V, "01": V}}).encode(), "vector.directions.01"),
    (JSON, f'{{"directions": {{"1": {V}, "1": {V}}}}}'.encode(), "vector"),
    (JSON, json.dumps({"directions": {"-1": V}}).encode(), "vector.directions.-1"),
    (JSON, json.dumps({"directions": {"\ud800": V}}).encode(), r"vector.directions.\ud800"),
    (JSON, json.dumps({"directions": {"0_1": V}}).encode(), "vector.directions.0_1"),
    (JSON, json.dumps({"vector": V, "directions": {"1": V}}).encode(), "vector"),
    (JSON, json.dumps({"vector": V, "scale": 2}).encode(), "vector"),
    (JSON, json.dumps({"directions": {"1": V, "2": V[1:]}}).encode(), "vector.directions"),
    (JSON, json.dumps({"directions": {str(LAYERS): V}}).encode(), f"vector.{LAYERS}"),
    (JSON, json.dumps({"b64": "AAAA", "dtype": "float32", "shape": [D]}).encode(), "vector.b64"),
    (SAFE, b"", "vector"),
    (SAFE, b"\x10" * 40, "vector"),
    (SAFE, save({"a": np.float32(V)})[:-1], "vector"),
    (SAFE, save({"a": np.float32(V)}) + b"x", "vector"),
    (SAFE, save({"a": np.int64([1] * D)}), "vector.a"),
    (SAFE, save({"a": np.float32([[[[1] * D]]])}), "vector.a"),
    (SAFE, save({"a": np.float32([np.nan] * D)}), "vector.a"),
    (SAFE, save({"a": np.float32(V), "b": np.float32(V)}), "vector.a"),
    (SAFE, save({"direction.1": np.float32(V), "direction.-1": np.float32(V)}), "vector.direction.-1"),
    (SAFE, save({"1": np.float32(V), "-1": np.float32(V)}), "vector.-1"),
    (SAFE, save({}), "vector"),
    (GGUF, b"GGU", "vector"),
    (GGUF, gguf({"direction.1": V}, version=1), "vector"),
    (GGUF, gguf({"direction.1": V}, architecture=b"llama"), "vector.general.architecture"),
    (GGUF, gguf({"direction.0": V, "direction.00": V}), "vector.direction.00"),
    (GGUF, gguf({"output.weight": V}), "vector.output.weight"),
    (GGUF, gguf({}), "vector"),
    (GGUF, gguf({"direction.1": V})[:-1], "vector"),
    (GGUF, gguf({"direction.1": [float("inf")] * D}), "vector.direction.1"),
    (GGUF, gguf({"direction.1": V}, kind=2), "vector.direction.1"),
    (GGUF, b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "vector"),
    (GGUF, b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 2**63) + b"x", "vector"),
    ("text/plain", b"x", "Content-Type"),
]


@pytest.mark.parametrize(("media", "data", "field"), BAD)
def test_what_is_no_vector_of_this_model_is_refused_by_name(refusing, media, data, field):
    one, two = refusing
    refused(one.put("/v1/vectors/bad", content=data, headers={"Content-Type": media}), 400, field)
    assert two.get("/v1/vectors").json() == {"vectors": []}


@given(st.data())
def test_damaged_files_are_read_or_refused(data):
    """Nothing but a WeirError comes out of a damaged file, whatever was done to it."""
    media = data.draw(st.sampled_from(sorted(LAYERED)))
    content = bytearray(LAYERED[media])
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = bytes(content[: data.draw(st.integers(0, len(content)))]) + data.draw(st.binary(max_size=8))
    kind = data.draw(st.sampled_from(["json", "safetensors", "gguf"])) if "octet" in media else media.split(";")[0]
    kind = {"application/x-gguf": "gguf"}.get(kind, kind.removeprefix("application/").removeprefix("vnd."))
    try:
        found = read_vectors(content, kind, "vector")
    except WeirError as e:
        assert e.field.startswith("vector")
    else:
        assert found and all(np.isfinite(v.array).all() for v in found.values())


def test_names_that_could_mean_something_else_are_refused(pair):
    """And no path gets through."""
    (one, _), _ = pair
    for name in ("-x", ".x", "a[1]", "a b", "0123456789abcdef" * 2, "x" * 129, "é"):
        refused(one.put(f"/v1/vectors/{name}", json=V), 400, "name")
    for name in ("../x", "%2e%2e%2fx", "a%2Fb", "%2Fetc%2Fpasswd"):
        assert one.put(f"/v1/vectors/{name}", json=V).status_code in (400, 404)
        assert one.get(f"/v1/vectors/{name}").status_code == 404


def test_a_server_is_bounded(tmp_path):
    with serving(tmp_path, 1, vectors=2, vector_bytes=4 * 3 * D * 32, body_bytes=4096) as (server,):
        client = TestClient(app_of(server), headers=ADMIN)
        assert client.put("/v1/vectors/a", json=V).status_code == 200
        module = {"name": "m", "vectors": {"resid_post": {"1": OTHER}}}
        assert client.post("/v1/steering/modules/register", json=module).status_code == 200
        refused(client.put("/v1/vectors/b", json=V), 400, "name")
        refused(client.post("/v1/steering/modules/register", json={**module, "name": "n"}), 400, "name")
        assert client.put("/v1/vectors/a", json=OTHER).status_code == 200  # what is there may be replaced
        many = {"b64": base64.b64encode(bytes(4 * D * 90)).decode(), "dtype": "float32", "shape": [90, D]}
        assert client.put("/v1/vectors/a", json=many).status_code == 200
        refused(client.put("/v1/vectors/a", content=b" " * 4097, headers={"Content-Type": JSON}), 413)
    with serving(tmp_path, 1, vector_bytes=1024) as (server,):
        client = TestClient(app_of(server), headers=ADMIN)
        refused(client.put("/v1/vectors/a", json=many), 400, "name")


ADMIN_ROUTES = [
    ("POST", "/v1/steering/set", {"vectors": {"resid_post": {"1": V}}}),
    ("POST", "/v1/steering/clear", {}),
    ("POST", "/v1/steering/modules/register", {"name": "m", "vectors": {"resid_post": {"1": V}}}),
    ("POST", "/v1/steering/modules/unregister", {"name": "m"}),
    ("POST", "/v1/steering/vectors/register", {"name": "s", "kind": "steer", "packed": {"post_block": packed(1, V)}}),
    ("POST", "/v1/steering/vectors/unregister", {"name": "s", "kind": "steer"}),
    ("PUT", "/v1/vectors/v", V),
    ("DELETE", "/v1/vectors/v", None),
    ("PUT", "/v1/probes/p", {"weight": V, "layer": 1}),
    ("DELETE", "/v1/probes/p", None),
    ("PUT", "/v1/saes/s", {"path": "/nowhere"}),
    ("DELETE", "/v1/saes/s", None),
]
READING = ["/v1/steering", "/v1/steering/layers", "/v1/steering/modules", "/v1/vectors", "/v1/probes", "/v1/saes"]


def test_what_changes_all_requests_needs_the_admin_key(tmp_path):
    with serving(tmp_path) as (server,):
        client = TestClient(app_of(server))
        before = server.names.read()
        for method, path, body in ADMIN_ROUTES:
            refused(client.request(method, path, json=body), 401)
            for wrong in ({"X-Weir-Admin-Key": "x"}, {"Authorization": "Bearer x"}, {"X-Weir-Admin-Key": KEY + "x"}):
                refused(client.request(method, path, json=body, headers=wrong), 401)
        assert server.names.read() is before
        for method, path, body in ADMIN_ROUTES:
            ours = client.request(method, path, json=body, headers={"Authorization": f"Bearer {KEY}"})
            assert ours.status_code in (200, 204, 404) or "/nowhere" in ours.text
        assert all(client.get(route).status_code == 200 for route in READING)
        server.admin_key = None
        for method, path, body in ADMIN_ROUTES:
            assert "admin key" in refused(client.request(method, path, json=body, headers=ADMIN), 403)
        assert all(client.get(route).status_code == 200 for route in READING)


GARBAGE = [b"{bad", b"\xff\xfe", b"[" * 100_000, b'{"name": ' + b"9" * 100_000 + b"}", b"", b"3"]


def test_who_may_comes_before_what_was_sent(tmp_path):
    """A body was read and parsed first: who has no key learnt that it was bad JSON, or too large."""
    with serving(tmp_path) as (server,):
        client = TestClient(app_of(server))
        json_ = {"Content-Type": JSON}
        for path in (path for method, path, _ in ADMIN_ROUTES if method == "POST"):
            for content in (*GARBAGE, (b" " * 1000 for _ in range(500))):
                refused(client.post(path, content=content, headers=json_), 401)
            for content in GARBAGE:
                refused(client.post(path, content=content, headers=json_ | {"X-Weir-Admin-Key": "x"}), 401)
            for content in GARBAGE[:4]:
                refused(client.post(path, content=content, headers=json_ | ADMIN), 400, "body")
        server.admin_key = None
        refused(client.post(path, content=GARBAGE[0], headers=json_ | ADMIN), 403)


@pytest.mark.parametrize("key", ["schlüssel", "clé-à"])
def test_an_admin_key_may_be_any_text(tmp_path, key):
    """A client sends its bytes, as curl does."""
    sent, wrong = os.fsencode(key), os.fsencode(key[:-1]) + b"\xe9"
    with serving(tmp_path, admin_key=key) as (server,):
        client = TestClient(app_of(server))
        for header, before in (("X-Weir-Admin-Key", b""), ("Authorization", b"Bearer ")):
            assert client.post("/v1/steering/clear", headers={header: before + sent}).status_code == 200
            refused(client.post("/v1/steering/clear", headers={header: before + wrong}), 401)
        server.admin_key = os.fsdecode(b"\xff-key")  # no text at all: what an environment may hold
        refused(client.post("/v1/steering/clear", headers={"X-Weir-Admin-Key": sent}), 401)


def test_steering_of_every_request(pair):
    """Tiers add up; a later set replaces its own places only; `replace` replaces all; clear clears."""
    (one, two), servers = pair
    plain = {"capture": []}
    body = {
        "vectors": {"post_mlp": {"1": V}, "pre_attn": {"2": {"vector": V, "scale": 2.0}}},
        "decode_vectors": {"resid_post": {"1": OTHER}},
    }
    made = one.post("/v1/steering/set", json=body | {"clamps": {"post_attn": {}}})
    sent = ["post_mlp", "pre_attn", "resid_post"]
    assert made.json() == {"status": "ok", "hook_points": sent, "layers_updated": [1, 2]}
    doubled = [2 * x for x in V]
    first = [
        ("resid_post", (1,), "all", [V]),
        ("resid_pre", (2,), "all", [doubled]),
        ("resid_post", (1,), "generated", [OTHER]),
    ]
    assert all(lowered(s, plain) == first for s in servers) and all(s.frontend.universal for s in servers)
    two.post("/v1/steering/set", json={"vectors": {"resid_post": {"1": OTHER}}})
    assert lowered(servers[0], plain) == [first[1], first[2], ("resid_post", (1,), "all", [OTHER])]
    active = one.get("/v1/steering").json()
    assert active["active_layers"]["1"]["resid_post"] == {
        "norm": pytest.approx(D**0.5),
        "decode_norm": pytest.approx(D**0.5),
        "clamps": 0,
    }
    assert active["active_layers"]["1"]["post_block"] == active["active_layers"]["1"]["resid_post"]
    assert active["active_layers"]["2"]["pre_attn"]["norm"] == pytest.approx(2 * np.linalg.norm(V))
    assert len(active["interventions"]) == 3 and "b64" not in json.dumps(active)
    one.post("/v1/steering/set", json={"prefill_vectors": {"resid_post": {"0": V}}, "replace": True})
    assert lowered(servers[1], plain) == [("resid_post", (0,), "prompt", [V])]
    assert two.post("/v1/steering/clear").json() == {"status": "ok"}
    assert lowered(servers[0], plain) == [] and not servers[0].frontend.universal
    assert one.get("/v1/steering").json() == {"active_layers": {}, "interventions": []}


def test_clamps_and_own_interventions_of_every_request(pair):
    (one, two), servers = pair
    bound = {"vector": OTHER, "min": -1.0, "max": 2.0, "strength": 0.5}
    body = {"clamps": {"resid_post": {"1": [bound, {"vector": V, "value": 3.0}]}}}
    own = [{"op": "ablate", "directions": OTHER, "layers": [0, 2]}]
    assert one.post("/v1/steering/set", json={**body, "interventions": own}).status_code == 200
    two.post("/v1/steering/set", json={"vectors": {"resid_post": {"1": V}}})
    servers[0].frontend.names.refresh()
    kinds = [(i.op, i.layers) for i in servers[0].frontend.names.always]
    assert kinds == [("add", (1,)), ("clamp", (1,)), ("clamp", (1,)), ("ablate", (0, 2))]
    low, fixed = servers[0].frontend.names.always[1:3]
    assert (low.min, low.max, low.strength, fixed.value, fixed.min) == (-1.0, 2.0, 0.5, 3.0, None)
    assert one.get("/v1/steering").json()["active_layers"]["1"]["resid_post"]["clamps"] == 2
    two.post("/v1/steering/set", json={"interventions": [{"op": "add", "vector": V, "layers": "all"}]})
    servers[0].frontend.names.refresh()
    assert [i.op for i in servers[0].frontend.names.always] == ["add", "clamp", "clamp", "add"]


def test_packed_vectors_and_clamps(pair):
    (one, _), servers = pair
    rows = np.float32([V, OTHER])
    packed = {"dtype": "float32", "shape": [2, D], "layer_indices": [3, 0]}
    packed |= {"data": base64.b64encode(rows.tobytes()).decode()}
    body = {
        "vectors": {"post_block": {**packed, "scales": [2.0, -1.0]}},
        "decode_clamps": {"resid_post": {**packed, "bounds": [[None, 1.0], [0.5, 0.5]], "strengths": [1.0, 0.5]}},
    }
    made = one.post("/v1/steering/set", json=body)
    assert made.status_code == 200, made.text
    servers[0].frontend.names.refresh()
    assert [(i.op, i.layers, i.positions.kind) for i in servers[0].frontend.names.always] == [
        ("add", (3,), "all"),
        ("add", (0,), "all"),
        ("clamp", (3,), "generated"),
        ("clamp", (0,), "generated"),
    ]
    assert [i.scale for i in servers[0].frontend.names.always[:2]] == [2.0, -1.0]
    assert [(i.min, i.max, i.strength) for i in servers[0].frontend.names.always[2:]] == [
        (None, 1.0, 1.0),
        (0.5, 0.5, 0.5),
    ]
    half = np.float16([V, OTHER]).tobytes()
    body = {"vectors": {"resid_post": {**packed, "dtype": "float16", "data": base64.b64encode(half).decode()}}}
    assert one.post("/v1/steering/set", json=body | {"replace": True}).status_code == 200
    assert lowered(servers[0], {})[0][3] == [V]
    bad = {**packed, "layer_indices": [1]}
    refused(
        one.post("/v1/steering/set", json={"vectors": {"resid_post": bad}}), 400, "vectors.resid_post.layer_indices"
    )


REFUSED = [
    ({}, "vectors"),
    ({"vectors": {}}, "vectors"),
    ({"replace": True}, "vectors"),
    ({"vectors": {"nowhere": {"1": V}}}, "vectors.nowhere.1.hook"),
    ({"vectors": {"resid_post": {"99": V}}}, "vectors.resid_post.99.layers"),
    ({"vectors": {"resid_post": {"-1": V}}}, "vectors.resid_post.-1.layers"),
    ({"vectors": {"resid_post": {"x": V}}}, "vectors.resid_post.x"),
    ({"vectors": {"resid_mid": {"2": V}}}, "vectors.resid_mid.2.layers"),
    ({"vectors": {"resid_post": {"1": V[1:]}}}, "vectors.resid_post.1.vector"),
    ({"vectors": {"resid_post": {"1": [V, V]}}}, "vectors.resid_post.1.vector"),
    ({"vectors": {"resid_post": {"1": {"vector": V, "scal": 2}}}}, "vectors.resid_post.1.scal"),
    ({"vectors": {"resid_post": {"1": {"vector": V, "scale": "2"}}}}, "vectors.resid_post.1.scale"),
    ({"vectors": {"resid_post": {"1": {"ref": "gone"}}}}, "vectors.resid_post.1.vector"),
    ({"vectors": [1]}, "vectors"),
    ({"vectors": {"resid_post": [1]}}, "vectors.resid_post"),
    ({"clamps": {"resid_post": {"1": {"vector": V}}}}, "clamps.resid_post.1"),
    ({"clamps": {"resid_post": {"1": [{"vector": V}]}}}, "clamps.resid_post.1[0].value"),
    ({"clamps": {"resid_post": {"1": [{"vector": [0.0] * D, "value": 1}]}}}, "clamps.resid_post.1[0].direction"),
    ({"clamps": {"resid_post": {"1": [{"vector": V, "min": 2, "max": 1}]}}}, "clamps.resid_post.1[0].min"),
    ({"interventions": [{"op": "eval"}]}, "interventions[0].op"),
    ({"vectors": {"resid_post": {"1": V}}, "target": "draft"}, "target"),
    ({"vectors": {"resid_post": {"1": V}}, "replace": "yes"}, None),
    ({"vectors": {"resid_post": {"1": V}}, "more": 1}, None),
]


@pytest.mark.parametrize(("body", "field"), REFUSED)
def test_steering_that_cannot_be_done_changes_nothing(pair, body, field):
    (one, _), servers = pair
    one.post("/v1/steering/set", json={"vectors": {"resid_post": {"0": V}}})
    before = servers[0].names.read()
    refused(one.post("/v1/steering/set", json=body), 400, field)
    if field and field not in ("vectors", "target"):
        refused(one.post("/v1/steering/modules/register", json={**body, "name": "m"}), 400, field)
    assert servers[0].names.read() is before


def test_modules(pair):
    (one, two), servers = pair
    one.put("/v1/vectors/happy", json=V)
    module = {"name": "m", "vectors": {"resid_post": {"1": {"vector": {"ref": "happy"}, "scale": 0.5}}}}
    made = one.post("/v1/steering/modules/register", json=module)
    assert made.json() == {"status": "ok", "name": "m", "modules": ["m"]}
    assert two.get("/v1/steering/modules").json() == {"modules": ["m"], "count": 1}
    half = [0.5 * x for x in V]
    assert lowered(servers[1], {"modules": ["m"]}) == [("resid_post", (1,), "all", [half])]
    one.put("/v1/vectors/happy", json=OTHER)  # what a name meant then is what the module has
    own = {"op": "add", "vector": "happy", "layers": [3]}
    made = lowered(servers[1], {"modules": [{"name": "m", "scale": -2}], "interventions": [own]})
    assert made == [("resid_post", (1,), "all", [[-x for x in V]]), ("resid_post", (3,), "all", [OTHER])]
    clamp = {"name": "c", "clamps": {"resid_post": {"1": [{"vector": V, "value": 1.0}]}}}
    assert two.post("/v1/steering/modules/register", json=clamp).json()["modules"] == ["c", "m"]
    assert lowered(servers[0], {"modules": ["c"]})
    for weir_object, field in (
        ({"modules": [{"name": "c", "scale": 2.0}]}, "modules[0].scale"),
        ({"modules": ["m", "gone"]}, "modules[1]"),
        ({"modules": ["happy"]}, "modules[0]"),
        ({"modules": [{"name": "m", "scales": 1}]}, "modules[0].scales"),
        ({"modules": [1]}, "modules[0]"),
        ({"modules": ["m"] * 65}, "modules"),
    ):
        with pytest.raises(WeirError) as caught:
            lowered(servers[0], weir_object)
        assert caught.value.field == field
    refused(one.post("/v1/steering/modules/register", json={**module, "name": "happy"}), 400, "name")
    refused(one.put("/v1/vectors/m", json=V), 400, "name")
    assert two.post("/v1/steering/modules/unregister", json={"name": "m"}).json()["modules"] == ["c"]
    refused(one.post("/v1/steering/modules/unregister", json={"name": "m"}), 404, "name")


STACK = np.arange(1.0, LAYERS * D + 1).reshape(LAYERS, D)


def test_vectors_by_layer_everywhere(pair):
    """In names, modules, what every request undergoes, and requests; seen by every process."""
    (one, two), servers = pair
    each = [("resid_post", (n,), "all", [STACK[n].tolist()]) for n in range(LAYERS)]
    assert one.put("/v1/vectors/stack", json=STACK.tolist()).json()["shape"] == [LAYERS, D]
    file = save({"deep": STACK[:2, None].astype(np.float32)})
    made = two.put("/v1/vectors/deep", content=file, headers={"Content-Type": "application/vnd.safetensors"})
    assert made.json()["shape"] == [2, 1, D]
    by_name = {"op": "add", "vector": {"ref": "stack"}, "per_layer": True}
    deep = {"op": "add", "vector": "deep", "per_layer": True, "layers": [2, 1]}
    swapped = [("resid_post", (1,), "all", [STACK[1].tolist()]), ("resid_post", (2,), "all", [STACK[0].tolist()])]
    mapping = {"op": "add", "vector": {"1": {"ref": "stack"}, "2": V}}
    for server in servers:
        assert lowered(server, {"interventions": [by_name]}) == each
        assert lowered(server, {"interventions": [deep]}) == swapped
        with pytest.raises(WeirError, match=r"4 rows, but 'all' is open.*per_layer=True") as caught:
            lowered(server, {"interventions": [mapping]})
        assert caught.value.field == "interventions[0].positions"
    own = [by_name, deep, {"op": "add", "vector": {"3": V, "0": [V]}, "keep_norm": True, "positions": "prompt"}]
    assert one.post("/v1/steering/set", json={"interventions": own}).json()["layers_updated"] == [0, 1, 2, 3]
    module = {"name": "m", "interventions": own[:2]}
    assert two.post("/v1/steering/modules/register", json=module).status_code == 200
    assert one.delete("/v1/vectors/stack").status_code == two.delete("/v1/vectors/deep").status_code == 204
    for server in servers:
        always = lowered(server, {})
        assert always[:6] == each + swapped and [m[:3] for m in always[6:]] == [("resid_post", (0, 3), "prompt")]
        assert lowered(server, {"modules": [{"name": "m", "scale": 2}]})[7:] == [
            (*m[:3], [[2 * x for x in m[3][0]]]) for m in each + swapped
        ]
    shown = two.get("/v1/steering").json()["interventions"]
    assert "b64" not in json.dumps(shown) and [i.get("per_layer") for i in shown] == [True, True, None]
    assert [i["layers"] for i in shown] == ["all", [2, 1], [0, 3]] and set(shown[2]["vector"]) == {"0", "3"}
    assert shown[2]["keep_norm"] is True


def test_a_row_as_a_matrix_is_that_row_in_every_body(pair):
    (one, two), servers = pair
    one.put("/v1/vectors/flat", json=V)
    two.put("/v1/vectors/row", json=[V])
    two.put("/v1/vectors/blocks", json={"directions": {"1": [V], "2": OTHER}})
    assert lowered(servers[0], {"modules": ["blocks"]}) == [
        ("resid_post", (1,), "all", [V]),
        ("resid_post", (2,), "all", [OTHER]),
    ]
    for vector in (V, [V], {"ref": "flat"}, {"ref": "row"}, {"ref": "blocks[1]"}):
        entry = {"vector": vector, "scale": 2.0}
        body = {
            "vectors": {"resid_post": {"1": entry}},
            "clamps": {"resid_post": {"1": [{"vector": vector, "max": 0}]}},
        }
        assert one.post("/v1/steering/set", json={**body, "replace": True}).status_code == 200, vector
        add, clamp = lowered(servers[1], {})
        assert add == ("resid_post", (1,), "all", [[2 * x for x in V]]) and clamp[:3] == add[:3]
        norm = two.get("/v1/steering").json()["active_layers"]["1"]["resid_post"]["norm"]
        assert norm == pytest.approx(2 * np.linalg.norm(V))
    rows = {"vectors": {"resid_post": {"1": [V, OTHER]}}}
    assert "2 rows" in refused(one.post("/v1/steering/set", json=rows), 400, "vectors.resid_post.1.vector")
    own = {"interventions": [{"op": "replace", "values": [V, OTHER], "layers": 1}]}
    message = refused(one.post("/v1/steering/set", json=own), 400, "interventions[0].positions")
    assert "2 rows, but 'all' is open" in message
    listed = {"interventions": [{**own["interventions"][0], "positions": [4, 1, 2]}]}
    assert "2 rows for 3 positions" in refused(
        two.post("/v1/steering/modules/register", json={"name": "m", **listed}), 400, "interventions[0].positions"
    )


def test_requests_of_the_fork(pair):
    """`steering_name` and the packed tiers of a request: module first, then tiers, then Weir's own."""
    (one, _), (server, _) = pair
    module = {"name": "m", "vectors": {"resid_post": {"1": V}}}
    one.post("/v1/steering/modules/register", json=module)
    packed = {"dtype": "float32", "shape": [1, D], "layer_indices": [2]}
    packed |= {"data": base64.b64encode(np.float32(OTHER).tobytes()).decode()}
    body = {"steering_name": "m", "decode_steering_vectors": {"post_mlp": packed}}
    own = {"v": 1, "interventions": {"op": "add", "vector": V, "layers": [3]}, "modules": "m"}
    first = [("resid_post", (1,), "all", [V]), ("resid_post", (2,), "generated", [OTHER])]

    def asked(body):
        assert asks(None, body)
        weir_object = dict(translate(WeirRequest.parse(None, body, server.limits), body).extra_args["weir"])
        assert json.loads(json.dumps(weir_object)) == weir_object and weir_object.pop("v") == 1
        return lowered(server, weir_object)

    assert asked(body) == first
    assert asked(body | {"weir": own}) == [first[0], *first, ("resid_post", (3,), "all", [V])]
    assert asked({"prefill_steering_vectors": {"post_mlp": {"0": V}}}) == [("resid_post", (0,), "prompt", [V])]
    clamp = {"resid_mid": {"1": [{"vector": V, "max": 4.0}]}}
    body = {"prefill_steering_clamps": clamp} | body
    ask = translate(WeirRequest.parse(None, body, server.limits), body)
    clamped = ask.extra_args["weir"]
    assert [(i["op"], i["positions"]) for i in clamped["interventions"]] == [("add", "generated"), ("clamp", "prompt")]
    assert asks(None, {"steering_clamps": clamp}) and clamped["interventions"][1]["max"] == 4.0
    assert not asks(None, {"steering_name": None}) and WeirRequest.parse(None, {}, server.limits) is None
    bad = {"steering_vectors": {"post_mlp": {**packed, "shape": [2, D]}}}
    with pytest.raises(WeirError) as caught:
        translate(WeirRequest.parse(None, bad, server.limits), bad)
    assert caught.value.field == "steering_vectors.post_mlp.data.b64"
    with pytest.raises(WeirError) as caught:
        asked({"steering_name": "m", "weir": {"v": 1, "modules": ["m", "gone"]}})
    body = {"steering_name": "m", "weir": {"v": 1, "modules": ["m", "gone"]}}
    ask = translate(WeirRequest.parse(None, body, server.limits), body)
    assert ask.as_sent(caught.value).field == "modules[1]"


def test_layers_and_targets_of_the_fork(pair):
    """Its other targets, and autoencoders by path, are refused."""
    (one, _), _ = pair
    manifest = {"d_model": D, "d_sae": 16, "activation": "relu", "layers": [[1, "post_mlp"]], "clampable_features": [0]}
    for body, field in (
        ({"name": "m", "kind": "sae_delta", "sae_manifest": manifest | {"weights_uri": "/etc/passwd"}}, "kind"),
        ({"name": "m", "vectors": {"resid_post": {"1": V}}, "sae_manifest": manifest}, "sae_manifest"),
    ):
        assert "PUT /v1/saes/NAME" in refused(one.post("/v1/steering/modules/register", json=body), 400, field)

    layers = one.get("/v1/steering/layers").json()["layers"]
    assert one.get("/v1/steering/layers?target=main").json() == {"layers": layers} and set(layers) == {*"0123"}
    for hook in ("resid_mid", "post_attn"):
        assert hook in layers["1"]["hook_points"] and hook not in layers["2"]["hook_points"]
    refused(one.get("/v1/steering/layers?target=draft"), 400, "target")
    refused(one.get("/v1/steering/layers?target=x"), 400)
    refused(one.post("/v1/steering/clear", json={"target": "draft"}), 400, "target")


def test_what_the_forks_gates_name(pair):
    """Probes and vectors to add, in the forms of the fork; they are Weir's probes and modules."""
    (one, two), servers = pair
    steer = {"name": "s", "kind": "steer", "packed": {"post_block": packed(1, V) | {"scales": [2.0]}}}
    probe = {"name": "p", "kind": "probe", "packed": {"pre_attn": packed(0, OTHER)}}
    one.post("/v1/steering/vectors/register", json=steer).raise_for_status()
    made = one.post("/v1/steering/vectors/register", json=probe).json()
    assert made == {"status": "ok", "name": "p", "kind": "probe", "vectors": {"probe": ["p"], "steer": ["s"]}}
    assert two.get("/v1/steering/vectors").json() == {"vectors": made["vectors"], "count": 2}
    assert lowered(servers[1], {"modules": ["s"]}) == [("resid_post", (1,), "all", [[2 * x for x in V]])]
    kept = two.get("/v1/probes/p").json()
    assert (kept["hook"], kept["layer"], kept["positions"]) == ("resid_pre", 0, "generated")

    def gate(name):
        when = {"kind": "probe", "probe": {"kind": "name", "name": "p"}, "threshold": 1}
        add = {"kind": "add", "steer": {"kind": "name", "name": name}, "strength": 0.5}
        return {"when": when, "scope": "this_token", "apply": add}

    names = asyncio.run(known_names(servers[1]))
    body = {"steering": [gate("s")]}
    ask = translate(WeirRequest.parse(None, body, servers[1].limits), body, names)
    (added,) = ask.extra_args["weir"]["interventions"]
    assert (added["scale"], added["positions"], added["when"]["probe"]) == (1.0, "generated", "p")
    servers[1].frontend.names.refresh()
    servers[1].frontend.admit("r", {"weir": {"v": 1, "interventions": [added]}}, [5, 6, 7], 3, 6)
    two_sites = {"post_block": packed(1, V), "pre_attn": packed(1, V)}
    for wrong, field in (
        (probe | {"packed": two_sites}, "body.packed"),
        (probe | {"packed": {}}, "body.packed"),
        (probe | {"name": "sites"}, "name"),
        (steer | {"packed": {}}, "vectors"),
        (steer | {"packed": {"post_block": {"1": [1.0]}}}, "vectors.post_block.1.vector"),
        (steer | {"packed": {"nowhere": packed(1, V)}}, "vectors.nowhere.hook"),
    ):
        refused(one.post("/v1/steering/vectors/register", json=wrong), 400, field)
    refused(one.post("/v1/steering/vectors/register", json=steer | {"kind": "x"}), 400)
    for kind, name in (("probe", "p"), ("steer", "s")):
        asked = {"name": name, "kind": kind}
        one.post("/v1/steering/vectors/unregister", json=asked).raise_for_status()
        refused(two.post("/v1/steering/vectors/unregister", json=asked), 404, "name")
    assert two.get("/v1/steering/vectors").json() == {"vectors": {"probe": [], "steer": []}, "count": 0}
    assert one.get("/v1/steering/dynamic").json() == {"workers": [{"controllers": {}}]}
    refused(one.delete("/v1/patch_source/r"), 404, "run_id")


def test_modules_of_files_are_registered_when_the_server_starts(pair, tmp_path):
    """As `--steering-modules` of the fork; in every process, and again when one comes later."""
    (one, _), servers = pair
    (tmp_path / "m.json").write_text(json.dumps({"vectors": {"post_block": {"1": V}}, "decode_vectors": None}))
    environ = {"WEIR_SERVE_MODULES": json.dumps({"m": str(tmp_path / "m.json")})}
    for server in servers:
        asyncio.run(modules.load_given(server, environ))
        assert lowered(server, {"modules": ["m"]}) == [("resid_post", (1,), "all", [V])]
    assert one.get("/v1/steering/modules").json() == {"modules": ["m"], "count": 1}
    wrong = ["{", "[]", "{}", '{"name": "x"}', '{"vectors": {"resid_post": {"99": [1.0]}}}', '{"more": 1}']
    for text in wrong:
        (tmp_path / "m.json").write_text(text)
        with pytest.raises(WeirError, match="m: ") as e:
            asyncio.run(modules.load_given(servers[0], environ))
        assert e.value.field == "--steering-modules"
    with pytest.raises(WeirError, match="No such file"):
        asyncio.run(modules.load_given(servers[0], {"WEIR_SERVE_MODULES": '{"m": "/nowhere"}'}))


@pytest.fixture
def with_parts(tmp_path):
    """A server of a model whose points inside attention and MLP are served."""
    with serving(tmp_path, 1, facts=PART_FACTS) as (server,):
        yield TestClient(app_of(server), headers=ADMIN)


def test_vectors_for_other_rows_are_kept(with_parts):
    """For a head, some neurons, all of them, or rows of heads; what they are for is said when they are used."""
    for shape in ((D,), (2,), (5,), (*NEURONS,), (3, 4, 2), (4, *NEURONS)):
        vector = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        kept = with_parts.put("/v1/vectors/v", json={"vector": vector.tolist()}).raise_for_status().json()
        assert kept["shape"] == list(shape)
        for format in ("json", "safetensors"):
            got = read_vectors(with_parts.get(f"/v1/vectors/v?format={format}").content, format, "v")
            assert np.array_equal(got[None].array, vector)
    why = refused(with_parts.put("/v1/vectors/v", json=[1.0] * (NEURONS[0] + 1)), 400, "vector")
    assert why.endswith("width 25 does not match the model's 8, and no row has more than 24 values")
    for width in (2, NEURONS[0]):  # directions of blocks are added to the stream
        body = {"directions": {"1": [1.0] * width}}
        assert "does not match" in refused(with_parts.put("/v1/vectors/v", json=body), 400, "vector.1")


def test_steering_of_heads_and_neurons(with_parts):
    """A row of heads by tier, flat; some heads and neurons in Weir's form; points that are only read are refused."""
    points = with_parts.get("/v1/steering/layers?target=main").json()["layers"]["1"]["hook_points"]
    assert {"z", "q", "mlp_post", "resid_post"} <= set(points) and not {"q_rot", "mlp_pre"} & set(points)
    body = {
        "vectors": {"z": {"1": V}},
        "interventions": [
            {"op": "add", "hook": "z", "layers": [1], "heads": [3, 0], "vector": [1.0, 2.0]},
            {"op": "replace", "hook": "mlp_post", "layers": [2], "neurons": [7], "values": [0.0]},
        ],
    }
    made = with_parts.post("/v1/steering/set", json=body).raise_for_status().json()
    assert made == {"status": "ok", "hook_points": ["mlp_post", "z"], "layers_updated": [1, 2]}
    kept = with_parts.get("/v1/steering").json()
    assert kept["active_layers"] == {"1": {"z": {"norm": pytest.approx(np.linalg.norm(V)), "clamps": 0}}}
    assert [one.get("heads") for one in kept["interventions"]] == [None, [3, 0], None]
    assert kept["interventions"][2]["neurons"] == [7]
    assert with_parts.put("/v1/vectors/head", json=[0.5, -0.5]).status_code == 200
    by_name = {"op": "add", "hook": "z", "layers": [1], "heads": [2], "vector": {"ref": "head"}}
    module = {"name": "m", "interventions": [by_name]}
    assert with_parts.post("/v1/steering/modules/register", json=module).status_code == 200
    for wrong, field in (
        ({"vectors": {"q_rot": {"1": V}}}, "vectors.q_rot.1.hook"),
        ({"vectors": {"z": {"1": V[:2]}}}, "vectors.z.1.vector"),
        ({"interventions": [by_name | {"hook": "mlp_pre"}]}, "interventions[0].hook"),
        ({"interventions": [by_name | {"heads": [4]}]}, "interventions[0].heads"),
        ({"interventions": [by_name | {"hook": "resid_post"}]}, "interventions[0].heads"),
    ):
        refused(with_parts.post("/v1/steering/set", json=wrong), 400, field)
    assert with_parts.get("/v1/steering").json() == kept


def test_equal_wishes_are_remembered_under_steering_and_by_name(pair):
    """Admission is looked up, not repeated, until a name changes its meaning."""
    (one, two), servers = pair
    frontend = servers[0].frontend
    one.post("/v1/steering/set", json={"vectors": {"resid_post": {"0": V}}})
    one.put("/v1/vectors/happy", json=V)

    def admitted():
        weir_object = {"v": 1, "interventions": [{"op": "add", "vector": "happy", "layers": [1]}]}
        frontend.names.refresh()
        return frontend._admitted({"weir": weir_object}, True), frontend._admitted({}, True)

    assert all(a is b for a, b in zip(admitted(), admitted()))
    first = admitted()
    two.put("/v1/vectors/happy", json=OTHER)
    two.post("/v1/steering/clear")
    assert [len(a.effective) for a in first] == [2, 1] and [len(a.effective) for a in admitted()] == [1, 0]
    assert admitted()[0].effective[0].digest != first[0].effective[1].digest
