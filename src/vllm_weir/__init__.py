"""Weir: read the activations of language models served by stock vLLM, at vLLM's own speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_weir.api import demo_model, params
from vllm_weir.errors import WeirError
from vllm_weir.spec import Capture, Site

if TYPE_CHECKING:
    from vllm_weir.drop_in import LLM, AsyncLLM
    from vllm_weir.frontend.activations import Activations, Receipt

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Activations",
    "AsyncLLM",
    "Capture",
    "Receipt",
    "Site",
    "WeirError",
    "__version__",
    "demo_model",
    "params",
]

_LAZY = {
    "LLM": "vllm_weir.drop_in",
    "AsyncLLM": "vllm_weir.drop_in",
    "Activations": "vllm_weir.frontend.activations",
    "Receipt": "vllm_weir.frontend.activations",
}


def __getattr__(name: str) -> Any:
    # vLLM loads its plugins in every process; what needs torch or vLLM is imported only when it is used.
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
