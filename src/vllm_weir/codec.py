"""The codecs: rows to packed records and back, on any device, without a synchronisation.

The 8-bit methods share one affine code: with ``zero`` the row's smallest value and
``scale = (largest - zero) / 255``,

    code = round((x - zero) / scale)        x~ = code * scale + zero

to within half a step (``scale / 2``) of every value; of a constant row ``scale`` is 0 and x~ exact.
A row that holds NaN, Inf or a magnitude over 1.5e38 (whose range float32 cannot hold) has
``scale = NaN`` and unpacks to NaN throughout: such a row is marked as lost.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import Compression, header_bytes, header_shape

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LARGEST = 1.5e38
"""Largest magnitude that a row may have: twice that is near the end of float32."""
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "float8_e4m3fn": FP8,
}


def projection(seed: int, k: int, d: int) -> torch.Tensor:
    """Return the random projection of rp8: independent N(0, 1/k), float32 [k, d], on the CPU.

    It depends on (seed, k, d) only: Box-Muller on the raw 64-bit output of Philox4x64-10 with
    `seed` as its key. (Of numpy, bit generators give the same numbers in every version, its normal
    distribution does not.)
    """
    return torch.from_numpy(_gaussian(seed, k, d).copy())


@functools.lru_cache(maxsize=4)
def _gaussian(seed: int, k: int, d: int) -> np.ndarray:
    pairs = (k * d + 1) // 2
    raw = np.random.Philox(key=seed).random_raw(2 * pairs) >> np.uint64(11)
    radius = np.sqrt(-2.0 * np.log((raw[0::2] + np.uint64(1)) * 2.0**-53) / k)
    angle = raw[1::2] * (2.0 * np.pi * 2.0**-53)
    values = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[: k * d]
    out = values.astype(np.float32).reshape(k, d)
    out.setflags(write=False)
    return out


@functools.lru_cache(maxsize=4)
def _inverse(seed: int, k: int, d: int) -> np.ndarray:
    """Return the pseudo-inverse of the projection, float32 [d, k]."""
    matrix = _gaussian(seed, k, d).astype(np.float64)
    if k > d:
        return np.linalg.solve(matrix.T @ matrix, matrix.T).astype(np.float32)
    return np.linalg.solve(matrix @ matrix.T, matrix).T.astype(np.float32)


def encode(rows: torch.Tensor, compression: object, projection: torch.Tensor | None = None) -> torch.Tensor:
    """Pack rows into records.

    Args:
        rows: [..., d], float32, float16 or bfloat16, any device.
        compression: the method and its parameters, see `Compression.parse`.
        projection: for rp8, the result of `projection` on the rows' device; made (and copied there)
            if None.

    Returns:
        uint8 [..., record_bytes], on the rows' device.

    Raises:
        WeirError: if the dtype is another one, or the compression does not suit rows of d values.
    """
    if rows.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise WeirError(f"rows are float32, float16 or bfloat16, got {rows.dtype}", "rows")
    d = rows.shape[-1]
    compression = Compression.parse(compression).check(d)
    method = compression.method
    if method == "none":
        return as_bytes(rows)
    if method == "fp16":
        return as_bytes(rows.to(torch.float16))
    values = rows.float()
    if method == "fp8":
        return _encode_fp8(values)
    if method == "full8":
        return torch.cat(_affine(values), dim=-1)
    if method == "topk8":
        indices = largest(values, compression.k or 0)
        # NaN counts as the largest, so a row with one is marked.
        scale, zero, codes = _affine(values.gather(-1, indices))
        return torch.cat([scale, zero, as_bytes(indices.to(torch.int32)), codes], dim=-1)
    if projection is None:
        projection = _projection_for(compression, rows)
    return torch.cat(_affine(values @ projection.T), dim=-1)


def _projection_for(compression: Compression, rows: torch.Tensor) -> torch.Tensor:
    return projection(compression.seed, compression.k or 0, rows.shape[-1]).to(rows.device)


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest magnitudes of each row.

    `values`: float32 [..., d]; `k`: how many. Returns int64 [..., k], ascending; of equal magnitudes those that come
    first.
    """
    # The bits of a magnitude order as it does; the index below them makes every key unique, so
    # equal values have an order.
    keys = values.abs().contiguous().view(torch.int32).to(torch.int64) << 32
    keys = keys | torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return keys.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values


def decode(records: torch.Tensor, header: Mapping[str, Any]) -> torch.Tensor:
    """Unpack records into rows.

    Args:
        records: uint8 [..., record_bytes], any device.
        header: how to read them, from `Activations.compressed`, a dataset, or `Compression.header`.

    Returns:
        float32 [..., d_model] on the records' device; [..., *shape] if the header has a shape, and
        int64 for integers. For rp8 it is the least-squares estimate: the shortest row with that
        projection, which has about ``k / d_model`` of the energy. For inner products use `project`.

    Raises:
        WeirError: if the records do not fit their header.
    """
    rows = _decoded(records, header)
    shape = header_shape(header)
    return rows if len(shape) == 1 else rows.unflatten(-1, shape)


def _decoded(records: torch.Tensor, header: Mapping[str, Any]) -> torch.Tensor:
    """Return the rows [..., d_model] of `decode`."""
    method, parts = _split(records, header)
    if method in ("none", "fp16"):
        values = parts["values"]
        return values.float() if values.is_floating_point() else values
    if method == "fp8":
        return parts["values"].float() * parts["scale"]
    values = parts["codes"].float() * parts["scale"] + parts["zero"]
    if method == "full8":
        return values
    d = header["d_model"]
    if method == "topk8":
        indices = parts["indices"].long()
        if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < d):
            raise WeirError(f"an index of topk8 lies outside a row of {d} values", "records")
        # 0 * NaN is NaN, so a marked row is NaN at all of its values.
        out = (parts["scale"] * 0).expand(*values.shape[:-1], d).clone()
        return out.scatter_(-1, indices, values)
    inverse = torch.from_numpy(_inverse(header["seed"], header["k"], d).copy()).to(records.device)
    return values @ inverse.T


def project(records: torch.Tensor, header: Mapping[str, Any]) -> torch.Tensor:
    """Return records of rp8 in the compressed space, float32 [..., k].

    Inner products there estimate those of the rows; a direction v is
    ``v @ projection(seed, k, d_model).T`` there.

    Raises:
        WeirError: if the records are of another method, or do not fit their header.
    """
    method, parts = _split(records, header)
    if method != "rp8":
        raise WeirError(f"only rp8 has a compressed space; these records are {method}", "header.method")
    return parts["codes"].float() * parts["scale"] + parts["zero"]


def _encode_fp8(rows: torch.Tensor) -> torch.Tensor:
    largest = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(largest <= LARGEST, largest / FP8_MAX, torch.nan)
    # A row of zeros (or of values too small for float32) has scale 0, which must not divide.
    values = torch.where(scale > 0, rows / scale, 0.0).clamp(-FP8_MAX, FP8_MAX)
    return torch.cat([as_bytes(scale), as_bytes(values.to(FP8))], dim=-1)


def _affine(rows: torch.Tensor) -> list[torch.Tensor]:
    """Return scale and zero as bytes, and codes, all uint8, of float32 [..., n]."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    # amin and amax return NaN if there is one, and NaN compares false.
    scale = torch.where((low >= -LARGEST) & (high <= LARGEST), (high - low) / 255, torch.nan)
    codes = torch.where(scale > 0, (rows - low) / scale, 0.0)
    return [as_bytes(scale), as_bytes(low), codes.round().clamp(0, 255).to(torch.uint8)]


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return values [..., n] as their bytes, uint8 [..., n * itemsize]."""
    # Flat, because `view` does not take the strides of empty tensors.
    flat = values.reshape(-1).view(torch.uint8)
    return flat.reshape(*values.shape[:-1], values.shape[-1] * values.element_size())


def _split(records: torch.Tensor, header: Mapping[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the method of records and their fields by name, each [..., n] (n = 1 for scalars)."""
    Compression.from_header(header)
    record_bytes = header_bytes(header)
    if records.dtype != torch.uint8 or records.shape[-1] != record_bytes:
        raise WeirError(
            f"records are uint8 [..., {record_bytes}], got {records.dtype} {list(records.shape)}", "records"
        )
    parts = {}
    ends = [f["offset"] for f in header["fields"][1:]] + [record_bytes]
    for field, end in zip(header["fields"], ends):
        raw = records[..., field["offset"] : end]
        # Copied, because a view must begin at a multiple of the item's size.
        flat = raw.clone(memory_format=torch.contiguous_format).reshape(-1).view(DTYPES[field["dtype"]])
        parts[field["name"]] = flat.reshape(*raw.shape[:-1], raw.shape[-1] // flat.element_size())
    return header["method"], parts
