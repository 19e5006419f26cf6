"""A case's runs so far, and how long it may still take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from vllm_weir.bench.plan import BenchPlan, BenchTask
from vllm_weir.bench.result import CaseResult, summarise


@dataclass(frozen=True)
class Deadlines:
    """What a case, and the whole run, may take."""

    case: float
    run: float | None
    started: float

    @classmethod
    def of(cls, plan: BenchPlan) -> Deadlines:
        """From now on."""
        return cls(plan.case_seconds, plan.run_seconds, time.monotonic())

    def of_run(self) -> float:
        """Seconds left of the run; without a limit, infinitely many."""
        return float("inf") if self.run is None else self.started + self.run - time.monotonic()

    def left(self, tally: TaskTimes) -> float:
        """Seconds that a case may still take."""
        return min(self.case - tally.spent(), self.of_run())

    def end(self, tally: TaskTimes, why: str, more: str = "") -> None:
        """No more runs, because of the nearer limit; what the run's cuts off says nothing of its system."""
        if self.case - tally.spent() <= self.of_run():
            tally.close(f"{why}: the limit is {self.case:.0f} s a case{more}", late=True)
        else:
            unmeasured = "" if tally.timed else "not measured, "
            tally.close(f"{unmeasured}{why}: the limit is {self.run:.0f} s a run{more}")


@dataclass
class TaskTimes:
    """A task's runs so far, in seconds."""

    task: BenchTask
    warm: list[float] = field(default_factory=list)
    timed: list[float] = field(default_factory=list)
    note: str | None = None
    closed: bool = False
    late: bool = False
    lost: float = 0.0
    """Seconds that a run took which was not waited for."""
    graphs: int = 0
    """CUDA graphs that were captured in the timed runs."""

    def spent(self) -> float:
        return sum(self.warm) + sum(self.timed) + self.lost

    def close(self, note: str, late: bool = False) -> None:
        """No more runs."""
        self.note, self.closed, self.late = note, True, late

    def result(self) -> CaseResult:
        """With each run as ms a step or thousand tokens a second."""
        captured = f"{self.graphs} CUDA graphs were captured in the timed runs" if self.graphs else None
        note = "; ".join(filter(None, [self.note, captured])) or None
        return summarise(self.task, [self.task.size.figure(s) for s in self.timed], note)
