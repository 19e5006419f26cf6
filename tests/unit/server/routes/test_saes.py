"""Routes of sparse autoencoders: loaded once on the workers, known to every process, refused and cleaned up."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from fastapi.testclient import TestClient

import vllm_weir as weir
from tests.support.sae_reference import weights
from tests.unit.admin_app import ADMIN, D, Workers, app_of, serving
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.schema.instructions import FEATURE
from vllm_weir.schema.read_outs import SAEInfo
from vllm_weir.server import saes
from vllm_weir.server.errors import StateNotSaved

FEATURES = 12


def make(path, seed=0, architecture="jumprelu", site=("resid_post", 1), d_in=D, **options):
    sae = weir.SAE.from_tensors(architecture, site, **weights(architecture, seed, d_in, FEATURES), **options)
    sae.save(path)
    return sae


@pytest.fixture
def sae(tmp_path):
    return make(tmp_path / "one")


@pytest.fixture
def pair(tmp_path, sae):
    workers = Workers(2 * sae.nbytes)
    with serving(tmp_path / "", 2, engine=workers) as servers:
        yield [TestClient(app_of(server), headers=ADMIN) for server in servers], servers, workers


def put(client, tmp_path, name="mood", file="one"):
    return client.put(f"/v1/saes/{name}", json={"path": str(tmp_path / file)})


def names(client):
    return [one["name"] for one in client.get("/v1/saes").json()["saes"]]


def test_labels_are_told_of_one(pair, sae, tmp_path):
    (one, other), _, _ = pair
    make(tmp_path / "labelled", labels={3: "<b>happy</b>", 0: "sad"})
    put(one, tmp_path, "told", "labelled")
    put(one, tmp_path)
    for client in (one, other):
        assert client.get("/v1/saes/told").json()["labels"] == {"0": "sad", "3": "<b>happy</b>"}
        assert client.get("/v1/saes/mood").json() == client.get("/v1/saes").json()["saes"][0] | {"labels": {}}
        assert "labels" not in client.get("/v1/saes").json()["saes"][1]
        unknown = client.get("/v1/saes/nobody")
        assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "name"


def files(servers):
    return list(servers[0].directory.path.glob("saes/*"))


def refused(answer, param, why=""):
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and why in error["message"], answer.text


def undergone(server, asked):
    server.frontend.names.refresh()
    request = {"weir": {"v": 1, "interventions": [asked]}}
    frontend = server.frontend
    return admit(request, frontend.engine.require_capabilities(), saes=frontend.names.saes)


def test_what_one_process_loads_the_other_knows(pair, sae, tmp_path):
    (one, other), servers, workers = pair
    answer = put(one, tmp_path)
    described = {"name": "mood", "hook": "resid_post", "layer": 1, "d_sae": FEATURES, "architecture": "jumprelu"}
    described |= {"bytes": sae.nbytes, "layers": []}
    assert answer.status_code == 200 and answer.json() == described
    assert other.get("/v1/saes").json() == {"saes": [described]} == one.get("/v1/saes").json()
    assert workers.loaded == [1, 1] and workers.calls == ["weir_load_sae"]
    response = sae.feature_response(3)
    for server in servers:
        found = undergone(server, {"op": "set_feature", "name": "mood", "feature": 3, "value": 2})
        (move,) = found.effective
        (term,) = move.instructions
        assert (move.hook, move.layers) == ("resid_post", (1,))
        assert (term.kind, term.a, term.b, term.lo, term.hi) == (FEATURE, -1.0, 2.0, response.b, response.theta)
        assert (found.rows[term.u] == response.u).all() and (found.rows[term.w] == response.w).all()
    refused(put(other, tmp_path), "name")
    assert other.delete("/v1/saes/mood").status_code == 204
    assert one.get("/v1/saes").json() == {"saes": []} and workers.loaded == [0, 0]
    assert not files(servers)
    assert other.delete("/v1/saes/mood").status_code == 404
    with pytest.raises(WeirError, match="none is"):
        undergone(servers[0], {"op": "set_feature", "name": "mood", "feature": 3, "value": 2})


def test_what_is_steered_for_all_outlives_its_autoencoder(pair, sae, tmp_path):
    (one, other), servers, _ = pair
    put(one, tmp_path)
    asked = {"op": "set_feature", "name": "mood", "feature": 3, "scale": 2}
    answer = other.post("/v1/steering/set", json={"interventions": [asked]})
    assert answer.status_code == 200 and answer.json()["hook_points"] == ["resid_post"], answer.text
    registered = one.post("/v1/steering/modules/register", json={"name": "glad", "interventions": [asked]})
    assert registered.status_code == 200
    one.delete("/v1/saes/mood")
    for server, client in zip(servers, (one, other), strict=True):
        server.frontend.names.refresh()
        (always,) = server.frontend.names.always
        (module,) = server.frontend.names.vectors.module("glad", "x")
        for kept in (always, module):
            assert (kept.w.array == sae.feature_response(3).w).all() and kept.scale == 2.0
        (shown,) = client.get("/v1/steering").json()["interventions"]
        assert shown["op"] == "set_activation" and shown["scale"] == 2.0


def test_what_encodes_rows_for_all_is_not_unloaded(pair, tmp_path):
    (one, other), _, workers = pair
    make(tmp_path / "topk", architecture="topk", k=3)
    put(one, tmp_path, file="topk")
    asked = {"op": "set_feature", "name": "mood", "feature": 3, "value": 2}
    assert other.post("/v1/steering/set", json={"interventions": [asked]}).status_code == 200
    refused(one.delete("/v1/saes/mood"), "name")
    assert other.post("/v1/steering/clear").status_code == 200
    module = {"name": "glad", "interventions": [asked]}
    assert one.post("/v1/steering/modules/register", json=module).status_code == 200
    refused(other.delete("/v1/saes/mood"), "name", "the module 'glad'")
    assert workers.loaded == [1, 1]
    assert one.post("/v1/steering/modules/unregister", json={"name": "glad"}).status_code == 200
    assert other.delete("/v1/saes/mood").status_code == 204 and workers.loaded == [0, 0]


def test_what_begins_to_encode_rows_for_all_while_it_is_unloaded_keeps_it(pair, tmp_path, monkeypatch):
    (one, other), servers, workers = pair
    make(tmp_path / "topk", architecture="topk", k=3)
    put(one, tmp_path, file="topk")
    asked = {"interventions": [{"op": "set_feature", "name": "mood", "feature": 3, "value": 2}]}
    change = servers[0].change

    async def set_first(job):
        assert (await change(lambda: other.post("/v1/steering/set", json=asked))).status_code == 200
        return await change(job)

    monkeypatch.setattr(servers[0], "change", set_first)
    refused(one.delete("/v1/saes/mood"), "name")
    assert names(one) == ["mood"] and workers.loaded == [1, 1]


@pytest.fixture
def failing(pair, tmp_path, monkeypatch):
    """The pair with an autoencoder of which workers cannot be told to let go; also what happens before that fails."""
    (one, _), _, workers = pair
    put(one, tmp_path)
    call, before = workers.collective_rpc, []

    async def fail(method, args=()):
        if method == "weir_unload_sae":
            for step in before:
                await step()
            raise ConnectionError("the workers do not answer")
        return await call(method, args)

    with monkeypatch.context() as patched:
        patched.setattr(workers, "collective_rpc", fail)
        yield pair, before, patched.undo


def test_an_unload_that_fails_can_be_sent_again(failing, tmp_path):
    ((one, other), servers, workers), _, mend = failing
    with pytest.raises(ConnectionError):
        one.delete("/v1/saes/mood")
    for client in (one, other):
        assert names(client) == ["mood"]
    assert len(files(servers)) == 1
    mend()
    assert other.delete("/v1/saes/mood").status_code == 204
    assert workers.loaded == [0, 0] and not files(servers)


def test_what_has_taken_the_name_by_then_keeps_it(failing, tmp_path):
    ((one, other), servers, _), before, _ = failing
    key = servers[0].names.read().saes["mood"].key

    async def take():
        assert (await asyncio.to_thread(put, other, tmp_path)).status_code == 200

    before.append(take)
    with pytest.raises(ConnectionError):
        one.delete("/v1/saes/mood")
    assert servers[0].names.read().saes["mood"].key != key


@pytest.mark.parametrize("fails", [False, True])
def test_an_unload_whose_caller_is_gone_ends_all_the_same(failing, fails):
    (_, servers, workers), _, mend = failing
    if not fails:
        mend()
    call = workers.collective_rpc

    async def cancelled():
        told, go = asyncio.Event(), asyncio.Event()

        async def wait(method, args=()):
            told.set()
            await go.wait()
            return await call(method, args)

        workers.collective_rpc = wait
        unloading = asyncio.create_task(saes.unload(servers[0], "mood"))
        await told.wait()
        unloading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unloading
        assert servers[0].names.read().saes == {}
        go.set()
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)

    asyncio.run(cancelled())
    assert len(servers[0].names.read().saes) == fails
    workers.collective_rpc = call
    assert len(files(servers)) == fails
    assert workers.loaded == [fails, fails]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"path": "{}/nowhere"}, "path"),
        ({"path": "{}/wide"}, "sae.d_in"),
        ({"path": "{}/refused"}, "sae.site"),
        ({"path": "{}/one", "site": ["resid_post", 9]}, "sae.site"),
        ({"path": "{}/one", "site": ["nothing", 1]}, "site"),
        ({"path": ""}, None),
        ({"path": "{}/one", "more": 1}, None),
        ({}, None),
    ],
)
def test_what_cannot_be_loaded(pair, tmp_path, body, param):
    (one, _), servers, workers = pair
    make(tmp_path / "wide", d_in=2 * D)
    make(tmp_path / "refused", site=("resid_mid", 2))
    body = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in body.items()}
    answer = one.put("/v1/saes/x", json=body)
    assert answer.status_code == 400
    if param is not None:
        assert answer.json()["error"]["param"] == param
    assert workers.loaded == [0, 0] and one.get("/v1/saes").json() == {"saes": []}
    assert not files(servers)


def test_a_worker_without_room_leaves_nothing_on_the_others(pair, sae, tmp_path):
    (one, _), servers, workers = pair
    workers.workers[1]._limit = sae.nbytes
    assert put(one, tmp_path, "a").status_code == 200
    refused(put(one, tmp_path, "b"), "settings.sae_bytes")
    assert workers.loaded == [1, 1] and names(one) == ["a"]
    assert len(files(servers)) == 1


def test_a_state_that_cannot_be_saved_leaves_nothing_on_the_workers(pair, tmp_path, monkeypatch):
    (one, _), servers, workers = pair
    publish = servers[0].names._publish

    def fail(contents):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(servers[0].names, "_publish", fail)
    assert put(one, tmp_path, "a").status_code == StateNotSaved.status
    assert workers.loaded == [0, 0] and not files(servers)
    monkeypatch.setattr(servers[0].names, "_publish", publish)
    assert put(one, tmp_path, "a").status_code == 200


def test_a_file_that_is_slow_to_read_holds_up_no_response(pair, tmp_path, monkeypatch):
    _, (server, _), _ = pair
    far = threading.Event()
    load = weir.SAE.load
    monkeypatch.setattr(weir.SAE, "load", lambda *args, **given: far.wait() and load(*args, **given))

    async def ask():
        loads = [
            asyncio.create_task(saes.load(server, f"a{i}", saes.SAESource(str(tmp_path / "one")))) for i in range(9)
        ]
        await asyncio.sleep(0.1)
        try:
            assert await asyncio.wait_for(server.run(lambda: "rows"), 60) == "rows"
        finally:
            far.set()
        return await asyncio.gather(*loads, return_exceptions=True)

    assert sum(isinstance(one, SAEInfo) for one in asyncio.run(ask())) == 2, "as many as the workers have room for"


def test_options_are_loaded_once_by_however_many_processes(pair, sae, tmp_path):
    _, servers, workers = pair
    environ = {}
    make(tmp_path / "at@home", 1)
    saes.put_options([f"mood={tmp_path}/one", f"other={tmp_path}/at@home@resid_pre.2"], environ)

    async def start():
        for server in servers:
            await saes.load_given(server, environ)

    asyncio.run(start())
    assert workers.loaded == [2, 2] and workers.calls == ["weir_load_sae"] * 2
    for server in servers:
        assert [(one.name, one.site) for one in saes.infos(server)] == [
            ("mood", ("resid_post", 1)),
            ("other", ("resid_pre", 2)),
        ]
    saes.put_options([f"late={tmp_path}/nowhere"], environ)
    with pytest.raises(WeirError, match=r"late: path: .* does not exist") as e:
        asyncio.run(saes.load_given(servers[0], environ))
    assert e.value.field == "--weir-sae"


def test_options():
    """Each is a name and a path, perhaps with the site that it is for."""
    for wrong in (["a"], ["a="], ["=b"], ["a b=c"], ["a=b", "a=c"]):
        environ = {}
        with pytest.raises(WeirError) as e:
            saes.put_options(wrong, environ)
        assert e.value.field == "--weir-sae" and environ == {}
    saes.put_options(["a=/x/y=z", "b=/x@resid_post.3", "c=/x@y"], environ)
    paths = {"a": ["/x/y=z"], "b": ["/x", ["resid_post", 3]], "c": ["/x@y"]}
    assert json.loads(environ["WEIR_SERVE_SAES"]) == paths
