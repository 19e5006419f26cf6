"""`vllm_weir.storage.verify` under the name that programs for earlier versions import."""

from vllm_weir.storage.verify import Damage, Verified, verify

__all__ = ["Damage", "Verified", "verify"]
