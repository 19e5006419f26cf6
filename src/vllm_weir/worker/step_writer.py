"""The beginning of each step: its plan, written to where the taps read it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.taps import GROUPS, NO_GRAPH, function_bits
from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.request_failures import NO_MEMORY, RequestFailures
from vllm_weir.worker.scoring.scorer import Scorer
from vllm_weir.worker.step_sender import StepSender
from vllm_weir.worker.tap.batch import Batch
from vllm_weir.worker.tap.calls import TapCalls
from vllm_weir.worker.tap.device_tables import PlanWriter, TableWriter
from vllm_weir.worker.tap.mapped import MappedTaps
from vllm_weir.worker.tap.op import TapSwitch, TapTensors
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.transfer.step_rows import StepRows

if TYPE_CHECKING:
    from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

logger = logging.getLogger(__name__)


class StepWriter:
    """Tells the taps what each forward pass is to record and to change."""

    def __init__(
        self,
        planner: Planner,
        step_rows: StepRows,
        table_writer: TableWriter,
        plan_writer: PlanWriter,
        tensors: TapTensors,
        switch: TapSwitch,
        calls: TapCalls,
        in_graphs: MappedTaps,
        scorer: Scorer,
        reducer: TapReducer,
        failures: RequestFailures,
        sender: StepSender,
        runner: str,
    ) -> None:
        self._planner, self._step_rows = planner, step_rows
        self._table_writer, self._plan_writer = table_writer, plan_writer
        self._tensors, self._device, self._switch = tensors, tensors.plan.device, switch
        self._calls, self._in_graphs, self._scorer, self._reducer = calls, in_graphs, scorer, reducer
        self._failures, self._sender, self._runner = failures, sender, runner

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
        self._sender.step, self._switch.launch = None, None
        try:
            plan = self._plan(request_ids, num_tokens, num_computed, num_drafts)
            if plan is not None and self._calls_in_taps and graph and self._runner == "V2":
                raise WeirError("a step in whose taps something is called was to be replayed from a CUDA graph")
            streamed_copy = None if plan is None or graph else self._step_rows.streamed_copy_for(plan)
            first_row = 0 if plan is None or streamed_copy is not None else self._step_rows.claim(plan.rows)
            if plan is not None:
                self._failures.note(plan.failures)
                requests = request_ids, num_tokens, num_computed
                self._begin(plan, requests, first_row, streamed_copy, graph, input_ids, positions)
        except (WeirError, ValueError, torch.OutOfMemoryError) as e:
            logger.exception("Weir cannot plan this step")
            self._failures.fail_step(
                request_ids, num_computed, NO_MEMORY if isinstance(e, torch.OutOfMemoryError) else str(e)
            )
            self._sender.step, self._switch.launch, plan = None, None, None
        if plan is None:
            self._plan_writer.silence()
            self._scorer.silence()

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
        self._table_writer.flush()
        self._write_ranks()
        acting_tokens = None
        if not graph and self._device.type == "cuda":
            acting_tokens = upload(plan.acting_tokens, self._device)
        if streamed_copy is not None:
            streamed_copy.begin(plan, self._planner.site_sets.columns_of, acting_tokens)
            self._switch.launch = streamed_copy.tap
            first_row = streamed_copy.cells
            self._plan_writer.write(plan.in_lanes(streamed_copy.stride, first_row), 0, input_ids, positions)
        else:
            if acting_tokens is not None:
                self._switch.launch = functools.partial(_launch_listed, acting_tokens)
            self._plan_writer.write(plan, first_row, input_ids, positions)
        self._sender.mapped = None
        if self._calls_in_taps:
            batch = Batch.of(self._programs_of(plan), *requests)
            self._switch.launch = self._calls.around(self._switch.launch, batch)
        elif function_bits(self._switch.mask):
            batch = Batch.of(self._programs_of(plan), *requests)
            self._in_graphs.begin(batch, positions)
            self._sender.mapped = self._switch.mask, batch
        self._scorer.begin(plan, positions)
        self._sender.step = first_row, plan, streamed_copy is not None
        self._reducer.seed(plan.reductions, first_row)

    @property
    def _calls_in_taps(self) -> bool:
        """Whether something may be called in the taps of the coming step; alike on all ranks."""
        return not self._switch.pinned and bool(self._switch.mask >> NO_GRAPH & 1)

    def _programs_of(self, plan: StepPlan) -> np.ndarray:
        """Return the programs of a step's tokens; waits for the device if only that knows some of them."""
        if not (plan.programs_by_token or plan.programs_by_position):
            return plan.programs
        return self._tensors.plan[: len(plan.programs), 2].cpu().numpy()

    def _plan(
        self,
        request_ids: Sequence[str],
        num_tokens: Sequence[int],
        num_computed: Sequence[int],
        num_drafts: Sequence[int] | None,
    ) -> StepPlan | None:
        plan = self._planner.plan(request_ids, num_tokens, num_computed, num_drafts)
        if plan is not None and not self._switch.live and (plan.rows or len(plan.runs) or (plan.programs >= 0).any()):
            raise WeirError("a step that was planned without taps has something for them to do")
        if plan is not None and plan.spans.any() and not self._switch.wants(GROUPS):
            raise WeirError("a step whose taps cannot reduce rows has rows to reduce")
        return plan

    def _write_ranks(self) -> None:
        """Bring the device's rank table up to date."""
        site_sets = self._planner.site_sets
        if site_sets.changed:
            used = site_sets.used
            self._tensors.ranks[:used].copy_(upload(site_sets.ranks[:used].copy(), self._tensors.ranks.device))
            site_sets.changed = False


def _launch_listed(listed: torch.Tensor, *arguments: Any, **more: Any) -> None:
    from vllm_weir.worker.tap.triton_kernel import launch

    launch(*arguments, listed=listed, **more)
