"""Single files and sequences, with Vllm_mi_patch's names and signatures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch

from vllm_weir.codec import decode, project
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.compression import METHODS, Compression
from vllm_weir.storage.foreign.mi_patch_npz import rebuild
from vllm_weir.storage.layouts.npz import to_records
from vllm_weir.storage.layouts.npz_file import read_npz
from vllm_weir.storage.object_store import Store, split_url

DENSE, SPARSE = ("rp8", "full8"), "topk8"
"""Vllm_mi_patch's modes whose values are in ``q``, and the one whose values are in ``values``."""


def load_activation_manifest(manifest_path: str | PathLike) -> dict[str, Any]:
    """A request's ``manifest.json``; raises WeirError naming the file if it is none, MissingFile if it is not there."""
    store, name = _split(manifest_path)
    data = store.read(name)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise store.fail(name, f"is no JSON: {str(e)[:80]}") from None
    if not isinstance(found, dict):
        raise store.fail(name, "is no manifest")
    return found


def load_activation_file(
    npz_path: str | PathLike, return_torch: bool = False, device: str | None = None
) -> dict[str, Any]:
    """The arrays of one ``.npz`` file as they are stored.

    Args:
        npz_path: path or fsspec URL.
        return_torch: tensors instead of arrays.
        device: for the tensors.

    Returns:
        ``q`` (or ``indices`` and ``values``), ``scale``, ``zero``; of Weir's files also ``positions``, ``token_ids``
        and ``weir``, the header as bytes of JSON. For `reconstruct_activations`.

    Raises:
        MissingFile: if it is not there.
        WeirError: if it is no npz file, or damaged.
    """
    store, name = _split(npz_path)
    arrays: dict[str, Any] = read_npz(store, name)
    if return_torch:
        return {key: torch.from_numpy(native(array)).to(device or "cpu") for key, array in arrays.items()}
    return arrays


def reconstruct_activations(
    compressed_data: Mapping[str, Any], mode: str | None = None, *, hidden_size: int | None = None,
    space: str = "projected",
) -> Any:  # fmt: skip
    """Rows from the arrays of a file.

    Weir's files are decoded by their header (without it: ``q * scale + zero``); Vllm_mi_patch's by the inverse that
    fits its code, ``(q - zero) * scale`` (its own function computes something else). What keeps no values (scales per
    dimension) is refused.

    Args:
        compressed_data: of `load_activation_file`, or of `ActivationLoader.load_request`.
        mode: ``"rp8"``, ``"full8"``, ``"topk8"``, ``"none"`` or another method of Weir's: the ``mode`` of a manifest
            (``"ActMode.RP8"`` in Vllm_mi_patch's). None: what the fields say.
        hidden_size: d_model, for topk8 of Vllm_mi_patch.
        space: of Weir's rp8: ``"projected"``, [n, k], where inner products and similarities are estimated; ``"model"``,
            [n, d_model], the least-squares estimate of the rows.

    Returns:
        float32 [n, d]: a tensor if the data are tensors, an array if they are arrays.
    """
    mode = check_mode(mode)
    if space not in ("projected", "model"):
        raise WeirError("space is 'projected' or 'model'", "space")
    if "activations" in compressed_data and "weir" not in compressed_data:
        return compressed_data["activations"]  # decoded already
    sample = next((v for v in compressed_data.values() if isinstance(v, torch.Tensor)), None)
    arrays = {k: v.cpu().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for k, v in compressed_data.items()}
    if "weir" not in arrays:
        if mode is not None and mode not in ((SPARSE,) if "indices" in arrays else DENSE):
            raise WeirError(f"these are not the fields of {mode}: {', '.join(sorted(arrays))[:80]}", "mode")
        rows = rebuild(arrays, hidden_size)
    else:
        rows = _by_header(arrays, space)
    return torch.from_numpy(rows).to(sample.device) if sample is not None else rows


def check_mode(mode: object) -> str | None:
    """The method that a mode names, which Vllm_mi_patch's manifests may call ``ActMode.RP8``; WeirError if none."""
    if mode is None:
        return None
    name = mode.removeprefix("ActMode.").lower() if isinstance(mode, str) and mode.startswith("ActMode.") else mode
    if name not in METHODS:
        raise WeirError(f"unknown mode {brief(mode)!r}; choose from {', '.join(METHODS)}", "mode")
    return METHODS[METHODS.index(name)]  # Vllm_mi_patch's enum equals it, but has another text


def _by_header(arrays: dict[str, np.ndarray], space: str) -> np.ndarray:
    try:
        header = json.loads(arrays["weir"].astype(np.uint8).tobytes())
        Compression.from_header(header)
        records = torch.from_numpy(to_records({k: _little(v) for k, v in arrays.items()}, header))
    except (ValueError, KeyError) as e:
        if isinstance(e, WeirError):
            raise
        raise WeirError(f"these arrays do not fit their header: {str(e)[:80]}") from None
    wanted = project if header["method"] == "rp8" and space == "projected" else decode
    return wanted(records, header).numpy()


def load_sequence_activations(
    output_dir: str | PathLike, request_id: str, sequence_id: int | str = 0, layers: Sequence[int] | None = None,
    return_torch: bool = False, device: str | None = None, **options: Any,
) -> dict[int, dict[str, Any]]:  # fmt: skip
    """All layers of one sequence, as stored; any dataset that `vllm_weir.load` reads will do.

    Args:
        output_dir: the dataset.
        request_id: of the dataset, or the name of its folder.
        sequence_id: of a request with several sequences.
        layers: only these.
        return_torch, device: as for `load_activation_file`.
        options: for `vllm_weir.load`, such as the ``hidden_size`` that Vllm_mi_patch's topk8 needs.

    Returns:
        layer -> arrays, by ascending layer, for `reconstruct_activations`.

    Raises:
        MissingFile: if there is no such request.
        WeirError: if there is no such sequence or layer; naming the file, if it is damaged.
    """
    from vllm_weir.analysis.loader import ActivationLoader

    loader = ActivationLoader(output_dir, device=(device or "cpu") if return_torch else None, **options)
    return loader.load_sequence(request_id, sequence_id, layers)


def _split(path: str | PathLike) -> tuple[Store, str]:
    url = Store(path).url  # which is checked
    folder, name = split_url(url)
    return Store(folder), name


def native(array: np.ndarray) -> np.ndarray:
    """In the machine's byte order, which torch wants."""
    return array.astype(array.dtype.newbyteorder("="))


def _little(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.itemsize > 1 else array
