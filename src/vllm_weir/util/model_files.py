"""`fingerprint`: tells whether a folder still holds the model that it held before."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ENDS = (".safetensors", ".bin", ".pt", ".gguf")
"""Suffixes of weights."""
PART = 1 << 20
"""Bytes at each end of a file of weights that are read."""


def fingerprint(model: str) -> str | None:
    """Return a hash of a model's files, or None if `model` is no folder or file of this machine.

    It covers names and sizes, all of the JSON files, and both ends of the weights: a step of
    training changes all weights, while whole files would take long to read. Times are left out, so
    a copy has the fingerprint of its original.

    Args:
        model: a folder, a file, or a hub's id.

    Raises:
        OSError: if a file cannot be read.
    """
    path = Path(model)
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in (*ENDS, ".json"))
    found = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if file.suffix == ".json" or size <= 2 * PART:
                found.update(stream.read())
            else:
                found.update(stream.read(PART))
                stream.seek(-PART, os.SEEK_END)
                found.update(stream.read(PART))
    return found.hexdigest()
