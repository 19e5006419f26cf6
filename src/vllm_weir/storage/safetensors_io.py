"""Headers of safetensors files, local or remote, which the safetensors library cannot read.

A file is 8 bytes (length of the header, little-endian), the header (JSON: name -> dtype, shape,
data_offsets, and ``__metadata__``), the data. Weir's metadata contains a CRC-32 of the header, so
that a damaged one is noticed.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from vllm_weir.results.safetensors_header import MAX_HEADER, SIZES, _crc
from vllm_weir.storage.object_store import ObjectStore


class TensorEntry(NamedTuple):
    """Dtype, shape and place of a tensor; `start` and `end` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsHeader(NamedTuple):
    """A parsed header: tensors by name, and the metadata."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_container(store: ObjectStore, name: str, size: int | None = None) -> SafetensorsHeader:
    """Parse a file's header; raise WeirError, naming the file, if it is damaged or foreign."""
    size = store.size(name) if size is None else size
    head = store.read(name, 0, min(size, 65_536))
    if len(head) < 8:
        raise store.error(name, f"{len(head)} bytes are too few for a safetensors file; it is truncated or foreign")
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER or 8 + length > size:
        raise store.error(name, f"says its header has {length} bytes; it is truncated or no safetensors file")
    if 8 + length > len(head):
        head += store.read(name, len(head), 8 + length)
    try:
        entries = json.loads(head[8 : 8 + length])
    except (ValueError, RecursionError) as e:
        raise store.error(name, f"its header is no JSON: {str(e)[:80]}") from None
    if not isinstance(entries, dict):
        raise store.error(name, "its header is no JSON object")
    metadata = entries.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise store.error(name, "its metadata are not strings")
    # Files of `Activations.save` have no checksum.
    needs_crc = metadata.get("weir") not in (None, "1") or "request" in metadata
    if (needs_crc or "crc" in metadata) and metadata.pop("crc", None) != _crc(entries):
        raise store.error(name, "its header is damaged: its checksum does not match")
    tensors = {}
    for key, entry in entries.items():
        if key != "__metadata__":
            tensors[key] = _entry(store, name, key, entry, 8 + length, size)
    return SafetensorsHeader(tensors, metadata)


def _entry(store: ObjectStore, name: str, key: str, entry: Any, data_start: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        nbytes = SIZES[dtype]
        for n in shape:
            if type(n) is not int or n < 0:
                raise ValueError
            nbytes *= n
        if type(start) is not int or type(end) is not int or not 0 <= start <= end or end - start != nbytes:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise store.error(name, f"its entry for tensor {key[:60]!r} makes no sense") from None
    if data_start + end > size:
        raise store.error(
            name, f"truncated: tensor {key[:60]!r} ends at byte {data_start + end}, the file has {size}"
        ) from None
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)
