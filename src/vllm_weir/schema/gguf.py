"""GGUF files of control vectors: one-dimensional tensors with metadata, to bytes and back.

The `gguf` package does not serve: its reader takes a path only, loops as often as counts in the
file say, and does not check reads against the file's end; and vLLM does not install it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError, brief

MAX_COUNT = 4096
"""Most tensors, metadata keys and strings of an array."""
ARCHITECTURE = "general.architecture"
_ALIGNMENT = 32
_UINT32, _STRING, _ARRAY = 4, 8, 9
# GGUF's numbers of types -> bytes of a value, and the types of tensors that are read.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FLOATS = (6, 12)
_TENSORS = {0: "<f4", 1: "<f2"}


class GGUF(NamedTuple):
    """What a file holds.

    Attributes:
        metadata: texts as bytes, and integers; arrays and floats, which are skipped, are None.
        tensors: by name, in the order of the file.
    """

    metadata: dict[bytes, Any]
    tensors: dict[str, np.ndarray]


def read_gguf(data: bytes, field: str, architecture: bytes = b"controlvector") -> GGUF:
    """Read a file.

    Args:
        data: its bytes.
        field: named by errors, followed by the place in the file.
        architecture: what ``general.architecture`` has to be.

    Raises:
        WeirError: for a file that is damaged, or has anything but tensors of one dimension, F32 or F16.
    """
    cursor = _Cursor(data, field)
    if cursor.take(4) != b"GGUF":
        raise WeirError("no GGUF file: it does not begin with 'GGUF'", field)
    version = cursor.number("I")
    if version not in (2, 3):
        raise WeirError(f"GGUF version {version} is not supported; versions 2 and 3 are", field)
    tensors, keys = cursor.count("tensors"), cursor.count("metadata keys")
    metadata: dict[bytes, Any] = {}
    for _ in range(keys):
        key = cursor.string()
        metadata[key] = _value(cursor, cursor.number("I"))
    if metadata.get(ARCHITECTURE.encode()) != architecture:
        found = brief(metadata.get(ARCHITECTURE.encode()))
        raise WeirError(f"{ARCHITECTURE} is {found}, not {architecture.decode()}", f"{field}.{ARCHITECTURE}")
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get(b"general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise WeirError("expected an alignment from 1 to 1048576 bytes", f"{field}.general.alignment")
    base = -(-cursor.offset // alignment) * alignment
    out: dict[str, np.ndarray] = {}
    for name, count, dtype, offset in entries:
        if name in out:
            raise WeirError("there are two tensors of that name", f"{field}.{brief(name)}")
        cursor.offset = min(base + offset, len(data))
        out[name] = np.frombuffer(cursor.take(count * np.dtype(dtype).itemsize), dtype)
    return GGUF(metadata, out)


def write_gguf(metadata: Mapping[str, str | int], tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return the bytes of a file, version 3, with the tensors as F32.

    Args:
        metadata: texts, and integers from 0 to 2**32 - 1.
        tensors: float32, of one dimension, by name.
    """
    keys = b"".join(_key(name, value) for name, value in metadata.items())
    entries, blob = b"", b""
    for name, array in tensors.items():
        entries += _text(name) + struct.pack("<IQIQ", 1, len(array), 0, len(blob))
        blob += _padded(np.ascontiguousarray(array, "<f4").tobytes())
    return _padded(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + keys + entries) + blob


def _key(name: str, value: str | int) -> bytes:
    if isinstance(value, str):
        return _text(name) + struct.pack("<I", _STRING) + _text(value)
    return _text(name) + struct.pack("<II", _UINT32, value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


class _Cursor:
    """A reader of little-endian values, one after the other. Past the end it raises WeirError."""

    def __init__(self, data: bytes, field: str) -> None:
        self.data, self.field, self.offset = data, field, 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if count < 0 or count > len(self.data) - self.offset:
            raise WeirError(f"the GGUF file is truncated or damaged at byte {self.offset}", self.field)
        self.offset += count
        return self.data[self.offset - count : self.offset]

    def number(self, code: str) -> int:
        """Return the next number, of the type that `struct` calls `code`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def string(self) -> bytes:
        """Return the next string, which follows its length."""
        return self.take(self.number("Q"))

    def count(self, counted: str) -> int:
        """Return the next number, if it is within `MAX_COUNT`; `counted` is for the error."""
        number = self.number("Q")
        if number > MAX_COUNT:
            raise WeirError(f"{number} {counted}, more than the limit of {MAX_COUNT}", self.field)
        return number


def _entry(cursor: _Cursor) -> tuple[str, int, str, int]:
    """Read the description of a tensor: (name, elements, dtype, offset)."""
    name = cursor.string().decode(errors="replace")
    at = f"{cursor.field}.{brief(name)}"
    dimensions = cursor.number("I")
    if dimensions != 1:
        raise WeirError(f"expected 1 dimension, got {dimensions}", at)
    count, kind, offset = cursor.number("Q"), cursor.number("I"), cursor.number("Q")
    if kind not in _TENSORS:
        raise WeirError(f"GGUF type {kind} is not supported; F32 (0) and F16 (1) are", at)
    return name, count, _TENSORS[kind], offset


def _value(cursor: _Cursor, kind: int) -> Any:
    """Read a metadata value; return None for arrays and floats, which are skipped."""
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        inner, count = cursor.number("I"), cursor.number("Q")
        if inner in _SIZES:
            cursor.take(count * _SIZES[inner])
        elif inner == _STRING:
            for _ in range(count):
                cursor.string()
        else:
            raise WeirError(f"an array of GGUF type {inner} is not supported", cursor.field)
        return None
    if kind not in _SIZES:
        raise WeirError(f"unknown GGUF type {kind}", cursor.field)
    raw = cursor.take(_SIZES[kind])
    return int.from_bytes(raw, "little") if kind not in _FLOATS else None
