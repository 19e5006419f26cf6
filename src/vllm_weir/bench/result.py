"""The result file: medians with their spread, what was checked, and what could not be measured and why."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, model_serializer

from vllm_weir.bench.plan import BenchTask

WRONG = "WRONG ROWS"
UNCOMPARED = "rows not compared"


class CaseResult(BaseModel):
    """One case of one system at one size.

    Attributes:
        batch, prefill, workload: the size; all None for `startup`.
        median_ms: milliseconds (a decode step, a workload's call, or a start); `ktok_s`: thousand prompt tokens a
            second. None: no figure, `note` says why.
        min, max: of the repeats, in the same unit.
        first: of the first call of this case in its engine, in the same unit; None where it was not measured.
        first_ratio: its time over that of stock's first call of the same size in the same run.
        rounds: time over stock's in each round of calls in which both took their turn.
        ratio_to_stock: the median of `rounds`, or of the calls over stock's median where these are not as many; above
            1 is slower than stock, for `ktok_s` too.
        ratios: of several runs that `pool` made one of, each run's own; `ratio_to_stock` is their median.
        checked: whether what was delivered agreed with the reference; None if there is nothing to compare.
    """

    case: str
    system: str
    batch: int | None = None
    prefill: str | None = None
    workload: str | None = None
    median_ms: float | None = None
    ktok_s: float | None = None
    min: float | None = None
    max: float | None = None
    repeats: int = 0
    ratio_to_stock: float | None = None
    rounds: list[float] = []
    ratios: list[float] = []
    first: float | None = None
    first_ratio: float | None = None
    samples: list[float] = []
    checked: bool | None = None
    note: str | None = None
    run: int = 0

    @property
    def median(self) -> float | None:
        return self.ktok_s if self.prefill is not None else self.median_ms

    @property
    def absent(self) -> str:
        """Why there is no figure, in two words; `note` has the rest."""
        if not self.note or self.median is not None:
            return "none"
        return next((words for words in ("not measured", "failed") if self.note.startswith(words)), "did not finish")

    @property
    def label(self) -> str:
        """``batch 32``, ``prefill 64x1024``, ``texts 1500x50-600``, or ``start``."""
        if self.workload is not None:
            return self.workload
        if self.prefill is not None:
            return f"prefill {self.prefill}"
        return "start" if self.batch is None else f"batch {self.batch}"

    @model_serializer
    def _write(self) -> dict[str, Any]:
        size = {"prefill": self.prefill} if self.prefill is not None else {"batch": self.batch}
        if self.workload is not None:
            size = {"workload": self.workload}
        unit = "ktok_s" if self.prefill is not None else "median_ms"
        out: dict[str, Any] = {"case": self.case, "system": self.system, **size, unit: self.median}
        out |= {"min": self.min, "max": self.max, "repeats": self.repeats, "ratio_to_stock": self.ratio_to_stock}
        out |= {name: found for name in ("rounds", "ratios") if (found := getattr(self, name))}
        out |= {} if self.first is None else {"first": self.first, "first_ratio": self.first_ratio}
        out |= {"samples": self.samples, "checked": self.checked, "run": self.run}
        return out | ({"note": self.note} if self.note else {})


class RowCheck(BaseModel):
    """A comparison of delivered rows with a reference.

    Attributes:
        what: what was compared with what.
        value, bound: the measured error, and the largest that passes.
        rows: rows compared.
        detail: further measures.
    """

    system: str
    case: str
    size: str
    what: str
    value: float
    bound: float
    rows: int
    passed: bool
    detail: dict[str, float] = {}
    run: int = 0


class BenchResult(BaseModel):
    """A result file; one that `merge` made holds several runs, each with its own stock baseline."""

    device: str
    vllm: str
    torch: str
    model: str
    cases: list[CaseResult] = []
    checks: list[RowCheck] = []
    systems: dict[str, dict[str, Any]] = {}
    runs: list[dict[str, Any]] = []

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.checks)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> BenchResult:
        return cls.model_validate_json(path.read_text())


def summarise(
    task: BenchTask, samples: Sequence[float], note: str | None = None, first: float | None = None
) -> CaseResult:
    size: dict[str, Any] = {"batch": task.size.count}
    if task.size.kind == "prefill":
        size = {"prefill": f"{task.size.count}x{task.size.prompt}"}
    elif task.size.is_workload:
        size = {"workload": task.size.label}
    return _with_samples(CaseResult(case=task.case, system=task.system, note=note, first=first, **size), samples)


def startup(system: str, seconds: Sequence[float], note: str | None = None) -> CaseResult:
    return _with_samples(CaseResult(case="startup", system=system, note=note), [1e3 * s for s in seconds])


def _with_samples(case: CaseResult, samples: Sequence[float]) -> CaseResult:
    if samples:
        unit = "ktok_s" if case.prefill is not None else "median_ms"
        figures = {unit: statistics.median(samples), "min": min(samples), "max": max(samples)}
        return case.model_copy(update=figures | {"repeats": len(samples), "samples": list(samples)})
    return case


def set_ratios(cases: Iterable[CaseResult]) -> None:
    """Fill the ratios from the same run's stock: its start, or its `idle` at that size."""
    cases = [c for c in cases if not c.ratios]
    stock = {(c.run, c.case, c.label): c for c in cases if c.system == "stock"}
    for c in cases:
        base = stock.get((c.run, "startup" if c.case == "startup" else "idle", c.label), CaseResult(case="", system=""))
        pairs = zip(c.samples, base.samples) if len(c.samples) == len(base.samples) else ()
        c.rounds = [ratio for ours, theirs in pairs if (ratio := _slowness(c, ours, theirs))]
        c.ratio_to_stock = statistics.median(c.rounds) if c.rounds else _slowness(c, c.median, base.median)
        c.first_ratio = _slowness(c, c.first, base.first)


def _slowness(case: CaseResult, figure: float | None, base: float | None) -> float | None:
    """Return the time of `figure` over that of `base`, whatever their unit."""
    if not figure or not base:
        return None
    return base / figure if case.prefill is not None else figure / base


def merge(results: Sequence[BenchResult]) -> BenchResult:
    """Join several runs in one file; a later run's figure of a system other than stock replaces an earlier one's."""
    out = _heading(results)
    kept: dict[tuple[Any, ...], CaseResult] = {}
    offset = 0
    for result in results:
        for case in result.cases:
            case = case.model_copy(update={"run": case.run + offset})
            key = (case.system, case.case, case.label, case.run if case.system == "stock" else None)
            if case.median is not None or key not in kept:
                kept[key] = case
        out.checks += [c.model_copy(update={"run": c.run + offset}) for c in result.checks]
        offset += max(1, len(result.runs))
    out.cases = list(kept.values())
    used = {(c.run, c.system, c.case, c.label) for c in out.cases}
    out.checks = [c for c in out.checks if (c.run, c.system, c.case, c.size) in used]
    return out


def pool(results: Sequence[BenchResult], cases: Sequence[str] | None = None) -> BenchResult:
    """Make one run of several that measured the same cases with engines of their own.

    Two engines of one machine differ by more than the repeats of either, so the median of the runs' ratios says more
    than any one of them.

    Figures are medians of the runs' medians; the samples, and so the smallest and the largest, are those of all runs.

    `results`: each of one run. `cases`: which to take; None for all.
    """
    out = _heading(results)
    found: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        if len(result.runs) > 1:
            raise ValueError(f"a file to be pooled holds one run, not {len(result.runs)}")
        for case in result.cases:
            if cases is None or case.case in cases:
                found.setdefault((case.system, case.case, case.label), []).append(case)
        out.checks += [c.model_copy(update={"run": 0}) for c in result.checks if cases is None or c.case in cases]
    out.cases = [_pooled(same) for same in found.values()]
    mark_checks(out)
    return out


def _pooled(same: Sequence[CaseResult]) -> CaseResult:
    """Return one case of several runs; its note says how many have no figure."""
    medians = [case.median for case in same if case.median is not None]
    ratios = [case.ratio_to_stock for case in same if case.ratio_to_stock is not None]
    notes = [case.note for case in same if case.note]
    if 0 < len(medians) < len(same):
        notes.insert(0, f"no figure in {len(same) - len(medians)} of {len(same)} runs")
    figures: dict[str, Any] = {"ratio_to_stock": statistics.median(ratios) if ratios else None}
    figures |= {"ratios": ratios, "rounds": []}
    if medians:
        figures["ktok_s" if same[0].prefill is not None else "median_ms"] = statistics.median(medians)
    firsts = [(case.first, case.first_ratio) for case in same]
    for name, values in zip(("first", "first_ratio"), zip(*firsts)):
        known = [value for value in values if value is not None]
        figures[name] = statistics.median(known) if known else None
    figures |= {"note": "; ".join(dict.fromkeys(notes)) or None, "run": 0}
    return _with_samples(same[0], [x for case in same for x in case.samples]).model_copy(update=figures)


def _heading(results: Sequence[BenchResult]) -> BenchResult:
    """Return a result with the systems and runs of all of these, and no cases."""
    first = results[0]
    for field in ("device", "vllm", "torch", "model"):
        for result in results:
            if getattr(result, field) != getattr(first, field):
                raise ValueError(f"{field} differs: {getattr(first, field)} and {getattr(result, field)}")
    out = BenchResult(device=first.device, vllm=first.vllm, torch=first.torch, model=first.model)
    for result in results:
        out.systems |= {name: about for name, about in result.systems.items() if _better(out.systems.get(name), about)}
        out.runs += result.runs
    return out


def _better(old: dict[str, Any] | None, new: dict[str, Any]) -> bool:
    return old is None or old.get("status") != "measured" or new.get("status") == "measured"


def mark_checks(result: BenchResult) -> None:
    """Write the outcome of each check to its cases; a case that failed keeps its figure and says so."""
    for case in result.cases:
        mine = [
            c
            for c in result.checks
            if (c.run, c.system, c.case, c.size) == (case.run, case.system, case.case, case.label)
        ]
        case.checked = None
        if mine:
            case.checked = all(c.passed for c in mine)
            failed = [f"{c.what}: {c.value:.2e} > {c.bound:.1e}" for c in mine if not c.passed]
            if failed and WRONG not in (case.note or ""):
                case.note = "; ".join([*([case.note] if case.note else []), f"{WRONG}: {', '.join(failed)}"])
