"""The header of a safetensors file whose tensors follow each other without gaps."""

from __future__ import annotations

import json
import zlib
from typing import Any

from vllm_weir.errors import WeirError

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
    "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip
"""Dtype code -> bytes of a value."""

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "int64": "I64"}
"""Dtype name -> its code, for what Weir writes."""

NAMES = {code: name for name, code in CODES.items()}

MAX_HEADER = 100_000_000
"""Bytes of a header at most, the limit of the safetensors library."""


def build_header(
    tensors: dict[str, tuple[str, list[int], int]], metadata: dict[str, str], room: int = 0, checked: bool = True
) -> bytes:
    """Return the bytes with which the file starts: the header's length, and the header.

    Args:
        tensors: name -> (dtype code, shape, bytes), in the order of their data.
        metadata: strings.
        room: length to fill up to with spaces; 0 for the next multiple of 8.
        checked: whether to add ``crc``, a checksum of the header, to the metadata.

    Raises:
        WeirError: if the header is longer than `room` or than a header may be.
    """
    entries: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    entries["__metadata__"] = dict(metadata)
    if checked:
        entries["__metadata__"]["crc"] = _crc(entries)
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = room or -(-(8 + len(text)) // 8) * 8
    if 8 + len(text) > size:
        raise WeirError(f"a header of {len(text)} bytes does not fit into the {room} bytes reserved for it")
    if len(text) > MAX_HEADER:
        raise WeirError(
            f"the header has {len(text):,} bytes, at most {MAX_HEADER:,} can be read; shorten the metadata", "metadata"
        )
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def _crc(entries: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(entries, sort_keys=True).encode()):08x}"
