"""The ratios to stock of a run beside those of an earlier one: what has become slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from vllm_weir.bench.cases import GOALS
from vllm_weir.bench.plan import BenchPlan
from vllm_weir.bench.result import WRONG, BenchResult, CaseResult, set_ratios

SETTINGS = ("dtype", "eager", "tokens", "prompt_tokens", "d_sae")
"""Settings of a run, not named by the label of a size, on which ratios depend; beside those of `workloads`."""
OF_WORKLOADS = ("blocks", "generated")


@dataclass(frozen=True)
class Compared:
    """A case at a size, before and now.

    Attributes:
        name: of the case, with the size.
        goal: the ratio that it should not exceed; None if it has none.
        before, now: its results.
        lacking: why they cannot be compared, or None.
        change: the ratio now over the one before, less 1; 0.0 if they cannot be compared.
    """

    name: str
    goal: float | None
    before: CaseResult | None
    now: CaseResult | None
    lacking: str | None
    change: float


@dataclass(frozen=True)
class Comparison:
    """A run beside an earlier one."""

    cases: Sequence[Compared]  # what was asked for
    tolerance: float  # how much a ratio may grow, in percent
    left_out: Sequence[str]  # what the earlier result has and this run was not asked for
    differs: Sequence[str]  # what else differs between the two, such as the card

    @property
    def worse(self) -> list[Compared]:
        return [c for c in self.cases if c.change > self.tolerance / 100]

    @property
    def passed(self) -> bool:
        return not self.worse and all(c.lacking is None for c in self.cases)

    def table(self) -> Table:
        """Return the ratios before and now, each with those of its rounds, and those of first calls."""
        out = Table(title="time over stock's in the same run: before, and now")
        for name in ("case", "goal", "before", "now", "change", "first call before", "now"):
            out.add_column(name, justify="left" if name == "case" else "right", overflow="fold")
        for c in self.cases:
            change = c.lacking or f"{100 * c.change:+.1f} %"
            style = "bold red" if c in self.worse or c.lacking else None
            goal = "" if c.goal is None else f"{c.goal:g}"
            firsts = (_number(x.first_ratio if x else None) for x in (c.before, c.now))
            out.add_row(c.name, goal, _ratio(c.before), _ratio(c.now), change, *firsts, style=style)
        return out

    def summary(self) -> list[str]:
        """Return what differs, what was left out and, last, the outcome, which names every case that fails."""
        out = [*self.differs]
        if self.left_out:
            out.append(f"not asked for, so not compared: {', '.join(self.left_out)}")
        allowed = f"worse by more than {self.tolerance:g} %"
        failed = [f"{c.name} ({_number(c.before.ratio_to_stock)} before, {_number(c.now.ratio_to_stock)} now)"
                  for c in self.worse if c.before and c.now]  # fmt: skip
        outcome = [f"{allowed}: {', '.join(failed)}"] if failed else []
        if lacking := [f"{c.name} ({c.lacking})" for c in self.cases if c.lacking]:
            outcome.append(f"not compared: {', '.join(lacking)}")
        if self.passed:
            outcome.append(f"none of {len(self.cases)} cases is {allowed}")
        return [*out, "; ".join([*outcome, *self.differs])]


def compare(before: BenchResult, now: BenchResult, plan: BenchPlan, tolerance: float) -> Comparison:
    """Compare Weir's ratios of a run, planned as `plan`, with those of an earlier result."""
    set_ratios(before.cases)
    old, new = ({(c.case, c.label): c for c in r.cases if c.system == "weir"} for r in (before, now))
    tasks = (*(plan.tasks("weir") if plan.has_steps else ()), *plan.workload_tasks("weir"))
    asked = [(task.case, task.size.label) for task in tasks]
    asked += [("startup", "start")] if "startup" in plan.cases else []
    cases = [_compared(key, old.get(key), new.get(key), before, plan) for key in asked]
    names = {"device": "the card", "vllm": "vLLM", "torch": "torch"}
    fields = [(name, getattr(before, field), getattr(now, field)) for field, name in names.items()]
    differs = [f"{name} differs: {a} before, {b} now" for name, a, b in fields if a != b]
    return Comparison(cases, tolerance, [" ".join(key) for key in old if key not in asked], differs)


def refusal(before: BenchResult, plan: BenchPlan, vllm: str) -> str | None:
    """Return why no run of a plan can be compared with a result, whatever comes of it."""
    if before.model != plan.model_name:
        return f"is of {before.model}, and this run of {plan.model_name}"
    if before.vllm.split(".")[0] != vllm.split(".")[0]:
        return f"is of vLLM {before.vllm}, and this run of {vllm}"
    return None


def _compared(
    key: tuple[str, str], old: CaseResult | None, new: CaseResult | None, before: BenchResult, plan: BenchPlan
) -> Compared:
    case, label = key
    change, lacking = 0.0, None
    if new is None or new.ratio_to_stock is None:
        lacking = f"no figure now: {new.note if new and new.note else 'stock or Weir has none'}"
    elif new.checked is False:
        lacking = WRONG
    elif old is None or old.ratio_to_stock is None or old.checked is False:
        lacking = "no figure before"
    elif differing := _settings_that_differ(before.runs[old.run] if old.run < len(before.runs) else {}, plan):
        lacking = differing
    else:
        change = new.ratio_to_stock / old.ratio_to_stock - 1
    return Compared(f"{case} {label}", GOALS.get(case), old, new, lacking, change)


def _settings_that_differ(run: dict[str, Any], plan: BenchPlan) -> str | None:
    now = plan.model_dump()
    sources = [(name, run, now) for name in SETTINGS]
    sources += [(name, run.get("workloads", {}), now["workloads"]) for name in OF_WORKLOADS]
    pairs = [(name, old[name], new[name]) for name, old, new in sources if name in old]
    return ", ".join(f"{name} {a} before, {b} now" for name, a, b in pairs if a != b) or None


def _ratio(case: CaseResult | None) -> str:
    if case is None or case.ratio_to_stock is None:
        return "-"
    spread = case.ratios or case.rounds
    return _number(case.ratio_to_stock) + (f" ({min(spread):.3f}-{max(spread):.3f})" if len(spread) > 1 else "")


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
