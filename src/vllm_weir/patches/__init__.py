"""Every place where Weir touches vLLM. Nothing outside this package imports vLLM's internals."""

from typing import TYPE_CHECKING

from vllm_weir.util.lazy import lazy_names

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PATCHES, Patch, PatchStatus, install, verify

__all__ = ["PATCHES", "Patch", "PatchStatus", "install", "verify"]

# `vllm_weir.guard.refuse` is on the way to the plugin: see `vllm_weir`.
__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "vllm_weir.patches.registry"))
