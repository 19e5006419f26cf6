"""Files of prompts: a line ends where a newline is, and nowhere else."""

from __future__ import annotations

import json

import pytest

from tests.unit.refusals import refused
from vllm_weir.experiments.prompts import read_prompts

TEXTS = ["one\u2028two", "three\x0cfour\x85five", "six\x1cseven"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_with_and_without_a_byte_order_mark(tmp_path, encoding, end):
    """One that stayed would be the first token of a prompt."""
    for name, lines in (("a.txt", TEXTS), ("a.jsonl", [json.dumps(text, ensure_ascii=False) for text in TEXTS])):
        (tmp_path / name).write_bytes((end.join(["", lines[0], " ", *lines[1:]]) + end).encode(encoding))
        assert read_prompts(tmp_path / name, "positive") == TEXTS


def test_what_is_not_utf_8(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\ntwo".encode("utf-16"))
    with refused("positive", "line 1 is not UTF-8: invalid start byte at its byte 0"):
        read_prompts(tmp_path / "a.txt", "positive")
    with refused("positive", "cannot read .*nowhere"):
        read_prompts(tmp_path / "nowhere", "positive")


def test_json_a_line(tmp_path):
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_prompts(tmp_path / "a.jsonl", "positive") == TEXTS
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]), encoding="utf-8")
    with refused("positive", "line 4 is not JSON"):
        read_prompts(tmp_path / "a.jsonl", "positive")
