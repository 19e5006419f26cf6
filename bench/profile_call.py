"""Where the time of one call of `generate` goes: its phases, with the engine in a process of its own as users have it.

PYTHONPATH=src python3 bench/profile_call.py --batches 256 --out bench/results/phases_h200.json
PYTHONPATH=src python3 bench/profile_call.py --cases idle,extract,mean,last_mixed --out texts.json

The engine's process is a fork of this one, or imports this file too, so the functions that are timed here are timed
there as well, and both read the same clock. What a case's phases have more than those of `idle` is what it costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

from timed import timed as hold

os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "fork"
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

LOG = sys.modules["weir_profile_log"] = types.ModuleType("weir_profile_log")
LOG.events, LOG.steps = [], []
CASES = ("idle", "steer_one", "steer_all_distinct", "capture_last_all_layers", "capture_all_all_layers", "capture_rp8")


def timed(owner: Any, name: str, part: str) -> None:
    """Log begin and end of every call of a method."""
    events = LOG.events
    hold(owner, name, lambda began, ended: events.append((part, began, ended)))


def log_steps(worker: Any) -> None:
    """Log when each step was issued, and its tokens and new requests."""
    original, steps = worker.execute_model, LOG.steps

    def execute_model(self, scheduler_output, *args, **kwargs):
        tokens, new = scheduler_output.total_num_scheduled_tokens, len(scheduler_output.scheduled_new_reqs)
        steps.append((time.perf_counter(), tokens, new))
        return original(self, scheduler_output, *args, **kwargs)

    worker.execute_model = execute_model


def take(_worker: Any = None) -> tuple[list[tuple[str, float, float]], list[tuple[float, int, int]]]:
    """The events of this process since the last time, and its first few steps."""
    import sys

    log = sys.modules["weir_profile_log"]
    out = list(log.events), log.steps[:12]
    log.events.clear()
    log.steps.clear()
    return out


def hold_parts() -> None:
    """Before the engine starts: the patches keep references to bound methods."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import SyncMPClient
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_weir.frontend.engine_frontend import EngineFrontend
    from vllm_weir.frontend.outputs.view import OutputView
    from vllm_weir.frontend.receive import receiver
    from vllm_weir.worker.live_requests import LiveRequests
    from vllm_weir.worker.steps import Steps
    from vllm_weir.worker.transfer.copy_out import CpuCopyOut, CudaCopyOut
    from vllm_weir.worker.transfer.notifier import Notifier

    timed(SamplingParams, "clone", "caller: clone of the params")
    timed(InputProcessor, "process_inputs", "caller: vLLM's reading of the request")
    timed(EngineFrontend, "admit", "caller: Weir's admission")
    timed(SyncMPClient, "add_request", "caller: send to the core")
    timed(OutputProcessor, "process_outputs", "caller: outputs of a step")
    timed(OutputView, "activations", "caller: hand-out")
    timed(receiver._ReceiverState, "_handle", "caller: a message of rows")
    timed(EngineCore, "preprocess_add_request", "core: take in a request")
    timed(EngineCore, "add_request", "core: queue a request")
    timed(Scheduler, "schedule", "core: schedule a step")
    timed(Scheduler, "update_from_output", "core: read a step")
    timed(Worker, "execute_model", "worker: execute_model")
    log_steps(Worker)
    timed(Worker, "sample_tokens", "worker: sample_tokens")
    timed(LiveRequests, "follow", "worker: follow")
    timed(Steps, "plan_step", "worker: plan")
    timed(Steps, "end_step", "worker: ship")
    timed(CudaCopyOut, "ship", "worker: start of the copies")
    timed(CpuCopyOut, "ship", "worker: start of the copies")
    timed(Notifier, "_tell", "drain: a message")


def record_device(_worker: Any = None) -> None:
    """Start to record what the device does."""
    import sys

    import torch

    log = sys.modules["weir_profile_log"]
    log.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    log.profile.start()


def device_sums(_worker: Any = None) -> dict[str, tuple[int, float]]:
    """Since `record_device`: times and microseconds of Weir's kernels, of copies by direction, and of all else."""
    import sys

    import torch

    torch.cuda.synchronize()
    profile = sys.modules["weir_profile_log"].profile
    profile.stop()
    own = {"_tap": "taps", "_pack": "packing", "_project": "packing"}
    out: dict[str, tuple[int, float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = own.get(event.name, event.name if event.name.startswith("Memcpy") else "the model and all else")
            count, us = out.get(kind, (0, 0.0))
            out[kind] = (count + 1, us + event.device_time)
    return out


def device_gaps(_worker: Any = None) -> list[tuple[float, float, float]]:
    """Since `record_device`, of the recording that `device_sums` ended: (ms after the first kernel, ms) of every time
    of at least `GAP_MS` in which no kernel ran, with the share of it in which rows were copied to the host."""
    import sys

    import torch

    module = sys.modules["weir_profile_log"]
    events = [e for e in module.profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.time_range.start / 1e3, e.time_range.end / 1e3, e.name.startswith("Memcpy DtoH")) for e in events]
    return module.gaps(spans)


def gaps(spans: list[tuple[float, float, bool]]) -> list[tuple[float, float, float]]:
    """As `device_gaps`, of (start, end, whether it is a copy to the host)."""
    kernels = sorted((a, b) for a, b, copy in spans if not copy)
    copies = sorted((a, b) for a, b, copy in spans if copy)
    out, end = [], kernels[0][0]
    for a, b in kernels:
        if a - end >= GAP_MS:
            busy = sum(max(0.0, min(a, y) - max(end, x)) for x, y in copies)
            out.append((round(end - kernels[0][0], 2), round(a - end, 2), round(min(busy / (a - end), 1.0), 2)))
        end = max(end, b)
    return out


LOG.gaps = gaps
GAP_MS = 0.25


def phases(began: float, returned: float, done: float, events: list[tuple[str, float, float]]) -> dict[str, float]:
    """One call, in milliseconds: what follows each other, steps, and (``sum of``) parts wherever they run."""
    by_part: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for part, a, b in events:
        by_part[part].append((a, b))
    sent = max(b for _, b in by_part["caller: send to the core"])
    queued = max([sent, *(b for _, b in by_part["core: queue a request"])])
    starts = sorted(a for a, _ in by_part["worker: execute_model"])
    full = [a for a in starts if a > queued]
    gaps = [b - a for a, b in itertools.pairwise(full[4:-4])]
    last = max(b for _, b in by_part["worker: execute_model"])
    out = {
        "all requests sent after": sent - began,
        "all requests queued after": queued - began,
        "first step with all after": full[0] - began,
        "last step issued after": last - began,
        "generate returned after": returned - began,
        "hand-out": done - returned,
        "  of it: the first output": next((b - returned for a, b in by_part["caller: hand-out"]), 0.0),
        "whole call": done - began,
        "a steady step": statistics.median(gaps) if gaps else 0.0,
        "mean steady step": statistics.fmean(gaps) if gaps else 0.0,
    }
    out |= {f"sum of {part}": sum(b - a for a, b in spans) for part, spans in by_part.items()}
    return {k: 1e3 * v for k, v in out.items()} | {
        "steps": len(starts),
        "steps before all were queued": len(starts) - len(full),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="256")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--cpu", action="store_true", help="the shipped model on this machine's CPU")
    parser.add_argument("--out", type=Path, default=Path("bench/results/phases_h200.json"))
    given = parser.parse_args()
    hold_parts()
    from vllm_weir.bench.cases import WORKLOADS
    from vllm_weir.bench.cli import SMALL_WORKLOADS, model_fields
    from vllm_weir.bench.plan import BenchPlan, EngineChoice, WorkloadSizes
    from vllm_weir.bench.reference import fill_engine
    from vllm_weir.bench.systems import WeirSystem

    work = Path(tempfile.mkdtemp())
    cuda = not given.cpu
    cases = tuple(given.cases.split(","))
    plan = BenchPlan(
        **model_fields("llama-8b" if cuda else "demo", work, cuda),
        systems=("weir",), cases=cases, batches=tuple(map(int, given.batches.split(","))), prefill=None,
        tokens=given.tokens, repeats=given.calls, warmups=given.warmups, case_seconds=600, cuda=cuda, eager=not cuda,
        weir_config={"host_bytes": 48 << 30} if cuda else {}, memory_share=0.8,
        workloads=WorkloadSizes() if cuda else SMALL_WORKLOADS,
    )  # fmt: skip
    system = WeirSystem(plan, work)
    llm = system.start(system.engine(EngineChoice(kind="workloads" if plan.named_workloads else "steps")))
    if plan.dummy:
        llm.apply_model(fill_engine)
    found: dict[str, Any] = {"model": plan.model_name, "tokens": plan.tokens, "calls": given.calls, "cases": []}
    for size in plan.workload_sizes() or plan.sizes():
        chosen = [case for case in cases if WORKLOADS.get(case) in (None, size.kind)]
        asked = {case: system.params(case, size) for case in chosen}
        seen: dict[str, list[dict[str, float]]] = defaultdict(list)
        starts: dict[str, list[list[tuple[float, int, int]]]] = defaultdict(list)
        for turn in range(-given.warmups, given.calls):
            for case, params in asked.items():
                call = f" {case} {turn}" if size.is_workload else ""
                prompts = [{"prompt_token_ids": ids} for ids in plan.prompts(size, call)]
                llm.collective_rpc(take)
                take()
                began = time.perf_counter()
                outs = llm.generate(prompts, params, use_tqdm=False)
                returned = time.perf_counter()
                rows = system.deliver(case, outs)
                done = time.perf_counter()
                del outs, rows
                if turn >= 0:
                    events, steps = llm.collective_rpc(take)[0]
                    seen[case].append(phases(began, returned, done, take()[0] + events))
                    starts[case].append([(round(1e3 * (at - began), 2), *what) for at, *what in steps])
        device, idle = {}, {}
        for case, params in asked.items() if cuda else ():
            if size.is_workload:
                prompts = [{"prompt_token_ids": ids} for ids in plan.prompts(size, f" {case} recorded")]
            llm.collective_rpc(record_device)
            outs = llm.generate(prompts, params, use_tqdm=False)
            device[case] = {
                kind: {"a_step": round(n / size.generated, 2), "us_a_step": round(us / size.generated, 1)}
                for kind, (n, us) in sorted(llm.collective_rpc(device_sums)[0].items())
            }
            idle[case] = llm.collective_rpc(device_gaps)[0]
            del outs
        for case, calls in seen.items():
            names = {name for call in calls for name in call}
            medians = {n: round(statistics.median(call.get(n, 0.0) for call in calls), 3) for n in sorted(names)}
            whole = [call["whole call"] for call in calls]
            medians |= {"whole call, least": round(min(whole), 3), "whole call, most": round(max(whole), 3)}
            found["cases"].append(
                {
                    "case": case,
                    "batch": size.label if size.is_workload else size.count,
                    "ms": medians,
                    "device": device.get(case, {}),
                    "gaps": idle.get(case, []),
                    "whole calls, ms": [round(ms, 2) for ms in whole],
                    "first steps (ms after, tokens, new requests) of each call": starts[case],
                }
            )
        show(found["cases"][-len(seen) :])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")


def show(entries: list[dict[str, Any]]) -> None:
    """A table, a case a column."""
    rows = sorted({row for entry in entries for row in entry["ms"]})
    print(f"{'ms':44s}" + "".join(f"{entry['case'][:16]:>17s}" for entry in entries))
    for row in rows:
        print(f"{row:44s}" + "".join(f"{entry['ms'].get(row, 0.0):17.2f}" for entry in entries), flush=True)
    for entry in entries:
        print(f"device, a step of {entry['case']}: {json.dumps(entry['device'])}", flush=True)
        print(f"device idle, {entry['case']} (ms after, ms, share with copies): {entry['gaps'][:40]}", flush=True)


if __name__ == "__mp_main__":  # a process of the engine that was spawned
    hold_parts()
if __name__ == "__main__":
    main()
