"""The worker's station: follows the live requests, plans each step, and sends what the taps have written.

Everything it is told is plain data from the seams; it knows torch, but no vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.settings import Settings
from vllm_weir.spec.request import ResolvedSpec
from vllm_weir.worker.drain import Drain
from vllm_weir.worker.plan import STAGES, Planner, StepPlan
from vllm_weir.worker.ring import Ring
from vllm_weir.worker.sites import find_trunk
from vllm_weir.worker.tap import TapTensors, place_input_tap, place_output_tap

logger = logging.getLogger(__name__)
MAX_PROFILES = 4096
STAGING = 4


@dataclass(frozen=True)
class ModelFacts:
    """What a station needs to know of the engine it stands in."""

    num_layers: int
    d_model: int
    dtype: torch.dtype
    device: torch.device
    max_tokens: int
    ships_rows: bool
    """Whether this rank sends rows: the first of its tensor-parallel group, since all of them hold the same stream."""
    runner: str = ""
    """Which of vLLM's model runners drives it."""


def ring_rows(settings: Settings, d_model: int, itemsize: int) -> int:
    """Rows that fit ``buffer_bytes``."""
    return settings.buffer_bytes // (d_model * itemsize)


class Station:
    """One per worker. Built once the model is loaded and before it is compiled."""

    def __init__(self, model: torch.nn.Module, facts: ModelFacts, settings: Settings) -> None:
        self.facts = facts
        trunk = find_trunk(model, facts.num_layers, settings)
        self.taps = trunk.taps
        columns = frozenset(tap * STAGES + stage for tap in trunk.taps for stage in range(STAGES))
        num_columns = (facts.num_layers + 1) * STAGES
        self.planner = Planner(columns if facts.ships_rows else frozenset(), num_columns, MAX_PROFILES)
        capacity = ring_rows(settings, facts.d_model, facts.dtype.itemsize) if facts.ships_rows and trunk.taps else 1
        self.ring = Ring(capacity, facts.d_model, facts.dtype, facts.device)
        self.tensors = TapTensors(
            plan=torch.full((2, facts.max_tokens), -1, dtype=torch.int32, device=facts.device),
            ranks=torch.full((MAX_PROFILES, num_columns), -1, dtype=torch.int32, device=facts.device),
            ring=self.ring.buffer,
        )
        self.drain = Drain(self.ring, facts.d_model, str(facts.dtype).removeprefix("torch."))
        self._writer = _PlanWriter(self.tensors)
        self._step: tuple[Any, StepPlan] | None = None
        for tap in trunk.taps:
            if tap == 0:
                place_input_tap(trunk.blocks[0], tap, self.tensors, trunk.hidden, trunk.residual)
            elif tap - 1 in trunk.blocks:
                place_output_tap(trunk.blocks[tap - 1], tap, self.tensors)

    def follow(self, new: Iterable[tuple[str, dict, int, Sequence[int] | None]], finished: Iterable[str]) -> None:
        """Requests that join (id, engine wire form, prompt length, prompt ids) and leave before the next step."""
        for request_id in finished:
            self.planner.remove(request_id)
        for request_id, wire, prompt_len, prompt_ids in new:
            try:
                spec = ResolvedSpec.from_wire(wire["wishes"])
                self.planner.add(request_id, wire["reply"], spec, prompt_len, prompt_ids)
            except (WeirError, KeyError, TypeError, ValueError) as e:
                logger.exception("Weir cannot follow request %s", request_id)
                if isinstance(wire.get("reply"), str):
                    self.drain.fail(wire["reply"], request_id, f"the worker could not read the request: {e}")

    def plan_step(self, request_ids: Sequence[str], num_tokens: Sequence[int], num_computed: Sequence[int]) -> None:
        """Tell the taps what the coming forward pass is to record; arguments as in `Planner.plan`."""
        self._step = None
        plan = lease = None
        try:
            plan = self.planner.plan(request_ids, num_tokens, num_computed)
            lease = self.ring.reserve(plan.rows) if plan is not None else None
        except (WeirError, ValueError) as e:
            # A capture that cannot be served fails its own requests; the engine and everybody else go on.
            logger.exception("Weir cannot plan this step")
            for request_id in request_ids:
                if (tracked := self.planner.requests.get(request_id)) is not None:
                    self.drain.fail(tracked.reply, request_id, str(e))
            plan = None
        if plan is None or lease is None:
            self._writer.silence()
            return
        if self.planner.ranks_changed:
            self.tensors.ranks.copy_(torch.from_numpy(self.planner.ranks))
            self.planner.ranks_changed = False
        self._writer.write(plan, lease.start)
        self._step = (lease, plan)

    def end_step(self) -> None:
        """The forward pass has been issued: send its rows on."""
        if self._step is not None:
            lease, plan = self._step
            self._step = None
            self.ring.ship(lease)
            self.drain.send(lease, plan.entries)

    def silence(self) -> None:
        """The coming forward pass is a dummy: nothing is recorded."""
        self._step = None
        self._writer.silence()

    def report(self) -> dict[str, Any]:
        """What this worker serves, for the caller's process."""
        return {
            "ok": True,
            "runner": self.facts.runner,
            "taps": list(self.taps),
            "num_layers": self.facts.num_layers,
            "d_model": self.facts.d_model,
            "dtype": str(self.facts.dtype).removeprefix("torch."),
            "ring_rows": self.ring.capacity if self.facts.ships_rows else 0,
        }

    def usage(self) -> dict[str, int]:
        """What is held right now; all zero when no request is live."""
        return {"requests": len(self.planner.requests), "ring_rows_in_flight": self.ring.in_flight}


class _PlanWriter:
    """Writes a step's plan into the device tensor; a few staging buffers, because the copy may lag behind the host."""

    def __init__(self, tensors: TapTensors) -> None:
        self._plan = tensors.plan
        self._cuda = tensors.plan.is_cuda
        self._dirty = 0
        self._turn = 0
        self._staging = (
            [torch.empty(tensors.plan.shape, dtype=torch.int32, pin_memory=True) for _ in range(STAGING)]
            if (self._cuda)
            else [torch.empty(tensors.plan.shape, dtype=torch.int32)]
        )
        self._copied = [torch.cuda.Event() for _ in range(STAGING)] if self._cuda else []

    def write(self, plan: StepPlan, start: int) -> None:
        """Plan of the step's tokens, slots shifted to the lease's `start`; later tokens are silenced."""
        n = len(plan.slots)
        self._put(n, plan.slots + np.where(plan.slots >= 0, start, 0), plan.profiles)
        self._dirty = n

    def silence(self) -> None:
        """No token is recorded."""
        if self._dirty:
            self._put(0, None, None)
            self._dirty = 0

    def _put(self, n: int, slots, profiles) -> None:
        width = max(n, self._dirty)
        self._turn = (self._turn + 1) % len(self._staging)
        if self._cuda:
            self._copied[self._turn].synchronize()
        staging = self._staging[self._turn]
        host = staging.numpy()
        host[:, n:width] = -1
        if n:
            host[0, :n], host[1, :n] = slots, profiles
        self._plan[:, :width].copy_(staging[:, :width], non_blocking=True)
        if self._cuda:
            self._copied[self._turn].record()
