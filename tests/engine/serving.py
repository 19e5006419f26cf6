"""A server of the shipped model for tests, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

import vllm_weir as weir
from tests.support.measure import eventually
from tests.support.ports import free_port
from tests.support.zygote import ROOT, Child, zygote

API_KEY, ADMIN_KEY = "read-me", "change-me"
ARGS = [
    *("--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"),
    *("--block-size", "32", "--seed", "0", "--kv-cache-memory-bytes", "67108864"),
    *("--host", "127.0.0.1", "--disable-uvicorn-access-log"),
]
WEIR = [sys.executable, "-m", "vllm_weir.cli.main", "serve"]
PLAIN = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


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
) -> Iterator[httpx.Client]:
    """A client of a server that has started; the server and all its processes are gone afterwards.

    Args:
        more: arguments, after `args`.
        model: another one than the shipped.
        forked: all its processes are forks of one that has imported vLLM: it starts in a quarter of the time.
    """
    port = free_port()
    environ = {k: v for k, v in os.environ.items() if k not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PLUGINS")}
    environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | (env or {})
    command = [*command, model or weir.demo_model(), *args, "--port", str(port), "--api-key", API_KEY, *more]
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
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(client: httpx.Client, process: subprocess.Popen | Child, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-4000:]
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health").status_code == 200
    return False
