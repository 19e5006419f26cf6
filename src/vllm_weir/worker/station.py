"""The worker's station: follows the live requests, plans each step, and sends what the taps have written.

Everything it is told is plain data from the seams; it knows torch, but no vLLM.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.settings import Settings
from vllm_weir.spec.interventions import Move
from vllm_weir.spec.request import ResolvedSpec
from vllm_weir.worker.drain import Drain
from vllm_weir.worker.fetch import Fetcher
from vllm_weir.worker.plan import STAGES, Planner, StepPlan
from vllm_weir.worker.programs import ProgramTable
from vllm_weir.worker.ring import Ring
from vllm_weir.worker.sites import find_trunk
from vllm_weir.worker.tables import PlanWriter, TableWriter
from vllm_weir.worker.tap import TapTensors, place_input_tap, place_output_tap

logger = logging.getLogger(__name__)
MAX_PROFILES = 4096


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
        self.table = ProgramTable(settings.table_sizes(facts.d_model), facts.num_layers + 1, trunk.taps, facts.d_model)
        self.planner = Planner(columns if facts.ships_rows else frozenset(), num_columns, MAX_PROFILES, self.table)
        capacity = ring_rows(settings, facts.d_model, facts.dtype.itemsize) if facts.ships_rows and trunk.taps else 1
        self.ring = Ring(capacity, facts.d_model, facts.dtype, facts.device)
        self._tables = TableWriter(self.table, facts.device)
        self.tensors = TapTensors(
            plan=torch.full((3, facts.max_tokens), -1, dtype=torch.int32, device=facts.device),
            ranks=torch.full((MAX_PROFILES, num_columns), -1, dtype=torch.int32, device=facts.device),
            ring=self.ring.buffer,
            **self._tables.tensors,
        )
        self.drain = Drain(self.ring, facts.d_model, str(facts.dtype).removeprefix("torch."))
        self._fetcher = Fetcher(facts.d_model)
        self._writer = PlanWriter(self.tensors.plan)
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
            self.planner.remove(request_id)  # a resumed request joins again
            try:
                self._join(request_id, wire, prompt_len, prompt_ids)
            except (WeirError, KeyError, TypeError, ValueError) as e:
                logger.exception("Weir cannot follow request %s", request_id)
                if isinstance(wire.get("reply"), str):
                    self.drain.fail(wire["reply"], request_id, f"the worker could not serve the request: {e}")

    def _join(self, request_id: str, wire: dict, prompt_len: int, prompt_ids: Sequence[int] | None) -> None:
        reply = wire["reply"]
        if wire["wishes"]:
            self.planner.read(request_id, reply, ResolvedSpec.from_wire(wire["wishes"]), prompt_len, prompt_ids)
        if wire["moves"]:
            moves = [Move.from_wire(m) for m in wire["moves"]]
            fetch = functools.partial(self._fetcher.fetch, reply)
            self.planner.steer(request_id, reply, moves, prompt_len, prompt_ids, fetch)

    def plan_step(
        self,
        request_ids: Sequence[str],
        num_tokens: Sequence[int],
        num_computed: Sequence[int],
        input_ids: torch.Tensor,
    ) -> None:
        """Tell the taps what the coming forward pass is to record and to change.

        Args:
            request_ids, num_tokens, num_computed: as in `Planner.plan`.
            input_ids: tokens of the step on the device, [>= tokens].
        """
        self._step = None
        plan = lease = None
        try:
            plan = self.planner.plan(request_ids, num_tokens, num_computed)
            lease = self.ring.reserve(plan.rows) if plan is not None and plan.rows else None
        except (WeirError, ValueError) as e:
            # What cannot be served fails its own requests; the engine and everybody else go on.
            logger.exception("Weir cannot plan this step")
            self._fail(request_ids, str(e))
            plan = None
        if plan is None:
            self._writer.silence()
            return
        self._tables.flush()
        if self.planner.ranks_changed:
            self.tensors.ranks.copy_(torch.from_numpy(self.planner.ranks))
            self.planner.ranks_changed = False
        self._writer.write(plan, lease.start if lease is not None else 0, input_ids)
        self._step = (lease, plan)

    def _fail(self, request_ids: Sequence[str], reason: str) -> None:
        for request_id in request_ids:
            live = self.planner.reading.get(request_id) or self.planner.steering.get(request_id)
            if live is not None:
                self.drain.fail(live.reply, request_id, reason)

    def end_step(self) -> None:
        """The forward pass has been issued: send its rows, and word of what was steered, on."""
        if self._step is not None:
            lease, plan = self._step
            self._step = None
            if lease is not None:
                self.ring.ship(lease)
            steered = plan.steered if self.facts.ships_rows else []
            if lease is not None or steered:
                self.drain.send(lease, plan.entries, steered)

    def silence(self) -> None:
        """The coming forward pass is a dummy: nothing is recorded or changed."""
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
        live = self.planner.reading.keys() | self.planner.steering.keys()
        return {"requests": len(live), "ring_rows_in_flight": self.ring.in_flight, **self.table.usage()}
