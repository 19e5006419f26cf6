"""The example consumer as a user gets it: installed beside Weir, named in the settings, run, seen by the doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet"]
    source = ROOT / "examples" / "consumer_package"
    site = tmp_path / "site"
    # Built from a copy: what setuptools leaves behind stays out of the repository.
    copy = tmp_path / "source"
    subprocess.run(["cp", "-r", str(source), str(copy)], check=True)
    done = subprocess.run(
        [*install, "--target", str(site), str(copy)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    script = tmp_path / "use.py"
    script.write_text(USE)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert "receipt {'watch': 'written'} ('odd.jsonl',)" in done.stdout
    assert "'problem': ''" in done.stdout.split("doctor")[1]
    (line,) = map(json.loads, (tmp_path / "odd.jsonl").read_text().splitlines())
    assert line["rows"] > 5 and all(set(odd) == {"site", "position", "norm"} for odd in line["odd"])
