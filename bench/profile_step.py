"""What Weir's parts cost in a live step: host time of each part, device time of taps and copies.

PYTHONPATH=src python3 bench/profile_step.py --batches 32,256 --out bench/results/profile_h200.json

The engine runs in this process, so that its parts can be timed; times of the whole call are therefore not those of
`weir bench`, whose engines have processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from timed import timed as hold

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

CASES = ("idle", "steer_one", "steer_all_distinct", "capture_last_all_layers", "capture_all_all_layers")
TIMES: dict[str, list[float]] = defaultdict(list)
"""Part -> seconds of each call."""


def timed(owner: Any, name: str, part: str) -> None:
    """Time every call of a method."""
    hold(owner, name, lambda began, ended: TIMES[part].append(ended - began))


def hold_parts() -> None:
    """Before the engine starts: the patches keep references to bound methods."""
    from vllm_weir.frontend.engine_frontend import EngineFrontend
    from vllm_weir.frontend.outputs.view import OutputView
    from vllm_weir.worker.live_requests import LiveRequests
    from vllm_weir.worker.planning.planner import Planner
    from vllm_weir.worker.steps import Steps
    from vllm_weir.worker.tap.device_tables import PlanWriter, TableWriter
    from vllm_weir.worker.transfer.copy_out import CudaCopyOut
    from vllm_weir.worker.transfer.notifier import Notifier

    timed(EngineFrontend, "admit", "admission, a request")
    timed(LiveRequests, "_join", "join, a request")
    timed(Planner, "remove", "leave, a request")
    timed(Planner, "_plan_one", "first plan, a request")
    timed(Steps, "plan_step", "plan, a step")
    timed(Planner, "plan", "  of it: planning")
    timed(TableWriter, "flush", "  of it: tables")
    timed(PlanWriter, "write", "  of it: plan to the device")
    timed(Steps, "end_step", "ship, a step")
    timed(CudaCopyOut, "ship", "  of it: copies and events")
    timed(Notifier, "_tell", "drain thread, a message")
    timed(OutputView, "activations", "hand-out, a request")


def host_table(steps: int) -> dict[str, dict[str, float]]:
    """Of one call: per part the number of calls, the median in microseconds, and the sum in milliseconds."""
    out = {}
    for part, seconds in TIMES.items():
        median = statistics.median(seconds)
        out[part] = {
            "calls": len(seconds),
            "median_us": round(1e6 * median, 1),
            "largest_us": round(1e6 * max(seconds), 1),
            "sum_ms": round(1e3 * sum(seconds), 2),
            "ms_a_step": round(1e3 * sum(seconds) / steps, 4),
        }
    return out


def device_table(profile: Any, steps: int) -> dict[str, dict[str, float]]:
    """Kernels of the taps, copies by direction, and all else, in microseconds a step."""
    import torch

    sums: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name
        kind = "taps" if name == "_tap" else name if name.startswith("Memcpy") else "all other kernels"
        sums[kind].append(event.device_time)
    return {
        kind: {"a_step": round(len(us) / steps, 1), "us_a_step": round(sum(us) / steps, 1)} for kind, us in sums.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="32,256")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/results/profile_h200.json"))
    given = parser.parse_args()
    hold_parts()
    import torch
    from vllm import LLM

    from vllm_weir.bench.plan import BatchSize, BenchPlan, EngineChoice
    from vllm_weir.bench.reference import LLAMA_8B, fill_engine, make_model
    from vllm_weir.bench.systems import WeirSystem

    work = Path(tempfile.mkdtemp())
    batches = tuple(map(int, given.batches.split(",")))
    plan = BenchPlan(
        model=make_model(work), model_name="Llama-3.1-8B shapes, random weights", dummy=True, layers=32, width=4096,
        vocab=LLAMA_8B["vocab_size"], cuda=True, dtype="bfloat16", eager=False, max_model_len=2048, systems=("weir",),
        cases=CASES, batches=batches, tokens=128, prefill=None, repeats=given.calls, warmups=given.warmups,
        case_seconds=600, weir_config={"host_bytes": 48 << 30}, memory_share=0.8,
    )  # fmt: skip
    weir = WeirSystem(plan, work)
    llm = LLM(**weir.engine(EngineChoice()))
    llm.apply_model(fill_engine)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": plan.model_name,
        "tokens": plan.tokens, "calls": given.calls, "cases": [],
    }  # fmt: skip
    for size in plan.sizes():
        assert isinstance(size, BatchSize)
        prompts = [{"prompt_token_ids": ids} for ids in plan.prompts(size)]
        for case in given.cases.split(","):
            params = weir.params(case, size)

            def call(params=params, case=case, prompts=prompts) -> float:
                before = time.perf_counter()
                outs = llm.generate(prompts, params, use_tqdm=False)
                rows = weir.deliver(case, outs)
                seconds = time.perf_counter() - before
                del outs, rows
                return seconds

            for _ in range(given.warmups):
                call()
            late = len(llm.collective_rpc("weir_graphs")[0]["captured_late"])
            seconds = []
            for _ in range(given.calls):
                TIMES.clear()
                seconds.append(call())
            host = host_table(size.generated)
            late = len(llm.collective_rpc("weir_graphs")[0]["captured_late"]) - late
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                call()
                torch.cuda.synchronize()
            entry = {
                "case": case,
                "batch": size.count,
                "call_ms": round(1e3 * statistics.median(seconds), 1),
                "step_ms": round(1e3 * statistics.median(seconds) / size.generated, 3),
                "graphs_captured_meanwhile": late,
                "host": host,
                "device": device_table(profile, size.generated),
            }
            found["cases"].append(entry)
            show(entry)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")


def show(entry: dict[str, Any]) -> None:
    """Print one case."""
    print(
        f"\n{entry['case']}, batch {entry['batch']}: {entry['call_ms']} ms a call, {entry['step_ms']} ms a step,"
        f" {entry['graphs_captured_meanwhile']} graphs captured meanwhile",
        flush=True,
    )
    for part, n in entry["host"].items():
        print(
            f"  {part:32s} {n['calls']:5d} x {n['median_us']:7.1f} us (largest {n['largest_us']:8.1f})"
            f" = {n['sum_ms']:7.2f} ms"
        )
    for kind, n in entry["device"].items():
        print(f"  device: {kind:24s} {n['a_step']:7.1f} = {n['us_a_step']:9.1f} us a step")


if __name__ == "__main__":
    main()
