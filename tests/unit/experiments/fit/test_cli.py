"""``weir fit``: what it refuses, before an engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_weir.cli.main import app
from vllm_weir.errors import WeirError
from vllm_weir.experiments.fit import cli


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The engines that were started; each is refused."""
    found: list[Any] = []

    def start(*arguments: Any) -> Any:
        found.append(arguments)
        raise WeirError("started", "engine")

    monkeypatch.setattr(cli, "start_llm", start)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a\nb\n")
    (tmp_path / "one.txt").write_text("a\n")
    (tmp_path / "folder.gguf").mkdir()
    return found


def invoke(*more: str, negative: str = "p.txt") -> Any:
    return CliRunner().invoke(app, ["fit", "p.txt", negative, "-m", "model", "-q", *more])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-o", "x.npz"], "out: expected a name that ends in"),
        (["-o", "x.gguf", "--hook", "mlp_out"], "out: a control vector is added to what leaves a block"),
        (["-o", "nowhere/x.gguf"], "out: there is no folder nowhere"),
        (["-o", "folder.gguf"], "out: folder.gguf is a folder"),
        (["-o", "x.gguf", "--plot", "auc.pdf"], "plot: the path of a plot"),
        (["-o", "x.gguf", "--method", "other"], "method: unknown method"),
        (["-o", "x.gguf", "--folds", "1"], "folds: expected"),
        (["-o", "x.gguf", "--seed", "-1"], "seed: expected"),
        (["-o", "x.gguf", "--hook", "nowhere"], "hook: "),
        (["-o", "x.gguf", "--positions", "sometimes"], "positions: "),
        (["-o", "x.gguf", "--no-check", "--answer", " a", "--wrong", " b"], "answer: it is what the check looks at"),
    ],
)
def test_refused(started: list[Any], arguments: list[str], says: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 1 and says in done.output and "Traceback" not in done.output
    assert not started


def test_prompts_that_the_method_cannot_fit(started: list[Any]) -> None:
    done = invoke("-o", "x.gguf", "--method", "pca", negative="one.txt")
    assert done.exit_code == 1 and "negative: 'pca' is fitted on pairs" in done.output and not started


def test_what_no_engine_is_needed_for_passes(started: list[Any]) -> None:
    assert "engine: started" in invoke("-o", "x.gguf", "--plot", "new/auc.svg").output and started
