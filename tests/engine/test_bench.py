"""`weir bench` as a user runs it: stock vLLM and Weir, checked rows, and a slower build that is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_weir.bench.cases import CAPTURES, DEFAULT_CASES, SETS, STEERS

pytestmark = pytest.mark.engine
CLOSE_OTHERS = True
ROOT = Path(__file__).parents[2]
# The scheduler and the worker in the system's own process: half the start.
QUIET = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "COLUMNS": "300"}
TINY = (
    *("--model", "demo", "--repeats", "1", "--warmups", "0", "--batches", "2", "--tokens", "4", "--prefill", "2x40"),
    *("--texts", "5", "--lengths", "6-20", "--blocks", "2", "--long", "70", "--chats", "8", "--system-prompt", "40"),
    *("--ablated", "3"),
)


def bench(folder, name, *options, passes=True, **environment):
    """Run it; return the result and what was printed."""
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", "vllm_weir.cli.main", "bench", *options, "--out", str(out)]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | QUIET | environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == (0 if passes else 1), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads(out.read_text()), done.stdout


@pytest.mark.timeout(900)
def test_steps_and_workloads(tmp_path):
    """Every case but the instruments on stock vLLM and Weir, with the shipped model: rows and steering are compared."""
    systems = ("--systems", "stock,weir,native,nnsight,transformers")
    found, _ = bench(tmp_path, "all", *systems, "--cases", ",".join((*DEFAULT_CASES, "workloads")), *TINY)
    assert {"device", "vllm", "torch", "model", "cases", "checks", "systems", "runs"} <= set(found)
    by = {
        (c["system"], c["case"], str(c.get("workload") or c.get("batch") or c.get("prefill"))): c
        for c in found["cases"]
    }
    own = {"texts 5x6-20", "long 1x70", "chats 8x40+16", "requests 3x16", "crowd 6x16", "single 1x16"}
    assert {size for system, case, size in by if (system, case) == ("stock", "idle")} == own | {"2", "2x40"}
    of_weir = {(case, size): c for (system, case, size), c in by.items() if system == "weir"}
    assert {case for case, _ in of_weir} == {*DEFAULT_CASES, *SETS["workloads"]}
    for (case, size), one in of_weir.items():
        figure = one["ktok_s" if size == "2x40" else "median_ms"]
        assert one["ratio_to_stock"] > 0 and one["repeats"] == 1 and one["min"] <= figure <= one["max"]
        assert one["checked"] is (True if case in (*CAPTURES, *STEERS) else None), case
        assert size not in own or (one["first"] > 0 and one["first_ratio"] > 0)
    read = {case for system, case, _ in by if system == "transformers"}
    assert read == {"extract", "mean", "last_mixed", "long", "long_one"}
    assert {check["case"] for check in found["checks"]} == {*CAPTURES, *STEERS}
    assert all(check["passed"] and check["rows"] for check in found["checks"])
    # What cannot run here says why.
    assert {found["systems"][name]["status"] for name in ("native", "nnsight")} == {"skipped"}
    assert all(s["status"] == "measured" or s["reason"] for s in found["systems"].values())
    text = (tmp_path / "all.md").read_text()
    assert "| nothing asked | weir |" in text and "| `mean`: mean over the prompt, all blocks | weir |" in text
    assert (tmp_path / "all.svg").exists() and (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_a_build_that_is_slower_fails_against_an_earlier_result(tmp_path):
    """The instruments make that result; one of them is run again, as it is and with a sleep in every step."""
    sets = ("--systems", "stock,weir", "--cases", "idle,instruments")
    before, _ = bench(tmp_path, "before", *sets, *TINY)
    figures = [c for c in before["cases"] if c["system"] == "weir" and c["case"] != "idle"]
    assert [c["case"] for c in figures] == list(SETS["instruments"])
    assert all(c["median_ms"] > 0 and c["ratio_to_stock"] > 0 and c["first_ratio"] > 0 for c in figures)

    # Sizes are the file's. A call has four steps and takes some 50 ms: slowed, a hundred times as long.
    again = ("--against", str(tmp_path / "before.json"), "--cases", "one_user_probes", "--model", "demo")
    again += ("--tolerance", "900", "--repeats", "3", "--warmups", "1")
    name = "one_user_probes single 1x16"
    _, said = bench(tmp_path, "same", *again)
    assert "ok: none of 1 cases is worse by more than 900 %" in said and f"│ {name} │" in said
    path = os.pathsep.join((str(ROOT / "tests" / "support" / "slowed"), str(ROOT / "src")))
    _, said = bench(tmp_path, "slowed", *again, passes=False, PYTHONPATH=path, WEIR_TEST_SLOWER="1200")
    assert f"FAILED: worse by more than 900 %: {name}" in said


@pytest.mark.parametrize(
    "command",
    [
        ["host.py", "--cases", "steer_one,steer_all again,capture_own", "--requests", "8", "--steps", "4",
         "--runs", "1"],
        ["keep.py", "{folder}", "--megabytes", "4", "--repeats", "1"],
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_what_docs_name_as_the_source_of_figures_runs(command, tmp_path):
    """Those that need neither a GPU nor a server, and seconds."""
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, *(part.format(folder=tmp_path) for part in command), "--out", str(out)],
        cwd=ROOT / "bench", env=os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert json.loads(out.read_text())
