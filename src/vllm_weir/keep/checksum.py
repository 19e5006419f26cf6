"""`vllm_weir.results.checksum` under the name of earlier versions."""

from vllm_weir.results.checksum import checksums

__all__ = ["checksums"]
