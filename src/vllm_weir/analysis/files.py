"""Readers of single files, with Vllm_mi_patch's names and signatures."""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

import torch

from vllm_weir.analysis.reconstruct import native
from vllm_weir.storage.layouts.npz_arrays import read_npz
from vllm_weir.storage.local_files import split_url
from vllm_weir.storage.object_store import ObjectStore


def load_activation_manifest(manifest_path: str | PathLike) -> dict[str, Any]:
    """Read a request's ``manifest.json``.

    Raises:
        MissingFile: if it does not exist.
        WeirError: if the file, which it names, is no manifest.
    """
    store, name = _split(manifest_path)
    data = store.read(name)
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise store.error(name, f"is no JSON: {str(e)[:80]}") from None
    if not isinstance(manifest, dict):
        raise store.error(name, "is no manifest")
    return manifest


def load_activation_file(
    npz_path: str | PathLike, return_torch: bool = False, device: str | None = None
) -> dict[str, Any]:
    """Read the arrays of one ``.npz`` file as they are stored.

    Args:
        npz_path: path or fsspec URL.
        return_torch: whether to return tensors instead of arrays.
        device: where the tensors go; default: CPU.

    Returns:
        ``q`` (or ``indices`` and ``values``), ``scale``, ``zero``; of Weir's files also
        ``positions``, ``token_ids`` and ``weir``, the header as bytes of JSON. For
        `reconstruct_activations`.

    Raises:
        MissingFile: if it does not exist.
        WeirError: if the file is no npz file, or damaged.
    """
    store, name = _split(npz_path)
    arrays: dict[str, Any] = read_npz(store, name)
    if return_torch:
        return {key: torch.from_numpy(native(array)).to(device or "cpu") for key, array in arrays.items()}
    return arrays


def _split(path: str | PathLike) -> tuple[ObjectStore, str]:
    url = ObjectStore(path).url  # checks the path
    folder, name = split_url(url)
    return ObjectStore(folder), name
