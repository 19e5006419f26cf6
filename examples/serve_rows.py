"""Serve a model with Weir's routes, then read rows, scores and a steered answer over HTTP.

python examples/serve_rows.py [MODEL]
"""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch

import vllm_weir as weir

PROMPT = "Anna walked to the harbor in the morning ."


def start(model: str, port: int) -> subprocess.Popen:
    """`weir serve` takes what `vllm serve` takes."""
    command = [sys.executable, "-m", "vllm_weir.cli", "serve", model, "--served-model-name", "demo"]
    command += ["--max-model-len", "256", "--host", "127.0.0.1", "--port", str(port)]
    if not torch.cuda.is_available():  # on CPU compiling takes longer than this example
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
    return subprocess.Popen(command)


def wait(client: httpx.Client, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit("the server did not start")


def ask(client: httpx.Client, site_request: dict, **more) -> dict:
    body = {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "weir": {"v": 1, **site_request},
        **more,
    }
    response = client.post("/v1/completions", json=body)
    return response.raise_for_status().json()["choices"][0]


def load(data: bytes) -> weir.Activations:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.safetensors")
        path.write_bytes(data)
        return weir.Activations.load(path)


def show(client: httpx.Client) -> None:
    info = client.get("/v1/weir/info").raise_for_status().json()
    print(f"{info['num_layers']} layers of width {info['d_model']}")

    # Few rows come with the answer.
    capture = [{"hook": "resid_post", "layers": [3], "positions": "last_prompt"}]
    small = ask(client, {"capture": capture})["weir"]["activations"]
    print("inline:", load(base64.b64decode(small["b64"])))

    # Many are fetched once, as a safetensors file.
    every = [{"hook": "resid_post", "positions": "all"}]
    large = ask(client, {"capture": every, "response": {"inline_bytes": 0}})["weir"]["activations"]
    rows = load(client.get(large["url"]).raise_for_status().content)
    print(f"by reference: {len(rows.sites)} sites x {len(rows.positions)} rows")
    client.delete(large["url"]).raise_for_status()

    # Dot products with a direction are few numbers: they come as JSON, and as they are made when streamed.
    direction = torch.nn.functional.normalize(rows["resid_post", 3][-1].float(), dim=0).tolist()
    probe = [{"hook": "resid_post", "layers": [3], "positions": "generated", "project": direction}]
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True}
    body["weir"] = {"v": 1, "capture": probe, "response": {"stream": True}}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            choice = json.loads(line[6:])["choices"][0] if line.startswith("data: {") else {}
            if choice.get("finish_reason") is None and "weir" in choice:
                for value in choice["weir"]["scores"]["sites"]["resid_post.3"]:
                    print(f"  {choice['text']!r} {value[0]:+.2f}")

    steer = [{"op": "add", "vector": direction, "layers": [3], "scale": 20.0}]
    choice = ask(client, {"interventions": steer})
    print("steered:", repr(choice["text"]), choice["weir"]["receipt"]["steered"])


def main(model: str) -> None:
    port = random.randrange(20_000, 32_000)  # below the ports that outgoing connections get
    server = start(model, port)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            wait(client, server)
            show(client)
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model())
