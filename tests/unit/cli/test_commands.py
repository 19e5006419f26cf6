"""What all commands share: where the model stands, how it may be named, help, and progress without a terminal."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import vllm_weir as weir
from vllm_weir.cli import doctor, options, serve
from vllm_weir.cli.main import app
from vllm_weir.errors import WeirError
from vllm_weir.schema.model_config import ModelConfig
from vllm_weir.storage import cli as storage_cli
from vllm_weir.util.shipped import model_path

GROUP: Any = typer.main.get_command(app)
TAKE_A_MODEL = ["doctor", "extract", "fit", "sites", "sweep"]


@pytest.mark.parametrize("name", TAKE_A_MODEL)
@pytest.mark.parametrize("form", [["demo"], ["--model", "demo"], ["-m", "demo"], ["--model=demo"]])
def test_the_model_is_the_first_argument_of_every_command(name, form):
    command = GROUP.commands[name]
    assert command.params[0].name == "model" and command.params[0].param_type_name == "argument"
    others = {"extract": ["texts", "--out", "o"], "fit": ["a", "b", "--out", "o"]}.get(name, [])
    for words in ([*form, *others], [*others, *form] if form != ["demo"] else [*form, *others]):
        assert command.make_context(name, list(words)).params["model"] == "demo"


def test_demo_is_the_shipped_model():
    assert model_path("demo") == weir.demo_model() and model_path("./demo") == "./demo"
    assert ModelConfig.read("demo", {}) == ModelConfig.read(weir.demo_model(), {}) != ModelConfig()


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        (["demo"], ["--served-model-name", "demo", "--kv-cache-memory-bytes", "268435456"]),
        (["--model", "demo", "--port", "1"], ["--port", "1", "--served-model-name", "demo"]),
        (["--model=demo", "--served-model-name", "x"], ["--served-model-name", "x", "--kv-cache-memory-bytes"]),
        (["demo", "--gpu-memory-utilization=0.5"], ["--gpu-memory-utilization=0.5", "--served-model-name", "demo"]),
    ],
)
def test_serve_takes_demo(given, passed_on):
    environ: dict[str, str] = {}
    rest = serve.prepare(given, environ)
    assert rest[: len(passed_on) + 1] == [weir.demo_model(), *passed_on]
    assert environ["WEIR_SERVE_DEMO"] == "1" and weir.demo_sae() in environ["WEIR_SERVE_SAES"]


def test_serve_adds_nothing_to_another_model():
    environ: dict[str, str] = {}
    assert serve.prepare(["./demo", "--port", "1"], environ) == ["./demo", "--port", "1"]
    assert not {"WEIR_SERVE_DEMO", "WEIR_SERVE_SAES"} & set(environ)


def test_a_port_in_use_is_refused():
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(WeirError, match=f"{port} is in use") as e:
            serve._check_port(["m", "--host", "127.0.0.1", "--port", str(port)])
        assert e.value.field == "--port"
    serve._check_port(["m", "--host", "127.0.0.1", f"--port={port}"])
    serve._check_port(["m", "--port", "many"])  # vLLM says what it takes


def test_help_and_version():
    for words in (["-h"], ["fit", "-h"], ["bench", "-h"], ["sae", "report", "-h"]):
        assert CliRunner().invoke(app, words).exit_code == 0, words
    assert CliRunner().invoke(app, ["--version"]).output.strip() == weir.__version__


@pytest.mark.parametrize("name", TAKE_A_MODEL)
def test_help_is_in_whole_phrases(name):
    for parameter in GROUP.commands[name].params:
        text = getattr(parameter, "help", "") or ""
        assert not re.match(r"(Of|For|See|Its|Whose|Likewise)\b", text), (parameter.name, text)


def test_the_reason_of_a_failure_is_one_line():
    assert options.reason(OSError("no such\n  model\n" + "x" * 9999)).startswith("no such model x")
    assert len(options.reason(OSError("x" * 9999))) == options.MOST


def test_the_doctor_s_verdict_comes_first(capsys):
    row = {"patch_point": "vllm.x.y", "process": "p", "purpose": "q", "problem": ""}
    found = doctor.Diagnosis(problems=["the disk is full"], patch_points=[row])
    doctor.show(found)
    said = capsys.readouterr().out
    assert said.splitlines()[:2] == ["not healthy", "problem: the disk is full"] and "x.y" not in said
    doctor.show(found, full=True)
    assert "x.y" in capsys.readouterr().out


def test_progress_is_told_where_there_is_no_terminal(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(storage_cli.time, "monotonic", lambda: now[0])
    for quiet in (False, True):
        now[0] = 0.0
        with storage_cli.progress_bar(quiet) as bar:
            task = bar.add_task("records", total=4000, rate="")
            for after in (10, 31, 40, 62):
                now[0] = float(after)
                bar.update(task, completed=after, rate="9 rows/s")
        lines = [line for line in capsys.readouterr().err.splitlines() if " of 4,000 " in line]
        assert lines == ([] if quiet else ["records: 31 of 4,000 9 rows/s", "records: 62 of 4,000 9 rows/s"])
