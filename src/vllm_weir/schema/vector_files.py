"""Readers of steering-vector files: safetensors, GGUF control vectors, JSON. No code runs.

A file holds one array ([d], [n, d] or [layers, n, d]), or a direction ([d] or [1, d]) for each of
some blocks, which is added to the stream that leaves the block, as llama.cpp and repeng do.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.json_text import loads
from vllm_weir.schema.vectors import KEPT, Vector

Directions = dict[int | None, Vector]
"""One vector under None, or directions by block."""

MAX_LAYERS, MAX_KEYS = 4096, 4096
_NUMBERED = re.compile(r"^(?:|.*[^0-9-]|.*[A-Za-z0-9]-)(\d{1,9})$", re.ASCII | re.DOTALL)
"""A name that ends in the number of a block. A dash before the number is a separator after a letter
or digit, elsewhere a minus sign, which is refused."""
_BLOCK = re.compile(r"^\d{1,9}$", re.ASCII)
_DESCRIPTION_KEYS = {"name", "digest", "shape", "layers", "refs", "bytes"}
"""What a server's answer says about a vector beside its content."""
# GGUF's numbers of types -> bytes of a value, and the types of tensors that are read.
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_TENSORS = {0: "<f4", 1: "<f2"}


def read_vectors(data: bytes, kind: str, field: str) -> Directions:
    """Read the vectors in a file.

    Args:
        data: the file's bytes.
        kind: ``"safetensors"``, ``"gguf"`` or ``"json"``.
        field: named by errors, followed by the place in the file.

    Raises:
        WeirError: for a file that is damaged, foreign or holds anything but finite vectors.
    """
    readers: dict[str, Callable[[bytes, str], Directions]] = {"safetensors": _safetensors, "gguf": _gguf, "json": _json}
    return readers[kind](data, field)


def kind_of(data: bytes) -> str:
    """Return the file format that the first bytes indicate."""
    return "gguf" if data[:4] == b"GGUF" else "json" if data[:1] in b"[{ \n\t\r" and data[:1] else "safetensors"


def _safetensors(data: bytes, field: str) -> Directions:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = dict(sorted(load(data).items()))
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, OverflowError) as e:
        raise WeirError(f"truncated, damaged or no safetensors file ({str(e)[:80]})", field) from None
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise WeirError(f"expected floats, got {tensor.dtype}", f"{field}.{brief(name)}")
    return _named(tensors, field)


def _named(arrays: Mapping[str, Any], field: str) -> Directions:
    """Parse one array of any name, or several whose names end in the number of their block."""
    if not arrays:
        raise WeirError("there is no vector in it", field)
    if len(arrays) == 1:
        ((name, array),) = arrays.items()
        block = re.match(r"^(?:direction|layer|block)s?[._]\d{1,9}$", name)
        if not block:
            return {None: Vector.parse(array, f"{field}.{brief(name)}", KEPT)}
    return _by_layer(arrays, field)


def _by_layer(arrays: Mapping[str, Any], field: str, names: re.Pattern[str] = _NUMBERED) -> Directions:
    if len(arrays) > MAX_LAYERS:
        raise WeirError(f"{len(arrays)} directions, more than the limit of {MAX_LAYERS}", field)
    out: Directions = {}
    for name, array in arrays.items():
        array_field = f"{field}.{brief(name)}"
        match = names.match(name)
        if match is None:
            expected = (
                "the number of a block" if names is _BLOCK else "one vector, or names that end in a block's number"
            )
            raise WeirError(f"expected {expected}, counted from 0", array_field)
        layer = int(match[names.groups])
        if layer in out:
            raise WeirError(f"there are two directions of block {layer}", array_field)
        out[layer] = Vector.parse_one(array, array_field)
    widths = {v.array.shape[0] for v in out.values() if v.array is not None}
    if len(widths) > 1:
        raise WeirError(f"the directions differ in width: {sorted(widths)[:5]}", field)
    return dict(sorted(out.items(), key=lambda entry: entry[0] or 0))


def _json(data: bytes, field: str) -> Directions:
    value = loads(data, field)
    content_keys = set(value) - _DESCRIPTION_KEYS if isinstance(value, dict) else set()
    if content_keys == {"vector"}:
        value, field = value["vector"], f"{field}.vector"
    elif content_keys == {"directions"}:
        field = f"{field}.directions"
        if not isinstance(value["directions"], dict) or not value["directions"]:
            raise WeirError("expected {block: vector}", field)
        for name, direction in value["directions"].items():
            _refuse_references(direction, f"{field}.{brief(name)}")
        return _by_layer(value["directions"], field, _BLOCK)
    _refuse_references(value, field)
    return {None: Vector.parse(value, field, KEPT)}


def _refuse_references(value: Any, field: str) -> None:
    """Raise WeirError for a value that refers to a vector elsewhere."""
    if isinstance(value, str) or (isinstance(value, dict) and "b64" not in value):
        raise WeirError(
            'expected a list of numbers, {"b64", "dtype", "shape"}, {"vector": ...} or {"directions": {block: ...}}',
            field,
        )


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
        """Return the next number, if it is within `MAX_KEYS`; `counted` is for the error."""
        number = self.number("Q")
        if number > MAX_KEYS:
            raise WeirError(f"{number} {counted}, more than the limit of {MAX_KEYS}", self.field)
        return number


def _gguf(data: bytes, field: str) -> Directions:
    """Read a control vector in GGUF.

    The `gguf` package does not serve: its reader takes a path only, loops as often as counts in the
    file say, and does not check reads against the file's end; and vLLM does not install it.
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
        metadata[key] = _gguf_value(cursor, cursor.number("I"))
    if metadata.get(b"general.architecture") != b"controlvector":
        found = brief(metadata.get(b"general.architecture"))
        raise WeirError(f"general.architecture is {found}, not controlvector", f"{field}.general.architecture")
    entries = [_gguf_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get(b"general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise WeirError("expected an alignment from 1 to 1048576 bytes", f"{field}.general.alignment")
    base = -(-cursor.offset // alignment) * alignment
    out: Directions = {}
    for name, count, dtype, offset in entries:
        tensor_field = f"{field}.{brief(name)}"
        match = re.match(r"^direction\.(\d{1,9})$", name, re.ASCII)
        if match is None or int(match[1]) in out:
            raise WeirError("expected one tensor direction.N for each block N", tensor_field)
        cursor.offset = min(base + offset, len(data))
        raw = cursor.take(count * np.dtype(dtype).itemsize)
        if int(match[1]) == 0:
            raise WeirError("llama.cpp uses no direction.0, so its meaning is unclear; remove it", tensor_field)
        out[int(match[1])] = Vector.parse(np.frombuffer(raw, dtype), tensor_field, (1,))
    if not out:
        raise WeirError("there is no direction in it", field)
    return _by_layer({f"direction.{layer}": v for layer, v in out.items()}, field)


def _gguf_entry(cursor: _Cursor) -> tuple[str, int, str, int]:
    """Read the description of a tensor: (name, elements, dtype, offset)."""
    name = cursor.string().decode(errors="replace")
    at = f"{cursor.field}.{brief(name)}"
    dimensions = cursor.number("I")
    if dimensions != 1:
        raise WeirError(f"expected 1 dimension, got {dimensions}", at)
    count, kind, offset = cursor.number("Q"), cursor.number("I"), cursor.number("Q")
    if kind not in _GGUF_TENSORS:
        raise WeirError(f"GGUF type {kind} is not supported; F32 (0) and F16 (1) are", at)
    return name, count, _GGUF_TENSORS[kind], offset


def _gguf_value(cursor: _Cursor, kind: int) -> Any:
    """Read a metadata value; return None for arrays and floats, which are skipped."""
    if kind == _GGUF_STRING:
        return cursor.string()
    if kind == _GGUF_ARRAY:
        inner, count = cursor.number("I"), cursor.number("Q")
        if inner in _GGUF_SIZES:
            cursor.take(count * _GGUF_SIZES[inner])
        elif inner == _GGUF_STRING:
            for _ in range(count):
                cursor.string()
        else:
            raise WeirError(f"an array of GGUF type {inner} is not supported", cursor.field)
        return None
    if kind not in _GGUF_SIZES:
        raise WeirError(f"unknown GGUF type {kind}", cursor.field)
    raw = cursor.take(_GGUF_SIZES[kind])
    return int.from_bytes(raw, "little") if kind not in (6, 12) else None


def to_json(directions: Directions) -> dict[str, Any]:
    """Return the JSON form that `read_vectors` reads."""
    if None in directions:
        return {"vector": directions[None].to_json()}
    return {"directions": {str(layer): v.to_json() for layer, v in directions.items()}}
