"""Reconstruction of rows from the arrays of a stored file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_weir.codec import decode, project
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.compression import METHODS, Compression
from vllm_weir.storage.layouts.npz import to_records

DENSE, SPARSE = ("rp8", "full8"), "topk8"
"""Modes of Vllm_mi_patch: those that store values in ``q``, and the one that stores them in
``values``."""


def reconstruct_activations(
    compressed_data: Mapping[str, Any], mode: str | None = None, *, hidden_size: int | None = None,
    space: str = "projected",
) -> Any:  # fmt: skip
    """Decode rows from the arrays of a file.

    Weir's files are decoded by their header (without it: ``q * scale + zero``), Vllm_mi_patch's as
    ``(q - zero) * scale``, which is the inverse of its encoder (its own function computes something
    else).

    Args:
        compressed_data: arrays from `load_activation_file` or `ActivationLoader.load_request`.
        mode: ``"rp8"``, ``"full8"``, ``"topk8"``, ``"none"`` or another method of Weir, or the
            ``mode`` of a manifest (``"ActMode.RP8"`` for Vllm_mi_patch); None to go by the fields.
        hidden_size: d_model, needed for topk8 of Vllm_mi_patch.
        space: for Weir's rp8: ``"projected"`` gives [n, k], whose inner products and similarities
            estimate those of the rows; ``"model"`` gives the least-squares estimate of the rows,
            [n, d_model].

    Returns:
        float32 [n, d] (or of the shape that the header says), a tensor if the data are tensors, else
        an array.

    Raises:
        WeirError: if the arrays do not fit the mode or their header, or hold no values (only scales
            per dimension).
    """
    mode = check_mode(mode)
    if space not in ("projected", "model"):
        raise WeirError(f"unknown space {brief(space)!r}; choose 'projected' or 'model'", "space")
    if "activations" in compressed_data and "weir" not in compressed_data:
        return compressed_data["activations"]  # they are decoded
    sample = next((v for v in compressed_data.values() if isinstance(v, torch.Tensor)), None)
    arrays = {k: v.cpu().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for k, v in compressed_data.items()}
    if "weir" not in arrays:
        if mode is not None and mode not in ((SPARSE,) if "indices" in arrays else DENSE):
            raise WeirError(f"these are not the fields of {mode}: {', '.join(sorted(arrays))[:80]}", "mode")
        rows = rebuild(arrays, hidden_size)
    else:
        rows = _by_header(arrays, space)
    return torch.from_numpy(rows).to(sample.device) if sample is not None else rows


def check_mode(mode: object) -> str | None:
    if mode is None:
        return None
    name = mode.removeprefix("ActMode.").lower() if isinstance(mode, str) and mode.startswith("ActMode.") else mode
    if name not in METHODS:
        raise WeirError(f"unknown mode {brief(mode)!r}; choose from {', '.join(METHODS)}", "mode")
    return METHODS[METHODS.index(name)]  # a plain str also for a member of Vllm_mi_patch's enum


def _by_header(arrays: dict[str, np.ndarray], space: str) -> np.ndarray:
    try:
        header = json.loads(arrays["weir"].astype(np.uint8).tobytes())
        Compression.from_header(header)
        records = torch.from_numpy(to_records({k: _little_endian(v) for k, v in arrays.items()}, header))
    except (ValueError, KeyError) as e:
        if isinstance(e, WeirError):
            raise
        raise WeirError(f"these arrays do not fit their header: {str(e)[:80]}") from None
    decoder = project if header["method"] == "rp8" and space == "projected" else decode
    return decoder(records, header).numpy()


def native(array: np.ndarray) -> np.ndarray:
    """Return an array in the machine's byte order, which torch needs."""
    return array.astype(array.dtype.newbyteorder("="))


def _little_endian(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.itemsize > 1 else array


def rebuild(arrays: dict[str, Any], width: int | None = None) -> np.ndarray:
    """Decode the arrays of one file: float32 [n, k] (dense) or [n, width] (topk8).

    Vllm_mi_patch's scales are [n], or [k] if its function for scales per dimension was given all
    rows at once; if n equals k they are taken to be per row. Scales of Weir's own files are [n, 1]
    and mean ``q * scale + zero``.

    `arrays`: Arrays of the file by name; `width`: Values of a row, for topk8.
    """
    sparse = "indices" in arrays
    for key in ("indices", "values", "scale", "zero") if sparse else ("q", "scale", "zero"):
        if key not in arrays:
            raise WeirError(f"has no field {key}", key)
    codes = np.asarray(arrays["values" if sparse else "q"], np.float32)
    scale, zero = (np.asarray(arrays[key], np.float32) for key in ("scale", "zero"))
    if codes.ndim != 2:
        raise WeirError(f"codes are [rows, values], got {list(codes.shape)}", "q")
    if scale.shape == codes.shape and codes.shape[1] > 1:
        raise WeirError(
            "its scales are per dimension (VLLM_ACT_PER_DIM=1), each taken over a single row: it keeps no values",
            "scale",
        )
    if not sparse and scale.shape == zero.shape == codes.shape[1:] != (len(codes),):
        return (codes - zero) * scale
    if scale.size != len(codes) or zero.size != len(codes):
        raise WeirError(f"{len(codes)} rows want as many scales and zeros, got {scale.size} and {zero.size}", "scale")
    if scale.shape == zero.shape == (len(codes), 1):
        values = codes * scale + zero
    else:
        values = (codes - zero.reshape(-1, 1)) * scale.reshape(-1, 1)
    if not sparse:
        return values
    if width is None:
        raise WeirError("topk8 does not say how wide a row is; pass hidden_size", "hidden_size")
    return scatter(np.asarray(arrays["indices"]), values, width)


def scatter(indices: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
    """Return sparse rows [n, k] as dense ones [n, width].

    int16 indices are read as uint16, since Vllm_mi_patch stores larger ones wrapped.
    """
    if indices.shape != values.shape or indices.dtype.kind not in "iu":
        raise WeirError(
            f"indices {indices.dtype} {list(indices.shape)} do not fit values {list(values.shape)}", "indices"
        )
    if indices.dtype == np.int16:
        if width > 65_536:
            raise WeirError(f"int16 indices cannot reach {width} values: it keeps wrong places", "indices")
        indices = indices.view(np.uint16)
    if indices.size and (int(indices.max()) >= width or int(indices.min()) < 0):
        raise WeirError(f"index {int(indices.max())} is outside a row of {width} values", "indices")
    dense = np.zeros((len(values), width), np.float32)
    np.put_along_axis(dense, indices.astype(np.int64), values, axis=1)
    return dense
