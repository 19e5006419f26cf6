"""Files as Vllm_mi_patch writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def codes_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Vllm_mi_patch's affine code with a scale for each row: q = rows / scale + zero."""
    low, high = rows.min(-1, keepdims=True), rows.max(-1, keepdims=True)
    scale = (high - low) / 255
    zero = np.clip(-low / scale, 0, 255)
    q = np.clip(np.rint(rows / scale + zero), 0, 255).astype(np.uint8)
    return {"q": q, "scale": scale[:, 0], "zero": zero[:, 0]}


def top_codes(values: np.ndarray, indices: list[list[int]]) -> dict[str, np.ndarray]:
    """The same of the largest values of rows; indices are stored in 16 bits."""
    codes = codes_of(values)
    return {"indices": np.array(indices).astype(np.int16), "values": codes.pop("q")} | codes


def write_request(folder: Path, layers: tuple[int, ...], rows: np.ndarray | None = None) -> np.ndarray:
    """Write the same rows for each layer, and return them."""
    if rows is None:
        rows = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    folder.mkdir(parents=True)
    for layer in layers:
        np.savez_compressed(folder / f"seq0_layer{layer}_rank0.npz", **codes_of(rows))
    return rows
