"""The names of `vllm_weir.compat.probe_hook`, for programs that import them from here."""

from vllm_weir.compat.probe_hook import LLM, AsyncLLM, HiddenStateRequest

__all__ = ["LLM", "AsyncLLM", "HiddenStateRequest"]
