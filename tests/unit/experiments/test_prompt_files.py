"""Files of prompts: a line ends where a newline is, and nowhere else."""

from __future__ import annotations

import json

from tests.unit.refusals import refused
from vllm_weir.experiments.fit.files import read_prompts

TEXTS = ["one\u2028two", "three\x0cfour\x85five", "six\x1cseven"]


def test_a_text_a_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(("\r\n".join([TEXTS[0], "", *TEXTS[1:]]) + "\n").encode())
    assert read_prompts(tmp_path / "a.txt", "positive") == TEXTS


def test_json_a_line(tmp_path):
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_prompts(tmp_path / "a.jsonl", "positive") == TEXTS
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]), encoding="utf-8")
    with refused("positive", "line 4 is not JSON"):
        read_prompts(tmp_path / "a.jsonl", "positive")
