"""The runs of a case so far, and how long it may still take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from vllm_weir.bench.plan import BenchPlan, BenchTask
from vllm_weir.bench.result import CaseResult, summarise


@dataclass(frozen=True)
class Deadlines:
    """The seconds that a case, and the whole run, may take.

    Attributes:
        case: seconds of a case, warm-ups included.
        run: seconds of the whole run; None: no limit.
        started: when the run started, in seconds of `time.monotonic`.
    """

    case: float
    run: float | None
    started: float

    @classmethod
    def starting_now(cls, plan: BenchPlan) -> Deadlines:
        return cls(plan.case_seconds, plan.run_seconds, time.monotonic())

    def left_of_run(self) -> float:
        """Return the seconds left of the run; infinity without a limit."""
        return float("inf") if self.run is None else self.started + self.run - time.monotonic()

    def left(self, times: TaskTimes) -> float:
        return min(self.case - times.spent(), self.left_of_run())

    def end(self, times: TaskTimes, why: str, more: str = "") -> None:
        """End a case because of the nearer limit; one that the run's limit cuts off says nothing of its system."""
        if self.case - times.spent() <= self.left_of_run():
            times.close(f"{why}: the limit is {self.case:.0f} s a case{more}", late=True)
        else:
            unmeasured = "" if times.timed else "not measured, "
            times.close(f"{unmeasured}{why}: the limit is {self.run:.0f} s a run{more}")


@dataclass
class TaskTimes:
    """The runs of a task so far.

    Attributes:
        warm: seconds of the warm-ups.
        timed: seconds of the timed runs.
        first: seconds of the first call of the task's case in its engine; None where it was not the first.
        note: why there are fewer runs than planned, or none.
        closed: whether there are no more runs.
        late: whether the case ran out of its own time.
        lost: seconds of a run that was not waited for.
        graphs: CUDA graphs that were captured in the timed runs.
    """

    task: BenchTask
    warm: list[float] = field(default_factory=list)
    timed: list[float] = field(default_factory=list)
    first: float | None = None
    note: str | None = None
    closed: bool = False
    late: bool = False
    lost: float = 0.0
    graphs: int = 0

    def spent(self) -> float:
        return sum(self.warm) + sum(self.timed) + self.lost

    def close(self, note: str, late: bool = False) -> None:
        self.note, self.closed, self.late = note, True, late

    def result(self) -> CaseResult:
        """Return the figures of the runs: milliseconds, or thousand tokens a second."""
        captured = f"{self.graphs} CUDA graphs were captured in the timed runs" if self.graphs else None
        note = "; ".join(filter(None, [self.note, captured])) or None
        figure = self.task.size.figure
        return summarise(
            self.task, [figure(s) for s in self.timed], note, None if self.first is None else figure(self.first)
        )
