"""`vllm_weir.storage` under the name of earlier versions."""

from __future__ import annotations

from typing import Any

from vllm_weir import storage

_NAMES = {"Rows": "DatasetRows"}


def __getattr__(name: str) -> Any:
    return getattr(storage, _NAMES.get(name, name))
