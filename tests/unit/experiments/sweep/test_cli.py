"""``weir sweep``: its options reach `sweep`, what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_weir.cli.main import app
from vllm_weir.experiments.grid import Grid
from vllm_weir.experiments.metrics import Baseline, LogitDiff
from vllm_weir.experiments.sweep import cli, run
from vllm_weir.experiments.sweep.result import Sweep

PROMPTS = ["--clean", "a b", "--corrupt", "a c", "--answer", " x", "--wrong", " y"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the engine and `sweep` were called with."""
    calls: dict[str, Any] = {}

    def sweep(llm: Any, clean: Any, corrupt: Any, hooks: Any, **more: Any) -> Sweep:
        calls.update(more, llm=llm, clean=clean, corrupt=corrupt, hooks=hooks)
        axes: dict[str, Any] = {"hook": ("z",), "layer": (0, 1), "position": (-1,)}
        cells = np.array([[[0.5], [2.0]]])
        return Sweep(
            Grid(cells, axes), Grid(cells[None], {"pair": (0,), **axes}), Baseline(2.0, -1.0), 0.0, "denoise",
            "logit difference", "", ("-1 c",),
        )  # fmt: skip

    monkeypatch.setattr(run, "sweep", sweep)
    monkeypatch.setattr(cli, "start_llm", lambda model, options: (model, options))
    return calls


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["sweep", "model", *arguments])


def test_options(asked: dict[str, Any]) -> None:
    done = invoke(
        *PROMPTS, "--hook", "z,q", "--layers", "1,2", "--positions", '[3, "1:2"]', "--heads", "0,3", "--mode", "noise",
        "--to", "q.5", "--to-heads", "1", "--freeze", "attn_out", "--checkpoint", "cells", "-e", "seed=3", "-q",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert asked == {
        "llm": ("model", {"seed": 3}), "clean": ["a b"], "corrupt": ["a c"], "hooks": ["z", "q"], "layers": [1, 2],
        "positions": [3, "1:2"], "heads": [0, 3], "metric": LogitDiff([" x"], [" y"]), "mode": "noise",
        "to": ("q", 5, [1]), "freeze": ["attn_out"], "checkpoint": "cells", "progress": False,
    }  # fmt: skip
    assert "clean 2, corrupt -1, noise floor 0" in done.output
    assert done.output.index("layer 1, position -1: 2") < done.output.index("layer 0, position -1: 0.5")


def test_defaults_and_files(asked: dict[str, Any], tmp_path: Path) -> None:
    out, plot = str(tmp_path / "a.npz"), str(tmp_path / "a.html")
    done = invoke(*PROMPTS, "--heads", "all", "--json", "--out", out, "--plot", plot)
    assert done.exit_code == 0, done.output
    assert asked["freeze"] is None
    assert (asked["layers"], asked["positions"], asked["heads"], asked["to"]) == ("all", "all", "all", None)
    found = json.loads(done.stdout)
    assert found["grid"] == [[[0.5], [2.0]]] and found["axes"]["layer"] == [0, 1] and found["files"] == [out, plot]
    assert found["baseline"] == {"clean": 2.0, "corrupt": -1.0}
    assert (Sweep.load(out).grid.array == np.array(found["grid"])).all() and Path(plot).exists()


def test_pairs_from_a_file(asked: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    records = [{"clean": f"a{i}", "corrupt": f"b{i}", "answer": i, "wrong": " y"} for i in range(2)]
    file.write_bytes(("\r\n".join(map(json.dumps, records)) + "\r\n\r\n").encode("utf-8-sig"))
    assert invoke("--pairs", str(file)).exit_code == 0
    assert asked["clean"] == ["a0", "a1"] and asked["corrupt"] == ["b0", "b1"]
    assert asked["metric"] == LogitDiff([0, 1], [" y", " y"])


@pytest.mark.parametrize(
    ("line", "says"),
    [("{", "line 3 is not JSON"), ('{"clean": 1}', "line 3 lacks 'answer'"), ("[]", "line 3 is a list")],
)
def test_a_pair_that_is_none_is_named(asked: dict[str, Any], tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(f'{{"clean": "a", "corrupt": "b", "answer": "c", "wrong": "d"}}\n\n{line}\n')
    done = invoke("--pairs", str(file))
    assert done.exit_code == 1 and says in done.output and not asked


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (PROMPTS[:-2], "wrong: missing"),
        ([*PROMPTS, "--pairs", "x"], "clean: the pairs come from a file"),
        (["--pairs", "/nowhere"], "pairs: cannot read"),
        ([*PROMPTS, "--layers", "some"], "layers: expected 'all' or ints"),
        ([*PROMPTS, "--to", "q"], "site: 'q' says no layer"),
        (["--pairs", "/dev/null"], "pairs: there are no pairs"),
        ([*PROMPTS, "--plot", "a.gif"], "plot: the path of a plot"),
        ([*PROMPTS, "--out", "/nowhere/a.npz"], "out: there is no folder"),
        ([*PROMPTS, "--out", "/"], "out: / is a folder"),
        ([*PROMPTS, "--mode", "other"], "mode: unknown mode"),
        ([*PROMPTS, "--hook", "nowhere"], "hooks: "),
        ([*PROMPTS, "--positions", '["x"]'], "positions"),
        ([*PROMPTS, "--to", "q.5", "--freeze", "z"], "freeze: z cannot be held still"),
        ([*PROMPTS, "--to-heads", "1"], "to_heads: it is for a path"),
        ([*PROMPTS, "--freeze", "mlp_out"], "freeze: it is what a path holds still"),
        ([*PROMPTS, "-e", "seed"], "engine: expected key=value"),
    ],
)
def test_refused(asked: dict[str, Any], arguments: list[str], says: str) -> None:
    """Before an engine is started."""
    done = invoke(*arguments)
    assert done.exit_code == 1 and says in done.output and "Traceback" not in done.output
    assert not asked
