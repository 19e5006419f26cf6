"""`weir bench` without an engine: figures, ratios, merging, turns, limits, weights, tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support.machine import module, needs
from tests.unit.bench.fakes import DECODE, PREFILL, Fake, by_key, decode, plan, result, run_fake
from vllm_weir.bench import cli, process, runner, systems
from vllm_weir.bench.plan import BenchTask
from vllm_weir.bench.process import WorkerExited, WorkerTimeout
from vllm_weir.bench.reference import draw, fill_engine, fill_reference
from vllm_weir.bench.report import as_markdown, draw_chart
from vllm_weir.bench.result import BenchResult, RowCheck, mark_checks, merge, pool, set_ratios, startup, summarise
from vllm_weir.cli.main import app

WIDE = {"COLUMNS": "400"}


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
    # Of the same round, where there are as many; the machine has become twice as slow.
    cases = [
        decode("stock", "idle", 4.0, 8.0, 8.0),
        decode("weir", "idle", 4.4, 8.8, 9.6),
        decode("weir", "steer_one", 6.0),
    ]
    set_ratios(cases)
    assert cases[1].rounds == pytest.approx([1.1, 1.1, 1.2]) and cases[1].ratio_to_stock == pytest.approx(1.1)
    assert cases[2].rounds == [] and cases[2].ratio_to_stock == 0.75


def test_merging_keeps_each_run_its_own_stock_and_counts_on() -> None:
    one = result([decode("stock", "idle", 4.0), decode("weir", "idle", 4.4), decode("vllm-lens", "idle", note="late")])
    two = result([decode("stock", "idle", 5.0), decode("vllm-lens", "idle", 20.0)])
    both = merge([one, two])
    wanted = {("stock", 0): 1.0, ("weir", 0): 1.1, ("stock", 1): 1.0, ("vllm-lens", 1): 4.0}
    for _ in range(2):
        assert {(c.system, c.run): c.ratio_to_stock for c in both.cases} == pytest.approx(wanted)
        set_ratios(both.cases)
    three = merge([both, one])
    assert [(c.run, c.median_ms) for c in three.cases if c.system == "stock"] == [(0, 4.0), (1, 5.0), (2, 4.0)]
    assert [c.run for c in three.cases if c.system == "weir"] == [2]
    with pytest.raises(ValueError, match="device differs"):
        merge([one, result([], device="E")])


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


def test_a_failed_check_marks_its_case_and_what_its_run_was_made_into() -> None:
    runs = [result([decode("stock", "idle", 4.0), decode("weir", "steer_one", 4.0)]) for _ in range(2)]
    sound = RowCheck(system="weir", case="steer_one", size="batch 32", what="w", value=0, bound=1, rows=3, passed=True)
    runs[0].checks, runs[1].checks = [sound], [sound.model_copy(update={"value": 2.0, "passed": False})]
    assert {c.case: c.checked for c in pool(runs[:1]).cases} == {"idle": None, "steer_one": True}
    assert {c.case: c.checked for c in pool(runs).cases} == {"idle": None, "steer_one": False}
    found = runs[1]
    mark_checks(found)
    mark_checks(found)
    assert not found.passed and found.cases[1].note == "WRONG ROWS: w: 2.00e+00 > 1.0e+00"
    assert found.cases[0].checked is None and "WRONG" in as_markdown(found)


@needs(module("matplotlib"))
def test_markdown_and_chart(tmp_path: Path) -> None:
    """A chart has room for what is faster, and hollow dots for what was not compared."""
    import matplotlib.pyplot as plt

    cases = [decode("stock", "idle", 4.0, 4.2), decode("weir", "idle", 4.1)]
    cases += [startup("stock", [60.0]), startup("weir", [30.0])]
    cases += [decode("vllm-lens", "capture_all_all_layers", note="did not finish within 60 s")]
    cases += [decode("weir", "steer_one", 8.2, note="stopped; rows not compared")]
    found = result(cases, systems={"native": {"status": "skipped", "reason": "no CUDA device"}})
    text = as_markdown(found)
    assert "| nothing asked | stock | 4.1 (4-4.2) | 60 (60-60) |" in text
    assert "| nothing asked | weir | 4.1 (4.1-4.1) **x1.000** | 30 (30-30) **x0.500** |" in text
    assert "| capture every token, all blocks | vllm-lens | did not finish |" in text
    assert "native was skipped: no CUDA device" in text and "did not finish within 60 s" in text
    drawn: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt, "close", drawn.append)
        files = draw_chart(found, tmp_path / "chart")
    assert [f.suffix for f in files] == [".svg", ".png"] and all(f.stat().st_size > 2000 for f in files)
    batch, start = drawn[0].axes
    dots = {round(x.get_xdata()[0], 3): x.get_markerfacecolor() for x in batch.lines if x.get_marker() == "o"}
    assert dots[2.0] == "white" != dots[1.0]
    assert start.get_xlim()[0] < 0.5 == start.lines[1].get_xdata()[0]


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
    (tmp_path / "odd.json").write_text('{"cases": 3}')
    for bad, why in (
        (["pool", one, paths[0]], "one run, not 2"), (["pool", *paths, "--cases", "idel"], "idel"),
        (["report", "missing.json"], "missing.json is no result file"),
        (["report", str(tmp_path / "odd.json")], "odd.json is no result file"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, ["bench", *bad, "--out", one], env=WIDE)
        assert done.exit_code == 2 and why in done.stderr


BAD = (
    "--systems stok;--systems ,;--cases ,;--batches a;--batches 0;--batches -1,4;--batches ,;--prefill 64;"
    "--prefill 0x10;--prefill 4x-5;--tokens 600;--weir-config [];--model /none/such;--model llama-8b;--lengths 600;"
    "--lengths 9-3;--lengths 8-5000;--long 5000;--system-prompt 5000"
)


@pytest.mark.parametrize("bad", BAD.split(";"))
def test_bad_options_name_themselves(bad: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(cli, "_has_gpu", lambda: False)
    option, value = bad.split()
    of_workloads = ["--cases", "workloads"] if option in ("--lengths", "--long", "--system-prompt") else []
    command = ["bench", "--model", "demo", *of_workloads, option, value]  # the last one counts
    done = CliRunner().invoke(app, command, env=WIDE)
    assert done.exit_code == 2 and option in done.stderr


def test_without_the_repository_stock_and_weir_are_timed_and_others_refused(monkeypatch: Any) -> None:
    """As where the package comes from a wheel."""
    monkeypatch.setattr(systems, "REPOSITORY", None)
    systems.known_systems.cache_clear()
    try:
        assert list(systems.known_systems()) == ["stock", "weir"] and cli._systems(None) == ("stock", "weir")
        done = CliRunner().invoke(app, ["bench", "--systems", "stock,native", "--model", "demo"], env=WIDE)
        assert done.exit_code == 2 and "the adapter of native comes with Weir's repository" in done.output
    finally:
        systems.known_systems.cache_clear()


def test_turns_are_taken_and_all_is_written(monkeypatch: Any, tmp_path: Path) -> None:
    found = run_fake(monkeypatch, tmp_path, systems=("stock", "weir", "vllm-lens"), prefill=None, batches=(1,))
    turn = [("stock", "idle", 1), ("weir", "idle", 1), ("weir", "capture_all_all_layers", 1)]
    assert Fake.calls == turn + 3 * turn
    assert found.systems["vllm-lens"] == {"status": "skipped", "reason": "not installed"}
    assert BenchResult.load(tmp_path / "out.json") == found
    assert all(c.repeats == 3 and c.median_ms == 125.0 for c in found.cases)
    for least, repeats in ((4.5, 5), (99.0, 30)):
        found = run_fake(monkeypatch, tmp_path, prefill=None, batches=(1,), least_seconds=least)
        assert {c.repeats for c in found.cases} == {repeats}


EVERY, ENDED = "capture_all_all_layers", "failed: its process ended: x"
LATE = "did not finish: the limit is 100 s a case; logged: ValueError: too long"


@pytest.mark.parametrize(
    ("script", "more", "wanted"),
    [
        # A late case costs its larger batches and nothing else.
        ({("weir", EVERY, 1): WorkerTimeout("late")}, {"cases": ("idle", EVERY)},
         {("weir", EVERY, "batch 1"): (0, LATE), ("weir", EVERY, "batch 4"): (0, f"not tried: batch 1 {LATE}"),
          ("weir", "idle", "batch 4"): (3, None), ("weir", EVERY, "prefill 2x32"): (3, "rows not compared")}),
        # A slow case stops at the limit.
        ({("weir", "idle", 1): 30.0, ("weir", "idle", 4): 60.0}, {},
         {("weir", "idle", "batch 1"): (2, "stopped after 2 repeats: the limit is 100 s a case"),
          ("weir", "idle", "batch 4"): (0, "one run took 60.0 s: the limit is 100 s a case")}),
        # An engine that ends is started again, unless there is no time for it: a start takes 10 s.
        ({("weir", "idle", 1): WorkerExited("its process ended: x"), ("stock", "idle", 4): {"error": "ValueError: y"}},
         {}, {("weir", "idle", "batch 1"): (0, ENDED), ("weir", "idle", "batch 4"): (3, None),
              ("stock", "idle", "batch 4"): (0, "failed: ValueError: y")}),
        ({("weir", "idle", 1): WorkerExited("its process ended: x")}, {"run_seconds": 9.0},
         {("weir", "idle", "batch 1"): (0, ENDED), ("stock", "idle", "batch 4"): (3, None),
          ("weir", "idle", "batch 4"): (0, "not run: its engine ended before and did not come back")}),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said_and_costs_nothing_else(
    script: Any, more: dict[str, Any], wanted: dict[Any, Any], monkeypatch: Any, tmp_path: Path
) -> None:
    by = by_key(run_fake(monkeypatch, tmp_path, script, **({"cases": ("idle",)} | more)))
    assert {key: (by[key].repeats, by[key].note) for key in wanted} == wanted
    assert all((by[key].ratio_to_stock is None) == (not by[key].repeats) for key in wanted if key[2] == "batch 1")


def clocked(monkeypatch: Any, ask: Any) -> tuple[list[float], type[Fake]]:
    """A clock, and a system whose `ask(seconds, do, count)` returns what a command takes and what it raises, if any."""
    now = [0.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])

    class Timed(Fake):
        def ask(self, seconds: float, do: str, **what: Any) -> dict[str, Any]:
            taken, error = ask(seconds, do, what["size"]["count"] if do == "run" else 0)
            now[0] += taken
            if error is not None:
                raise error
            return super().ask(seconds, do, **what) | ({"seconds": taken} if do == "run" else {})

    return now, Timed


def test_a_run_ends_at_its_limit_and_names_what_is_left(monkeypatch: Any, tmp_path: Path) -> None:
    """Rows that came in time are compared all the same."""

    def ask(seconds: float, do: str, count: int) -> Any:
        late = WorkerTimeout("late") if do == "run" and seconds < 10.0 else None
        return min(seconds, 10.0) if do in ("start", "run") else 0.0, late

    (now, kind), compared = clocked(monkeypatch, ask), []
    found = run_fake(
        monkeypatch, tmp_path, kind=kind, compare=lambda plan, samples, workdir: compared.extend(samples) or [],
        run_seconds=285, prefill=None, batches=(1, 4, 8), systems=("stock", "weir", "native"), interleave=False,
    )  # fmt: skip
    by = {(c.system, c.case, c.batch): c for c in found.cases}
    # A start and 12 runs of stock's, another and 12 of weir's: 260 s.
    assert by["stock", "idle", 8].repeats == by["weir", "idle", 8].repeats == 3
    left = [by["weir", "capture_all_all_layers", n] for n in (1, 4, 8)]
    why = ["stopped after 1 repeats", "not measured, did not finish", "not measured, not begun"]
    assert [(c.note or "").split(";")[0] for c in left] == [f"{x}: the limit is 285 s a run" for x in why]
    assert [c.repeats for c in left] == [1, 0, 0] and as_markdown(found).count(" not measured |") == 2
    assert found.systems["native"] == {"status": "skipped", "reason": "not started: the limit is 285 s a run"}
    assert now == [285.0] and len(compared) == 1 and found.runs[0]["run_seconds"] == 285


def test_steering_is_compared_before_what_may_end_the_engine(monkeypatch: Any, tmp_path: Path) -> None:
    script = {("weir", "steer_one", 4): WorkerExited("its process ended: x")}
    found = run_fake(monkeypatch, tmp_path, script, cases=("steer_one", EVERY), interleave=False)
    weirs = [key for key in Fake.calls if key[0] == "weir"]
    assert weirs[0] == ("weir", "steer_one", 0) and weirs.count(weirs[0]) == 1
    by = by_key(found)
    assert by["weir", "steer_one", "batch 1"].checked and by["weir", "steer_one", "prefill 2x32"].checked
    assert by["weir", "steer_one", "batch 4"].checked is None and len(found.checks) == 2


def test_steering_that_was_not_compared_says_so_and_is_not_called_wrong(monkeypatch: Any, tmp_path: Path) -> None:
    late, error = WorkerTimeout("no answer within 100 s"), {"error": "ValueError: y"}
    found, wrong = (
        run_fake(monkeypatch, tmp_path, {("weir", "steer_one", 0): answer}, cases=("steer_one",))
        for answer in (late, error)
    )
    steered = [c for c in found.cases if c.case == "steer_one"]
    assert {(c.note, c.checked, c.repeats) for c in steered} == {("rows not compared", None, 3)}
    assert found.passed and "WRONG" not in as_markdown(found) and as_markdown(found).count(" not compared**") == 3
    assert not wrong.passed and as_markdown(wrong).count(" WRONG**") == 3


@pytest.mark.parametrize(
    ("limit", "call", "first", "first_note", "second_note", "end"),
    [
        # A case that took all of its time is late, though less is left of the run by then.
        (150, 200.0, WorkerTimeout("late"), "did not finish: the limit is 100 s a case",
         "not tried: batch 1 did not finish", 110.0),
        # A new engine's start is taken from what a run may take.
        (90, 50.0, WorkerExited("ended"), "failed: ended", "not measured, did not finish", 90.0),
    ],
)  # fmt: skip
def test_which_limit_ended_a_case_is_said(
    limit: float, call: float, first: Exception, first_note: str, second_note: str, end: float, monkeypatch: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    def ask(seconds: float, do: str, count: int) -> Any:
        taken = {"start": 10.0, "run": min(seconds, call)}.get(do, 0.0)
        return taken, None if do != "run" else first if count == 1 else WorkerTimeout("late")

    now, kind = clocked(monkeypatch, ask)
    more: dict[str, Any] = dict(run_seconds=limit, prefill=None, batches=(1, 4), systems=("stock",), cases=("idle",))
    found = run_fake(monkeypatch, tmp_path, kind=kind, **more)
    for case, note in zip(found.cases, (first_note, second_note), strict=True):
        assert (case.note or "").startswith(note)
    assert now == [end]


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


def test_a_chart_that_cannot_be_drawn_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(cli, "_can_draw", lambda: False)
    result([decode("stock", "idle", 4.0)]).save(tmp_path / "one.json")
    for asked in (["--model", "demo"], ["report", str(tmp_path / "one.json")]):
        done = CliRunner().invoke(app, ["bench", *asked, "--chart", str(tmp_path / "c")], env=WIDE)
        assert done.exit_code == 2 and "matplotlib is not installed" in done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json"]
