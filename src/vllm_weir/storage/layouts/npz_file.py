"""Reading and writing npz files without pickled objects; damage is a WeirError."""

from __future__ import annotations

import io
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

try:
    from lzma import LZMAError
except ImportError:  # a Python that was built without it

    class LZMAError(Exception):  # type: ignore[no-redef]
        """A stand-in that is never raised."""


from vllm_weir.storage.object_store import ObjectStore

_T = TypeVar("_T")
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, LZMAError, ValueError, LookupError, EOFError, OSError, struct.error,
    NotImplementedError, RuntimeError, SyntaxError, tokenize.TokenError, TypeError, MemoryError, OverflowError,
)  # fmt: skip
"""What zipfile and numpy raise for damaged files."""


def read_npz(store: ObjectStore, name: str) -> dict[str, np.ndarray]:
    """Return all arrays of a file by name."""

    def arrays(file: io.BytesIO) -> dict[str, np.ndarray]:
        with np.load(file, allow_pickle=False) as data:
            return {key: data[key] for key in data.files}

    return _guarded(store, name, arrays)


def read_some(store: ObjectStore, name: str, wanted: tuple[str, ...]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays `wanted` of a file, and the (shape, dtype) of every array."""

    def read(file: io.BytesIO) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        with zipfile.ZipFile(file) as archive:
            shapes = {n.removesuffix(".npy"): _shape(archive, n) for n in archive.namelist() if n.endswith(".npy")}
        file.seek(0)
        with np.load(file, allow_pickle=False) as data:
            return {key: data[key] for key in wanted if key in data.files}, shapes

    return _guarded(store, name, read)


def _guarded(store: ObjectStore, name: str, read: Callable[[io.BytesIO], _T]) -> _T:
    file = io.BytesIO(store.read(name))
    try:
        return read(file)
    except _DAMAGE as e:
        raise store.error(name, f"is not an npz file, or is damaged: {type(e).__name__}: {str(e)[:120]}") from None


def write_npz(arrays: dict[str, np.ndarray]) -> bytes:
    """Return the bytes of a compressed npz file."""
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def _shape(archive: zipfile.ZipFile, member: str) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"npy version {version}")
        shape, _, dtype = readers[version](file)
        return shape, dtype
