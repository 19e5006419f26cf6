"""Where the time goes when texts are read: many of mixed lengths, or one that is long.

PYTHONPATH=src python3 bench/profile_texts.py --out bench/results/texts_h100.json

One engine with the Llama-3.1-8B shapes and vLLM's and Weir's defaults. Every call gets texts that no call had before,
so that the prefix cache, which is on, spares no case what it would not spare the others. The clock stops when every
row that was asked for is in the caller's hands. The cases take turns; ratios are to `plain`, in the same engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "fork"
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

import profile_call

PARTS = (
    ("vllm_weir.worker.planning.planner", "Planner", "plan", "worker: of the plan, planning"),
    ("vllm_weir.worker.tap.reductions", "TapReducer", "settle", "worker: of the shipping, joining groups"),
    ("vllm_weir.worker.transfer.postprocess", "Postprocessor", "pack", "worker: of the shipping, records"),
    ("vllm_weir.worker.transfer.pinned_buffer", "HostBuffer", "prepare", "worker: of the plan, pinning host memory"),
    ("vllm_weir.frontend.receive.row_store", "RowStore", "prepare", "caller: hand-outs made early"),
)


def take_all(_worker: Any = None) -> tuple[list[tuple[str, float, float]], list[tuple[float, int, int]]]:
    """The events and the steps of this process since the last time."""
    import sys

    log = sys.modules["weir_profile_log"]
    out = list(log.events), list(log.steps)
    log.events.clear()
    log.steps.clear()
    return out


def hold_parts() -> None:
    """Before the engine starts."""
    import importlib

    profile_call.hold_parts()
    for module, owner, name, part in PARTS:
        found = getattr(importlib.import_module(module), owner)
        if hasattr(found, name):
            profile_call.timed(found, name, part)


def hold_collector() -> None:
    """Log what Python's garbage collector takes in this process."""
    began = [0.0]

    def tell(phase: str, _info: Any) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            profile_call.LOG.events.append(("caller: garbage collection", began[0], time.perf_counter()))

    gc.callbacks.append(tell)


def texts(kind: str, turn: int, vocab: int, given: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Prompts of a call: lengths are the same for every call, tokens differ."""
    lengths = [given.long] if kind == "long" else _lengths(given.texts, given.most)
    draw = random.Random(f"{kind} {turn}")
    return [{"prompt_token_ids": [draw.randrange(10, vocab) for _ in range(n)]} for n in lengths]


def _lengths(count: int, most: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randint(50, most) for _ in range(count)]


def asked(layers: int) -> dict[str, Any]:
    """Case -> its params."""
    from vllm import SamplingParams

    import vllm_weir as weir

    base = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    few = [layers * k // 4 for k in range(4)]
    captures = {
        "four": weir.Capture("resid_post", few, "prompt"),
        "last": weir.Capture("resid_post", positions="last_prompt"),
        "mean": weir.Capture("resid_post", positions="prompt", reduce="mean"),
        "score": weir.Capture("resid_post", positions="prompt", project=_directions(weir)),
        "every": weir.Capture("resid_post", positions="prompt"),
        "one": weir.Capture("resid_post", layers // 2, "prompt"),
    }
    return {"plain": base} | {name: weir.params(base, capture=capture) for name, capture in captures.items()}


def _directions(_weir: Any) -> Any:
    import torch

    return torch.randn(2, WIDTH[0], generator=torch.Generator().manual_seed(1))


WIDTH = [0]


def deliver(case: str, outs: list[Any]) -> int:
    """Rows of every output as tensors; returns how many rows of a site there are."""
    if case == "plain":
        return 0
    rows = [[acts[site] for site in acts.sites] for acts in (out.activations for out in outs)]
    return sum(len(some[0]) for some in rows)


def call(llm: Any, case: str, prompts: list[Any], params: Any) -> dict[str, Any]:
    """One call, in milliseconds."""
    llm.collective_rpc(take_all)
    take_all()
    began = time.perf_counter()
    outs = llm.generate(prompts, params, use_tqdm=False)
    returned = time.perf_counter()
    rows = deliver(case, outs)
    done = time.perf_counter()
    del outs
    events, steps = llm.collective_rpc(take_all)[0]
    sums: dict[str, float] = defaultdict(float)
    for part, a, b in [*events, *take_all()[0]]:
        sums[part] += 1e3 * (b - a)
    tokens = [n for _, n, _ in steps]
    return {
        "ms": round(1e3 * (done - began), 2),
        "hand-out ms": round(1e3 * (done - returned), 2),
        "rows of a site": rows,
        "steps": len(tokens),
        "tokens of the largest step": max(tokens, default=0),
        "tokens of the median step": statistics.median(tokens) if tokens else 0,
        "sums, ms": {part: round(ms, 2) for part, ms in sorted(sums.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=1500)
    parser.add_argument("--most", type=int, default=600, help="tokens of the longest of them; the shortest has 50")
    parser.add_argument("--long", type=int, default=32_000)
    parser.add_argument("--cases", default="plain,four,last,mean")
    parser.add_argument("--long-cases", default="plain,every,one")
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="the shipped model on this machine's CPU")
    parser.add_argument("--out", type=Path, default=Path("bench/results/texts_h100.json"))
    given = parser.parse_args()
    hold_parts()
    from vllm import LLM

    from vllm_weir.bench.cli import model_fields
    from vllm_weir.bench.weights import fill_engine

    cuda = not given.cpu
    model = model_fields("llama-8b" if cuda else "demo", Path(tempfile.mkdtemp()), cuda)
    WIDTH[0] = model["width"]
    more = {"load_format": "dummy"} if cuda else {"kv_cache_memory_bytes": 256 << 20, "dtype": "float32"}
    llm = LLM(model["model"], skip_tokenizer_init=True, seed=0, disable_log_stats=True, **more)
    if cuda:
        llm.apply_model(fill_engine)
    hold_collector()
    params = asked(model["layers"])
    sizes = {"texts": given.texts, "most": given.most, "long": given.long}
    found: dict[str, Any] = {"model": model["model_name"], **sizes, "kinds": {}}
    kinds = {"texts": given.cases.split(","), "long": [c for c in given.long_cases.split(",") if c]}
    for kind, cases in kinds.items():
        seen: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
        for turn in range(given.calls + 1):  # the first is told apart
            for case in cases:
                prompts = texts(kind, turn * len(cases) + cases.index(case), model["vocab"], given)
                seen[case].append(call(llm, case, prompts, params[case]))
        device: dict[str, Any] = {}
        for k, case in enumerate(cases if cuda else ()):
            prompts = texts(kind, -1 - k, model["vocab"], given)
            llm.collective_rpc(profile_call.record_device)
            outs = llm.generate(prompts, params[case], use_tqdm=False)
            deliver(case, outs)
            sums = llm.collective_rpc(profile_call.device_sums)[0]
            device[case] = {name: [n, round(us / 1e3, 2)] for name, (n, us) in sorted(sums.items())}
            del outs
        found["kinds"][kind] = {"calls": seen, "device: times, ms": device} | summary(seen)
        show(kind, seen, device)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")


def summary(seen: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios to `plain`: of medians, and of the first calls to plain's median."""
    base = statistics.median(c["ms"] for c in seen["plain"][1:])
    return {
        "ratio": {case: round(statistics.median(c["ms"] for c in calls[1:]) / base, 4) for case, calls in seen.items()},
        "ratio of the first call": {case: round(calls[0]["ms"] / base, 4) for case, calls in seen.items()},
    }


def show(kind: str, seen: dict[str, list[dict[str, Any]]], device: dict[str, Any]) -> None:
    """A table, a case a column."""
    print(f"\n{kind}: {json.dumps(summary(seen))}")
    last = {case: calls[-1] for case, calls in seen.items()}
    for name in ("ms", "hand-out ms", "rows of a site", "steps", "tokens of the largest step"):
        print(f"{name:46s}" + "".join(f"{one[name]:12.1f}" for one in last.values()))
    for part in sorted({part for one in last.values() for part in one["sums, ms"]}):
        print(f"{part:46s}" + "".join(f"{one['sums, ms'].get(part, 0):12.1f}" for one in last.values()))
    for case, sums in device.items():
        print(f"device, {case}: {json.dumps(sums)}", flush=True)


if __name__ == "__mp_main__":  # a process of the engine that was spawned
    hold_parts()
if __name__ == "__main__":
    sys.modules["profile_texts"] = sys.modules["__main__"]
    main()
