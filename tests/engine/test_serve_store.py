"""Two servers of one model with one store, behind a proxy: names and results of each are known to both."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

import vllm_weir as weir
from tests.engine.serving import ADMIN, ADMIN_KEY, ARGS, COMPLETIONS, WEIR, body, running
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

        def started(name: str, *more: str) -> contextlib.AbstractContextManager[httpx.Client]:
            own = folder / name
            own.mkdir()
            # Not a fork: a fork must not share connections to a store.
            return running(
                own / "log", WEIR, "--weir-store", "s3://names/demo", *more,
                env=env | {"WEIR_SERVE_DIRECTORY": str(own)}, args=ARGS,
            )  # fmt: skip

        yield started


@pytest.fixture(scope="module")
def pair(start):
    with start("one") as one, start("two") as two:
        yield one, two


def answer(client: httpx.Client, **weir_object: Any) -> dict[str, Any]:
    reply = client.post(COMPLETIONS, json=body(weir={"v": 1} | weir_object))
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


@contextlib.contextmanager
def proxy(folder: Path, *servers: httpx.Client) -> Iterator[httpx.Client]:
    """Yield a client of a proxy that takes the servers in turn."""
    port, config = free_port(), folder / "haproxy.cfg"
    behind = [f"  server s{k} 127.0.0.1:{server.base_url.port}" for k, server in enumerate(servers)]
    seconds = ["  mode http", "  timeout connect 60s", "  timeout client 120s", "  timeout server 120s"]
    front = ["frontend f", f"  bind 127.0.0.1:{port}", "  default_backend b", "backend b", "  balance roundrobin"]
    config.write_text("\n".join(["defaults", *seconds, *front, *behind, ""]))
    process = subprocess.Popen(["haproxy", "-db", "-f", str(config)])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=servers[0].headers, timeout=120) as client:
            eventually(lambda: answers(client), True, 60)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health").status_code == 200
    return False


def names(client: httpx.Client) -> list[list[str]]:
    return [[one["name"] for one in client.get(f"/v1/{kind}").json()[kind]] for kind in ("vectors", "probes", "saes")]


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
            eventually(lambda server=server: names(server), [["v"], ["p"], ["s"]], 120)
        steer = [{"op": "add", "vector": {"ref": "v"}, "layers": [2], "scale": 4.0}]
        asked = {
            "capture": [SITE],
            "interventions": steer,
            "probes": ["p"],
            "features": [{"name": "s", "top_k": 4}],
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
        assert outs[0]["weir"]["scores"] == outs[1]["weir"]["scores"]
        assert outs[0]["weir"]["features"] == outs[1]["weir"]["features"]
        assert both.delete(outs[0]["weir"]["activations"]["url"]).status_code == 204
        assert {both.get(outs[0]["weir"]["activations"]["url"]).status_code for _ in range(2)} == {404}
        assert both.delete("/v1/saes/s", headers=ADMIN).status_code == 204
        for server in pair:
            eventually(lambda server=server: names(server)[2], [], 120)
            assert (
                server.post(COMPLETIONS, json=body(weir={"v": 1, "features": [{"name": "s", "top_k": 4}]})).status_code
                == 400
            )


def test_a_restarted_server_knows_everything(pair, start):
    """What one server is told after another has ended is known to it when it starts again."""
    one, _ = pair
    assert one.put("/v1/vectors/w", json={"vector": [0.5] * 256}, headers=ADMIN).status_code == 200
    kept = answer(one, capture=[SITE], response={"inline_bytes": 0})["weir"]["activations"]["url"]
    with start("again") as again:
        assert "w" in names(again)[0]
        assert again.get(kept).content == one.get(kept).content
        assert again.delete("/v1/vectors/w", headers=ADMIN).status_code == 204
        eventually(lambda: "w" in names(one)[0], False, 120)
