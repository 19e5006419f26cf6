"""`Ray` and `extract` under the name that programs for earlier versions import."""

from vllm_weir.extraction.plan import Ray
from vllm_weir.extraction.run import extract

__all__ = ["Ray", "extract"]
