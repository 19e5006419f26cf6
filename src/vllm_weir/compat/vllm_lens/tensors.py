"""vllm-lens's form of tensors in a response's field ``activations``: zstd frames, in base64 or to be fetched."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import zstandard

from vllm_weir.errors import WeirError

JSON_KEY = "__json__"
"""Marks an entry of ``activations`` that is no tensor."""
_DTYPES = ("float32", "float16", "float64", "bfloat16")


def serialize_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor as JSON data, with the keys data (base64 of zstd), dtype, original_dtype, shape, compression."""
    data, described = zstd_frame(tensor)
    return {"data": base64.b64encode(data).decode("ascii"), **described}


def zstd_frame(tensor: torch.Tensor) -> tuple[bytes, dict[str, Any]]:
    """Return a tensor's values as one zstd frame (C order), and the keys of JSON data that describe it."""
    tensor = tensor.detach().cpu().contiguous()
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    # Threads must not share a compressor.
    data = zstandard.ZstdCompressor(level=1).compress(array.tobytes())
    return data, {
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
        raw = base64.b64decode(d["data"], validate=True)
    except (KeyError, TypeError, AttributeError, binascii.Error) as e:
        raise _damaged(e) from None
    return _tensor_of(raw, d)


def _tensor_of(raw: bytes, d: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor whose values `raw` holds, as `d` describes it; raise WeirError if it is damaged."""
    try:
        original = str(d.get("original_dtype") or d["dtype"]).removeprefix("torch.")
        shape = tuple(map(int, d["shape"]))
        stored = np.dtype(d["dtype"])
        size = int(np.prod(shape, dtype=object)) * stored.itemsize
        if d.get("compression") == "zstd":
            if zstandard.frame_content_size(raw) != size:  # before it is unpacked
                raise ValueError(f"not {size} bytes")
            raw = zstandard.ZstdDecompressor().decompress(raw)
        if original not in _DTYPES or len(raw) != size or min(shape, default=0) < 0:
            raise ValueError(f"{len(raw)} bytes of {stored} are not {original} {list(shape)}")
        tensor = torch.from_numpy(np.frombuffer(bytearray(raw), stored).reshape(shape))
    except (KeyError, TypeError, ValueError, AttributeError, zstandard.ZstdError) as e:
        raise _damaged(e) from None
    dtype = getattr(torch, original)
    return tensor.view(dtype) if stored == np.int16 and original == "bfloat16" else tensor.to(dtype)


def _damaged(why: Exception) -> WeirError:
    return WeirError(f"not a tensor of vllm-lens: {type(why).__name__}: {str(why)[:80]}", "activations")


def serialize_activations(tensor_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by name as JSON data, see `serialize_tensor`; what is no tensor as ``{"__json__": value}``."""
    return {
        name: serialize_tensor(one) if isinstance(one, torch.Tensor) else {JSON_KEY: one}
        for name, one in tensor_dict.items()
    }


def decode_activations(
    response_json: Mapping[str, Any], *, fetch_bytes: Callable[[str], bytes] | None = None
) -> dict[str, Any]:
    """Return what a response's field ``activations`` holds; empty if the response has none.

    That is ``residual_stream`` [layers, rows, d_model], and for ``output_qk`` ``attn_q`` [layers, rows, heads,
    d_head], ``attn_k`` [layers, rows, key-value heads, d_head], and the lists ``qk_layers`` and ``qk_meta``.

    Args:
        response_json: the response.
        fetch_bytes: returns the body of ``GET /v1/activations/{handle}``, for a request with
            ``activations_transport="binary"``.

    Raises:
        WeirError: if an entry is damaged, or has to be fetched and there is no `fetch_bytes`.
    """
    entries = response_json.get("activations") or {}
    return {name: _decoded(name, one, fetch_bytes) for name, one in entries.items()}


def _decoded(name: str, entry: Mapping[str, Any], fetch_bytes: Callable[[str], bytes] | None) -> Any:
    if JSON_KEY in entry:
        return entry[JSON_KEY]
    if "handle" not in entry:
        return deserialize_tensor(entry)
    if fetch_bytes is None:
        raise WeirError(
            f"{name} came by binary transport, to be fetched from /v1/activations/{entry['handle']}; give a function "
            "of the handle that does",
            "fetch_bytes",
        )
    return _tensor_of(fetch_bytes(entry["handle"]), entry)
