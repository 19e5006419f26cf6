"""Plans, results and systems' processes without engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_weir.bench import reference, runner
from vllm_weir.bench.plan import BatchSize, BenchPlan, BenchTask, WorkloadSizes
from vllm_weir.bench.result import BenchResult, CaseResult, set_ratios, summarise

DECODE = BatchSize(kind="decode", count=32, prompt=16, generated=128)
PREFILL = BatchSize(kind="prefill", count=64, prompt=1024, generated=1)
SIZES = WorkloadSizes(
    texts=6, shortest=3, longest=9, blocks=2, long=50, chats=8, system_prompt=20, chat_tokens=5, ablated=3,
    ablated_tokens=7, generated=4,
)  # fmt: skip
Script = dict[tuple[str, str, int], Any]


def plan(**more: Any) -> BenchPlan:
    given = dict(
        model="m", model_name="m", dummy=False, layers=6, width=8, vocab=100, cuda=False, dtype="float32", eager=True,
        max_model_len=512, systems=("stock", "weir"), cases=("idle", "capture_all_all_layers"), batches=(1, 4),
        tokens=8, prefill=(2, 32), repeats=3, warmups=1, case_seconds=100,
    )  # fmt: skip
    return BenchPlan(**(given | more))


def workloads(*cases: str, **more: Any) -> BenchPlan:
    return plan(cases=cases, workloads=SIZES, **more)


def result(cases: list[CaseResult], **more: Any) -> BenchResult:
    for case in cases:
        case.run = 0
    set_ratios(cases)
    return BenchResult(**dict(device="D", vllm="1", torch="2", model="m", runs=[{}], cases=cases) | more)


def decode(system: str, case: str, *ms: float, note: str | None = None) -> CaseResult:
    return summarise(BenchTask(system=system, case=case, size=DECODE), ms, note)


def texts(system: str, case: str, seconds: float, first: float | None = None) -> CaseResult:
    task = BenchTask(system=system, case=case, size=SIZES.of_kind("texts"))
    return summarise(task, [1e3 * seconds], None, first and 1e3 * first)


class Fake:
    """Answers like a worker; `script` gives seconds, an exception, or an error by (system, case, count)."""

    calls: list[tuple[str, str, int]] = []  # noqa: RUF012
    script: Script = {}  # noqa: RUF012

    def __init__(self, system: str, plan: BenchPlan, workdir: Path) -> None:
        self.system = system

    def ask(self, seconds: float, do: str, **what: Any) -> dict[str, Any]:
        if do == "hello":
            missing = "not installed" if self.system == "vllm-lens" else None
            return {"missing": missing, "version": "1"}
        if do == "start":
            about = {"device": "D", "vllm": "1", "torch": "2", "python": "3"}
            return {"seconds": 10.0, "arguments": {"model": "m"}, "about": about}
        if do == "fill":
            return {}
        count = 0 if do == "steer_check" else what["size"]["count"]
        key = (self.system, what["case"], count)
        self.calls.append(key)
        answer = self.script.get(key, 1.0 if count else {"worst": 0.0, "cosine": 1.0, "rows": 1, "layers": 1})
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, dict) else {"seconds": answer}

    def last_error(self) -> str:
        return "ValueError: too long"

    def close(self, patience: float = 0) -> None:
        pass


def run_fake(
    monkeypatch: Any, tmp_path: Path, script: Script | None = None, kind: type[Fake] = Fake,
    compare: Callable[..., Any] = lambda *_: [], **more: Any,
) -> BenchResult:  # fmt: skip
    """Run a plan with `kind` in the place of processes."""
    monkeypatch.setattr(runner, "WorkerProcess", kind)
    monkeypatch.setattr(reference, "compare", compare)
    Fake.calls, Fake.script = [], script or {}
    return runner.Bench(plan(**more), tmp_path / "out.json", tmp_path, lambda _: None).run()


def by_key(found: BenchResult) -> dict[tuple[str, str, str], CaseResult]:
    return {(c.system, c.case, c.label): c for c in found.cases}
