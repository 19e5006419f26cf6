"""``weir convert`` and ``weir inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.unit.stored import SITES, D, check, length_of, make, rows_of, tokens_of
from vllm_weir.cli.main import app
from vllm_weir.errors import WeirError
from vllm_weir.storage import LAYOUTS, Batch, Writer, convert, inspect, load, open_writer

NAMES = ["a", "b/c", "d"]


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_into_every_other_to_the_bit(source: str, tmp_path: Path) -> None:
    make(tmp_path / "from", source, NAMES)
    for layout in LAYOUTS:
        assert convert(tmp_path / "from", tmp_path / layout, layout) == 3
        check(load(tmp_path / layout), NAMES)


def test_compressed_records_are_copied_and_not_compressed_again(tmp_path: Path) -> None:
    make(tmp_path / "from", "sharded", NAMES, compress="full8")
    for compress in (None, "full8"):
        target = tmp_path / f"to-{compress}"
        convert(tmp_path / "from", target, "packed", compress=compress)
        for name in NAMES:
            for site in SITES:
                assert torch.equal(load(target)[name][site], load(tmp_path / "from")[name][site])
    with pytest.raises(WeirError, match="compressed by full8 already"):
        convert(tmp_path / "from", tmp_path / "x", compress={"method": "rp8", "k": 32})
    convert(tmp_path / "from", tmp_path / "x", compress={"method": "rp8", "k": 32}, again=True)
    assert load(tmp_path / "x").header["method"] == "rp8"
    convert(tmp_path / "from", tmp_path / "plain", compress="none", again=True)
    assert load(tmp_path / "plain").header["dtype"] == "float32"


def test_a_conversion_that_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "from", "packed", NAMES)
    real = Writer.finish_request

    def stop(self: Writer, request: str, metadata: object = None) -> None:
        if request == "d":
            raise KeyboardInterrupt
        real(self, request, metadata)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "finish_request", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "from", tmp_path / "to")
    check(load(tmp_path / "to"), ["a", "b/c"])
    seen = []
    assert convert(tmp_path / "from", tmp_path / "to", progress=lambda *a: seen.append(a)) == 1
    check(load(tmp_path / "to"), NAMES)
    assert seen[-1] == (3 * sum(map(length_of, NAMES)),) * 2
    assert sorted(seen) == seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversion_goes_on_only_with_the_compression_it_was_begun_with(layout: str, tmp_path: Path) -> None:
    make(tmp_path / "from", "sharded", NAMES)
    rp8 = {"method": "rp8", "k": 32}
    assert convert(tmp_path / "from", tmp_path / "to", layout, compress=rp8) == 3
    assert convert(tmp_path / "from", tmp_path / "to", layout, compress=rp8) == 0
    for other in (None, "none", "full8", {"method": "rp8", "k": 32, "seed": 3}):
        with pytest.raises(WeirError, match=r"^compress: .*/to holds requests of this dataset already, compressed by"):
            convert(tmp_path / "from", tmp_path / "to", layout, compress=other)
    make(tmp_path / "more", "packed", ["e"])
    assert convert(tmp_path / "more", tmp_path / "to", layout) == 1  # other requests may be of another kind


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compress", [None, "full8"])
def test_two_requests_of_one_id_are_not_taken_for_one(layout: str, compress: str | None, tmp_path: Path) -> None:
    """What the target holds is passed over only if it is what would be put there."""
    make(tmp_path / "one", "sharded", NAMES)
    assert convert(tmp_path / "one", tmp_path / "to", layout, compress=compress) == 3
    longer = np.arange(length_of("a") + 2)
    tokens, other = tokens_of(len(longer)), rows_of("other", "resid_post", 0, len(longer))
    for k, (rows, ids) in enumerate([(longer, tokens), (longer[:-2], tokens[:-2] + 1), (longer[:-2], tokens[:-2])]):
        with open_writer(tmp_path / f"two{k}", "packed") as writer:
            for hook, layer in SITES:
                writer.write(Batch("a", hook, layer, rows, ids, other[: len(rows)]))
            writer.finish_request("a")
        if k < 2 or compress is None:  # the same prompt, compressed anew, is not compared
            with pytest.raises(WeirError, match=r"^target: .*to holds another request 'a': its rows are not those of"):
                convert(tmp_path / f"two{k}", tmp_path / "to", layout, compress=compress)
    with open_writer(tmp_path / "fewer", "packed") as writer:
        writer.write(Batch("a", *SITES[0], longer[:-2], tokens[:-2], rows_of("a", *SITES[0], len(longer) - 2)))
        writer.finish_request("a")
    with pytest.raises(WeirError, match="holds another request"):
        convert(tmp_path / "fewer", tmp_path / "to", layout, compress=compress)
    if compress is None:
        check(load(tmp_path / "to"), NAMES)
    assert convert(tmp_path / "one", tmp_path / "to", layout, compress=compress) == 0


def test_rows_that_were_stored_without_checksums_are_read_to_compare_them(tmp_path: Path) -> None:
    x = torch.randn(2, 6, D)
    for k in range(2):
        (tmp_path / f"native{k}").mkdir()
        file = tmp_path / f"native{k}" / "r.safetensors"
        save_file({"hidden_states": x[k][:, None].contiguous(), "token_ids": torch.arange(6)}, file)
    sources = [load(tmp_path / f"native{k}", layer_ids=[3]) for k in range(2)]
    assert [convert(sources[0], tmp_path / "to") for _ in range(2)] == [1, 0]
    with pytest.raises(WeirError, match="holds another request 'r'"):
        convert(sources[1], tmp_path / "to")


def test_what_a_foreign_format_should_say_comes_along(tmp_path: Path) -> None:
    """And what it has compressed with loss is compressed again only when asked."""
    codes = {"q": np.ones((4, 8), np.uint8), "scale": np.ones(4, np.float32), "zero": np.zeros(4, np.float32)}
    (tmp_path / "mi" / "req_1").mkdir(parents=True)
    np.savez_compressed(tmp_path / "mi" / "req_1" / "seq0_layer0_rank0.npz", **codes)
    dataset = load(tmp_path / "mi")
    with pytest.raises(WeirError, match="compressed by Vllm_mi_patch to 8 bits already"):
        convert(dataset, tmp_path / "lossy", compress="full8")
    assert convert(dataset, tmp_path / "again", compress="full8", again=True) == 1
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "mi"), str(tmp_path / "to"), "--compress", "none"])
    assert done.exit_code == 0 and all(f"Note: {note}" in done.stderr for note in dataset.index.notes)
    assert load(tmp_path / "to").metadata("req_1") == {
        "source": {"layout": "vllm_mi_patch", "notes": dataset.index.notes}
    }
    convert(tmp_path / "to", tmp_path / "on", "packed")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "on")]).output
    for note in dataset.index.notes:
        assert inspect(load(tmp_path / "to")).notes.count(note) == 1 and f"note: {note}" in shown


@pytest.mark.parametrize("own", ["a book", {"notes": "few"}, {"notes": [1]}, ["notes"]])
def test_a_source_of_another_form_is_the_writers_own(own: object, tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write(Batch("a", "resid_post", 0, [0], [0], torch.ones(1, 4)))
        writer.finish_request("a", {"source": own})
    assert inspect(load(tmp_path)).notes == []


def test_the_commands(tmp_path: Path) -> None:
    make(tmp_path / "from", "sharded", NAMES)
    run = CliRunner()
    arguments = ["convert", str(tmp_path / "from"), str(tmp_path / "to"), "--to", "packed", "--compress"]
    done = run.invoke(app, [*arguments, '{"method": "rp8", "k": 32, "seed": 3}'])
    assert done.exit_code == 0, done.output
    assert "3 requests copied" in done.output
    done = run.invoke(app, [*arguments, '{"method": "rp8", "k": 32, "seed": 3}', "--quiet"])
    assert "0 requests copied" in done.output and "3 were there already" in done.output
    shown = run.invoke(app, ["inspect", str(tmp_path / "to")])
    assert shown.exit_code == 0, shown.output
    for text in ("packed", "3 requests", "rp8, k 32, seed 3", "resid_post[3]", "times less"):
        assert text in shown.output, shown.output
    narrow = run.invoke(app, ["inspect", str(tmp_path / "to")], env={"COLUMNS": "40"})
    assert narrow.output == shown.output and "…" not in shown.output  # whole numbers, also in a pipe
    found = json.loads(run.invoke(app, ["inspect", str(tmp_path / "from"), "--json"]).output)
    assert found["rows"] == 3 * found["tokens"] == 3 * sum(map(length_of, NAMES))
    assert found["stored_bytes"] == found["raw_bytes"] == found["rows"] * D * 2
    assert [s["hook"] for s in found["sites"]] == ["resid_pre", "resid_post", "resid_post"]
    copy = ["convert", str(tmp_path / "from"), str(tmp_path / "y")]
    for arguments in (["inspect", str(tmp_path / "no")], [*copy, "--to", "zip"], [*copy, "--compress", "{"]):
        refused = run.invoke(app, arguments)
        assert refused.exit_code == 1 and "Error: " in refused.output, refused.output
