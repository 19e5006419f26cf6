"""The end of each step: sends its rows, and tells readers of them, of what was steered, of scores and failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_weir.worker.functions import WorkerFunctions
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.request_failures import RequestFailures
from vllm_weir.worker.scoring.scorer import Scorer
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.tap.batch import Batch
from vllm_weir.worker.tap.device_tables import PlanWriter
from vllm_weir.worker.tap.op import TapSwitch
from vllm_weir.worker.tap.reductions import TapReducer
from vllm_weir.worker.transfer.copy_out import no_wait
from vllm_weir.worker.transfer.notifier import Notifier, StepNotice
from vllm_weir.worker.transfer.step_rows import StepRows

SPILL = 0.6
"""Once this share of the host buffer is in use, readers are asked to move their rows out of it."""


def _never_sampled() -> Mapping[str, int]:
    raise RuntimeError("vLLM did not sample the step")


class StepSender:
    """Sends what the forward pass that was issued has for its readers.

    Args:
        switch: turns the taps off after the pass.
        plan_writer, scorer: silenced where a draft model runs after it.
        reducer: forgets reductions whose row sequences are closed.
        speculative: see `EngineTraits.speculative`.

    Attributes:
        step: first ring row and plan of the step being issued, and whether it is streamed; None if
            nothing is recorded or changed in it. In a streamed step the row is that of its groups
            of reduced rows. Who plans the step sets it.
        mapped: mask of the taps and tokens of a step in which compiled functions are called inside taps, else None.
            Who plans the step sets it.
    """

    def __init__(
        self,
        switch: TapSwitch,
        plan_writer: PlanWriter,
        scorer: Scorer,
        planner: Planner,
        row_seqs: RowSequences,
        arena: Arena,
        step_rows: StepRows,
        reducer: TapReducer,
        notifier: Notifier,
        failures: RequestFailures,
        speculative: bool,
        functions: WorkerFunctions,
        table: ProgramTable,
    ) -> None:
        self._switch, self._plan_writer, self._scorer = switch, plan_writer, scorer
        self._planner, self._row_seqs, self._arena = planner, row_seqs, arena
        self._step_rows, self._reducer = step_rows, reducer
        self._notifier, self._failures, self._speculative = notifier, failures, speculative
        self._functions, self._table = functions, table
        self.mapped: tuple[int, Batch] | None = None
        self.step: tuple[int, StepPlan, bool] | None = None
        self._unsampled: StepNotice | None = None
        """What readers are to be told of the last step, once it is sampled."""

    def end_step(self) -> None:
        """Send the rows of the forward pass that was issued, and tell what was steered."""
        self._switch.turn(0)  # what is called between steps (by users, through `apply_model`) belongs to no request
        self.note_sampled()  # does nothing if the last step was sampled, as usual
        step, self.step = self.step, None
        if self._switch.pinned and self._speculative:
            # A draft model that runs now may share tapped modules.
            self._plan_writer.silence()
            self._scorer.silence()
        drafted, self._planner.drafted = self._planner.drafted, None
        if step is None and drafted is None and not self._row_seqs.layout_updates:
            return
        mapped, self.mapped = self.mapped, None
        failed = [] if step is None else self._scorer.controllers.run()
        for request_id, reason in (
            () if step is None or mapped is None else self._functions.collect(*mapped, self._table)
        ):
            self._failures.fail_called(request_id, reason)
        notice = StepNotice(no_wait, failures=self._failures.take_noted(), drafted=drafted)
        if step is not None:
            first_row, plan, streamed = step
            notice.arrived = self._step_rows.send(plan, first_row, streamed) or no_wait
            self._switch.launch = None
            notice.arrivals, notice.steered = plan.arrivals, plan.steered
            if plan.score_reads is not None:
                notice.scored, notice.scores = plan.scored, self._scorer.read(plan.score_reads)
        notice.told = self._functions.take()
        notice.spill = self._arena.pressure > SPILL
        if notice.spill:
            self._row_seqs.retire_all()
        notice.layout_updates = self._row_seqs.take_layout_updates()
        for layout_update in notice.layout_updates.values():
            self._reducer.forget(layout_update.closed)
        if drafted is not None and drafted.undecided:
            self._unsampled = notice
        else:
            self._notifier.send(notice)
        for gate, reason in failed:
            self._failures.fail_controlled(gate, reason)

    def note_sampled(self, sampled: Callable[[], Mapping[str, int]] = _never_sampled) -> None:
        """Tell the readers of the last step, whose tokens are about to be sampled.

        `sampled`: see `StepNotice.sampled`; left out if they never will be.
        """
        notice, self._unsampled = self._unsampled, None
        if notice is not None:
            notice.sampled = sampled
            self._notifier.send(notice)
