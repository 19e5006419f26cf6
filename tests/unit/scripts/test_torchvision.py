"""What lets torchvision be imported where its operators do not load: a stand-in for it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parents[3] / "scripts" / "site"
DESCRIBES = """
import torch
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold): ...
"""


@pytest.mark.parametrize("has_ops", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_operators_are_declared_where_they_did_not_load(tmp_path, has_ops):
    package = tmp_path / "torchvision"
    package.mkdir()
    own = "import torch\nlib = torch.library.Library('torchvision', 'DEF')\n"
    own += "lib.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
    extension = (own if has_ops else "") + f"def _has_ops(): return {has_ops}\n"
    (package / "extension.py").write_text(extension)
    (package / "__init__.py").write_text(f"from torchvision import extension\n{DESCRIBES}")
    path = os.pathsep.join([str(tmp_path), str(SITE)])
    # The environment of these tests may have it in place.
    without = "import sys; sys.meta_path[:] = [m for m in sys.meta_path if type(m).__name__ != '_OnImport']; "
    within = f"{without}sys.modules.pop('torchvision_without_ops', None); import torchvision_without_ops; "
    within += "assert 'torch' not in sys.modules; "
    for first, expected in ((without, has_ops), (within, True)):
        done = subprocess.run(
            [sys.executable, "-c", f"{first}import torchvision"],
            env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode == 0) == expected, done.stderr
        assert expected or "operator torchvision::nms does not exist" in done.stderr
