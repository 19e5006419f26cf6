"""`vllm_weir.results.checksum` under the name that programs for earlier versions import."""

from vllm_weir.results.checksum import checksums

__all__ = ["checksums"]
