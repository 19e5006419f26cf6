"""Two servers of one model with one store, behind a proxy: names and results of each are known to both."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

import vllm_weir as weir
from tests.engine.serving import ADMIN, ADMIN_KEY, COMPLETIONS, LENS, WEIR, body, jacobians, proxy, running
from tests.support.machine import engine_processes, haproxy, needs, object_store
from tests.support.measure import eventually
from tests.support.ports import free_port
from tests.support.s3 import s3_environment, s3_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), needs(engine_processes, object_store)]
CLOSE_OTHERS = True
SITE = {"hook": "resid_post", "layers": [2], "positions": "all"}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a server of the store."""
    folder = tmp_path_factory.mktemp("store")
    with s3_server("names") as options:
        env = s3_environment(options) | {"WEIR_ADMIN_KEY": ADMIN_KEY, "VLLM_LOGGING_LEVEL": "WARNING"}

        def started(name: str, *more: str, **options: Any) -> contextlib.AbstractContextManager[httpx.Client]:
            own = folder / name
            own.mkdir(exist_ok=True)
            # Not a fork: a fork must not share connections to a store.
            return running(
                own / "log", WEIR, "--weir-store", "s3://names/demo", *more,
                env=env | {"WEIR_SERVE_DIRECTORY": str(own)}, **options,
            )  # fmt: skip

        yield started


@pytest.fixture(scope="module")
def pair(start, tmp_path_factory):
    lens = tmp_path_factory.mktemp("lens") / "lens.pt"
    torch.save({"J": jacobians(), "n_prompts": 3}, lens)
    with start("one", "--weir-lens", f"{LENS}={lens}") as one, start("two") as two:
        yield one, two


def answer(client: httpx.Client, **weir_object: Any) -> dict[str, Any]:
    reply = client.post(COMPLETIONS, json=body(weir={"v": 1} | weir_object))
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def names(client: httpx.Client) -> list[list[str]]:
    found = {kind: client.get(f"/v1/{kind}").json()[kind] for kind in ("vectors", "probes", "saes", "lenses")}
    return [[one["name"] for one in listed] for listed in found.values()]


@needs(haproxy)
def test_servers_behind_a_proxy_agree(pair, tmp_path):
    """Each request goes to the other server than the one before."""
    with proxy(tmp_path, *pair) as both:
        vector = torch.linspace(-1, 1, 256).tolist()
        assert both.put("/v1/vectors/v", json={"vector": vector}, headers=ADMIN).status_code == 200
        assert both.put("/v1/probes/p", json={"weight": vector, "layer": 2}, headers=ADMIN).status_code == 200
        put = both.put("/v1/saes/s", json={"path": weir.demo_sae()}, headers=ADMIN)
        assert put.status_code == 200, put.text
        for server in pair:
            eventually(lambda server=server: names(server), [["v"], ["p"], ["s"], [LENS]], 120)
        steer = [{"op": "add", "vector": {"ref": "v"}, "layers": [2], "scale": 4.0}]
        asked = {
            "capture": [SITE],
            "interventions": steer,
            "probes": ["p"],
            "features": [{"name": "s", "top_k": 4}],
            "lens": {"name": LENS, "layers": [0], "top_k": 4},
            "response": {"inline_bytes": 0},
        }
        outs = [answer(both, **asked) for _ in range(2)]
        rows = []
        for out in outs:
            kept = out["weir"]["activations"]
            files = [both.get(kept["url"]) for _ in range(2)]
            assert [file.status_code for file in files] == [200, 200] and files[0].content == files[1].content
            rows.append(load(files[0].content))
        assert rows[0].keys() == rows[1].keys() and all(torch.equal(rows[0][key], rows[1][key]) for key in rows[0])
        assert outs[0]["text"] == outs[1]["text"]
        for read in ("scores", "features", "lens"):
            assert outs[0]["weir"][read] == outs[1]["weir"][read]
        assert both.delete(outs[0]["weir"]["activations"]["url"]).status_code == 204
        assert {both.get(outs[0]["weir"]["activations"]["url"]).status_code for _ in range(2)} == {404}
        assert both.delete("/v1/saes/s", headers=ADMIN).status_code == 204
        for server in pair:
            eventually(lambda server=server: names(server)[2], [], 120)
            assert (
                server.post(COMPLETIONS, json=body(weir={"v": 1, "features": [{"name": "s", "top_k": 4}]})).status_code
                == 400
            )


@needs(haproxy)
def test_a_killed_server_knows_everything(pair, start, tmp_path):
    """What was named through it or through another, before it was killed and while it was away."""
    one, _ = pair
    port, vector = free_port(), [0.5] * 256
    with contextlib.ExitStack() as killed:
        three = killed.enter_context(start("three", port=port, end=signal.SIGKILL))
        with proxy(tmp_path, one, three) as both:
            put = three.put("/v1/saes/t", json={"path": weir.demo_sae()}, headers=ADMIN)
            assert put.status_code == 200, put.text
            assert three.put("/v1/probes/t", json={"weight": vector, "layer": 2}, headers=ADMIN).status_code == 200
            took = [named(three, one, f"t{k}", vector) for k in range(5)]
            print(f"seconds until the other server knows a vector: {took}")  # a busy machine may take longer than one
            kept = answer(three, capture=[SITE], response={"inline_bytes": 0})["weir"]["activations"]["url"]
            content = three.get(kept).content
            killed.close()
            for _ in range(4):  # whichever server's turn it is
                assert both.get(kept).content == content
                answer(both, probes=["t"], features=[{"name": "t", "top_k": 4}])
            assert one.put("/v1/vectors/w", json={"vector": vector}, headers=ADMIN).status_code == 200
            assert one.delete("/v1/vectors/t0", headers=ADMIN).status_code == 204
            with start("three", port=port) as again:
                found = names(again)
                assert found == names(one)
                assert {"w", "t1", "t4"} <= set(found[0]) and "t0" not in found[0]
                assert "t" in found[1] and "t" in found[2] and found[3] == [LENS]
                assert again.get(kept).content == content
                asked = {
                    "probes": ["t"],
                    "features": [{"name": "t", "top_k": 4}],
                    "lens": {"name": LENS, "layers": [0], "top_k": 2},
                }
                steer = [{"op": "add", "vector": {"ref": "t1"}, "layers": [2], "scale": 4.0}]
                outs = [answer(server, interventions=steer, **asked)["weir"] for server in (one, again)]
                for read in ("scores", "features", "lens"):
                    assert outs[0][read] == outs[1][read]
                assert again.delete("/v1/vectors/w", headers=ADMIN).status_code == 204
                eventually(lambda: "w" in names(one)[0], False, 120)


def named(server: httpx.Client, other: httpx.Client, name: str, vector: list[float]) -> float:
    """Name a vector through one server; return the seconds until the other knows it."""
    assert server.put(f"/v1/vectors/{name}", json={"vector": vector}, headers=ADMIN).status_code == 200
    begun = time.monotonic()
    eventually(lambda: other.get(f"/v1/vectors/{name}").status_code, 200, 120)
    return round(time.monotonic() - begun, 3)
