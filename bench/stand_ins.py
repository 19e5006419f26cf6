"""What stands around Weir's code in `host.py`: a station that computes nothing, a line without sockets, a clock."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.engine import EngineCoreRequest

from vllm_weir.config.settings import Settings
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.frontend.receive.receiver import deliver
from vllm_weir.schema.hooks import Site
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.model_info import ModelInfo
from vllm_weir.worker.runtime import WorkerRuntime
from vllm_weir.worker.transfer.copy_out import no_wait

LAYERS, WIDTH, PROMPT = 32, 4096, 16
SETTINGS = {"hooks": ["resid_pre", "resid_post"], "host_bytes": 64 << 30}


class Clock:
    """Seconds of each part, one entry for each run (or step)."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str, among: int = 1, now=time.thread_time):
        """Time a part that is done for `among` requests."""
        before = now()
        yield
        self.seconds[name].append((now() - before) / among)

    def table(self) -> dict[str, dict[str, float]]:
        """Part -> median and minimum, in microseconds."""
        return {
            name: {"median_us": round(1e6 * statistics.median(s), 2), "min_us": round(1e6 * min(s), 2), "times": len(s)}
            for name, s in self.seconds.items()
        }


class Nothing(torch.nn.Module):
    """A model of blocks that are never run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(LAYERS))


def make_runtime(requests: int) -> WorkerRuntime:
    """A station whose rows go nowhere."""
    out = TensorKey("out", -1)
    anchors = {Site("resid_post", k): Anchor(f"blocks.{k}", "after", out) for k in range(LAYERS)}
    anchors |= {Site("resid_pre", k): Anchor(f"blocks.{k}", "before", TensorKey("arg", 0)) for k in range(LAYERS)}
    capabilities = ModelInfo(WIDTH, torch.bfloat16, torch.device("cpu"), requests * PROMPT)
    settings = Settings.load({"weir": SETTINGS})
    runtime = WorkerRuntime(Nothing(), capabilities, settings, SiteMap(LAYERS, anchors))
    runtime.parts.step_rows.copy_out.ship = lambda plan, start, quick, treat: (plan.segments, no_wait)[1]
    return runtime


class Line:
    """From the drain to the store, without sockets; what is sent waits in `parcels`."""

    def __init__(self, runtime: WorkerRuntime, frontend: EngineFrontend) -> None:
        self.parcels: list[Any] = []
        self._frames: list[Any] = []
        self._drain, self._frontend = runtime.parts.notifier, frontend
        runtime.parts.notifier.send = self.parcels.append
        runtime.parts.notifier._post = lambda address, frames: self._frames.append(frames)

    def carry(self, clock: Clock, kind: str) -> None:
        """Deliver what waits."""
        if not self.parcels:
            return
        _, _, (state, *_), _ = self._frontend._receiver.close.peek()
        for parcel in self.parcels:
            replies = sorted(parcel.layout_updates.keys() | parcel.arrivals.keys() | parcel.steered.keys())
            scores = parcel.scores(parcel.score_reads)
            for reply in replies:
                with clock.part(f"worker: drain thread, {kind} message"):
                    self._drain._tell(reply, parcel, "", scores.get(reply, NO_SCORES), [])
                with clock.part(f"caller: receiver thread, {kind} message"):
                    deliver(self._frontend.store, state.endpoint.token, self._frames.pop(), state._mapped)
                with clock.part(f"caller: receiver thread, what is made after a {kind} message"):
                    while self._frontend.store.prepare():
                        pass
        self.parcels.clear()


NO_SCORES = np.empty(0, np.float32)


class Scheduler:
    """As much of vLLM's as Weir looks at."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.max_num_scheduled_tokens = 8192
        self.scheduler_config = SimpleNamespace(enable_chunked_prefill=True)
        self.connector = None
        model = SimpleNamespace(get_hidden_size=lambda: WIDTH, dtype=torch.bfloat16, is_mm_prefix_lm=False)
        device = SimpleNamespace(device_type="cpu")
        limits = SimpleNamespace(
            max_num_seqs=256, long_prefill_token_threshold=0, policy="fcfs", disable_chunked_mm_input=False
        )
        self.vllm_config = SimpleNamespace(
            additional_config={"weir": SETTINGS}, model_config=model, device_config=device, scheduler_config=limits
        )


class Tokens:
    """A request as the block hasher sees it."""

    def __init__(self, request: EngineCoreRequest, tokens: list[int]) -> None:
        self.sampling_params, self.num_prompt_tokens, self.all_token_ids = request.sampling_params, PROMPT, tokens
