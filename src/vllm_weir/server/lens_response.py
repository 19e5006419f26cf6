"""vllm-lens's response fields: tensors as base64 of zstd, as its clients decode them."""

from __future__ import annotations

import base64
from typing import Any

import torch
import zstandard

from vllm_weir.errors import WeirError
from vllm_weir.results.activations import LENS_KEY, Activations
from vllm_weir.schema.compat.vllm_lens import LENS_CAPTURE_KEY


def activations_field(acts: Activations, most: int) -> dict[str, Any] | None:
    """The field ``activations`` of a response, or None for a request that captured nothing that way.

    Raises:
        WeirError: for more than `most` bytes of rows.
    """
    if LENS_KEY not in acts:
        return None
    stream = acts[LENS_KEY]
    if stream.nbytes > most:
        raise WeirError(
            f"{stream.nbytes} bytes of rows do not go into an answer of at most {most} (WEIR_SERVE_LENS_BYTES); "
            "ask for fewer blocks or tokens, or with the key weir, whose rows are fetched by reference",
            LENS_CAPTURE_KEY,
        )
    return {LENS_KEY: encode(stream)}


def encode(tensor: torch.Tensor) -> dict[str, Any]:
    """vllm-lens's wire form of a tensor."""
    held = tensor.contiguous()
    array = (held.view(torch.int16) if held.dtype == torch.bfloat16 else held).numpy()
    # A compressor each: they must not be shared between threads.
    data = zstandard.ZstdCompressor(level=1).compress(array.tobytes())
    return {
        "data": base64.b64encode(data).decode("ascii"),
        "dtype": str(array.dtype),
        "original_dtype": str(tensor.dtype),
        "shape": list(array.shape),
        "compression": "zstd",
    }
