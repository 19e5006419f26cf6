"""Every kind of source: the same records whatever the format, read from anywhere, and what is no record is named."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import random
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.extracting import texts, write_jsonl
from vllm_weir.errors import WeirError
from vllm_weir.extraction.source import open_source
from vllm_weir.util.text_lines import text_lines

VALUES = texts(700)
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}]


def as_parquet(path: Path, values: list[Any], column: str = "text") -> Path:
    pq.write_table(pa.table({"n": list(range(len(values))), column: values}), path, row_group_size=150)
    return path


def as_saved(path: Path, values: list[Any], column: str = "text") -> Path:
    """What `Dataset.save_to_disk` leaves: Arrow streams that state.json lists."""
    path.mkdir(parents=True)
    names = []
    for i, begin in enumerate(range(0, len(values), 300)):
        names.append(f"data-{i:05d}-of-00003.arrow")
        table = pa.table({column: values[begin : begin + 300]})
        with pa.OSFile(str(path / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=64)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    (path / "dataset_info.json").write_text("{}")
    return path


def make(kind: str, folder: Path) -> Path:
    if kind == "jsonl":
        return write_jsonl(folder / "t.jsonl", VALUES)
    if kind == "jsonl.gz":
        path = folder / "t.jsonl.gz"
        path.write_bytes(gzip.compress(write_jsonl(folder / "plain.jsonl", VALUES).read_bytes()))
        return path
    if kind == "folder":
        (folder / "many").mkdir()
        for i in range(3):
            write_jsonl(folder / "many" / f"part-{i}.jsonl", VALUES[i * 300 : (i + 1) * 300])
        return folder / "many"
    if kind == "txt":
        (folder / "t.txt").write_text("\r\n".join(VALUES))  # no end of line at the end
        return folder / "t.txt"
    if kind == "parquet":
        return as_parquet(folder / "t.parquet", VALUES)
    if kind == "dict":
        as_saved(folder / "dict" / "train", VALUES)
        (folder / "dict" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
        return folder / "dict"
    return as_saved(folder / "saved", VALUES)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "folder", "txt", "parquet", "saved", "dict"])
def test_every_format_gives_the_same_records(kind: str, tmp_path: Path) -> None:
    path = make(kind, tmp_path)
    source = pickle.loads(pickle.dumps(open_source(path)))  # noqa: S301  (as it goes to a worker)
    assert len(source) == 700
    assert [r.value for r in source.read(0, 700)] == VALUES
    rng = random.Random(1)
    for _ in range(20):
        start = rng.randrange(700)
        stop = rng.randint(start, 720)
        some = list(source.read(start, stop))
        assert [r.index for r in some] == list(range(start, min(stop, 700)))
        assert [r.value for r in some] == VALUES[start:stop]
    assert open_source(path).digest == source.digest
    url = f"memory://{uuid.uuid4()}/{path.name}"
    fsspec.filesystem("memory").put(str(path), url, recursive=True)
    remote = open_source(url)
    assert remote.digest == source.digest and [r.value for r in remote.read(250, 470)] == VALUES[250:470]


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    first = open_source(write_jsonl(tmp_path / "a.jsonl", VALUES)).digest
    (tmp_path / "moved").mkdir()
    assert open_source(write_jsonl(tmp_path / "moved" / "a.jsonl", VALUES)).digest == first
    other = [*VALUES[:500], VALUES[500] + "!", *VALUES[501:]]
    assert open_source(write_jsonl(tmp_path / "a.jsonl", other)).digest != first


def test_lines_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (1, 7, 64):
        monkeypatch.setattr("vllm_weir.extraction.source.BLOCK", block)
        source = open_source(write_jsonl(tmp_path / "t.jsonl", VALUES[:300]))
        assert len(source) == 300 and [r.value for r in source.read(255, 300)] == VALUES[255:300]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got a list"),
        ('{"body": "x"}', "no column 'text'; it has body"),
        ('{"text": "  "}', "the text is empty"),
        ('{"text": null}', "holds nothing, not a text"),
        ('{"text": 5}', "holds a int, not a text"),
        ('{"text": []}', "holds an empty list"),
        ('{"messages": [{"role": "user"}]}', "a chat is a list of messages with role and content"),
    ],
)
def test_what_is_no_record_is_named(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n{{"text": "good"}}\n')
    good, bad, last = open_source(path).read(0, 3)
    assert (good.value, last.value, bad.value) == ("good", "good", None)
    assert bad.reason.startswith(f"{path}, line 2: ") and reason in bad.reason


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"one\n\n\xff\xfe\n\xc2\xa0\nfive\n")
    records = list(open_source(tmp_path / "t.txt").read(0, 9))
    assert [r.value for r in records] == ["one", None, None, "five"]
    assert "line 3: not UTF-8" in records[1].reason and "line 4: the text is empty" in records[2].reason


@pytest.mark.parametrize("name", ["t.txt", "t.txt.gz", "t.jsonl"])
def test_a_byte_order_mark_in_front_is_no_text(name: str, tmp_path: Path) -> None:
    lines = ["one", "\ufefftwo"]  # within a file it is a character like others
    if name.endswith("jsonl"):
        data = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode("utf-8-sig")
    else:
        data = "".join(line + "\n" for line in lines).encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    source = open_source(tmp_path / name)
    assert [record.value for record in source.read(0, 2)] == lines
    assert [record.value for record in source.read(1, 2)] == lines[1:]


LINES = st.lists(st.sampled_from(["", " ", "\t\r", "\ufeff", "a", "b\u2028", " c "]), max_size=9)


@given(
    lines=LINES, end=st.sampled_from(["\n", "\r\n"]), ends=st.booleans(), mark=st.booleans(), block=st.integers(1, 9)
)
@pytest.mark.parametrize("name", ["t.txt", "t.txt.gz"])
def test_blank_lines_marks_and_ends_of_lines(
    name: str, tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, ends: bool, mark: bool, block: int
) -> None:
    path = tmp_path_factory.mktemp("t") / name
    data = (end.join(lines) + end * ends).encode("utf-8-sig" if mark else "utf-8")
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    kept = [(i, line) for i, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1) if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_weir.extraction.source.BLOCK", block)
        patch.setattr("vllm_weir.extraction.readers.MARK_LINES", 2)
        source = open_source(path) if kept or lines else None
        assert source is None or len(source) == len(kept)
        for start in range(len(kept)):
            found = list(source.read(start, len(kept)))
            assert [one.index for one in found] == list(range(start, len(kept)))
            assert [one.value for one in found] == [line.removesuffix(b"\r").decode() for _, line in kept[start:]]
        assert [(n, text) for n, text in text_lines(io.BytesIO(data))] == [(n, t.removesuffix(b"\r")) for n, t in kept]


def test_a_source_without_its_blank_lines_is_another_one(tmp_path: Path) -> None:
    """Runs of earlier versions gave blank lines numbers."""
    path = tmp_path / "t.jsonl"
    for blank in ("", "\n"):
        path.write_text(f'{{"text": "a"}}\n{blank}{{"text": "b"}}\n')
        plain = hashlib.blake2b(path.read_bytes(), digest_size=16)
        plain.update(json.dumps(["t.jsonl", path.stat().st_size]).encode())
        assert (open_source(path).digest == plain.hexdigest()) is not bool(blank)


def test_chats(tmp_path: Path) -> None:
    for path in (
        write_jsonl(tmp_path / "t.jsonl", [CHAT], "messages"),
        as_parquet(tmp_path / "t.parquet", [CHAT], "messages"),
        as_saved(tmp_path / "saved", [CHAT], "messages"),
    ):
        assert [r.value for r in open_source(path).read(0, 1)] == [CHAT]
    path = write_jsonl(tmp_path / "other.jsonl", [CHAT], "talk")
    assert [r.value for r in open_source(path, "talk").read(0, 1)] == [CHAT]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(WeirError, match=r"nowhere.* does not exist; .*hf://datasets/OWNER/NAME/FILE"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeirError, match="holds no texts"):
        open_source(tmp_path / "empty")
    write_jsonl(tmp_path / "a.jsonl", VALUES[:2])
    as_parquet(tmp_path / "b.parquet", VALUES[:2])
    with pytest.raises(WeirError, match=r"several kinds \(jsonl, parquet\)"):
        open_source(tmp_path)
    with pytest.raises(WeirError, match=r"column: there is no column 'body'; there are n, text"):
        open_source(tmp_path / "b.parquet", "body")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(WeirError, match=r"cannot read .*bad.parquet"):
        open_source(tmp_path / "bad.parquet")
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 1000)[:-6])
    with pytest.raises(WeirError, match=r"bad.jsonl.gz.*too early"):
        open_source(tmp_path / "bad.jsonl.gz")
    as_saved(tmp_path / "dict" / "train", VALUES)
    as_saved(tmp_path / "dict" / "test", VALUES)
    (tmp_path / "dict" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(WeirError, match=r"split: .* has the splits train, test; name one"):
        open_source(tmp_path / "dict")
    (tmp_path / "dict" / "train" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(WeirError, match=r"data-00001-of-00003\.arrow: is missing, although state.json names it"):
        open_source(tmp_path / "dict", split="train")


def test_half_a_surrogate_pair_costs_its_own_record_alone() -> None:
    from transformers import AutoTokenizer

    from vllm_weir.extraction.engine import VllmEngine

    engine = object.__new__(VllmEngine)
    engine.tokenizer = AutoTokenizer.from_pretrained(weir.demo_model())
    half = "a " + chr(0xD800)
    first, second, third, fourth = engine.encode(["Tom", half, [{"role": "user", "content": half}], "Tom"])
    assert first == fourth and isinstance(first, list)
    for refused in (second, third):
        assert isinstance(refused, WeirError) and "half of a surrogate pair" in refused.message
