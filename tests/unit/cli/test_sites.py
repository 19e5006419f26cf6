"""`weir sites`, without an engine: what is printed, and descriptions that installed packages bring."""

from __future__ import annotations

import json
import os
import sys

import pytest
from typer.testing import CliRunner

from tests.unit.refusals import refused
from vllm_weir import WeirError
from vllm_weir.cli import sites
from vllm_weir.cli.main import app
from vllm_weir.schema.model_facts import SiteVerdict
from vllm_weir.worker.discovery.block_stack import description_of

VERDICTS = [SiteVerdict("resid_post", layer, True, "", (64,)) for layer in (0, 1, 2, 5)]
VERDICTS += [SiteVerdict("resid_mid", layer, False, "attention and MLP run in parallel") for layer in range(6)]
VERDICTS += [SiteVerdict("embed", 0, True, "", (64,))]
VERDICTS += [SiteVerdict("z", layer, True, "", (8, 128)) for layer in (0, 2, 3, 5)]
VERDICTS += [SiteVerdict("z", layer, True, "", (4, 256)) for layer in (1, 4)]
VERDICTS += [SiteVerdict("pattern", 0, True, "", (8, 0)), SiteVerdict("pattern", 1, False, "it has no softmax")]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([0, 2, 4], "0, 2, 4"), ([1, 2], "1-2")]
)
def test_spans(numbers, text):
    assert sites.spans(numbers) == text


@pytest.fixture
def surveyed(monkeypatch):
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
        monkeypatch.setenv(name, "")  # so that what the command sets is taken back
        monkeypatch.delenv(name)
    asked = []

    def stand_in(model, **engine_args):
        asked.append((model, engine_args))
        if model == "none":
            raise WeirError("two lists of blocks", "model")
        return VERDICTS

    monkeypatch.setattr(sites, "survey", stand_in)
    return asked


def test_the_table_has_a_line_for_each_point_and_reason(surveyed):
    result = CliRunner().invoke(app, ["sites", "some/model", "--dtype", "float32"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    assert surveyed == [("some/model", {"load_format": "auto", "dtype": "float32", "trust_remote_code": False})]
    lines = [
        [c.strip() for c in cells[1:6]] for line in result.output.splitlines() if len(cells := line.split("│")) > 5
    ]
    assert lines == [
        ["embed", "", "64", "yes", ""],
        ["pattern", "0", "8 x keys", "read only", ""],
        ["pattern", "1", "", "no", "it has no softmax"],
        ["z", "1, 4", "4 x 256", "yes", ""],
        ["z", "0, 2-3, 5", "8 x 128", "yes", ""],
        ["resid_mid", "0-5", "", "no", "attention and MLP run in parallel"],
        ["resid_post", "0-2, 5", "64", "yes", ""],
    ]


def test_the_list_for_programs(surveyed):
    result = CliRunner().invoke(app, ["sites", "some/model", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output)[4] == {
        "hook": "resid_mid", "layer": 0, "supported": False, "reason": "attention and MLP run in parallel", "shape": [],
        "read_only": "",
    }  # fmt: skip
    listed = [entry | {"shape": tuple(entry["shape"])} for entry in json.loads(result.output)]
    assert [SiteVerdict(**entry) for entry in listed] == VERDICTS


@pytest.mark.parametrize("own", [{}, {"VLLM_LOGGING_LEVEL": "WARNING"}, {"VLLM_LOGGING_STREAM": "ext://sys.stdout"}])
def test_vllm_logs_apart_from_what_is_printed(surveyed, monkeypatch, own):
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert CliRunner().invoke(app, ["sites", "some/model", "--json"]).exit_code == 0
    set_to = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"} | own
    assert {name: os.environ[name] for name in set_to} == set_to


def test_a_model_that_is_not_served_says_why(surveyed):
    result = CliRunner().invoke(app, ["sites", "none"])
    assert result.exit_code == 1
    assert "model: two lists of blocks" in result.stderr


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that describes two models, one of them wrongly."""
    (tmp_path / "their_models.py").write_text(
        'GOOD = {"stack": "trunk.blocks", "points": {"attn_out": "mixer:out"}}\n'
        'BAD = {"points": {"attn_out": "mixer"}}\n'
    )
    info = tmp_path / "their_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm_weir.models]\nGoodForCausalLM = their_models:GOOD\nBadForCausalLM = their_models:BAD\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("their_models", None)


def test_a_package_describes_its_models(package):
    description = description_of("GoodForCausalLM", None)
    assert (description.stack, description.points) == ("trunk.blocks", {"attn_out": "mixer:out"})
    assert description_of("OtherForCausalLM", None).points == {}
    with refused("vllm_weir.models:BadForCausalLM.points.attn_out", "is no place"):
        description_of("BadForCausalLM", None)


def test_the_setting_comes_before_the_package(package):
    assert description_of("GoodForCausalLM", {"stack": "here"}).stack == "here"
