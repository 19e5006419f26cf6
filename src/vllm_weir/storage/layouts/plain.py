"""Headers for rows that came without one."""

from __future__ import annotations

from typing import Any

from vllm_weir.results.safetensors_header import NAMES
from vllm_weir.schema.compression import ROW_DTYPES, Compression
from vllm_weir.storage.object_store import Store
from vllm_weir.storage.safetensors_io import Tensor


def plain_header(store: Store, name: str, tensor: Tensor) -> dict[str, Any]:
    """The header of uncompressed rows stored as a tensor [n, d]."""
    dtype = NAMES.get(tensor.dtype, tensor.dtype)
    if dtype not in ROW_DTYPES or len(tensor.shape) < 2 or not tensor.shape[-1]:
        raise store.fail(name, f"rows are {', '.join(ROW_DTYPES)} [n, d], found {dtype} {list(tensor.shape)}")
    return Compression().header(tensor.shape[-1], dtype)
