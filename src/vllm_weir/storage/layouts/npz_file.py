"""Reading and writing npz files without pickled objects; damage is a WeirError."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

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
