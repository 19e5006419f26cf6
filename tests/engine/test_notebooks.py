"""Every notebook runs from its first cell to its last, prints what it shows, and draws its pictures."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_docs import alike
from tests.support.notebook import read
from tests.support.zygote import zygote

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
ENV = os.environ | {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 3


@pytest.mark.engine
@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path: Path, tmp_path: Path) -> None:
    where = tmp_path / "notebooks"
    for folder in (where, tmp_path / "images"):
        folder.mkdir()
    copy = shutil.copy(path, where)
    done: Any = zygote().run(["-m", "tests.support.notebook", str(copy)], ENV, where, tmp_path, 800)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    printed = json.loads(done.stdout.rstrip().splitlines()[-1])
    cells = read(path)
    for said, cell in zip(printed, (cell for cell in cells if cell.kind == "code"), strict=True):
        assert alike(said, cell.printed), f"{cell.text}\nprinted\n{said}\nand shows\n{cell.printed}"
    shown = re.findall(r"\]\(\.\./(images/[\w.]+)\)", "".join(cell.text for cell in cells))
    assert shown
    for name in shown:
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG", name
