"""Let torchvision be imported where its compiled operators do not load.

PyPI has CUDA builds of torchvision only, whose operators do not load beside a torch for CPUs. Without them its import
ends at two operators whose shapes it describes and that nobody has declared. Declared, they let all of it be imported
that is written in Python, which is what image processors use; calling an operator raises as before.

`scripts/setup_env.py` puts this file into the environment, with a ``.pth`` file that imports it when Python starts, so
it holds in every process. It imports nothing until torchvision is.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _OnImport(MetaPathFinder):
    """Declare the operators once torchvision has tried to load its own."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "torchvision.extension":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            if not module._has_ops():
                declare(module)

        spec.loader.exec_module = exec_module
        return spec


def declare(owner):
    """Declare what is missing; `owner` keeps the declarations alive."""
    import torch

    owner.declared = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        owner.declared.define(schema)


sys.meta_path.insert(0, _OnImport())
