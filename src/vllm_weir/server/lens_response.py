"""vllm-lens's response fields: tensors as zstd in base64, which its clients decode."""

from __future__ import annotations

import base64
from typing import Any

import torch
import zstandard

from vllm_weir.errors import WeirError
from vllm_weir.results.activations import LENS_KEY, Activations
from vllm_weir.schema.compat.vllm_lens import LENS_CAPTURE_KEY


def activations_field(acts: Activations, max_bytes: int) -> dict[str, Any] | None:
    """Return the response's field ``activations``, None if vllm-lens's key captured nothing.

    Raises:
        WeirError: If the rows have more than `max_bytes` bytes.
    """
    if LENS_KEY not in acts:
        return None
    rows = acts[LENS_KEY]
    if rows.nbytes > max_bytes:
        raise WeirError(
            f"{rows.nbytes} bytes of rows exceed the {max_bytes} that a response may carry (WEIR_SERVE_LENS_BYTES); "
            "ask for fewer blocks or tokens, or use the key weir, whose rows are fetched by reference",
            LENS_CAPTURE_KEY,
        )
    return {LENS_KEY: encode(rows)}


def encode(tensor: torch.Tensor) -> dict[str, Any]:
    """Return vllm-lens's wire form of a tensor."""
    tensor = tensor.contiguous()
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
