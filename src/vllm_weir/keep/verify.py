"""`vllm_weir.storage.verify` under the name of earlier versions."""

from vllm_weir.storage.verify import Damage, Verified, verify

__all__ = ["Damage", "Verified", "verify"]
