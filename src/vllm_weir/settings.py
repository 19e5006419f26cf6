"""`vllm_weir.config.settings` under the name that programs for earlier versions import."""

from vllm_weir.config.settings import Settings

__all__ = ["Settings"]
