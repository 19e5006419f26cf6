"""Plain requests on `weir serve` against the same on plain `vllm serve`, alternately, in one run.

    python bench/serve.py [--rounds 80] [--clients 8] [--crowd 200] [--crowd-rounds 6] [--out FILE]
    python bench/serve.py --llama-8b --out FILE     # on a GPU, with torch.compile and CUDA graphs
    python bench/serve.py --llama-8b --pace 0 --pace 64 --out FILE     # and Weir's servers of these paces in the crowd

Servers of the shipped model, or of the Llama-3.1-8B shapes with dummy weights and the shipped tokenizer, run side
by side; one at a time is sent a round of requests. `alone`: one client sends plain requests, `idle`: several do.
`crowd`: of many clients only some are plain, and on `weir serve` the others capture and steer, where on plain vLLM they
send the same requests plain; the latency of the plain ones is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import httpx
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
import vllm_weir as weir
from tests.engine.serving import PLAIN, WEIR, running
from vllm_weir.bench.reference import LLAMA_8B, make_model

PAUSE = 0.3
"""Seconds after a round, for what it has left to do."""
SOON = 0.1
"""Seconds until a round's clients begin, wherever they are."""
PROMPTS = ("Anna walked to the harbor in the morning .", "Tom was sad", "The lesson", "A dog ran over the hill")
CAPTURE = {"v": 1, "capture": [{"hook": "resid_post", "layers": "all", "positions": "all"}]}
GPU_ARGS = [
    *("--served-model-name", "demo", "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "2048"),
    *("--gpu-memory-utilization", "0.25", "--kv-cache-memory-bytes", str(8 << 30), "--no-enable-prefix-caching"),
    *("--disable-uvicorn-access-log", "--host", "127.0.0.1"),
]
"""Of a server of the Llama-3.1-8B shapes; several of them share a GPU."""


def steer(width: int) -> dict:
    """An `Add` in block 3 of a model of this width, as Weir's client sends it."""
    return {"v": 1, "interventions": [weir.Add([0.1] * width, layers=[3]).to_json()]}


async def one(client: httpx.AsyncClient, prompt: str, site_request: dict | None) -> float:
    """Seconds of one request of 16 tokens."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    answer = await client.post("/v1/completions", json=body | ({"weir": site_request} if site_request else {}))
    answer.raise_for_status()
    return time.perf_counter() - began


async def people(url: str, headers: dict, numbers: range, each: int, site_requests: tuple, begin: float) -> list[float]:
    """Seconds of each request of these clients, which begin together at the time `begin`."""
    # No connection is used twice: servers close those that nobody uses for 5 s, in the middle of a crowd too.
    limits = httpx.Limits(max_connections=len(numbers), max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as client:

        async def person(number: int) -> list[float]:
            chance = random.Random(number)
            site_request = chance.choice(site_requests)
            return [await one(client, chance.choice(PROMPTS), site_request) for _ in range(each)]

        await asyncio.sleep(begin - time.time())
        found = await asyncio.gather(*map(person, numbers))
    return [t for took in found for t in took]


def several(*args) -> list[float]:
    """`people`, in a process of their own."""
    return asyncio.run(people(*args))


def round_of(
    pool: Executor, url: str, headers: dict, clients: int, each: int, share: float, heavy: bool, width: int = 256
) -> tuple[list[float], list[float]]:
    """Latencies of the plain requests of a round and of the others, in seconds; `width`: of the model's stream.

    Those who send plain requests and the others are processes of their own: neither waits for the other's Python.
    """
    site_requests = (CAPTURE, steer(width), CAPTURE | steer(width)) if heavy else (None,)
    plain, begin = round(share * clients), time.time() + SOON
    mine = pool.submit(several, url, headers, range(plain), each, (None,), begin)
    others = (
        pool.submit(several, url, headers, range(plain, clients), each, site_requests, begin)
        if plain < clients
        else None
    )
    return mine.result(), others.result() if others is not None else []


def compare(
    pool: Executor,
    servers: dict[str, httpx.Client],
    width: int,
    case: str,
    clients: int,
    each: int,
    share: float,
    rounds: int,
) -> dict:
    """p50 of the plain requests of all rounds on all servers, and Weir's ratio to vLLM's with its 95 % interval; and
    the p50 of the others."""
    took: dict[str, list[list[float]]] = {name: [] for name in servers}
    beside: dict[str, list[list[float]]] = {name: [] for name in servers}
    for number in tqdm(range(rounds + 1), desc=case, unit="round"):
        for name in sorted(servers, reverse=bool(number % 2)):
            server = servers[name]
            url, headers = str(server.base_url), dict(server.headers)
            found, others = round_of(pool, url, headers, clients, each, share, name != "vllm", width)
            time.sleep(PAUSE)
            if number:  # the first round warms up
                took[name].append([1000 * seconds for seconds in found])
                beside[name].append([1000 * seconds for seconds in others])
    ratios = {name: against(took["vllm"], found) for name, found in took.items() if name != "vllm"}
    others = {k: round(p50(v), 3) for k, v in beside.items() if any(v)}
    return {
        "case": case,
        "clients": clients,
        "requests_a_round": clients * each,
        "rounds": rounds,
        "p50_ms": {k: round(p50(v), 3) for k, v in took.items()},
        "p50_ms_by_round": {k: [round(statistics.median(x), 3) for x in v] for k, v in took.items()},
        **ratios.pop("weir"),
        **({"others_p50_ms": others} if others else {}),
        **({"paced": ratios} if ratios else {}),
    }


def against(plain: list[list[float]], weir: list[list[float]]) -> dict:
    """The ratio of the p50 and its 95 % interval."""
    low, high = interval(plain, weir)
    return {"ratio": round(p50(weir) / p50(plain), 4), "ratio_95": [round(low, 4), round(high, 4)]}


@contextlib.contextmanager
def all_of(starts: dict[str, contextlib.AbstractContextManager[httpx.Client]]) -> Iterator[dict[str, httpx.Client]]:
    """Clients of all these servers, which start at the same time."""
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(starts)) as threads:
            clients = list(threads.map(stack.enter_context, starts.values()))
        yield dict(zip(starts, clients, strict=True))


def llama_8b(folder: Path) -> str:
    """A model's directory: the 8B shapes, and the shipped model's tokenizer."""
    made = make_model(folder)
    for file in Path(weir.demo_model()).glob("*token*"):
        shutil.copy(file, folder)
    return made


def p50(rounds: list[list[float]]) -> float:
    """Of the requests of all rounds."""
    return statistics.median([t for took in rounds for t in took])


def interval(plain: list[list[float]], weir: list[list[float]], draws: int = 1000) -> tuple[float, float]:
    """Bootstrap of the ratio over pairs of rounds: requests of one round are not independent."""
    chance = random.Random(0)
    ratios = []
    for _ in range(draws):
        some = [chance.randrange(len(plain)) for _ in plain]
        ratios.append(p50([weir[k] for k in some]) / p50([plain[k] for k in some]))
    ratios.sort()
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--crowd", type=int, default=200, help="clients of the crowd; 0: without it")
    parser.add_argument("--crowd-rounds", type=int, default=6)
    parser.add_argument("--pace", type=float, action="append", default=[], help="a server more in the crowd")
    parser.add_argument("--llama-8b", action="store_true", help="the 8B shapes on a GPU instead of the shipped model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        start, width = running, 256
        if args.llama_8b:
            start = functools.partial(running, model=llama_8b(logs / "model"), args=GPU_ARGS)
            width = LLAMA_8B["hidden_size"]
        wanted = {"vllm": (PLAIN, {"WEIR_DISABLE": "1"}), "weir": (WEIR, {})}
        for pace in args.pace if args.crowd else ():
            wanted[f"weir, {pace:g}/s"] = (WEIR, {"WEIR_SERVE_PACE": str(pace)})
        starts = {}
        for number, (name, (command, env)) in enumerate(wanted.items()):
            # They compile at the same time: each has a cache of its own.
            starts[name] = start(logs / str(number), command, env=env | {"VLLM_CACHE_ROOT": str(logs / f"{number}.d")})
        with (
            all_of(starts) as servers,
            ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool,
        ):
            two = {name: servers[name] for name in ("vllm", "weir")}
            cases = [
                compare(pool, two, width, "alone", 1, 8, 1.0, args.rounds),
                compare(pool, two, width, "idle", args.clients, 3, 1.0, args.rounds),
            ]
            print(json.dumps(cases), flush=True)
            if args.crowd:
                cases.append(compare(pool, servers, width, "crowd", args.crowd, 2, 0.5, args.crowd_rounds))
    found = {
        "device": torch.cuda.get_device_name() if args.llama_8b else platform.processor() or platform.machine(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "model": "Llama-3.1-8B shapes, dummy weights, bfloat16"
        if args.llama_8b
        else "the shipped model, float32, eager",
        "cases": cases,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
