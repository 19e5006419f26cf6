"""Make an x86 processor look like a lesser one, for this process and all that it starts.

    make test PROCESSOR=avx2        # or avx512, avx512_bf16

vLLM ships its CPU kernels in several builds and asks `torch.cpu` which of them the processor can run; no setting of its
own chooses one. PyTorch, oneDNN and MKL choose their kernels by environment variables.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from typing import NamedTuple


class Kind(NamedTuple):
    """A processor: PyTorch's, oneDNN's and MKL's names for it, and what `torch.cpu` says that it has not."""

    aten: str
    onednn: str
    mkl: str
    lacking: tuple[str, ...]


AMX = ("_is_amx_tile_supported", "_is_amx_fp16_supported")
BF16 = ("_is_avx512_bf16_supported", "_is_vnni_supported")
KINDS = {
    "avx2": Kind("avx2", "AVX2", "AVX2", (*AMX, *BF16, "_is_avx512_supported")),
    "avx512": Kind("avx512", "AVX512_CORE", "AVX512", (*AMX, *BF16)),
    "avx512_bf16": Kind("avx512", "AVX512_CORE_BF16", "AVX512", AMX),
}
KIND = KINDS[os.environ.setdefault("WEIR_TEST_PROCESSOR", "avx2")]
for variable, value in (
    ("ATEN_CPU_CAPABILITY", KIND.aten),
    ("ONEDNN_MAX_CPU_ISA", KIND.onednn),
    ("MKL_ENABLE_INSTRUCTIONS", KIND.mkl),
):
    os.environ.setdefault(variable, value)


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
            for name in KIND.lacking:
                setattr(module, name, lambda: False)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _OnImport())
