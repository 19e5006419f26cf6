"""Example packages of plugins, installed as users install them and used by a script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.zygote import ROOT


def run_with_packages(names: Sequence[str], script: str, folder: Path) -> str:
    """Install ``examples/NAME`` of each into a folder, run a script there that imports them; return what it prints."""
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet"]
    site, copies, file = folder / "site", folder / "source", folder / "use.py"
    copies.mkdir()
    # Built from copies: what setuptools leaves behind stays out of the repository.
    subprocess.run(["cp", "-r", *(str(ROOT / "examples" / name) for name in names), str(copies)], check=True)
    command = [*install, "--target", str(site), *map(str, copies.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    file.write_text(script)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(file)], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout
