"""`Filesystem` and `Npz` of `vllm_weir.storage.consumer` under the name of earlier versions."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("Filesystem", "Npz"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("vllm_weir.storage.consumer"), name)  # of a floor above
