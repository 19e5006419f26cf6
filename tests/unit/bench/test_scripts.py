"""The scripts in bench/ can be imported, and the one that needs neither a GPU nor a model runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.zygote import zygote

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(path.stem for path in (ROOT / "bench").glob("*.py"))


def run(folder: Path, *arguments: str) -> None:
    done = zygote().run(arguments, os.environ, ROOT, folder)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_script_can_be_imported(tmp_path: Path) -> None:
    """In one process."""
    assert len(SCRIPTS) > 10
    script = tmp_path / "imports.py"
    lines = ["import sys", f"sys.path.insert(0, {str(ROOT / 'bench')!r})", *(f"import {name}" for name in SCRIPTS)]
    script.write_text("\n".join(lines))
    run(tmp_path, str(script))


@pytest.mark.parametrize("rate", ["0", "1e9"])
def test_the_host_side_of_extraction(tmp_path: Path, rate: str) -> None:
    out = tmp_path / "found.json"
    run(tmp_path, str(ROOT / "bench" / "extract_host.py"), "--texts", "4", "--blocks", "1", "--repeats", "1",
        "--rate", rate, "--folder", str(tmp_path), "--out", str(out))  # fmt: skip
    found = json.loads(out.read_text())["now"]
    assert found["blocks: 1, flat out"]["MB/s"] > 0 and ("blocks: 1, paced" in found) == (rate != "0")
