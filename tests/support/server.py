"""`weir serve` in a process of its own, for tests that share one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

ARGUMENTS = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32")


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    model: str
    admin_key: str
    log: Path


@contextlib.contextmanager
def serving(model: str, log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """A server of `model` on a free port of this machine; ended, with its children, at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = "the-admin-key"
    environ = os.environ | {
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "WEIR_ADMIN_KEY": key,
    } | dict(env or {})  # fmt: skip
    environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # set by other tests, for engines in their own process
    command = [sys.executable, "-m", "vllm_weir.cli", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *ARGUMENTS, *arguments], env=environ, stdout=out, stderr=out, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _await(url, process, log)
        yield Served(url, model, key, log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        if process.poll() is not None:
            break
        time.sleep(0.5)
    raise RuntimeError(f"no server at {url}:\n{log.read_text(errors='replace')[-4000:]}")
