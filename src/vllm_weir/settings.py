"""`vllm_weir.config.settings` under the name of earlier versions."""

from vllm_weir.config.settings import Settings

__all__ = ["Settings"]
