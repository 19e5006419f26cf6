"""Npz files without pickled objects, and records as their arrays and back."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from vllm_weir.schema.compression import header_bytes
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.util.foreign_files import DAMAGE, npz_arrays


def read_npz(store: ObjectStore, name: str) -> dict[str, np.ndarray]:
    return read_some(store, name, None)[0]


def read_some(
    store: ObjectStore, name: str, wanted: tuple[str, ...] | None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays `wanted` of a file, None for all, and the (shape, dtype) of every array.

    Rows may be compressed to any part of their size.
    """
    file = io.BytesIO(store.read(name))
    try:
        return npz_arrays(file, wanted, bounded=False)
    except DAMAGE as e:
        raise store.error(name, f"is not an npz file, or is damaged: {type(e).__name__}: {str(e)[:120]}") from None


def write_npz(arrays: dict[str, np.ndarray]) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


CODES = ("q", "indices", "codes")
"""Names of arrays one of which is in every file of compressed rows."""
_STORED_DTYPES = {
    "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8", "int32": "<i4", "uint8": "u1",
    "float8_e4m3fn": "u1",
}  # fmt: skip
_ARRAY_NAMES = {
    "none": {"values": "activations"},
    "fp16": {"values": "activations"},
    "fp8": {"values": "codes"},
    "rp8": {"codes": "q"},
    "full8": {"codes": "q"},
    "topk8": {"codes": "values"},
}
"""Method -> name of a record's field -> name of its array, where that differs."""


def to_arrays(records: np.ndarray, header: dict[str, Any]) -> dict[str, np.ndarray]:
    """Split records [n, record_bytes] into arrays by field, each [n, ...].

    Scale and zero are [n, 1]; bfloat16 becomes float32.
    """
    arrays = {}
    for field, end in _fields_with_ends(header):
        values = np.ascontiguousarray(records[:, field["offset"] : end]).view(_STORED_DTYPES[field["dtype"]])
        if field["dtype"] == "bfloat16":
            values = (values.astype("<u4") << 16).view("<f4")
        arrays[_array_name(field, header)] = values
    return arrays


def to_records(arrays: dict[str, np.ndarray], header: dict[str, Any]) -> np.ndarray:
    """Join arrays to records: uint8 [n, record_bytes], the inverse of `to_arrays`.

    Also reads bfloat16 as the uint16 of its bits, and the codes of fp8 under the name
    ``activations``.
    """
    parts = []
    for field, end in _fields_with_ends(header):
        name = _array_name(field, header)
        array = arrays["activations" if name == "codes" and name not in arrays else name]
        if array.ndim == 2 and field["dtype"] == "bfloat16" and array.dtype == np.dtype("<f4"):
            array = _bfloat16_bits(array, name)
        if array.dtype != np.dtype(_STORED_DTYPES[field["dtype"]]) or array.ndim != 2:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
        parts.append(np.ascontiguousarray(array).view(np.uint8))
        if parts[-1].shape[1] != end - field["offset"]:
            raise ValueError(f"{name} has the wrong width")
    return np.concatenate(parts, axis=1)


def _bfloat16_bits(array: np.ndarray, name: str) -> np.ndarray:
    """Return the bits of bfloat16 values stored as float32: uint16; raise ValueError for others."""
    bits = np.ascontiguousarray(array).view("<u4")
    if (bits & 0xFFFF).any():
        raise ValueError(f"{name} has values that are no bfloat16, although the header says they are")
    return (bits >> 16).astype("<u2")


def _array_name(field: dict[str, Any], header: dict[str, Any]) -> str:
    return _ARRAY_NAMES[header["method"]].get(field["name"], field["name"])


def _fields_with_ends(header: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
    fields = header["fields"]
    return list(zip(fields, [f["offset"] for f in fields[1:]] + [header_bytes(header)]))
