"""Every patch of vLLM. Only this package and `vllm_weir.guard` import vLLM's internals."""

from typing import TYPE_CHECKING

from vllm_weir.util.lazy import lazy_names

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PATCHES, Patch, PatchStatus, install, verify

__all__ = ["PATCHES", "Patch", "PatchStatus", "install", "verify"]

# Imported lazily, so that the guard and the plugin load where a package that Weir needs is missing.
__getattr__, __dir__ = lazy_names(__name__)
