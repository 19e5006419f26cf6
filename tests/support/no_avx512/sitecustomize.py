"""Make an x86 processor look like one without AVX-512, for this process and all that it starts.

    PYTHONPATH=$PWD/tests/support/no_avx512 make test

vLLM ships its CPU kernels in several builds and asks `torch.cpu` which of them the processor can run; no setting of its
own chooses one. PyTorch, oneDNN and MKL choose their kernels by environment variables.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder

LACKING = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported")
LACKING += ("_is_amx_tile_supported", "_is_amx_fp16_supported")
for variable in ("ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=AVX2", "MKL_ENABLE_INSTRUCTIONS=AVX2"):
    os.environ.setdefault(*variable.split("="))


class _OnImport(MetaPathFinder):
    """Change `torch.cpu` once it has been imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            for name in LACKING:
                setattr(module, name, lambda: False)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _OnImport())
