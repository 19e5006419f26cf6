"""The scripts in bench/ can be imported, and the one that needs neither a GPU nor a model runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(path.stem for path in (ROOT / "bench").glob("*.py"))


def run(*arguments: str) -> str:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "bench")])
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_script_can_be_imported() -> None:
    """In one process, which imports torch once."""
    assert len(SCRIPTS) > 10
    run("-c", "\n".join(f"import {name}" for name in SCRIPTS))


@pytest.mark.parametrize("rate", ["0", "1e9"])
def test_the_host_side_of_extraction(tmp_path: Path, rate: str) -> None:
    out = tmp_path / "found.json"
    run(str(ROOT / "bench" / "extract_host.py"), "--texts", "4", "--blocks", "1", "--repeats", "1", "--rate", rate,
        "--folder", str(tmp_path), "--out", str(out))  # fmt: skip
    found = json.loads(out.read_text())["now"]
    assert found["blocks: 1, flat out"]["MB/s"] > 0 and ("blocks: 1, paced" in found) == (rate != "0")
