"""`weir bench --smoke` as a user runs it: stock vLLM and Weir, checked rows, and a result of the promised form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CLOSE_OTHERS = True


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_smoke(tmp_path: Path) -> None:
    out = tmp_path / "smoke.json"
    command = [sys.executable, "-m", "vllm_weir.cli.main", "bench", "--smoke", "--model", "demo", "--repeats", "1"]
    command += [
        "--systems",
        "stock,weir,native",
        "--warmups",
        "0",
        "--batches",
        "2",
        "--tokens",
        "4",
        "--prefill",
        "2x40",
        "--out",
        str(out),
    ]
    # The scheduler and the worker in the system's own process: half the start.
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "| nothing asked | weir |" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".svg").exists() and out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.read_text())
    assert {"device", "vllm", "torch", "model", "cases", "checks", "systems", "runs"} <= set(found)
    figures = {(c["system"], c["case"], c.get("batch"), c.get("prefill")): c for c in found["cases"]}
    cases = ("idle", "steer_one", "steer_all_distinct", "capture_last_all_layers", "capture_all_all_layers")
    for system, case in [("stock", "idle"), *(("weir", c) for c in cases)]:
        for batch, prefill, unit in ((2, None, "median_ms"), (None, "2x40", "ktok_s")):
            one = figures[system, case, batch, prefill]
            assert one[unit] > 0 and one["min"] <= one[unit] <= one["max"] and one["repeats"] == 1
            assert one["ratio_to_stock"] > 0
            assert one["checked"] is (None if case == "idle" else True)
    assert all(figures[s, "startup", None, None]["median_ms"] > 0 for s in ("stock", "weir"))
    assert len(found["checks"]) == 8 and all(c["passed"] and c["rows"] for c in found["checks"])
    # What cannot run here says why.
    assert found["systems"]["native"]["status"] == "skipped" or found["systems"]["native"]["version"]
    assert all(s["status"] == "measured" or s["reason"] for s in found["systems"].values())


@pytest.mark.engine
@pytest.mark.parametrize(
    "command",
    [
        [
            "host.py",
            "--cases",
            "steer_one,steer_all again,capture_own",
            "--requests",
            "8",
            "--steps",
            "4",
            "--runs",
            "1",
        ],
        ["keep.py", "{folder}", "--megabytes", "4", "--repeats", "1"],
    ],
    ids=lambda command: command[0],
)
def test_what_docs_name_as_the_source_of_figures_runs(command: list[str], tmp_path: Path) -> None:
    """Those that need neither a GPU nor a server, and seconds."""
    bench = Path(__file__).parents[2] / "bench"
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, *(part.format(folder=tmp_path) for part in command), "--out", str(out)],
        cwd=bench,
        env=os.environ | {"PYTHONPATH": f"{bench.parent}/src:{bench.parent}", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert json.loads(out.read_text())


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_workloads(tmp_path: Path) -> None:
    """Every workload on stock vLLM and Weir, with the shipped model: rows and ablations are compared."""
    out = tmp_path / "workloads.json"
    command = [
        sys.executable,
        "-m",
        "vllm_weir.cli.main",
        "bench",
        "--smoke",
        "--model",
        "demo",
        "--cases",
        "workloads",
    ]
    command += [
        "--systems",
        "stock,weir,native,nnsight,transformers",
        "--repeats",
        "1",
        "--warmups",
        "1",
        "--out",
        str(out),
    ]
    command += ["--texts", "5", "--lengths", "6-20", "--blocks", "2", "--long", "70", "--chats", "8", "--tokens", "4"]
    command += ["--system-prompt", "40", "--ablated", "3"]
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found = json.loads(out.read_text())
    figures = {(c["system"], c["case"], c["workload"]): c for c in found["cases"]}
    labels = {"texts 5x6-20", "long 1x70", "chats 8x40+16", "requests 3x16"}
    assert {label for system, case, label in figures if (system, case) == ("stock", "idle")} == labels
    of_weir = {case: c for (system, case, _), c in figures.items() if system == "weir"}
    assert set(of_weir) == {"extract", "mean", "last_mixed", "long", "long_one", "chat_mix", "ablate_everywhere"}
    for case in of_weir.values():
        assert case["median_ms"] > 0 and case["ratio_to_stock"] > 0 and case["checked"] is True
        assert case["first"] > 0 and case["first_ratio"] > 0 and case["repeats"] == 1
    read = {case for system, case, _ in figures if system == "transformers"}
    assert read == {"extract", "mean", "last_mixed", "long", "long_one"}
    assert len(found["checks"]) == 7 + len(read) and all(c["passed"] and c["rows"] for c in found["checks"])
    assert {found["systems"][name]["status"] for name in ("native", "nnsight")} == {"skipped"}
    text = out.with_suffix(".md").read_text()
    assert "| workload | system | s a call | over stock | first call, s | over stock's first |" in text
    assert "| `mean`: mean over the prompt, all blocks | weir |" in text and "start, s" not in text
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
