"""What a dataset says of rows that are not simply the rows of all positions, and what readers do about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.support.extracting import run_fake, write_jsonl
from tests.unit.refusals import refused
from vllm_weir import Capture
from vllm_weir.cli.main import app
from vllm_weir.consumers import EngineInfo, Finished
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.capture_groups import make_groups
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.postprocesses import postprocesses_of
from vllm_weir.frontend.sinks.manager import SinkManager
from vllm_weir.results.activations import Activations
from vllm_weir.schema.capture import describe_rows, entries_of, in_words, is_about
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.sinks import parse_sinks
from vllm_weir.storage import LAYOUTS, Batch, load, open_writer
from vllm_weir.storage.conversion import convert

SITE = ("resid_post", 3)


@pytest.mark.parametrize(
    ("capture", "directions", "entry"),
    [
        ({}, 0, None),
        ({"positions": "prompt"}, 0, None),
        ({"positions": "prompt", "reduce": "max"}, 0, {"layers": "all", "reduce": "max", "positions": "prompt"}),
        ({"layers": [3, 1], "reduce": "mean"}, 0, {"layers": [1, 3], "reduce": "mean"}),
        ({"layers": 3, "before": True}, 0, {"layers": [3], "before": True}),
        ({"layers": 3, "positions": "-2:"}, 0, {"layers": [3], "positions": "-2:"}),
        ({"layers": 3, "positions": -1, "project": torch.ones(2, 8)}, 2,
         {"layers": [3], "project": 2, "positions": [-1]}),
        ({"layers": 3, "positions": range(5000)}, 0, {"layers": [3], "positions": "5000 listed ones"}),
        ({"layers": 3, "positions": {"token_ids": list(range(70))}}, 0, {"layers": [3], "positions": "70 token ids"}),
        ({"layers": 3, "positions": {"not_token_ids": list(range(70))}}, 0,
         {"layers": [3], "positions": "all but 70 token ids"}),
        ({"layers": 3, "positions": {"not_token_ids": [4, 2]}}, 0,
         {"layers": [3], "positions": {"not_token_ids": [2, 4]}}),
        ({"layers": 3, "positions": {"special": False}}, 0, {"layers": [3], "positions": {"special": False}}),
    ],
)  # fmt: skip
def test_what_is_not_ordinary_is_told(capture: dict[str, Any], directions: int, entry: dict[str, Any] | None) -> None:
    found = describe_rows(Capture(**capture), directions)
    assert found == (None if entry is None else {"hook": "resid_post"} | entry)
    if found is not None:
        assert entries_of(json.loads(json.dumps({"capture": [found]}))) == [found]
        assert is_about(found, Site(*SITE)) and not is_about(found, Site("resid_pre", 3))
        assert in_words(found)


def test_metadata_of_another_form_are_the_writers_own() -> None:
    for own in ("all", {"resid_post": 3}, [1], [{"hook": "resid_post"}], [{"hook": 3, "layers": "all"}], None):
        assert entries_of({"capture": own}) == []


class Looked:
    """Stands in for a view."""

    rows, size = 1, 100

    def __init__(self, part: Any, acts: Activations) -> None:
        self.part, self.acts = part, acts

    def activations(self) -> Activations:
        return self.acts

    def missing(self, acts: Activations) -> dict[Site, int]:
        return {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sinks_rows_say_what_they_are(layout: str, tmp_path: Path) -> None:
    manager = SinkManager(
        parse_sinks({"x": {"filesystem": {"url": str(tmp_path), "layout": layout}}}), 1 << 20, 60.0, 1.0
    )
    manager.open(EngineInfo("m", 4, 8, "float32"))
    asked: dict[str, dict[str, Any]] = {
        "plain": {}, "mean": {"reduce": "mean", "positions": "-2:"}, "scores": {"project": torch.ones(2, 8)},
    }  # fmt: skip
    for name, fields in asked.items():
        captures = [Capture(*SITE, sink="x", **fields)]
        engine = EngineCapabilities({}, 4, 8, "float32", 64)
        ways = postprocesses_of(captures, engine, lambda *_: np.zeros(8))
        part = make_groups(captures, engine, ways, True, lambda *_: None)[1]
        site = Site(*SITE)
        width, at = (2 if name == "scores" else 8), torch.arange(1 if name == "mean" else 4)
        acts = Activations({site: torch.ones(len(at), width)}, {site: at}, {site: at})
        tickets = manager.deliver(
            name, [Looked(part, acts)], Finished(name, 0, name, 4, 1, "stop"),  # type: ignore[list-item]
            lambda: None, False,
        )  # fmt: skip
        tickets[0].wait(60)
    manager.close()
    found = load(tmp_path)
    assert "capture" not in found.metadata("plain")
    assert found.metadata("mean")["capture"] == [
        {"hook": "resid_post", "layers": [3], "reduce": "mean", "positions": "-2:"}
    ]
    assert found.metadata("scores")["capture"] == [{"hook": "resid_post", "layers": [3], "project": 2}]
    assert len(found.rows(SITE, ["plain"], positions="last_prompt")) == 1
    assert len(found.rows(SITE, ["scores"], positions="last_prompt")) == 1
    for positions in ("last_prompt", "-2:", [0], 0, {"token_ids": [1]}):
        with refused("positions", r"row of resid_post\[3\] of request 'mean' is the mean over .*'-2:'"):
            found.rows(SITE, ["plain", "mean"], positions=positions)
    assert len(found.rows(SITE, ["plain", "mean"])) == 5
    width = r"rows of resid_post\[3\] differ in width between requests: 2 \('scores'\), 8 \('.*' and 1 more\)"
    with pytest.raises(WeirError, match=width):
        found.rows(SITE)
    out = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert "note: resid_post[3]: one row a request, reduced (mean) over positions '-2:' (1 request)" in out
    assert "note: resid_post[3]: dot products with 2 directions instead of rows (1 request)" in out


def test_what_was_extracted_says_so_and_a_conversion_keeps_it(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", ["Tom went", "Anna took a boat"])
    run_fake(source, str(tmp_path / "plain"))
    assert all("capture" not in load(tmp_path / "plain").metadata(r) for r in load(tmp_path / "plain"))
    run_fake(source, str(tmp_path / "out"), reduce="max", layers=[0, 1])
    convert(tmp_path / "out", tmp_path / "again", "packed")
    for name in ("out", "again"):
        found = load(tmp_path / name)
        told = [{"hook": "resid_post", "layers": [0, 1], "reduce": "max", "positions": "prompt"}]
        assert [found.metadata(request)["capture"] for request in found] == [told, told]
        with pytest.raises(WeirError, match="is the max over positions 'prompt'"):
            found.rows(("resid_post", 1), positions="last_prompt")


def test_the_last_row_is_the_row_of_its_position(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write(Batch("a", *SITE, [7], [1], torch.ones(1, 4)))
        told = describe_rows(Capture(*SITE, positions="prompt", reduce="last"))
        writer.finish_request("a", {"prompt_tokens": 8, "capture": [told]})
    assert load(tmp_path).rows(SITE, positions="last_prompt").positions.tolist() == [7]


def test_many_kinds_of_rows_are_counted(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        for i in range(12):
            writer.write(Batch(f"r{i}", *SITE, [i], [1], torch.ones(1, 4)))
            writer.finish_request(f"r{i}", {"capture": [describe_rows(Capture(*SITE, positions=i))]})
    out = CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).output
    notes = json.loads(out)["notes"]
    assert len(notes) == 9 and notes[-1] == "and 4 more kinds of rows"
