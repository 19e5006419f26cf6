"""Servers of the shipped model for tests, in processes of their own, and requests to them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

import vllm_weir as weir
from tests.engine.serve_cases import PROMPTS, D, other_sae
from tests.engine.serve_probe import PATH as HELD
from tests.engine.serve_probe import WHY
from tests.support.engines import DEFAULTS
from tests.support.machine import haproxy_program
from tests.support.measure import eventually
from tests.support.ports import free_port
from tests.support.zygote import ROOT, Child, zygote

API_KEY, ADMIN_KEY = "read-me", "change-me"
ADMIN = {"X-Weir-Admin-Key": ADMIN_KEY}
ARGS = [
    *("--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"),
    *("--block-size", "32", "--seed", "0", "--kv-cache-memory-bytes", "67108864"),
    *("--host", "127.0.0.1", "--disable-uvicorn-access-log"),
]
WEIR = [sys.executable, "-m", "vllm_weir.cli.main", "serve"]
PLAIN = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
LORA = ["--enable-lora", "--max-lora-rank", "8"]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = [COMPLETIONS, CHAT]
HOOKS = {"steer": "STEER", "watch": "watch", "fail": "fail", "clip": "CLIP"}
"""The hooks of the shared server."""
SAE = "mood"
"""The name of the shipped autoencoder on the shared server."""
LENS = "j"
"""The name of a Jacobian lens on the shared server."""


def jacobians() -> dict[int, torch.Tensor]:
    """The matrices of `LENS`, of some blocks."""
    generator = torch.Generator().manual_seed(5)
    return {layer: (torch.randn(D, D, generator=generator) / D**0.5).half() for layer in (0, 2)}


@contextlib.contextmanager
def running(
    log: Path,
    command: list[str],
    *more: str,
    env: dict[str, str] | None = None,
    timeout: float = 800,
    forked: bool = False,
    model: str = "",
    args: Sequence[str] = ARGS,
    port: int = 0,
    end: signal.Signals = signal.SIGTERM,
) -> Iterator[httpx.Client]:
    """A client of a server that has started; the server and all its processes are gone afterwards.

    Args:
        more: arguments, after `args`.
        model: another one than the shipped.
        forked: all its processes are forks of one that has imported vLLM: it starts in a quarter of the time.
        end: ends the server; SIGKILL ends all its processes at once.
    """
    port = port or free_port()
    environ = {k: v for k, v in os.environ.items() if k not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PLUGINS")}
    environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | (env or {})
    command = [*command, model or weir.demo_model(), *args, "--port", str(port), "--api-key", API_KEY, *more]
    if (share := DEFAULTS.get("gpu_memory_utilization")) is not None:
        command += ["--gpu-memory-utilization", str(share)]  # other processes may be on the card
    process: subprocess.Popen | Child
    if forked:
        process = zygote().start(command[1:], environ, ROOT, log)
    else:
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
    headers = {"Authorization": f"Bearer {API_KEY}"}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120) as client:
            eventually(lambda: _answers(client, process, log), True, timeout)
            yield client
    finally:
        if end == signal.SIGKILL:
            os.killpg(process.pid, end)
        else:
            process.send_signal(end)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def proxy(folder: Path, *servers: httpx.Client) -> Iterator[httpx.Client]:
    """A client of a proxy with the configuration of `deploy/`, which takes idle servers in turn."""
    port, config = free_port(), folder / f"haproxy-{len(servers)}.cfg"
    head = (ROOT / "deploy/haproxy.cfg").read_text().partition("  server one ")[0]
    assert head.count(" :8000\n") == 1
    behind = [f"  server s{k} 127.0.0.1:{server.base_url.port}\n" for k, server in enumerate(servers)]
    config.write_text(head.replace(" :8000\n", f" 127.0.0.1:{port}\n") + "".join(behind))
    process = subprocess.Popen([str(haproxy_program()), "-db", "-f", str(config)])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=servers[0].headers, timeout=120) as client:
            eventually(lambda: _answers(client, process, config), True, 60)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def _answers(client: httpx.Client, process: subprocess.Popen | Child, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-4000:]
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health").status_code == 200
    return False


class Server:
    """The server that most files share.

    Attributes:
        http: a client with the API key.
        folder: where it keeps results and writes what requests archive.
        left: how many results by reference tests have left to expire.
    """

    model, api_key, admin_key = "demo", API_KEY, ADMIN_KEY

    def __init__(self, http: httpx.Client, folder: Path) -> None:
        self.http, self.folder, self.left, self._logged = http, folder, 0, 0
        self.url = str(http.base_url).rstrip("/")
        self._begin = self.state()

    def client(self, cls: Any = weir.Client, **options: Any) -> Any:
        return cls(self.url, self.api_key, self.admin_key, **options)

    def admin(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.http.request(method, path, headers=ADMIN, **more)

    def held(self) -> dict[str, int]:
        return self.http.get(HELD).raise_for_status().json()

    def check_nothing_held(self) -> None:
        """Nothing of any request is left but the results that are known to be."""
        eventually(self.held, {"store": 0, "requests": 0, "workers": 0, "spool": self.left}, 10)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        families = text_string_to_metric_families(self.http.get("/metrics").raise_for_status().text)
        samples = (s for family in families for s in family.samples if s.name == name)
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def state(self) -> dict[str, list[str]]:
        """What every request may use by name, or undergoes."""

        def read(path: str) -> Any:
            return self.http.get(f"/v1/{path}").raise_for_status().json()

        return {
            **{kind: [one["name"] for one in read(kind)[kind]] for kind in ("vectors", "probes", "saes")},
            "modules": read("steering/modules")["modules"],
            "steering": read("steering")["interventions"],
            "adapters": [one["id"] for one in read("models")["data"] if one.get("parent")],
        }

    def restore(self) -> None:
        """Have it as it was at the start; nothing of any request is left."""
        self.left = self.held()["spool"]
        self.check_nothing_held()
        self.admin("POST", "/v1/steering/clear").raise_for_status()
        found = self.state()
        for name in found["modules"]:
            self.admin("POST", "/v1/steering/modules/unregister", json={"name": name})
        for kind in ("probes", "vectors", "saes"):
            for name in set(found[kind]) - set(self._begin[kind]):
                self.admin("DELETE", f"/v1/{kind}/{name}").raise_for_status()
        for name in found["adapters"]:
            self.admin("POST", "/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
        assert self.state() == self._begin
        told = (self.folder / "log").read_text()[self._logged :]
        self._logged += len(told)
        # vLLM logs the streams that a test has failed, and the adapters that it could not load.
        assert told.count("Traceback") == told.count(WHY) or "No adapter found" in told, told[-4000:]


class SharedServer:
    """Starts the server that most files share when it is first asked for; it can be closed in between."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._server: Server | None = None

    def get(self, folder: Path) -> Server:
        """Return the server, which works in `folder` if it has to be started."""
        if self._server is None:
            self._server = self._stack.enter_context(_shared(folder))
        return self._server

    def close(self) -> None:
        self._server = None
        self._stack.close()


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[Server]:
    """A server with adapters, an admin key, a sink, small limits, and room for two autoencoders."""
    room = weir.SAE.load(weir.demo_sae()).nbytes + other_sae().nbytes
    limits = {"BODY_BYTES": 4 << 20, "ROWS": 5000, "DIRECTORY": folder}
    env = {f"WEIR_SERVE_{name}": str(value) for name, value in limits.items()}
    env |= {"WEIR_ADMIN_KEY": ADMIN_KEY, "WEIR_SAE_BYTES": str(room), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    sinks = {"archive": {"filesystem": {"url": str(folder / "archive")}}}
    more = [*LORA, "--weir-sae", f"{SAE}={weir.demo_sae()}"]
    for name, attribute in HOOKS.items():
        more += ["--weir-hook", f"{name}=tests.support.served_hooks:{attribute}"]
    torch.save({"J": jacobians(), "n_prompts": 3}, folder / "lens.pt")
    more += ["--weir-lens", f"{LENS}={folder / 'lens.pt'}"]
    more += ["--middleware", "tests.engine.serve_probe.Held"]
    more += ["--additional-config", json.dumps({"weir": {"sinks": sinks}})]
    with running(folder / "log", WEIR, *more, env=env, forked=True) as http:
        yield Server(http, folder)
    assert not list(folder.glob("weir-serve-*")), "the server leaves its directory behind"
    assert ADMIN_KEY not in (folder / "log").read_text()


def body(path: str = COMPLETIONS, prompt: Any = PROMPTS[0], **more: Any) -> dict[str, Any]:
    """The fields of a request: greedy, and of a length that is known."""
    asked = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return {"model": "demo", "max_tokens": 6, "temperature": 0, "ignore_eos": True} | asked | more


def post(client: httpx.Client, path: str = COMPLETIONS, code: int = 200, **more: Any) -> Any:
    # httpx's own JSON has no escapes, so no half of a surrogate pair.
    content, headers = json.dumps(body(path, **more)), {"Content-Type": "application/json"}
    answer = client.post(path, content=content, headers=headers)
    assert answer.status_code == code, answer.text[:2000]
    return answer.json()


def events(client: httpx.Client, path: str = COMPLETIONS, **more: Any) -> list[dict]:
    """What comes of a stream."""
    with client.stream("POST", path, json=body(path, stream=True, **more)) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines), lines
    return [json.loads(line[6:]) for line in lines[:-1]]


def choices(chunks: Sequence[dict], index: int = 0) -> list[dict]:
    """What comes of a stream for one choice."""
    return [c for chunk in chunks for c in chunk.get("choices", ()) if c["index"] == index]


def rows_of(client: httpx.Client, choice: dict, folder: Path) -> weir.Activations:
    """The rows of a choice, inline or fetched and freed; they are mapped from a file in `folder`."""
    told = choice["weir"]["activations"]
    if "b64" in told:
        data = base64.b64decode(told["b64"])
        assert len(data) == told["bytes"]
    else:
        data = client.get(told["url"]).raise_for_status().content
        assert told["bytes"] <= len(data) and 0 < told["expires_in"] <= 600
        assert client.delete(told["url"]).status_code == 204
    path = folder / f"rows-{len(list(folder.iterdir()))}.safetensors"
    path.write_bytes(data)
    found = weir.Activations.load(path)
    assert [f"{s.hook}.{s.layer}" for s in found.sites] == told["sites"] and told["format"] == "safetensors"
    return found


def add(layer: int = 3, **more: Any) -> dict[str, Any]:
    """An intervention in wire form that changes what is generated."""
    return {"op": "add", "vector": [0.5] * D, "layers": [layer], "scale": 2.0} | more
