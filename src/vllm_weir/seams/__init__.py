"""Every place where Weir touches vLLM. Nothing outside this package imports vLLM's internals."""

from vllm_weir.seams.table import SEAMS, Seam, Status, install, verify

__all__ = ["SEAMS", "Seam", "Status", "install", "verify"]
