"""`weir bench --against`: which ratios are worse, what cannot be compared, and what is said of it; without engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.unit.bench.fakes import SIZES, Fake, plan, result, texts, workloads
from vllm_weir.bench import cli, reference, runner
from vllm_weir.bench.against import Comparison, compare, refusal
from vllm_weir.bench.cases import GOALS, SETS, WORKLOADS
from vllm_weir.bench.plan import BenchTask
from vllm_weir.bench.result import BenchResult, summarise
from vllm_weir.bench.systems.stock import vllm_version
from vllm_weir.cli.main import app

TEXTS = SIZES.of_kind("texts").label
RUN = {"dtype": "float32", "eager": True, "tokens": 8, "workloads": SIZES.model_dump()}


def timed(extract: float, mean: float | None = 1.0, **more: Any) -> BenchResult:
    """Ratios of two cases to stock."""
    cases = [texts("stock", "idle", 1.0, 2.0), texts("weir", "extract", extract, 3.0)]
    cases += [] if mean is None else [texts("weir", "mean", mean)]
    return result(cases, **{"runs": [RUN], **more})


def compared(before: BenchResult, now: BenchResult, *cases: str, tolerance: float = 2.0) -> Comparison:
    return compare(before, now, workloads(*(cases or ("extract", "mean"))), tolerance)


@given(st.floats(0.5, 4), st.floats(0.5, 4), st.floats(0, 50))
def test_a_case_fails_exactly_where_its_ratio_grew_by_more(before: float, now: float, tolerance: float) -> None:
    found = compared(timed(before), timed(now), tolerance=tolerance)
    grown = now / before - 1
    if abs(100 * grown - tolerance) > 1e-6:
        assert found.passed == (100 * grown < tolerance) and [c.name for c in found.worse] == (
            [] if found.passed else [f"extract {TEXTS}"]
        )
    assert found.summary()[-1].startswith(
        "none of 2" if found.passed else f"worse by more than {tolerance:g} %: extract"
    )


def test_another_card_or_version_is_said_with_the_outcome() -> None:
    *remarks, outcome = compared(timed(1.0), timed(1.0, device="E", vllm="1.1")).summary()
    said = ["the card differs: D before, E now", "vLLM differs: 1 before, 1.1 now"]
    assert remarks == said and outcome == "none of 2 cases is worse by more than 2 %; " + "; ".join(said)


def test_what_is_missing_on_either_side_is_listed_and_fails_if_it_was_asked_for() -> None:
    before, now = timed(1.0, mean=None), timed(1.0)
    assert compared(before, now).summary() == [f"not compared: mean {TEXTS} (no figure before)"]
    late = timed(1.0, mean=None)
    late.cases.append(summarise(BenchTask(system="weir", case="mean", size=SIZES.of_kind("texts")), [], "late"))
    for gone, why in ((before, "stock or Weir has none"), (late, "late")):
        found = compared(now, gone)
        assert not found.passed and not found.worse and f"mean {TEXTS} (no figure now: {why})" in found.summary()[-1]
    fewer = compared(now, now, "extract")
    assert fewer.passed and fewer.summary()[0] == f"not asked for, so not compared: mean {TEXTS}"
    wrong = timed(1.0)
    wrong.cases[1].checked = False
    assert "extract " in compared(now, wrong).summary()[-1] and not compared(now, wrong).passed
    assert not compared(wrong, now).passed


@pytest.mark.parametrize("other", [{"tokens": 9}, {"eager": False}, {"workloads": SIZES.model_dump() | {"blocks": 3}}])
def test_figures_of_other_settings_are_not_compared(other: dict[str, Any]) -> None:
    found = compared(timed(9.0, runs=[RUN | other]), timed(1.0))
    assert not found.passed and next(iter(other if "workloads" not in other else ["blocks"])) in found.summary()[-1]
    assert compared(timed(1.0, runs=[{}]), timed(1.0)).passed, "a file that does not say"


def test_a_case_is_compared_with_the_run_of_a_merged_file_that_it_is_of() -> None:
    before = timed(1.0, runs=[RUN | {"tokens": 9}, RUN])
    for case in before.cases:
        case.run = 1
    assert compared(before, timed(1.0)).passed


def test_other_models_and_other_major_versions_are_refused() -> None:
    assert refusal(timed(1.0), plan(), "1.9") is None
    assert refusal(timed(1.0), plan(model_name="n"), "1.9") == "is of m, and this run of n"
    assert refusal(timed(1.0), plan(), "2.0") == "is of vLLM 1, and this run of 2.0"


def test_every_workload_has_a_goal_and_a_set() -> None:
    assert set(GOALS) == {"idle", *WORKLOADS} and {*SETS["workloads"], *SETS["instruments"]} == set(WORKLOADS)
    assert min(GOALS.values()) > 1 and set(SETS["guard"]) - {"idle"} < set(WORKLOADS)


@pytest.mark.parametrize(("slower", "code"), [(1.0, 0), (1.05, 1)])
def test_the_command_takes_cases_and_sizes_from_the_file(
    slower: float, code: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Rounds alternate between two speeds of the machine, which ratios of the same round do not see."""

    class Paired(Fake):
        def ask(self, seconds: float, do: str, **what: Any) -> dict[str, Any]:
            reply = super().ask(seconds, do, **what)
            key = (self.system, what["case"], what["size"]["count"]) if do == "run" else None
            speed = 1.0 if key is None or self.calls.count(key) % 2 else 3.0
            return reply if key is None else {"seconds": speed * (slower if key[1] == "ablate_everywhere" else 1.0)}

    monkeypatch.setattr(runner, "WorkerProcess", Paired)
    monkeypatch.setattr(reference, "compare", lambda *_: [])
    for name in ("_has_gpu", "_can_draw"):
        monkeypatch.setattr(cli, name, lambda: False)
    before = tmp_path / "before.json"
    size = SIZES.of_kind("requests")
    pair = [("stock", "idle"), ("weir", "ablate_everywhere")]
    cases = [summarise(BenchTask(system=s, case=c, size=size), [1.0, 1.0]) for s, c in pair]
    result(cases, model="demo", vllm=vllm_version(), runs=[{"workloads": SIZES.model_dump()}]).save(before)
    command = ["bench", "--model", "demo", "--against", str(before), "--out", str(tmp_path / "now.json")]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert done.exit_code == code, done.output
    said = f"worse by more than 2 %: ablate_everywhere {size.label} (1.000 before, 1.050 now)"
    assert (said if code else "none of 1 cases is worse") in done.output and "vLLM differs" in done.output
    assert {key[:2] for key in Fake.calls} == set(pair) and all(count in (0, 3) for _, _, count in Fake.calls)
    (now,) = (c for c in BenchResult.load(tmp_path / "now.json").cases if c.system == "weir")
    assert now.rounds == pytest.approx([slower] * 5) and now.ratio_to_stock == pytest.approx(slower)
    for bad, why in ((["--systems", "weir"], "needs stock and weir"), (["--against", "gone"], "no result file")):
        refused = CliRunner().invoke(app, [*command, *bad], env={"COLUMNS": "300"})
        assert refused.exit_code == 2 and why in refused.output
