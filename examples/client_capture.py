"""The Python client: read, steer, stream, many prompts at once. Without an address it starts a server of its own.

python examples/client_capture.py [http://localhost:8000]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

import vllm_weir as weir

HAPPY, SAD = "Tom went to the garden. Tom was happy.", "Tom went to the garden. Tom was sad."


@contextlib.contextmanager
def server() -> Iterator[str]:
    """`weir serve` of the model that ships with Weir."""
    port = str(random.randrange(20_000, 32_000))  # below the ports that outgoing connections get
    command = [
        sys.executable,
        "-m",
        "vllm_weir.cli",
        "serve",
        weir.demo_model(),
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    command += ["--max-model-len", "256", "--kv-cache-memory-bytes", str(256 << 20)]
    if not torch.cuda.is_available():
        command.append("--enforce-eager")  # on CPU compiling takes longer than this example
    process = subprocess.Popen(command, env=os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"}, stdout=subprocess.DEVNULL)
    try:
        with weir.Client(f"http://127.0.0.1:{port}", timeout=5, retries=0) as client:
            while process.poll() is None:
                with contextlib.suppress(weir.ServerError):
                    client.info()
                    break
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def read_and_steer(client: weir.Client) -> torch.Tensor:
    read = weir.Capture("resid_post", layers=2, positions="-2:")
    happy, sad = client.generate([HAPPY, SAD], max_tokens=1, capture=read)
    vector = (happy.activations["resid_post", 2].float() - sad.activations["resid_post", 2].float()).mean(0)
    for scale in (-2.0, 2.0):
        steer = weir.Add(vector, layers=2, scale=scale)
        out = client.generate("Tom went to the garden. Tom", max_tokens=12, temperature=0, interventions=steer)
        print(f"scale {scale:+g}: Tom{out.text}")
        print(f"  rows changed: {out.receipt.steered}")
    return vector


def by_reference(client: weir.Client) -> None:
    # More than the server puts into its answer: fetched after it, and freed there.
    out = client.generate(HAPPY, max_tokens=32, capture=weir.Capture("resid_post"), inline_bytes=0)
    print(f"fetched: {out.activations}")


def stream(client: weir.Client, probe: torch.Tensor) -> None:
    chunks = client.stream("Tom was", max_tokens=6, temperature=0, capture=weir.Capture(layers=3, project=probe))
    for chunk in chunks:
        if chunk.scores is not None:
            scores = [f"{value:+.1f}" for value in chunk.scores["resid_post", 3][:, 0].tolist()]
            print(f"{chunk.text!r:12} scores {' '.join(scores)}")
    print(f"together {list(chunk.result.scores['resid_post', 3].shape)}")


async def many(url: str) -> None:
    prompts = [f"{name} went to the {place}." for name in ("Tom", "Anna") for place in ("garden", "lake", "market")]
    async with weir.AsyncClient(url) as client:
        mean = weir.Capture(layers=5, reduce="mean")
        outs = await client.generate(prompts, max_tokens=8, capture=mean, concurrency=4)
    means = torch.cat([out.activations["resid_post", 5] for out in outs])
    print(f"means of {len(outs)} prompts: {list(means.shape)}")


def main(url: str) -> None:
    with weir.Client(url) as client:
        probe = read_and_steer(client)
        by_reference(client)
        stream(client, probe)
        try:
            client.generate(HAPPY, capture=weir.Capture(layers=99))
        except weir.WeirError as e:
            print(f"refused, field {e.field}: {e.message}")
    asyncio.run(many(url))


if __name__ == "__main__":
    with contextlib.nullcontext(sys.argv[1]) if len(sys.argv) > 1 else server() as address:
        main(address)
