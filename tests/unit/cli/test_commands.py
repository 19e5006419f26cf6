"""What all commands share: where the model stands, how it may be named, help, and progress without a terminal."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import typer
from typer.testing import CliRunner

import vllm_weir as weir
from vllm_weir.cli import doctor, serve
from vllm_weir.cli.main import app
from vllm_weir.errors import WeirError
from vllm_weir.schema.model_facts import ModelConfig
from vllm_weir.storage.cli import progress_bar
from vllm_weir.util import start_llm
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
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(WeirError, match=f"{port} is in use") as e:
            serve._check_port(["m", "--host", "127.0.0.1", "--port", str(port)])
        assert e.value.field == "--port"
    serve._check_port(["m", "--host", "127.0.0.1", f"--port={port}"])
    serve._check_port(["m", "--port", "many"])  # vLLM says what it takes


def commands(group: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it, groups too."""
    for name, command in group.commands.items():
        yield (*above, name), command
        yield from commands(command, (*above, name)) if hasattr(command, "commands") else ()


COMMANDS = dict(commands(GROUP))


@pytest.mark.parametrize("words", [(), *COMMANDS], ids=" ".join)
def test_help_and_version(words):
    if words != ("serve",):  # which also has vLLM's help, so it starts vLLM
        assert CliRunner().invoke(app, [*words, "-h"]).output.strip().startswith("Usage: ")
    assert CliRunner().invoke(app, [*words, "--version"]).output.strip() == weir.__version__


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_in_whole_phrases(words):
    """A line of help is understood without the line before it."""
    for parameter in COMMANDS[words].params:
        text = getattr(parameter, "help", "") or ""
        assert not re.match(r"(Of|For|By|See|Its|Whose|Likewise|All of them)\b|.*\b(those|these|of it)\b", text), text


def test_the_reason_of_a_failure_is_one_line():
    assert start_llm.reason(OSError("no such\n  model\n" + "x" * 9999)).startswith("no such model x")
    assert len(start_llm.reason(OSError("x" * 9999))) == start_llm.MOST


TEXTS = "texts.jsonl"
SWEEP = ["--clean", "a", "--corrupt", "b", "--answer", " a", "--wrong", " b"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["doctor", "/no/model"], "no folder /no/model"),
        (["sites", "/no/model"], "no folder /no/model"),
        (["sites", "nobody/nothing"], "vLLM cannot start: not on this machine, nor on the hub"),
        (["extract", "/no/model", TEXTS, "--out", "rows"], "no folder /no/model"),
        (["extract", "demo", "/no/texts.jsonl", "--out", "rows"], "/no/texts.jsonl does not exist"),
        (["fit", "/no/model", TEXTS, TEXTS, "--out", "v.gguf"], "no folder /no/model"),
        (["fit", "nobody/nothing", TEXTS, TEXTS, "--out", "v.gguf"], "vLLM cannot start: not on this machine"),
        (["fit", "demo", "/no/a", "/no/b", "--out", "v.gguf"], "/no/a"),
        (["fit", "demo", TEXTS, TEXTS, "--out", "/no/v.gguf"], "/no"),
        (["sweep", "/no/model", *SWEEP], "no folder /no/model"),
        (["sweep", "demo", *SWEEP, "--out", "/no/s.npz"], "/no"),
        (["inspect", "/no/rows"], "/no/rows"),
        (["convert", "/no/rows", "rows"], "/no/rows"),
        (["sae", "report", "/no/sae", "-f", "/no/features"], "/no/"),
        (["bench", "--model", "/no/model"], "'/no/model' cannot be read"),
        (["bench", "--against", "/no/file.json"], "/no/file.json is no result file"),
        (["bench", "report", "/no/file.json"], "/no/file.json is no result file"),
        (["bench", "pool", "/no/file.json", "--out", "p.json"], "/no/file.json is no result file"),
        (["serve", "demo", "--weir-sae", "x=/no/sae"], "/no/sae"),
        (["serve", "/no/model", "--weir-admin-key-file", "/no/key"], "/no/key"),
        (["serve", "demo", "--steering-modules", "x=/no/module"], "/no/module"),
        (["serve", "demo", "--port", "{port}"], "is in use"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(words, says, tmp_path, monkeypatch):
    def start(*_args: Any, **_options: Any) -> Any:
        raise OSError("not on this machine,\nnor on the hub\n")

    monkeypatch.setattr("vllm.LLM", start)
    monkeypatch.chdir(tmp_path)
    (tmp_path / TEXTS).write_text('{"text": "Tom was happy."}\n{"text": "Tom was sad."}\n' * 3)
    with socket.socket() as held, mock.patch.dict(os.environ):
        held.bind(("", 0))
        held.listen()
        level = logging.root.level
        result = CliRunner().invoke(app, [word.format(port=held.getsockname()[1]) for word in words])
        logging.root.setLevel(level)  # what vLLM's server imports sets it to the command's
    assert result.exit_code in (1, 2) and isinstance(result.exception, SystemExit), result.exception
    (line,) = result.stderr.splitlines()
    assert says in line


def test_the_doctor_s_verdict_comes_first(capsys):
    row = {"patch_point": "vllm.x.y", "process": "p", "purpose": "q", "problem": ""}
    found = doctor.Diagnosis(problems=["the disk is full"], patch_points=[row])
    doctor.show(found)
    said = capsys.readouterr().out
    assert said.splitlines()[:2] == ["not healthy", "problem: the disk is full"] and "x.y" not in said
    doctor.show(found, full=True)
    assert "x.y" in capsys.readouterr().out


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_is_told_where_there_is_no_terminal(quiet, monkeypatch, capsys):
    monkeypatch.setattr(start_llm, "EVERY", 0.01)
    said = ""
    with progress_bar(quiet) as bar:
        task = bar.add_task("starting the engine", total=None, rate="")
        for described, numbers in (
            ("starting the engine", {}),
            ("records: 31 of 4,000 9 rows/s", {"completed": 31, "total": 4000, "rate": "9 rows/s"}),
        ):
            bar.update(task, description=described.partition(":")[0], **numbers)
            while f"{described}\n" not in said and not quiet:
                said += capsys.readouterr().err
    assert not quiet or not capsys.readouterr().err
