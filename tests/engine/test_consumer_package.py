"""The example consumer as a user gets it: installed beside Weir, named in the settings, run, seen by the doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.example_package import run_with_package

CLOSE_OTHERS = True
USE = """
from vllm import LLM, SamplingParams
import vllm_weir as weir
if __name__ == "__main__":
    sinks = {"watch": {"norm_watch": {"path": "odd.jsonl", "times": 1.5}}}
    llm = LLM(weir.demo_model(), max_model_len=128, kv_cache_memory_bytes=64 << 20, enforce_eager=True,
              additional_config={"weir": {"sinks": sinks}})
    out = llm.generate("Tom went to the garden.", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))[0]
    print("receipt", out.receipt.sinks, out.receipt.files)
    from vllm_weir.cli.doctor import examine
    print("doctor", [r for r in examine(live=False).consumers if r["consumer"] == "norm_watch"])
"""


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_example_package(tmp_path: Path) -> None:
    printed = run_with_package("consumer_package", USE, tmp_path)
    assert "receipt {'watch': 'written'} ('odd.jsonl',)" in printed
    assert "'problem': ''" in printed.split("doctor")[1]
    (line,) = map(json.loads, (tmp_path / "odd.jsonl").read_text().splitlines())
    assert line["rows"] > 5 and all(set(odd) == {"site", "position", "norm"} for odd in line["odd"])
