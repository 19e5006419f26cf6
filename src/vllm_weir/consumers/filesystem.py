"""`Filesystem` and `Npz` of `vllm_weir.storage.consumer` under the name of earlier versions."""

from vllm_weir.util.lazy import lazy_names

__getattr__, _ = lazy_names(__name__, dict.fromkeys(("Filesystem", "Npz"), "vllm_weir.storage.consumer"))
