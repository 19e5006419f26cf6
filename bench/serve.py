"""Plain requests on `weir serve` against the same on plain `vllm serve`, alternately, in one run.

    python bench/serve.py [--rounds 9] [--clients 8] [--crowd 200] [--out bench/results/serve_cpu.json]

Two servers of the shipped model run side by side; one at a time is sent a round of requests. `idle`: every client sends
plain requests. `crowd`: of many clients only some are plain, and on `weir serve` the others capture and steer, where on
plain vLLM they send the same requests plain; the latency of the plain ones is compared. Medians of rounds, and spread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.engine.serving import PLAIN, WEIR, running

PROMPTS = ("Anna walked to the harbor in the morning .", "Tom was sad", "The lesson", "A dog ran over the hill")
CAPTURE = {"v": 1, "capture": [{"hook": "resid_post", "layers": "all", "positions": "all"}]}
STEER = {"v": 1, "interventions": [{"op": "add", "vector": [0.1] * 256, "layers": [3], "scale": 1.0}]}


async def one(client: httpx.AsyncClient, prompt: str, wish: dict | None) -> float:
    """Seconds of one request of 16 tokens."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    answer = await client.post("/v1/completions", json=body | ({"weir": wish} if wish else {}))
    answer.raise_for_status()
    return time.perf_counter() - began


async def round_of(url: str, headers: dict, clients: int, each: int, share: float, heavy: bool) -> list[float]:
    """Latencies of the plain requests of a round, in seconds."""
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as client:

        async def person(number: int) -> list[float]:
            plain = number < share * clients
            chance = random.Random(number)
            wish = None if plain or not heavy else chance.choice((CAPTURE, STEER, CAPTURE | STEER))
            took = [await one(client, chance.choice(PROMPTS), wish) for _ in range(each)]
            return took if plain else []

        found = await asyncio.gather(*(person(i) for i in range(clients)))
    return [t for took in found for t in took]


def measure(servers: dict[str, httpx.Client], case: str, clients: int, each: int, share: float, rounds: int) -> dict:
    """p50 by round of both servers, and their ratio."""
    p50: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + 1):
        for name in sorted(servers, reverse=bool(number % 2)):
            server = servers[name]
            took = asyncio.run(
                round_of(str(server.base_url), dict(server.headers), clients, each, share, name == "weir")
            )
            if number:  # the first round warms up
                p50[name].append(1000 * statistics.median(took))
        print(case, number, {k: round(v[-1], 2) for k, v in p50.items() if v}, flush=True)
    ratios = [w / p for w, p in zip(p50["weir"], p50["vllm"], strict=True)]
    return {
        "case": case,
        "clients": clients,
        "requests_a_round": clients * each,
        "rounds": rounds,
        "p50_ms": {k: round(statistics.median(v), 3) for k, v in p50.items()},
        "p50_ms_by_round": {k: [round(x, 3) for x in v] for k, v in p50.items()},
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--crowd", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        with (
            running(logs / "vllm", PLAIN, env={"WEIR_DISABLE": "1"}) as plain,
            running(logs / "weir", WEIR) as served,
        ):
            servers = {"vllm": plain, "weir": served}
            cases = [measure(servers, "idle", args.clients, 12, 1.0, args.rounds)]
            cases.append(measure(servers, "crowd", args.crowd, 2, 0.5, args.rounds))
    found = {
        "device": platform.processor() or platform.machine(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "model": "the shipped model, float32, eager",
        "cases": cases,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
