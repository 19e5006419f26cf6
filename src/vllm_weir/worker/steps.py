"""Each step on a worker: its plan, written to where the taps read it, and what its readers are sent and told."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.taps import GROUPS, NO_GRAPH, REPLAY, function_bits
from vllm_weir.util.h2d import NO_MEMORY, upload
from vllm_weir.worker.parts import Parts
from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.tap.batch import Batch
from vllm_weir.worker.transfer.copy_out import no_wait
from vllm_weir.worker.transfer.notifier import StepNotice

if TYPE_CHECKING:
    from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

logger = logging.getLogger(__name__)
SPILL = 0.6
"""Once this share of the host buffer is in use, readers are asked to move their rows out of it."""


@dataclass(frozen=True)
class IssuedStep:
    """A step whose forward pass is being issued, in which something is recorded or changed."""

    plan: StepPlan  # what is
    first_row: int  # its first ring row; in a `streamed` step that of its groups of reduced rows
    streamed: bool
    # mask of its taps and its tokens if compiled functions are called inside taps, else None
    mapped: tuple[int, Batch] | None


def _never_sampled() -> Mapping[str, int]:
    raise RuntimeError("vLLM did not sample the step")


class Steps:
    """Tells the taps what each forward pass is to record and to change, and its readers what it did.

    `parts`: of this worker; `runner`: vLLM's model runner, "V1" or "V2"; `speculative`: see `EngineTraits.speculative`.
    """

    def __init__(self, parts: Parts, runner: str, speculative: bool) -> None:
        self._parts, self._runner, self._speculative = parts, runner, speculative
        self._issued: IssuedStep | None = None
        self._unsampled: StepNotice | None = None
        """What readers are to be told of the last step, once it is sampled."""

    def plan_step(
        self,
        request_ids: Sequence[str],
        num_tokens: Sequence[int],
        num_computed: Sequence[int],
        input_ids: torch.Tensor,
        graph: bool = True,
        num_drafts: Sequence[int] | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Tell the taps what the coming forward pass is to record and to change.

        What cannot be served fails its own requests; the engine and all other requests go on.

        Lists are by request, in batch order: its tokens, the position of the first of them, and how many
        are drafts (None if none are). On the device, at least one for each token, are `input_ids`, and
        `positions` where drafts are verified. `graph`: whether the pass may be replayed from a CUDA graph.
        """
        parts = self._parts
        self.forget()
        try:
            parts.replays.write(request_ids, num_tokens, num_computed, positions, parts.switch.wants(REPLAY))
            plan = self._plan(request_ids, num_tokens, num_computed, num_drafts)
            if plan is not None and self._calls_in_taps and graph and self._runner == "V2":
                raise WeirError("a step in whose taps something is called was to be replayed from a CUDA graph")
            streamed_copy = None if plan is None or graph else parts.step_rows.streamed_copy_for(plan)
            first_row = 0 if plan is None or streamed_copy is not None else parts.step_rows.claim(plan.rows)
            if plan is not None:
                parts.failures.note(plan.failures)
                requests = request_ids, num_tokens, num_computed
                self._begin(plan, requests, first_row, streamed_copy, graph, input_ids, positions)
        except (WeirError, ValueError, torch.OutOfMemoryError) as e:
            logger.exception("Weir cannot plan this step")
            why = NO_MEMORY if isinstance(e, torch.OutOfMemoryError) else str(e)
            parts.failures.fail_step(request_ids, num_computed, why)
            self.forget()
        if self._issued is None:
            parts.plan_writer.silence()
            parts.scorer.silence()

    def forget(self) -> None:
        """Let nothing be sent of the coming forward pass, unless it is planned."""
        self._issued = None
        self._parts.switch.launch_by(None)

    def _begin(
        self,
        plan: StepPlan,
        requests: tuple[Sequence[str], Sequence[int], Sequence[int]],
        first_row: int,
        streamed_copy: StreamedCopy | None,
        graph: bool,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> None:
        """Write a step's plan, whose rows begin at `first_row` of the ring, to where the taps read it.

        `requests` are the first three arguments of `plan_step`.
        """
        parts = self._parts
        parts.table_writer.flush()
        parts.planner.site_sets.write_changes(self._write_ranks)
        device = parts.tensors.plan.device
        launch: Callable[..., None] | None = None
        acting_tokens = None
        if not graph and device.type == "cuda":
            acting_tokens = upload(plan.acting_tokens, device)
        if streamed_copy is not None:
            streamed_copy.begin(plan, parts.planner.site_sets.columns_of, acting_tokens)
            launch, first_row = streamed_copy.tap, streamed_copy.cells
            parts.plan_writer.write(plan.in_lanes(streamed_copy.stride, first_row), 0, input_ids, positions)
        else:
            if acting_tokens is not None:
                launch = functools.partial(_launch_listed, acting_tokens)
            parts.plan_writer.write(plan, first_row, input_ids, positions)
        mapped = None
        if self._calls_in_taps:
            launch = parts.calls.around(launch, Batch.of(self._programs_of(plan), *requests))
        elif function_bits(parts.switch.mask):
            mapped = parts.switch.mask, Batch.of(self._programs_of(plan), *requests)
            parts.in_graphs.begin(mapped[1], positions)
        parts.switch.launch_by(launch)
        parts.scorer.begin(plan, positions)
        parts.reducer.seed(plan.reductions, first_row)
        self._issued = IssuedStep(plan, first_row, streamed_copy is not None, mapped)

    def _write_ranks(self, ranks: np.ndarray) -> None:
        on_device = self._parts.tensors.ranks
        on_device[: len(ranks)].copy_(upload(ranks, on_device.device))

    @property
    def _calls_in_taps(self) -> bool:
        """Whether something may be called in the taps of the coming step; alike on all ranks."""
        switch = self._parts.switch
        return not switch.pinned and bool(switch.mask >> NO_GRAPH & 1)

    def _programs_of(self, plan: StepPlan) -> np.ndarray:
        """Return the programs of a step's tokens; waits for the device if only that knows some of them."""
        if not (plan.programs_by_token or plan.programs_by_position):
            return plan.programs
        return self._parts.tensors.plan[: len(plan.programs), 2].cpu().numpy()

    def _plan(
        self,
        request_ids: Sequence[str],
        num_tokens: Sequence[int],
        num_computed: Sequence[int],
        num_drafts: Sequence[int] | None,
    ) -> StepPlan | None:
        plan, switch = self._parts.planner.plan(request_ids, num_tokens, num_computed, num_drafts), self._parts.switch
        if plan is not None and not switch.live and (plan.rows or len(plan.runs) or (plan.programs >= 0).any()):
            raise WeirError("a step that was planned without taps has something for them to do")
        if plan is not None and plan.spans.any() and not switch.wants(GROUPS):
            raise WeirError("a step whose taps cannot reduce rows has rows to reduce")
        return plan

    def end_step(self) -> None:
        """Send the rows of the forward pass that was issued, and tell what was steered, scored or failed."""
        parts = self._parts
        # What is called between steps (by users, through `apply_model`) belongs to no request.
        parts.switch.set_active(0)
        self.note_sampled()  # does nothing if the last step was sampled, as usual
        issued, self._issued = self._issued, None
        if parts.switch.pinned and self._speculative:
            # A draft model that runs now may share tapped modules.
            parts.plan_writer.silence()
            parts.scorer.silence()
        drafted = parts.planner.take_drafted()
        if issued is None and drafted is None and not parts.row_seqs.layout_updates:
            return
        failed = [] if issued is None else parts.scorer.controllers.run()
        if issued is not None and issued.mapped is not None:
            for request_id, reason in parts.functions.collect(*issued.mapped, parts.table):
                parts.failures.fail_called(request_id, reason)
        notice = StepNotice(no_wait, failures=parts.failures.take_noted(), drafted=drafted)
        if issued is not None:
            plan = issued.plan
            notice.arrived = parts.step_rows.send(plan, issued.first_row, issued.streamed) or no_wait
            parts.switch.launch_by(None)
            notice.arrivals, notice.steered = plan.arrivals, plan.steered
            if plan.score_reads is not None:
                notice.scored, notice.scores = plan.scored, parts.scorer.read(plan.score_reads)
        notice.told = parts.functions.take()
        notice.spill = parts.arena.pressure > SPILL
        if notice.spill:
            parts.row_seqs.retire_all()
        notice.layout_updates = parts.row_seqs.take_layout_updates()
        for layout_update in notice.layout_updates.values():
            parts.reducer.forget(layout_update.closed)
        if drafted is not None and drafted.undecided:
            self._unsampled = notice
        else:
            parts.notifier.send(notice)
        for gate, reason in failed:
            parts.failures.fail_controlled(gate, reason)

    def note_sampled(self, sampled: Callable[[], Mapping[str, int]] = _never_sampled) -> None:
        """Tell the readers of the last step, whose tokens are about to be sampled.

        `sampled`: see `StepNotice.sampled`; left out if they never will be.
        """
        notice, self._unsampled = self._unsampled, None
        if notice is not None:
            notice.sampled = sampled
            self._parts.notifier.send(notice)


def _launch_listed(listed: torch.Tensor, *arguments: Any, **more: Any) -> None:
    from vllm_weir.worker.tap.triton_kernel import launch

    launch(*arguments, listed=listed, **more)
