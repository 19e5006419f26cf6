"""Readers of steering-vector files: safetensors, GGUF control vectors, JSON. No code runs.

A file holds one array ([d], [n, d] or [layers, n, d]), or a direction ([d] or [1, d]) for each of
some blocks, which is added to the stream that leaves the block, as llama.cpp and repeng do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import is_json, loads
from vllm_weir.schema.gguf import read_gguf
from vllm_weir.schema.vectors import KEPT, Vector
from vllm_weir.util.foreign_files import MAX_NAMES, damage_refused, stand_in

Directions = dict[int | None, Vector]
"""One vector under None, or directions by block."""

_NUMBERED = re.compile(r"^(?:|.*[^0-9-]|.*[A-Za-z0-9]-)(\d{1,9})$", re.ASCII | re.DOTALL)
"""A name that ends in the number of a block. A dash before the number is a separator after a letter
or digit, elsewhere a minus sign, which is refused."""
_BLOCK = re.compile(r"^\d{1,9}$", re.ASCII)
_DESCRIPTION_KEYS = {"name", "digest", "shape", "layers", "refs", "norms", "bytes"}
"""What a server's answer says about a vector beside its content."""
METADATA = "weir_directions"
"""Key of the metadata under which a file of `Directions` has all but its vectors, as JSON."""
BLOCK_0 = "weir.direction.0"
"""Key of GGUF's metadata under which Weir keeps the direction of block 0, in its wire form."""


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


def kind_of(data: bytes, field: str = "file") -> str:
    """Return the file format that the first bytes indicate.

    Raises:
        WeirError: naming `field`, for a file that is none of a program with tensors, saying what it is.
    """
    if data[:4] == b"GGUF":
        return "gguf"
    if is_json(data):
        return "json"
    if reason := stand_in(data[:2048]):
        raise WeirError(f"{reason}; read are safetensors, GGUF and JSON", field)
    return "safetensors"


def is_safetensors(data: bytes) -> bool:
    """Return whether the bytes begin as a safetensors file does: the length of its header, and an object of JSON."""
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data) - 8


def parse_safetensors(data: bytes, field: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata.

    Raises:
        WeirError: for a file that is damaged, or has more than `MAX_NAMES` tensors.
    """
    from safetensors.torch import load

    with damage_refused("truncated, damaged or no safetensors file", field, data[:2048]):
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        if (count := header.count(b'"data_offsets"')) > MAX_NAMES:
            raise ValueError(f"{count} names, more than the limit of {MAX_NAMES}")
        tensors = dict(sorted(load(data).items()))
        return tensors, json.loads(header).get("__metadata__") or {}


def read_safetensors(data: bytes, field: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Do what `parse_safetensors` does; raise WeirError for anything but floats, too."""
    import torch

    tensors, metadata = parse_safetensors(data, field)
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise WeirError(f"expected floats, got {tensor.dtype}", f"{field}.{brief(name)}")
    return tensors, metadata


def _safetensors(data: bytes, field: str) -> Directions:
    tensors, metadata = read_safetensors(data, field)
    if METADATA in metadata:
        described = loads(metadata[METADATA], f"{field}.{METADATA}")
        hook = described.get("hook") if isinstance(described, dict) else None
        if hook != "resid_post":
            raise WeirError(
                f"directions of {brief(hook)}, and those of a file are added to resid_post; add them with a request",
                f"{field}.{METADATA}.hook",
            )
    return _named(tensors, field)


def number_in(name: str) -> int | None:
    """Return the number of a block in which a name ends; None if it ends in none."""
    match = _NUMBERED.match(name)
    return None if match is None else int(match[1])


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
    if len(arrays) > MAX_NAMES:
        raise WeirError(f"{len(arrays)} directions, more than the limit of {MAX_NAMES}", field)
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


def _gguf(data: bytes, field: str) -> Directions:
    """Read a control vector of llama.cpp or repeng.

    Both add ``direction.N`` to the stream that leaves block N, counted from 0. llama.cpp has no
    direction of block 0, and refuses a file with one; repeng reads and writes it. Where Weir
    writes a file for both, it lies in the metadata.
    """
    file = read_gguf(data, field)
    out: dict[str, Any] = {}
    for name, array in file.tensors.items():
        tensor_field = f"{field}.{brief(name)}"
        if re.match(r"^direction\.\d{1,9}$", name, re.ASCII) is None:
            raise WeirError("expected one tensor direction.N for each block N", tensor_field)
        out[name] = Vector.parse(array, tensor_field, (1,))
    text = file.metadata.get(BLOCK_0.encode())
    if text is not None:
        value = loads(text, f"{field}.{BLOCK_0}") if isinstance(text, bytes) else text
        if not isinstance(value, dict):
            raise WeirError("expected the wire form of a vector", f"{field}.{BLOCK_0}")
        _refuse_references(value, f"{field}.{BLOCK_0}")
        out[BLOCK_0] = Vector.parse(value, f"{field}.{BLOCK_0}", (1,))
    if not out:
        raise WeirError("there is no direction in it", field)
    return _by_layer(out, field)


def to_json(directions: Directions) -> dict[str, Any]:
    """Return the JSON form that `read_vectors` reads."""
    if None in directions:
        return {"vector": directions[None].to_json()}
    return {"directions": {str(layer): v.to_json() for layer, v in directions.items()}}
