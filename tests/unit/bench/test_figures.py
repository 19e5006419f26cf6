"""`weir bench` without an engine: figures, ratios, merging, turns, limits, weights, tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support.machine import module, needs
from vllm_weir.bench import cli, deadlines, reference, runner
from vllm_weir.bench.chart import draw_chart
from vllm_weir.bench.plan import BatchSize, BenchPlan, BenchTask
from vllm_weir.bench.process import WorkerExited, WorkerTimeout
from vllm_weir.bench.report import as_markdown
from vllm_weir.bench.result import (
    BenchResult,
    CaseResult,
    RowCheck,
    mark_checks,
    merge,
    pool,
    set_ratios,
    startup,
    summarise,
)
from vllm_weir.bench.weights import draw, fill_engine, fill_reference
from vllm_weir.cli.main import app

DECODE = BatchSize(kind="decode", count=32, prompt=16, generated=128)
PREFILL = BatchSize(kind="prefill", count=64, prompt=1024, generated=1)


def plan(**more: Any) -> BenchPlan:
    given = dict(
        model="m", model_name="m", dummy=False, layers=6, width=8, vocab=100, cuda=False, dtype="float32", eager=True,
        max_model_len=512, systems=("stock", "weir"), cases=("idle", "capture_all_all_layers"), batches=(1, 4),
        tokens=8, prefill=(2, 32), repeats=3, warmups=1, case_seconds=100,
    )  # fmt: skip
    return BenchPlan(**(given | more))


def result(cases: list[CaseResult], **more: Any) -> BenchResult:
    for case in cases:
        case.run = 0
    set_ratios(cases)
    return BenchResult(**dict(device="D", vllm="1", torch="2", model="M", runs=[{}], cases=cases) | more)


def decode(system: str, case: str, *ms: float, note: str | None = None) -> CaseResult:
    return summarise(BenchTask(system=system, case=case, size=DECODE), ms, note)


def test_a_figure_is_the_whole_call_by_its_tokens() -> None:
    assert DECODE.figure(1.28) == pytest.approx(10.0)
    assert PREFILL.figure(2.0) == pytest.approx(32.768)
    assert plan().wanted("capture_all_all_layers", DECODE, 0, 16) == (6, 143, 8)
    assert plan().wanted("capture_last_all_layers", DECODE, 0, 16) == (6, 1, 8)


def test_median_spread_and_form() -> None:
    found = json.loads(decode("weir", "idle", 5.0, 4.0, 9.0).model_dump_json())
    assert found["median_ms"] == 5.0 and (found["min"], found["max"], found["repeats"]) == (4.0, 9.0, 3)
    assert found["batch"] == 32 and "prefill" not in found and "ktok_s" not in found
    prefill = json.loads(summarise(BenchTask(system="weir", case="idle", size=PREFILL), [40.0]).model_dump_json())
    assert prefill["prefill"] == "64x1024" and prefill["ktok_s"] == 40.0 and "median_ms" not in prefill
    nothing = json.loads(decode("weir", "idle", note="did not finish").model_dump_json())
    assert nothing["median_ms"] is None and nothing["note"] == "did not finish" and nothing["repeats"] == 0
    assert json.loads(startup("stock", [2.0]).model_dump_json())["median_ms"] == 2000.0


def test_ratios_are_slowness_for_both_units() -> None:
    cases = [decode("stock", "idle", 4.0), decode("weir", "capture_all_all_layers", 5.0)]
    cases += [
        summarise(BenchTask(system=s, case="idle", size=PREFILL), [v]) for s, v in (("stock", 40.0), ("weir", 32.0))
    ]
    cases += [startup("stock", [10.0]), startup("native", [15.0]), decode("native", "idle")]
    set_ratios(cases)
    assert [c.ratio_to_stock for c in cases] == pytest.approx([1.0, 1.25, 1.0, 1.25, 1.0, 1.5, None])


def test_merging_keeps_each_run_its_own_stock() -> None:
    one = result([decode("stock", "idle", 4.0), decode("weir", "idle", 4.4), decode("vllm-lens", "idle", note="late")])
    two = result([decode("stock", "idle", 5.0), decode("vllm-lens", "idle", 20.0)])
    both = merge([one, two])
    assert {(c.system, c.run): c.ratio_to_stock for c in both.cases} == pytest.approx(
        {("stock", 0): 1.0, ("weir", 0): 1.1, ("stock", 1): 1.0, ("vllm-lens", 1): 4.0}
    )
    set_ratios(both.cases)
    assert sorted(c.ratio_to_stock for c in both.cases) == pytest.approx([1.0, 1.0, 1.1, 4.0])
    with pytest.raises(ValueError, match="device differs"):
        merge([one, result([], device="E")])


def test_merging_twice_counts_runs_on() -> None:
    files = [result([decode("stock", "idle", float(n)), decode("weir", "idle", 8.0)]) for n in (1, 2, 4)]
    both = merge([merge(files[:2]), files[2]])
    assert [(c.run, c.median_ms) for c in both.cases if c.system == "stock"] == [(0, 1.0), (1, 2.0), (2, 4.0)]
    assert [(c.run, c.ratio_to_stock) for c in both.cases if c.system == "weir"] == [(2, 2.0)]


def test_runs_made_one_have_the_median_of_their_ratios() -> None:
    runs = [
        result(
            [decode("stock", "idle", s, s), decode("weir", "idle", w, w), startup("stock", [s]), startup("weir", [w])]
        )
        for s, w in ((4.0, 4.4), (8.0, 8.0), (2.0, 2.6))
    ]
    runs[1].cases.append(decode("weir", "steer_one", 6.0))
    set_ratios(runs[1].cases)
    both = pool(runs)
    found = {(c.system, c.case): c for c in both.cases}
    weir = found["weir", "idle"]
    assert (weir.median_ms, weir.min, weir.max, weir.repeats) == (4.4, 2.6, 8.0, 6)
    assert weir.ratios == pytest.approx([1.1, 1.0, 1.3]) and weir.ratio_to_stock == pytest.approx(1.1)
    assert found["weir", "startup"].ratio_to_stock == pytest.approx(1.1)
    assert found["weir", "steer_one"].ratios == pytest.approx([0.75]) and len(both.runs) == 3
    again = BenchResult.model_validate_json(both.model_dump_json())
    set_ratios(again.cases)  # stays: the pooled figures' quotient is another number
    assert again == both and "**x1.100 (1.000-1.300)**" in as_markdown(again)
    assert {c.case for c in pool(runs, ("steer_one",)).cases} == {"steer_one"}
    # One run after it in a merged file counts on from all that were made one.
    assert merge([both, runs[0]]).cases[-1].run == 3
    with pytest.raises(ValueError, match="one run, not 3"):
        pool([both])


def test_runs_without_a_figure_are_not_left_out_in_silence() -> None:
    late = decode("weir", "steer_one", note="did not finish")
    runs = [
        result([decode("stock", "idle", 4.0), case, decode("weir", "capture_rp8", note="out of memory")])
        for case in (decode("weir", "steer_one", 5.0), late)
    ]
    found = {c.case: c for c in pool(runs).cases}
    assert found["steer_one"].ratio_to_stock == 1.25
    assert found["steer_one"].note == "no figure in 1 of 2 runs; did not finish"
    assert found["capture_rp8"].median is None and found["capture_rp8"].note == "out of memory"


def test_a_failed_check_of_any_run_marks_what_they_were_made_into() -> None:
    runs = [result([decode("stock", "idle", 4.0), decode("weir", "steer_one", 4.0)]) for _ in range(2)]
    sound = RowCheck(system="weir", case="steer_one", size="batch 32", what="w", value=0, bound=1, rows=3, passed=True)
    runs[0].checks, runs[1].checks = [sound], [sound.model_copy(update={"value": 2.0, "passed": False})]
    assert {c.case: c.checked for c in pool(runs[:1]).cases} == {"idle": None, "steer_one": True}
    assert {c.case: c.checked for c in pool(runs).cases} == {"idle": None, "steer_one": False}


def test_a_failed_check_marks_its_case() -> None:
    found = result([decode("stock", "idle", 4.0), decode("weir", "capture_all_all_layers", 4.0)])
    check = RowCheck(
        system="weir",
        case="capture_all_all_layers",
        size="batch 32",
        what="rows",
        value=0.5,
        bound=0.1,
        rows=3,
        passed=False,
    )
    found.checks = [check]
    mark_checks(found)
    mark_checks(found)
    assert not found.passed and found.cases[1].checked is False
    assert found.cases[1].note == "WRONG ROWS: rows: 5.00e-01 > 1.0e-01" and found.cases[0].checked is None
    assert "WRONG" in as_markdown(found)


@needs(module("matplotlib"))
def test_markdown_and_chart(tmp_path: Path) -> None:
    cases = [decode("stock", "idle", 4.0, 4.2), decode("weir", "idle", 4.1), startup("stock", [50.0])]
    cases += [decode("vllm-lens", "capture_all_all_layers", note="did not finish within 60 s")]
    found = result(cases, systems={"native": {"status": "skipped", "reason": "no CUDA device"}})
    text = as_markdown(found)
    assert "| nothing asked | stock | 4.1 (4-4.2) | 50 (50-50) |" in text
    assert "| nothing asked | weir | 4.1 (4.1-4.1) **x1.000** |" in text
    assert "| capture every token, all blocks | vllm-lens | did not finish |" in text
    assert "native was skipped: no CUDA device" in text and "did not finish within 60 s" in text
    files = draw_chart(found, tmp_path / "chart")
    assert [f.suffix for f in files] == [".svg", ".png"] and all(f.stat().st_size > 2000 for f in files)


@needs(module("matplotlib"))
def test_a_chart_has_room_for_what_is_faster_and_hollow_dots_for_what_was_not_compared(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    drawn: list[Any] = []
    cases = [decode("stock", "idle", 4.0), startup("stock", [60.0]), startup("weir", [30.0])]
    cases += [decode("weir", "steer_one", 8.0, note="stopped; rows not compared"), decode("weir", "idle", 4.0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt, "close", drawn.append)
        draw_chart(result(cases), tmp_path / "chart")
    batch, start = drawn[0].axes
    dots = {line.get_xdata()[0]: line.get_markerfacecolor() for line in batch.lines if line.get_marker() == "o"}
    assert dots[2.0] == "white" != dots[1.0]
    assert start.get_xlim()[0] < 0.5 == start.lines[1].get_xdata()[0]


def test_a_report_of_what_is_no_result_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('{"cases": 3}')
    for name in ("missing.json", "odd.json"):
        done = CliRunner().invoke(app, ["bench", "report", str(tmp_path / name)], env={"COLUMNS": "400"})
        assert done.exit_code == 2 and name in done.stderr and "no result file" in done.stderr


def test_report_and_pool_commands(tmp_path: Path) -> None:
    for name, ms in (("a", 4.0), ("b", 5.0)):
        result([decode("stock", "idle", ms), decode("weir", "idle", 6.0)]).save(tmp_path / f"{name}.json")
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    done = CliRunner().invoke(app, ["bench", "report", *paths, "--out", str(tmp_path / "all.json")])
    assert done.exit_code == 0, done.output
    assert "| nothing asked | stock | 4-5 (4-5) |" in done.output
    assert len(BenchResult.load(tmp_path / "all.json").runs) == 2
    one = str(tmp_path / "one.json")
    done = CliRunner().invoke(app, ["bench", "pool", *paths, "--out", one, "--cases", "idle"])
    assert done.exit_code == 0, done.output
    assert [c.ratios for c in BenchResult.load(Path(one)).cases] == [[1.0, 1.0], pytest.approx([1.5, 1.2])]
    for bad in (["pool", one, paths[0]], ["pool", *paths, "--cases", "idel"]):
        done = CliRunner().invoke(app, ["bench", *bad, "--out", one], env={"COLUMNS": "400"})
        assert done.exit_code == 2 and ("one run, not 2" in done.stderr or "idel" in done.stderr)


@pytest.mark.parametrize(
    "bad",
    [
        ["--systems", "stok"],
        ["--prefill", "64"],
        ["--batches", "a"],
        ["--batches", "0"],
        ["--batches", "-1,4"],
        ["--batches", ","],
        ["--prefill", "0x10"],
        ["--prefill", "4x-5"],
        ["--systems", ","],
        ["--cases", ","],
        ["--model", "/none/such"],
        ["--weir-config", "[]"],
        ["--tokens", "600"],
        ["--model", "llama-8b"],
    ],
)
def test_bad_options_name_themselves(bad: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(cli, "_has_gpu", lambda: False)
    done = CliRunner().invoke(app, ["bench", *([] if "--model" in bad else ["--model", "demo"]), *bad])
    assert done.exit_code == 2 and bad[0] in done.stderr


def test_prompts_are_the_same_everywhere_and_all_different() -> None:
    size = plan().sizes()[1]
    assert plan().prompts(size) == plan(systems=("native",)).prompts(size)
    assert len({tuple(p) for p in plan().prompts(size)}) == size.count


class Fake:
    """Answers like a worker; `script` gives seconds, an exception, or an error by (system, case, count)."""

    calls: list[tuple[str, str, int]] = []  # noqa: RUF012
    script: dict[tuple[str, str, int], Any] = {}  # noqa: RUF012

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


def run_fake(monkeypatch: Any, tmp_path: Path, script: dict, **more: Any) -> BenchResult:
    monkeypatch.setattr(runner, "WorkerProcess", Fake)
    monkeypatch.setattr(reference, "compare", lambda *_: [])
    Fake.calls, Fake.script = [], script
    return runner.Bench(plan(**more), tmp_path / "out.json", tmp_path, lambda _: None).run()


def test_turns_are_taken_and_all_is_written(monkeypatch: Any, tmp_path: Path) -> None:
    found = run_fake(monkeypatch, tmp_path, {}, systems=("stock", "weir", "vllm-lens"), prefill=None, batches=(1,))
    turn = [("stock", "idle", 1), ("weir", "idle", 1), ("weir", "capture_all_all_layers", 1)]
    assert Fake.calls == turn + 3 * turn
    assert found.systems["vllm-lens"] == {"status": "skipped", "reason": "not installed"}
    assert BenchResult.load(tmp_path / "out.json") == found
    assert all(c.repeats == 3 and c.median_ms == 125.0 for c in found.cases)


def test_a_late_case_costs_its_larger_batches_and_nothing_else(monkeypatch: Any, tmp_path: Path) -> None:
    script = {("weir", "capture_all_all_layers", 1): WorkerTimeout("late")}
    found = run_fake(monkeypatch, tmp_path, script)
    by = {(c.system, c.case, c.label): c for c in found.cases}
    late = [by["weir", "capture_all_all_layers", f"batch {n}"] for n in (1, 4)]
    assert late[0].median is None
    assert late[0].note == "did not finish: the limit is 100 s a case; logged: ValueError: too long"
    assert late[1].note == f"not tried: batch 1 {late[0].note}"
    assert by["weir", "idle", "batch 4"].repeats == 3
    assert by["weir", "capture_all_all_layers", "prefill 2x32"].repeats == 3


def test_a_slow_case_stops_at_the_limit(monkeypatch: Any, tmp_path: Path) -> None:
    script = {("weir", "idle", 1): 30.0, ("weir", "idle", 4): 60.0}
    found = run_fake(monkeypatch, tmp_path, script, cases=("idle",))
    by = {(c.system, c.case, c.label): c for c in found.cases}
    assert by["weir", "idle", "batch 1"].repeats == 2
    assert by["weir", "idle", "batch 1"].note == "stopped after 2 repeats: the limit is 100 s a case"
    assert by["weir", "idle", "batch 4"].note == "one run took 60.0 s: the limit is 100 s a case"


def test_a_run_ends_at_its_limit_and_names_what_is_left(monkeypatch: Any, tmp_path: Path) -> None:
    """Rows that came in time are compared all the same."""
    now, compared = [0.0], []
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])

    class Timed(Fake):
        def ask(self, seconds: float, do: str, **what: Any) -> dict[str, Any]:
            now[0] += min(seconds, 10.0) if do in ("start", "run") else 0.0
            if do == "run" and seconds < 10.0:
                raise WorkerTimeout("late")
            return super().ask(seconds, do, **what) | ({"seconds": 10.0} if do == "run" else {})

    monkeypatch.setattr(runner, "WorkerProcess", Timed)
    monkeypatch.setattr(reference, "compare", lambda plan, samples, workdir: compared.extend(samples) or [])
    systems = ("stock", "weir", "native")
    given = plan(run_seconds=285, prefill=None, batches=(1, 4, 8), systems=systems, interleave=False)
    found = runner.Bench(given, tmp_path / "out.json", tmp_path, lambda _: None).run()
    by = {(c.system, c.case, c.batch): c for c in found.cases}
    # A start and 12 runs of stock's, another and 12 of weir's: 260 s.
    assert by["stock", "idle", 8].repeats == by["weir", "idle", 8].repeats == 3
    left = [by["weir", "capture_all_all_layers", n] for n in (1, 4, 8)]
    why = ["stopped after 1 repeats", "not measured, did not finish", "not measured, not begun"]
    assert [(c.note or "").split(";")[0] for c in left] == [f"{x}: the limit is 285 s a run" for x in why]
    assert [c.repeats for c in left] == [1, 0, 0] and as_markdown(found).count(" not measured |") == 2
    assert found.systems["native"] == {"status": "skipped", "reason": "not started: the limit is 285 s a run"}
    assert now == [285.0] and len(compared) == 1 and found.runs[0]["run_seconds"] == 285


def test_an_engine_that_ends_is_not_started_again_where_there_is_no_time(monkeypatch: Any, tmp_path: Path) -> None:
    script = {("weir", "idle", 1): WorkerExited("its process ended: x")}
    found = run_fake(monkeypatch, tmp_path, script, cases=("idle",), run_seconds=9.0)  # a start takes 10
    by = {(c.system, c.case, c.label): c for c in found.cases}
    assert by["weir", "idle", "batch 1"].note == "failed: its process ended: x"
    assert by["weir", "idle", "batch 4"].note == "not run: its engine ended before and did not come back"
    assert by["stock", "idle", "batch 4"].repeats == 3


def test_an_engine_that_ends_is_started_again_and_said(monkeypatch: Any, tmp_path: Path) -> None:
    script = {
        ("weir", "idle", 1): WorkerExited("its process ended: x"),
        ("stock", "idle", 4): {"error": "ValueError: y"},
    }
    found = run_fake(monkeypatch, tmp_path, script, cases=("idle",))
    by = {(c.system, c.case, c.label): c for c in found.cases}
    assert by["weir", "idle", "batch 1"].note == "failed: its process ended: x"
    assert by["weir", "idle", "batch 4"].repeats == 3 and by["weir", "idle", "batch 4"].ratio_to_stock is None
    assert by["stock", "idle", "batch 4"].note == "failed: ValueError: y"


def test_steering_is_compared_before_what_may_end_the_engine(monkeypatch: Any, tmp_path: Path) -> None:
    script = {("weir", "steer_one", 4): WorkerExited("its process ended: x")}
    cases = ("steer_one", "capture_all_all_layers")
    found = run_fake(monkeypatch, tmp_path, script, cases=cases, systems=("stock", "weir"), interleave=False)
    weirs = [key for key in Fake.calls if key[0] == "weir"]
    assert weirs[0] == ("weir", "steer_one", 0) and weirs.count(weirs[0]) == 1
    by = {(c.system, c.case, c.label): c for c in found.cases}
    assert by["weir", "steer_one", "batch 1"].checked and by["weir", "steer_one", "prefill 2x32"].checked
    assert by["weir", "steer_one", "batch 4"].checked is None and len(found.checks) == 2


def test_steering_that_was_not_compared_says_so_and_is_not_called_wrong(monkeypatch: Any, tmp_path: Path) -> None:
    script = {("weir", "steer_one", 0): WorkerTimeout("no answer within 100 s")}
    found = run_fake(monkeypatch, tmp_path, script, cases=("steer_one",))
    steered = [c for c in found.cases if c.case == "steer_one"]
    assert {(c.note, c.checked, c.repeats) for c in steered} == {("rows not compared", None, 3)}
    assert found.passed and "WRONG" not in as_markdown(found)
    assert as_markdown(found).count(" not compared**") == 3
    script = {("weir", "steer_one", 0): {"error": "ValueError: y"}}
    wrong = run_fake(monkeypatch, tmp_path, script, cases=("steer_one",))
    assert not wrong.passed and as_markdown(wrong).count(" WRONG**") == 3


def test_a_limit_that_ended_a_case_is_named_whatever_was_left_of_the_other(monkeypatch: Any, tmp_path: Path) -> None:
    """A case that took all of its time is late, though less is left of the run by then."""
    now = [0.0]
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])

    class Slow(Fake):
        def ask(self, seconds: float, do: str, **what: Any) -> dict[str, Any]:
            now[0] += {"start": 10.0, "run": min(seconds, 200.0)}.get(do, 0.0)
            if do == "run" and what["size"]["count"] == 1:
                raise WorkerTimeout("late")
            return super().ask(seconds, do, **what)

    monkeypatch.setattr(runner, "WorkerProcess", Slow)
    given = plan(run_seconds=150, prefill=None, batches=(1, 4), systems=("stock",), cases=("idle",))
    found = runner.Bench(given, tmp_path / "out.json", tmp_path, lambda _: None).run()
    first, second = found.cases
    assert (first.note or "").startswith("did not finish: the limit is 100 s a case")
    assert (second.note or "").startswith("not tried: batch 1 did not finish") and now == [110.0]


def test_a_new_engines_start_is_taken_from_what_a_run_may_take(monkeypatch: Any, tmp_path: Path) -> None:
    now = [0.0]
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])

    class Ending(Fake):
        def ask(self, seconds: float, do: str, **what: Any) -> dict[str, Any]:
            now[0] += {"start": 10.0, "run": min(seconds, 50.0)}.get(do, 0.0)
            if do == "run":
                raise WorkerExited("ended") if what["size"]["count"] == 1 else WorkerTimeout("late")
            return super().ask(seconds, do, **what)

    monkeypatch.setattr(runner, "WorkerProcess", Ending)
    given = plan(run_seconds=90, prefill=None, batches=(1, 4), systems=("stock",), cases=("idle",))
    found = runner.Bench(given, tmp_path / "out.json", tmp_path, lambda _: None).run()
    assert now == [90.0] and (found.cases[1].note or "").startswith("not measured, did not finish")


def test_steering_is_right_or_the_check_fails() -> None:
    task = BenchTask(system="weir", case="steer_one", size=DECODE)
    good = {"worst": 4e-3, "cosine": 0.99, "rows": 8, "layers": 1, "one_pass": True}
    assert runner.steering_check(task, good, "bfloat16").passed
    assert not runner.steering_check(task, good, "float32").passed
    for bad in ({"worst": 0.01}, {"cosine": 0.5}, {"worst": float("nan")}):
        assert not runner.steering_check(task, good | bad, "bfloat16").passed
    gone = runner.steering_check(task, {"error": "its engine ended before"}, "bfloat16")
    assert not gone.passed and gone.what == "its engine ended before" and gone.rows == 0


class Fused(torch.nn.Module):
    """The parameters of vLLM's Llama, by name."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.table = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self.table.items())


@needs(module("transformers"))
def test_engine_and_reference_draw_the_same_weights() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=20, tie_word_embeddings=False,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    fill_reference(net)
    block = "model.layers.1."
    names = {f"{block}self_attn.qkv_proj.weight": (16, 8), f"{block}mlp.gate_up_proj.weight": (24, 8)}
    names |= {f"{block}mlp.down_proj.weight": (8, 12), "model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,)}
    engine = Fused(names)
    assert fill_engine(engine) == len(names)
    mine, theirs = engine.table, dict(net.named_parameters())
    qkv = [theirs[f"{block}self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(torch.cat(qkv), mine[f"{block}self_attn.qkv_proj.weight"])
    gate_up = [theirs[f"{block}mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(torch.cat(gate_up), mine[f"{block}mlp.gate_up_proj.weight"])
    for name in (f"{block}mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(theirs[name], mine[name])
    device = torch.device("cpu")
    assert not torch.equal(draw("a", (4, 4), device, torch.float32), draw("b", (4, 4), device, torch.float32))


def test_wrong_rows_are_far() -> None:
    truth = torch.randn(4, 3, 64)
    assert reference.distance(truth, truth) < 1e-12
    assert reference.distance(truth.roll(1, 0), truth) > 0.5
    assert reference.distance(torch.full_like(truth, float("nan")), truth) == float("inf")


def test_a_chart_that_cannot_be_drawn_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(cli, "_can_draw", lambda: False)
    result([decode("stock", "idle", 4.0)]).save(tmp_path / "one.json")
    for asked in (["--model", "demo"], ["report", str(tmp_path / "one.json")]):
        done = CliRunner().invoke(app, ["bench", *asked, "--chart", str(tmp_path / "c")], env={"COLUMNS": "400"})
        assert done.exit_code == 2 and "matplotlib is not installed" in done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json"]
