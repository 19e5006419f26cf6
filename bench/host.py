"""What Weir costs on the host: its real code driven by hand, without a GPU, an engine or a model.

PYTHONPATH=src python3 bench/host.py --out bench/results/host_cpu.json

Every case follows 256 requests of 16 prompt tokens from `weir.params` to the tensors of their outputs, through the
wrappers of vLLM's functions (whose originals do nothing here), a station with 32 blocks that compute nothing, and the
store of the caller's process. Nothing is copied to or from a device. Times are CPU times of the one thread.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm
from stand_ins import LAYERS, PROMPT, SETTINGS, WIDTH, Clock, Line, Scheduler, Tokens, make_runtime
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import vllm_weir as weir
from vllm_weir.config.settings import Settings
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.frontend.lookup import view_of
from vllm_weir.patches import frontend
from vllm_weir.patches import sampling_params as params
from vllm_weir.patches import scheduler as core
from vllm_weir.patches.worker import _starts
from vllm_weir.worker.runtime import WorkerRuntime

BLOCK = 16
CASES = (
    "idle", "steer_one", "steer_one again", "steer_one alike", "steer_all", "steer_all again",
    "capture_last", "capture_all", "capture_own", "capture_rp8",
)  # fmt: skip
"""`capture_own`: every request wants blocks of its own choice. ``again``: the batch's params have been used before;
``alike``: all requests share one params object. Captures of all blocks do both."""
OK = SimpleNamespace(refusal=None, active=True)
CLONE = params.clone(SamplingParams.clone, OK)


def site_requests(case: str, count: int) -> list[dict[str, Any]]:
    """Arguments of `weir.params` for every request."""
    if case == "capture_own":
        draw = np.random.default_rng(0)
        own = [np.sort(draw.choice(LAYERS, LAYERS // 2, replace=False)).tolist() for _ in range(count)]
        return [{"capture": weir.Capture("resid_post", layers)} for layers in own]
    if case == "capture_rp8":
        return [{"capture": weir.Capture("resid_post", compress={"method": "rp8", "k": 64})}] * count
    if case.startswith("capture"):
        capture = weir.Capture("resid_post", positions="last_prompt" if case == "capture_last" else "all")
        return [{"capture": capture}] * count
    if case == "idle":
        return [{}] * count
    layers = [LAYERS // 2 - 1] if case.startswith("steer_one") else list(range(LAYERS))
    vectors = 0.5 * torch.randn(count, WIDTH)
    return [{"interventions": weir.Add(v, layers=layers)} for v in vectors]


class Run:
    """One batch of requests, from the caller's params to its tensors."""

    def __init__(
        self, steps: int, clock: Clock, frontend: EngineFrontend, runtime: WorkerRuntime, params: list[SamplingParams]
    ) -> None:
        self.count, self.steps, self.clock, self.params = len(params), steps, clock, params
        self.frontend, self.runtime, self.line = frontend, runtime, Line(runtime, frontend)
        self.output_processor = SimpleNamespace(request_states={}, _weir_frontend=frontend)
        self.scheduler = Scheduler()
        self.ids = [f"{k}-0badcafe" for k in range(self.count)]
        self.generated = list(range(100, 100 + steps))
        self.input_ids = torch.zeros(self.count * PROMPT, dtype=torch.int32)

    def ask(self) -> list[EngineCoreRequest]:
        """The requests as vLLM makes them."""
        with self.clock.part("caller: copy of the params, a request", self.count):
            copies = [CLONE(p) for p in self.params]
        prompts = np.random.default_rng(0).integers(10, 1000, (self.count, PROMPT)).tolist()
        return [
            EngineCoreRequest(i, prompt, None, p, None, 0.0, None, None, None, external_req_id=i.split("-")[0])
            for i, prompt, p in zip(self.ids, prompts, copies, strict=True)
        ]

    def admit(self, requests: list[EngineCoreRequest]) -> None:
        """Through the patch of the output processor."""
        states = self.output_processor.request_states

        def original(self, request):
            states[request.request_id] = SimpleNamespace(external_req_id=request.external_req_id, request_index=0)

        admit = frontend.add_request(original, OK)
        with self.clock.part("caller: admission, a request", self.count):
            for request in requests:
                admit(self.output_processor, request)

    def send(self, requests: list[EngineCoreRequest]) -> list[EngineCoreRequest]:
        """To the engine core and into its scheduler."""
        encode, decode = MsgpackEncoder().encode, MsgpackDecoder(EngineCoreRequest).decode
        with self.clock.part("caller: request to bytes, a request", self.count):
            sent = [encode(request) for request in requests]
        with self.clock.part("core: bytes to request, a request", self.count):
            arrived = [decode(frames) for frames in sent]
        live = self.scheduler.requests
        add = core.scheduler_add_request(lambda self, request: live.update({request.request_id: request}), OK)
        with self.clock.part("core: into the scheduler, a request", self.count):
            for request in arrived:
                add(self.scheduler, request)
        self.hash_blocks(arrived)
        return arrived

    def hash_blocks(self, requests: list[EngineCoreRequest]) -> None:
        """The keys of all full blocks of the first 32 requests."""
        keys = core.block_hash_extra_keys(lambda request, start, end, mm: (None, mm), OK)
        some = [Tokens(r, [*r.prompt_token_ids, *self.generated]) for r in requests[:32]]
        blocks = (PROMPT + self.steps) // BLOCK
        with self.clock.part("core: cache key, a block", len(some) * blocks):
            for request in some:
                for k in range(blocks):
                    keys(request, k * BLOCK, (k + 1) * BLOCK, 0)

    def serve(self, requests: list[EngineCoreRequest]) -> None:
        """The worker's and the scheduler's steps: the prompts, as many at once as have room, then one token each."""
        runtime, clock, count = self.runtime, self.clock, self.count
        new = [
            (r.request_id, engine_request, PROMPT, r.prompt_token_ids, 0)
            for r in requests
            if (engine_request := core.engine_request_of(r)) is not None
        ]
        with clock.part("worker: join, a request", count):
            runtime.requests.follow(new, ())
        limit = core.schedule(lambda scheduler: scheduler.max_num_scheduled_tokens, OK)(self.scheduler)
        group, first = min(count, limit // PROMPT), Clock()
        for k in range(0, count, group):
            self.step(first, "first", self.ids[k : k + group], np.full(len(self.ids[k : k + group]), PROMPT), 0)
        clock.seconds["worker: first plan, a request"].append(sum(first.seconds["worker: first plan, a step"]) / count)
        clock.seconds["worker: shipping of the first, a request"].append(
            sum(first.seconds["worker: shipping of the first, a step"]) / count
        )
        for part, seconds in first.seconds.items():
            if "message" in part:
                clock.seconds[f"{part}, a request"].append(sum(seconds) / count)
        for step in range(self.steps - 1):
            kind = "second" if step == 0 else "steady"
            self.step(clock, kind, self.ids, np.ones(count, np.int64), PROMPT + step)

    def step(self, clock: Clock, kind: str, ids: list[str], counts: np.ndarray, computed: int) -> None:
        """One step of the scheduler and of the worker."""
        cached = SimpleNamespace(req_ids=list(ids), num_computed_tokens=[computed] * len(ids))
        output = SimpleNamespace(scheduled_new_reqs=(), scheduled_cached_reqs=cached)
        order, starts = list(ids), np.full(len(ids), computed, np.int32)
        with clock.part(f"core: {kind} schedule, a step"):
            core.schedule(lambda self: None, OK)(self.scheduler)
        with clock.part(f"worker: {kind} plan, a step"):
            self.runtime.begin_step(*_starts(output))
            self.runtime.steps.plan_step(order, counts.astype(np.int32), starts, self.input_ids)
        with clock.part(f"worker: shipping of the {kind}, a step"):
            self.runtime.steps.end_step()  # without copies
        self.line.carry(clock, kind)

    def finish(self) -> None:
        """Outputs, and the caller's look at all tensors; then everything leaves."""
        clock, states = self.clock, self.output_processor.request_states
        original = lambda self, token_ids, reason: SimpleNamespace(token_ids=token_ids)  # noqa: E731
        wrapper = frontend.new_completion_output(original, OK)
        for state in states.values():
            state.output_kind = SimpleNamespace(name="FINAL_ONLY")
            state.detokenizer = SimpleNamespace(output_token_ids=self.generated)
            state.num_cached_tokens = 0
        with clock.part("caller: output, a request", self.count):
            outputs = [wrapper(state, self.generated, "length") for state in states.values()]
        with clock.part("worker: leave, a request", self.count):
            self.runtime.requests.follow((), self.ids)
        self.runtime.steps.end_step()
        self.line.carry(Clock(), "last")
        views = [view for o in outputs if (view := view_of(o)) is not None]
        with clock.part("caller: check at the end, a request", self.count):
            for view in views:
                frontend._verify(view)
        if views and views[0].part.spec.site_requests:
            with clock.part("caller: output.activations, a request", self.count):
                found = [view.activations() for view in views]
            with clock.part("caller: first look at all tensors, a request", self.count):
                if views[0].part.spec.postprocess is None:
                    tensors, width = [[acts[site] for site in acts.sites] for acts in found], WIDTH
                else:
                    tensors, width = [[acts.compressed(site)[0] for site in acts.sites] for acts in found], 8 + 64
            assert {len(some) for some in tensors} == {len(views[0].part.spec.sites)}
            assert {t.shape[1] for some in tensors for t in some} == {width}
        self.scheduler.requests.clear()
        with clock.part("core: leave, a request", self.count):
            core.schedule(lambda self: None, OK)(self.scheduler)

    def all(self) -> None:
        """Every stage, one after the other."""
        requests = self.ask()
        self.admit(requests)
        self.serve(self.send(requests))
        self.finish()


def ask(case: str, count: int, steps: int, clock: Clock) -> list[SamplingParams]:
    """The caller's params."""
    kind = RequestOutputKind.FINAL_ONLY  # as `LLM.generate` has it
    base = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True, detokenize=False, output_kind=kind)
    asked = site_requests(case, count)
    with clock.part("caller: weir.params, a request", count):
        params = [base if not site_request else weir.params(base, **site_request) for site_request in asked]
    return params[:1] * count if "alike" in case else params


def measure(case: str, count: int, steps: int, runs: int) -> dict[str, dict[str, float]]:
    """All parts of one case; the first of the runs is not counted."""
    runtime, frontend = make_runtime(count), EngineFrontend(Settings.load({"weir": SETTINGS}), True)
    frontend.learn([runtime.report()])
    clock = Clock()
    for k in range(runs + 1):
        if k == 1:
            clock.seconds.clear()
        if k == 0 or "again" not in case:
            params = ask(case, count, steps, clock)
        Run(steps, clock, frontend, runtime, params).all()
        gc.collect()
    assert runtime.usage()["requests"] == 0
    frontend.close()
    runtime.parts.notifier.close()
    return clock.table()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="now", help="of these figures in the file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as vLLM's engine core does once it has started
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "msgspec", "vllm-weir")}
    found: dict[str, Any] = {
        "processor": platform.machine(), "python": platform.python_version(), "vllm": vllm.__version__, **versions,
        "requests": given.requests, "steps": given.steps, "runs": given.runs, "cases": {},
    }  # fmt: skip
    for case in given.cases.split(","):
        found["cases"][case] = parts = measure(case, given.requests, given.steps, given.runs)
        print(f"\n{case}: {given.requests} requests (us)", flush=True)
        for part, t in parts.items():
            print(f"  {part:58s} median {t['median_us']:9.2f}  min {t['min_us']:9.2f}", flush=True)
    if given.out is not None:
        kept = json.loads(given.out.read_text()) if given.out.exists() else {}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(kept | {given.name: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
