"""A run: what is refused, skipped, cut, gone on with; the engine is a made-up one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support.extracting import D, FakeAheadEngine, FakeEngine, differences, run_fake, texts, write_jsonl
from vllm_weir.cli.main import app
from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import PIECES_AHEAD, VllmEngine
from vllm_weir.extraction.run import extract
from vllm_weir.extraction.run_spec import RunSpec
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import Site
from vllm_weir.storage import LAYOUTS, Batch, load, open_writer
from vllm_weir.storage.cli import parse_positions

VALUES = texts(50)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "t.jsonl", VALUES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_the_records(layout: str, source: Path, tmp_path: Path) -> None:
    summary = run_fake(source, str(tmp_path / "out"), layout=layout)
    ds = load(tmp_path / "out")
    words = [len(value.split()) for value in VALUES]
    assert sorted(ds.requests) == sorted(set(ds.requests)) and len(ds) == 50
    for i, request in enumerate(sorted(ds.requests)):
        assert request.startswith(f"{i:010d}-") and ds.metadata(request)["record"] == i
        assert ds.metadata(request)["prompt_tokens"] == words[i]
        assert ds[request].positions.tolist() == list(range(words[i]))
        expected = FakeEngine(RunSpec("fake")).read([ds[request].token_ids.tolist()])[0].rows
        for batch in expected:
            assert torch.equal(ds[request][batch.hook, batch.layer], batch.rows)
    assert (summary.records, summary.requests, summary.held, summary.skipped) == (50, 50, 0, {})
    assert summary.tokens == sum(words) and summary.rows == 2 * sum(words) == ds.count()
    assert summary.bytes == ds.count() * 64 and not summary.interrupted


def never(wanted: object) -> Any:
    """In place of an engine that must not be started."""
    raise AssertionError("an engine was started")


def same_as_whole(out: Path, source: Path, tmp_path: Path) -> bool:
    """Whether a dataset equals that of a run that nothing stopped, whose engine reads a batch at a time."""
    run_fake(source, str(tmp_path / "whole"))
    return differences(load(out), load(tmp_path / "whole")) == []


def test_a_capture_says_what_its_fields_say(source: Path, tmp_path: Path) -> None:
    """A run that one began, the other goes on with."""
    run_fake(source, str(tmp_path / "out"), limit=9, layers=[0, 1], positions="prompt", dtype="float32")
    wanted = Capture(layers=[0, 1], positions="prompt", dtype="float32")
    assert run_fake(source, str(tmp_path / "out"), capture=wanted).held == 9
    for field, given in [
        ("layers", {"capture": wanted, "layers": [0]}),
        ("positions", {"capture": wanted, "positions": "prompt"}),
        ("capture", {"capture": {"layers": [0]}}),
        ("capture.before", {"capture": Capture(before=True)}),
        ("capture.project", {"capture": Capture(project=[1.0, 0.0])}),
        ("capture.sink", {"capture": Capture(sink="logging")}),
    ]:
        with pytest.raises(WeirError) as e:
            run_fake(source, str(tmp_path / "refused"), **given)
        assert e.value.field == field
    assert not (tmp_path / "refused").exists()


def test_limit_then_all(source: Path, tmp_path: Path) -> None:
    first = run_fake(source, str(tmp_path / "out"), limit=11)
    assert (first.records, first.requests, first.held) == (11, 11, 0)
    rest = run_fake(source, str(tmp_path / "out"), batch=7)
    assert (rest.records, rest.requests, rest.held) == (50, 39, 11)
    assert same_as_whole(tmp_path / "out", source, tmp_path)
    again = run_fake(source, str(tmp_path / "out"), start_engine=never)
    assert (again.requests, again.held) == (0, 50)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", {}),
        ("layers", {"layers": [1]}),
        ("positions", {"positions": "last_prompt"}),
        ("max_tokens", {"max_tokens": 2}),
        ("max_length", {"max_length": 9}),
        ("compress", {"compress": "full8"}),
        ("dtype", {"dtype": "float16"}),
        ("engine", {"engine": {"dtype": "float32"}}),
        ("source", {"column": "text"}),
    ],
)
def test_another_run_into_the_same_place_is_refused(
    field: str, change: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    run_fake(source, str(tmp_path / "out"), layers=[0, 1], limit=9)
    before = sorted(p.name for p in (tmp_path / "out").iterdir())
    if field == "source":
        write_jsonl(source, [*VALUES[:-1], "another text"])
    with pytest.raises(WeirError, match=f"^{field}: .*was begun with"):
        extract(
            source, "other" if field == "model" else "fake", tmp_path / "out", start_engine=FakeEngine,
            **{"layers": [0, 1]} | change,
        )  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == before


def test_an_engine_with_other_weights_is_refused(source: Path, tmp_path: Path) -> None:
    class Trained(FakeEngine):
        weights = "those of the next step"

    out = str(tmp_path / "out")
    extract(source, "fake", out, limit=9, layers=[0, 1], start_engine=FakeEngine)
    extract(source, "fake", out, limit=11, layers=[0, 1], start_engine=FakeEngine)
    with pytest.raises(WeirError, match=r"^model: .*was begun with other weights of \"fake\""):
        extract(source, "fake", out, layers=[0, 1], start_engine=Trained)
    run = tmp_path / "out" / "extract.json"
    described = json.loads(run.read_text())
    del described["loaded_weights"]  # as earlier versions wrote it
    run.write_text(json.dumps(described))
    assert extract(source, "fake", out, layers=[0, 1], start_engine=Trained).held == 11


AS_WRITTEN = {"cudagraph_capture_sizes": (1, 2), "lora_extra": {1: "a"}}


@pytest.mark.parametrize(
    ("first", "then"),
    [({"max_num_seqs": 4, "dtype": "float32"}, {"dtype": "float32"}), (AS_WRITTEN, AS_WRITTEN)],
    ids=["those that only decide how fast", "those that JSON has in another form"],
)
def test_options_of_an_engine_that_do_not_make_another_run(
    first: dict[str, Any], then: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    run_fake(source, str(tmp_path / "out"), limit=9, engine=first)
    assert run_fake(source, str(tmp_path / "out"), engine=then).held == 9


def test_a_dataset_of_something_else_is_refused(source: Path, tmp_path: Path) -> None:
    with open_writer(tmp_path / "out") as writer:
        writer.write(Batch("a", "resid_post", 0, [0], [0], torch.zeros(1, 4)))
        writer.finish_request("a")
    with pytest.raises(WeirError, match=r"^out: .*`weir extract` did not write"):
        run_fake(source, str(tmp_path / "out"))


def bad(tmp_path: Path) -> Path:
    path = write_jsonl(tmp_path / "bad.jsonl", [*VALUES[:20], "", *VALUES[20:25], "a " * 65, 7, "unspeakable"])
    with path.open("a") as file:
        file.write("{not json\n")
    return path


def test_a_bad_record_ends_the_run_and_what_was_done_is_kept(tmp_path: Path) -> None:
    with pytest.raises(WeirError, match=r"^record 20: .*bad.jsonl, line 21: the text is empty; .*--on-error skip"):
        run_fake(bad(tmp_path), str(tmp_path / "out"))
    assert len(load(tmp_path / "out")) == 16  # two batches of 8
    mended = run_fake(bad(tmp_path), str(tmp_path / "out"), on_error="skip")
    assert (mended.requests, mended.held) == (9, 16)


def test_bad_records_are_listed(tmp_path: Path) -> None:
    source = bad(tmp_path)
    for _ in range(2):  # the second run finds all settled
        summary = run_fake(source, str(tmp_path / "out"), on_error="skip")
        assert sorted(summary.skipped) == [20, 26, 27, 28, 29]
        for index, why in {20: "empty", 26: "65 tokens, the engine takes 64", 27: "a int", 28: "template"}.items():
            assert why in summary.skipped[index]
        lines = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
        assert {entry["record"]: entry["reason"] for entry in lines} == summary.skipped
    assert (summary.requests, summary.held) == (0, 25)
    with pytest.raises(WeirError, match="record 20"):
        run_fake(source, str(tmp_path / "out"))


def test_a_text_too_short_for_the_positions_is_no_record_without_rows(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", ["a b c d e f", "a b c", "a b c d e"])
    with pytest.raises(
        WeirError, match=r"^record 1: none of the selected positions .* text of 3 tokens; .*--on-error skip"
    ):
        run_fake(source, str(tmp_path / "out"), positions="4:")
    summary = run_fake(source, str(tmp_path / "out"), positions="4:", on_error="skip")
    assert (summary.requests + summary.held, list(summary.skipped)) == (2, [1])
    cut = run_fake(source, str(tmp_path / "cut"), positions="4:", max_length=4, on_error="skip")
    assert (cut.requests, len(cut.skipped)) == (0, 3)
    longer = run_fake(source, str(tmp_path / "longer"), positions="4:", max_tokens=3)
    assert (longer.requests, longer.skipped) == (3, {})


def test_long_prompts_are_cut_if_asked(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", ["a " * 65, "b b b"])
    summary = run_fake(source, str(tmp_path / "out"), max_length=10)
    ds = load(tmp_path / "out")
    long, short = sorted(ds.requests)
    assert summary.truncated == 1 and ds.metadata(long)["truncated_from"] == 65
    assert len(ds[long].positions) == 10 and "truncated_from" not in ds.metadata(short)
    with pytest.raises(WeirError, match="max_length: the engine takes prompts of up to 64"):
        run_fake(source, str(tmp_path / "other"), max_length=65)


def test_rows_under_way_are_bounded(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_weir.extraction.record_loop.PIECE_BYTES", 50 * FakeEngine.row_bytes)
    seen: list[int] = []

    class Engine(FakeEngine):
        def read(self, prompts: Any) -> Any:
            seen.append(sum(map(len, prompts)))
            return super().read(prompts)

    run_fake(source, str(tmp_path / "out"), start_engine=Engine, batch=50)
    assert max(seen) <= 50 and len(seen) >= 10
    assert same_as_whole(tmp_path / "out", source, tmp_path)


@pytest.mark.parametrize(
    ("kind", "batch", "done"), [(FakeEngine, 8, 24), (FakeAheadEngine, 2 * PIECES_AHEAD, 2 * (3 + PIECES_AHEAD - 1))]
)
def test_ctrl_c_finishes_what_the_engine_has(
    kind: type[FakeEngine], batch: int, done: int, source: Path, tmp_path: Path
) -> None:
    class Engine(kind):  # type: ignore[misc, valid-type]
        def read(self, prompts: Any) -> Any:
            out = super().read(prompts)
            if self.reads == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return out

    handler, out = signal.getsignal(signal.SIGINT), tmp_path / "out"
    more = {"batch": batch, "flush_seconds": 60.0, "shard_bytes": 10**9}
    summary = run_fake(source, str(out), start_engine=Engine, **more)
    assert summary.interrupted and summary.requests == done == len(load(out))
    assert signal.getsignal(signal.SIGINT) is handler
    assert run_fake(source, str(out), start_engine=kind).held == done
    assert same_as_whole(out, source, tmp_path)


@pytest.mark.parametrize("cause", ["engine", "disk"])
@pytest.mark.parametrize(("kind", "batch", "reads"), [(FakeEngine, 8, 4), (FakeAheadEngine, 2 * PIECES_AHEAD, 8)])
def test_a_failure_keeps_what_was_finished_and_drops_what_the_engine_has(
    kind: type[FakeEngine], batch: int, reads: int, cause: str, source: Path, tmp_path: Path, full: list[bool]
) -> None:
    engines = []

    class Engine(kind):  # type: ignore[misc, valid-type]
        def read(self, prompts: Any) -> Any:
            engines.append(self)
            if self.reads == reads and cause == "engine":
                raise RuntimeError("the engine died")
            full[0] = self.reads == reads
            return super().read(prompts)

    out, piece = tmp_path / "out", 8 if kind is FakeEngine else 2
    error, message = (RuntimeError, "the engine died") if cause == "engine" else (WeirError, "No space left on device")
    with pytest.raises(error, match=message):
        run_fake(source, str(out), start_engine=Engine, batch=batch)
    full[0] = False
    if kind is FakeAheadEngine:
        assert engines[-1].unread == PIECES_AHEAD - 1
    held = len(load(out))
    assert held == reads * piece if cause == "engine" else (reads - 1) * piece <= held <= (reads + 1) * piece
    assert run_fake(source, str(out), start_engine=kind).held == held
    assert same_as_whole(out, source, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_no_texts_are_a_dataset_without_requests(layout: str, on_error: str, tmp_path: Path) -> None:
    source, out = tmp_path / "t.jsonl", str(tmp_path / "out")
    source.write_bytes(b"")
    for _ in range(2):
        summary = run_fake(source, out, layout=layout, on_error=on_error, start_engine=never)
        assert (summary.records, summary.requests, summary.held, summary.interrupted) == (0, 0, 0, False)
        assert len(load(out)) == load(out).count() == 0 and load(out).layout == layout
    assert CliRunner().invoke(app, ["inspect", out, "--verify"]).exit_code == 0
    write_jsonl(source, VALUES[:3])
    assert run_fake(source, out, layout=layout).requests == 3 == len(load(out))


def test_groups_do_not_depend_on_what_is_there(source: Path, tmp_path: Path) -> None:
    """A resumed run gives the engine the same batches, less what is there."""
    seen: list[list[int]] = []

    class Engine(FakeEngine):
        def read(self, prompts: Any) -> Any:
            seen.append([len(p) for p in prompts])
            return super().read(prompts)

    run_fake(source, str(tmp_path / "out"), limit=13)
    run_fake(source, str(tmp_path / "out"), start_engine=Engine)
    assert [len(batch) for batch in seen] == [3, 8, 8, 8, 8, 2]


def test_differences_sees_each_kind(source: Path, tmp_path: Path) -> None:
    run_fake(source, str(tmp_path / "a"))
    run_fake(source, str(tmp_path / "b"), limit=49)
    whole = load(tmp_path / "a")
    assert any("requests" in d for d in differences(load(tmp_path / "b"), whole))
    shard = max((tmp_path / "a").glob("shard-*"), key=lambda p: p.stat().st_size)
    raw = bytearray(shard.read_bytes())
    raw[5000] ^= 1
    (tmp_path / "c").mkdir()
    for file in (tmp_path / "a").iterdir():
        (tmp_path / "c" / file.name).write_bytes(raw if file == shard else file.read_bytes())
    other = load(tmp_path / "c")
    other.index.run_has_checksums[:] = False  # else the checksum tells before anyone compares
    assert any("bytes of rows" in d for d in differences(other, whole))


def test_arguments(source: Path, tmp_path: Path) -> None:
    for field, change in {
        "on_error": {"on_error": "ignore"}, "batch": {"batch": 0}, "limit": {"limit": 0}, "hook": {"hook": "nowhere"},
        "max_tokens": {"max_tokens": 0}, "engine": {"engine": {"model": "x"}}, "layout": {"layout": "heap"},
        "reduce": {"reduce": "median"}, "layers": {"layers": []}, "positions": {"positions": []},
        "positions: 'generated' selects no row": {"positions": "generated"},
        "positions: '5:3' selects no position": {"positions": "5:3"},
    }.items():  # fmt: skip
        with pytest.raises(WeirError, match=f"^{field}"):
            run_fake(source, str(tmp_path / "out"), **change)
        assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_engine_starts(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    with open_writer(tmp_path / "packed", "packed"):
        pass
    for out, change, message in (
        ("file", {}, "not a Weir dataset"),
        ("full", {}, "not a Weir dataset"),
        ("packed", {}, "cannot be continued as 'sharded'"),
        ("new", {"layout": "heap"}, "layout: unknown layout"),
        ("new", {"pack_bytes": 9}, "pack_bytes: unknown option"),
    ):
        with pytest.raises(WeirError, match=message):
            extract(source, "fake", tmp_path / out, start_engine=never, **change)
    assert not (tmp_path / "new").exists()


def test_command(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm_weir.extraction.run as job

    asked = []

    def fake(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return extract(*args, **kwargs | {"start_engine": FakeEngine})

    monkeypatch.setattr(job, "extract", fake)
    line = ["extract", str(bad(tmp_path)), "-m", "fake", "-o", str(tmp_path / "out"), "--layers", "0,1"]
    options = ["-e", "max-num-seqs=4", "-e", "enforce_eager=True", "-e", '{"dtype": "float32"}', "--batch", "8"]
    result = CliRunner().invoke(app, [*line, *options])
    assert result.exit_code == 1 and "record 20" in result.output
    result = CliRunner().invoke(app, [*line, *options, "--on-error", "skip", "--positions", "prompt"])
    assert result.exit_code == 0, result.output
    assert asked[1][1]["engine"] == {"max_num_seqs": 4, "enforce_eager": True, "dtype": "float32"}
    for text in ("9 of 30 records", "16 records were there already", "5 records were skipped", "record 26: 65 tokens"):
        assert text in result.output
    result = CliRunner().invoke(app, [*line, "-q", "--json", "--on-error", "skip", "--layers", "0"])
    assert result.exit_code == 1 and "layers: " in result.output
    assert parse_positions("-4:") == "-4:" and parse_positions('{"token_ids": [3]}') == {"token_ids": [3]}
    assert parse_positions("[0, -1]") == [0, -1]
    for option, value, told in (
        ("--layers", "", "layers: expected 'all' or ints with commas, got ''"),
        ("--heads", "1,x", "heads: expected ints with commas, got '1,x'"),
        ("--neurons", "all", "neurons: expected ints with commas, got 'all'"),
        ("--hook", "pattern", "hook: rows of pattern have a value for each key"),
        ("--positions", "[]", "positions: an empty list"),
        ("--positions", '{"special": 1}', "positions.special: true"),
    ):
        place = ["-o", str(tmp_path / "new"), option, value]
        result = CliRunner().invoke(app, [*line, *place])
        assert result.exit_code == 1 and told in result.output and not (tmp_path / "new").exists()
    special = ["-o", str(tmp_path / "new"), "--positions", '{"special": false}', "--on-error", "skip"]
    assert CliRunner().invoke(app, [*line, *special]).exit_code == 0
    assert json.loads((tmp_path / "new" / "extract.json").read_text())["positions"] == {"special": False}
    assert load(tmp_path / "new").metadata(load(tmp_path / "new").requests[0])["capture"][0]["positions"] == {
        "special": False
    }


def test_a_share_is_told_in_steps(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    run_fake(source, str(tmp_path / "out"), report=lambda step, total: seen.append((step.records, total)))
    assert sum(n for n, _ in seen) == 50 and {total for _, total in seen} == {50} and len(seen) >= 7


class HeadEngine(FakeEngine):
    """Rows of the heads that were asked for, [n, heads, 4]."""

    def read(self, prompts: Any) -> list[Any]:
        heads = self.wanted.capture.to_json()["heads"]
        found = super().read(prompts)
        for prompt in found:
            for batch in prompt.rows:
                batch.hook, batch.rows = "z", batch.rows.view(-1, D // 4, 4)[:, heads]
        return found


def test_some_heads(source: Path, tmp_path: Path) -> None:
    """The rows are [n, heads, d_head], which heads they are is kept, and other heads are another run."""
    job = [str(source), "-m", "fake", "-o", str(tmp_path / "out"), "--hook", "z", "--layers", "0,1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_weir.extraction.run.VllmEngine", HeadEngine)
        patch.setitem(extract.__wrapped__.__kwdefaults__, "start_engine", HeadEngine)
        result = CliRunner().invoke(app, ["extract", *job, "--heads", "3,0", "-q"])
        assert result.exit_code == 0, result.output
        other = CliRunner().invoke(app, ["extract", *job, "--heads", "1", "-q"])
        assert other.exit_code == 1 and "heads: " in other.output and "was begun with" in other.output
    dataset = load(tmp_path / "out")
    assert [tuple(site) for site in dataset.sites] == [("z", 0), ("z", 1)] and len(dataset) == 50
    run_fake(source, str(tmp_path / "whole"), layers=[0, 1])
    whole = load(tmp_path / "whole")
    for request in dataset.requests:
        expected = whole[request]["resid_post", 1].view(-1, D // 4, 4)[:, [3, 0]]
        assert torch.equal(dataset[request]["z", 1], expected)
    (note,) = dataset.metadata(dataset.requests[0])["capture"]
    assert note == {"hook": "z", "layers": [0, 1], "heads": [3, 0]}


@pytest.mark.parametrize(("hook", "dtype", "expected"), [
    ("resid_post", "bfloat16", 2 * 16 * 2), ("z", "bfloat16", (4 * 8 + 2 * 8) * 2), ("z", "float32", 48 * 4),
    ("expert_ids", "float32", 2 * 2 * 8),
])  # fmt: skip
def test_bytes_of_a_tokens_rows(hook: str, dtype: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the shapes of the points, which differ from layer to layer."""
    shapes = {Site("z", 0): (4, 8), Site("z", 1): (2, 8)} | {Site("expert_ids", k): (2,) for k in (0, 1)}
    sites = dict.fromkeys([*shapes, Site("resid_post", 0), Site("resid_post", 1)], "")
    facts = EngineCapabilities(sites, 2, 16, "bfloat16", 100, shapes)
    llm = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64), get_tokenizer=lambda: None)
    monkeypatch.setattr("vllm.LLM", lambda **_: llm)
    engine = SimpleNamespace(capabilities=facts, model=llm.model_config, weights=lambda: "some")
    monkeypatch.setattr("vllm_weir.api.engine", lambda _: engine)
    assert VllmEngine(RunSpec("m", Capture(hook, dtype=dtype))).row_bytes == expected
