"""vllm-lens's wire form of tensors: zstd in base64, as in a response's field ``activations``."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import zstandard

from vllm_weir.errors import WeirError

_DTYPES = ("float32", "float16", "float64", "bfloat16")


def serialize_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor as JSON data, with the keys data (base64 of zstd), dtype, original_dtype, shape, compression."""
    tensor = tensor.detach().cpu().contiguous()
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    # Threads must not share a compressor.
    data = zstandard.ZstdCompressor(level=1).compress(array.tobytes())
    return {
        "data": base64.b64encode(data).decode("ascii"),
        "dtype": str(array.dtype),
        "original_dtype": str(tensor.dtype),
        "shape": list(array.shape),
        "compression": "zstd",
    }


def deserialize_tensor(d: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor of `serialize_tensor`, or of vllm-lens's function of that name, in its original dtype.

    Raises:
        WeirError: if it is damaged.
    """
    try:
        original = str(d.get("original_dtype") or d["dtype"]).removeprefix("torch.")
        shape = tuple(map(int, d["shape"]))
        stored = np.dtype(d["dtype"])
        size = int(np.prod(shape, dtype=object)) * stored.itemsize
        raw = base64.b64decode(d["data"], validate=True)
        if d.get("compression") == "zstd":
            if zstandard.frame_content_size(raw) != size:  # before it is unpacked
                raise ValueError(f"not {size} bytes")
            raw = zstandard.ZstdDecompressor().decompress(raw)
        if original not in _DTYPES or len(raw) != size or min(shape, default=0) < 0:
            raise ValueError(f"{len(raw)} bytes of {stored} are not {original} {list(shape)}")
        tensor = torch.from_numpy(np.frombuffer(bytearray(raw), stored).reshape(shape))
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, zstandard.ZstdError) as e:
        raise WeirError(f"not a tensor of vllm-lens: {type(e).__name__}: {str(e)[:80]}", "activations") from None
    dtype = getattr(torch, original)
    return tensor.view(dtype) if stored == np.int16 and original == "bfloat16" else tensor.to(dtype)


def serialize_activations(tensor_dict: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors by name as JSON data, see `serialize_tensor`."""
    return {name: serialize_tensor(tensor) for name, tensor in tensor_dict.items()}


def decode_activations(response_json: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors in a response's field ``activations``: ``residual_stream`` [layers, rows, d_model].

    Empty if the response has none.
    """
    return {name: deserialize_tensor(one) for name, one in (response_json.get("activations") or {}).items()}
