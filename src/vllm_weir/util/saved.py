"""What a user's function saves, as bytes: msgpack, with tensors and arrays as (dtype, shape, bytes)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from vllm_weir.errors import WeirError

_TENSOR = "__tensor__"


def encode(value: Any) -> bytes:
    """Return a value as bytes; tensors are copied to the host, bfloat16 as float32.

    Raises:
        WeirError: if it holds something else than tensors, numbers, texts, bytes, None, lists and dicts.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=_plain)
    except TypeError as e:
        raise WeirError(f"cannot be sent to the caller: {e}", "hooks") from None


def decode(data: bytes) -> Any:
    """Return what `encode` was given; arrays come back as tensors, tuples as lists."""
    return _with_tensors(msgspec.msgpack.decode(data))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).cpu().numpy()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {_TENSOR: [str(value.dtype), list(value.shape), np.ascontiguousarray(value).tobytes()]}
    raise TypeError(f"a {type(value).__name__}")


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            dtype, shape, data = value[_TENSOR]
            return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy())
        return {key: _with_tensors(one) for key, one in value.items()}
    return [_with_tensors(one) for one in value] if isinstance(value, list) else value
