"""Weir: read and steer the activations of language models served by stock vLLM, at vLLM's own speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_weir.api import (
    clear_global,
    demo_model,
    flush,
    list_vectors,
    mark,
    params,
    register,
    set_global,
    sinks,
    sites,
    sites_async,
    unregister,
)
from vllm_weir.errors import WeirError
from vllm_weir.spec import Ablate, Add, Capture, Clamp, LowRank, Replace, Site
from vllm_weir.spec.lens import SteeringVector
from vllm_weir.spec.tiers import from_tiers
from vllm_weir.spec.verdict import SiteVerdict

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from vllm_weir.client.aio import AsyncClient
    from vllm_weir.client.errors import AuthError, NotFound, ServerError, TooLarge
    from vllm_weir.client.sync import Client
    from vllm_weir.drop_in import LLM, AsyncLLM
    from vllm_weir.extraction.job import extract
    from vllm_weir.frontend.activations import Activations, Receipt
    from vllm_weir.keep.dataset import ActivationDataset
    from vllm_weir.keep.open import load, open_writer

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Ablate",
    "ActivationDataset",
    "Activations",
    "Add",
    "AsyncClient",
    "AsyncLLM",
    "AuthError",
    "Capture",
    "Clamp",
    "Client",
    "LowRank",
    "NotFound",
    "Receipt",
    "Replace",
    "RequestOutput",
    "SamplingParams",
    "ServerError",
    "Site",
    "SiteVerdict",
    "SteeringVector",
    "TooLarge",
    "WeirError",
    "__version__",
    "clear_global",
    "demo_model",
    "extract",
    "flush",
    "from_tiers",
    "list",
    "list_vectors",
    "load",
    "mark",
    "open_writer",
    "params",
    "register",
    "set_global",
    "sinks",
    "sites",
    "sites_async",
    "unregister",
]

_LAZY = {
    "RequestOutput": "vllm",  # with the drop-in classes, so that a script can import all that it needs from here
    "SamplingParams": "vllm",
    "AsyncClient": "vllm_weir.client.aio",
    "AuthError": "vllm_weir.client.errors",
    "Client": "vllm_weir.client.sync",
    "NotFound": "vllm_weir.client.errors",
    "ServerError": "vllm_weir.client.errors",
    "TooLarge": "vllm_weir.client.errors",
    "LLM": "vllm_weir.drop_in",
    "AsyncLLM": "vllm_weir.drop_in",
    "Activations": "vllm_weir.frontend.activations",
    "Receipt": "vllm_weir.frontend.activations",
    "ActivationDataset": "vllm_weir.keep.dataset",
    "extract": "vllm_weir.extraction.job",
    "load": "vllm_weir.keep.open",
    "open_writer": "vllm_weir.keep.open",
}


def __getattr__(name: str) -> Any:
    # vLLM loads its plugins in every process; what needs torch or vLLM is imported only when it is used.
    if name == "list":  # the public name; a plain global would shadow the built-in in this file
        return list_vectors
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
