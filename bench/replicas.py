"""Requests a second of one and of two `weir serve` behind the proxy of deploy/, and how soon each knows a name.

    python bench/replicas.py --out bench/results/replicas_cpu.json

Both servers of the shipped model run from the beginning, share a store, a folder, and have an engine of one thread
each. Proxies in front of one and of both are sent the same rounds alternately. A name is known to the other server
when it lists it; that is looked for every few milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.engine.serving import ADMIN, ADMIN_KEY, COMPLETIONS, WEIR, body, proxy, running
from tests.support.machine import haproxy_program

ROWS = {"capture": [{"hook": "resid_post", "layers": [2], "positions": "all"}]}
STEER = {"interventions": [{"op": "add", "vector": {"ref": "v"}, "layers": [2], "scale": 4.0}]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "steered by a name": STEER,
    "rows inline": ROWS,
    "rows by reference": ROWS | {"response": {"inline_bytes": 0}},
}


async def round_of(client: httpx.Client, clients: int, each: int, asked: dict[str, Any]) -> float:
    """Requests a second of so many clients, each with a connection of its own; what is kept is read and deleted."""
    content = body(max_tokens=16, **({"weir": {"v": 1} | asked} if asked else {}))

    async def person() -> None:
        async with httpx.AsyncClient(base_url=client.base_url, headers=client.headers, timeout=600) as own:
            for _ in range(each):
                answer = (await own.post(COMPLETIONS, json=content)).raise_for_status().json()
                kept = answer["choices"][0].get("weir", {}).get("activations", {}).get("url")
                if kept is not None:
                    (await own.get(kept)).raise_for_status()
                    (await own.delete(kept)).raise_for_status()

    begun = time.perf_counter()
    await asyncio.gather(*(person() for _ in range(clients)))
    return clients * each / (time.perf_counter() - begun)


def soon(server: httpx.Client, other: httpx.Client, count: int) -> list[float]:
    """Seconds from the answer to a PUT at one server until the other knows the name."""
    took = []
    for k in range(count):
        server.put(f"/v1/vectors/s{k}", json={"vector": [0.5] * 256}, headers=ADMIN).raise_for_status()
        begun = time.perf_counter()
        while other.get(f"/v1/vectors/s{k}").status_code != 200:
            time.sleep(0.005)
        took.append(round(time.perf_counter() - begun, 4))
        time.sleep(0.037 * (k % 14))  # at another moment between two looks
    return took


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[list[httpx.Client]]:
    """Clients of two servers that share a store, and of proxies in front of the first and of both."""
    env = {"WEIR_ADMIN_KEY": ADMIN_KEY, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:

        def started(name: str) -> httpx.Client:
            more = ["--weir-store", str(folder / "store")]
            return stack.enter_context(running(folder / f"{name}.log", WEIR, *more, env=env))

        one, two = started("one"), started("two")
        yield [one, two, stack.enter_context(proxy(folder, one)), stack.enter_context(proxy(folder, one, two))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--names", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import vllm

    rates: dict[str, dict[str, list[float]]] = {case: {"one server": [], "two servers": []} for case in CASES}
    with tempfile.TemporaryDirectory() as made, servers(Path(made)) as (one, two, *proxies):
        one.put("/v1/vectors/v", json={"vector": [0.5] * 256}, headers=ADMIN).raise_for_status()
        seconds = sorted(soon(one, two, args.names))
        for case, asked in CASES.items():
            for number in range(args.rounds + 1):
                for name, client in zip(rates[case], proxies, strict=True):
                    found = asyncio.run(round_of(client, args.clients, args.each, asked))
                    if number:  # the first round warms up
                        rates[case][name].append(round(found, 2))
            print(case, {name: statistics.median(found) for name, found in rates[case].items()}, flush=True)
    told = subprocess.run([str(haproxy_program()), "-v"], capture_output=True, text=True, check=True).stdout
    found = {
        "device": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_at_the_end": [round(one, 1) for one in os.getloadavg()],
        "vllm": vllm.__version__,
        "haproxy": told.split()[2],
        "model": "the shipped model, float32, eager; 16 tokens a request",
        "clients": args.clients,
        "requests_a_round": args.clients * args.each,
        "note": "servers, proxy and clients share the cores, so two servers have no more of them than one",
        "seconds_until_the_other_server_knows_a_name": {
            "median": statistics.median(seconds),
            "longest": seconds[-1],
            "all": seconds,
        },
        "requests_per_second": {
            case: {name: {"median": round(statistics.median(r), 2), "rounds": r} for name, r in by.items()}
            for case, by in rates.items()
        },
    }
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
