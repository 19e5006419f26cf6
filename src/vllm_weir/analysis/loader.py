"""`ActivationLoader` and `quick_load`."""

from __future__ import annotations

import json
import re
from os import PathLike
from typing import Any

import numpy as np
import torch

from vllm_weir.analysis.files import check_mode, native, reconstruct_activations
from vllm_weir.analysis.measure import (
    Matrix,
    compute_layer_statistics,
    compute_similarity,
    create_token_timeline,
)
from vllm_weir.errors import WeirError, brief
from vllm_weir.keep.blocks import ArrayBlock, Block
from vllm_weir.keep.npz import CODES, folder_of, to_arrays
from vllm_weir.keep.npzfile import read_npz
from vllm_weir.keep.open import load
from vllm_weir.spec.hooks import normalise_hook

_SEQUENCE = re.compile(r"(.+)/seq(\d+)")


class ActivationLoader:
    """Vllm_mi_patch's loader over any dataset that `vllm_weir.load` reads.

    Args:
        output_dir: the dataset: path or fsspec URL.
        mode: ignored but checked: the data say how they are compressed.
        device: tensors on it; None: numpy arrays.
        hook: which hook point's layers.
        options: for `vllm_weir.load` (``hidden_size``, ``layer_ids``, ``storage_options``).
    """

    def __init__(
        self, output_dir: str | PathLike, mode: str | None = None, device: str | None = None, *,
        hook: str = "resid_post", **options: Any,
    ) -> None:  # fmt: skip
        check_mode(mode)
        self.output_dir, self.mode, self.device = output_dir, mode, device
        self.hook = normalise_hook(hook)
        self.dataset = load(output_dir, **options)
        self._sequences: dict[str, dict[int, str]] = {}
        for request in self.dataset.requests:
            match = _SEQUENCE.fullmatch(request) if self.dataset.layout == "vllm_mi_patch" else None
            name, sequence = (match[1], int(match[2])) if match else (request, 0)
            self._sequences.setdefault(name, {})[sequence] = request

    def list_requests(self) -> list[str]:
        """Request ids, sorted."""
        return sorted(self._sequences)

    def load_request(
        self, request_id: str, reconstruct: bool = False, *, space: str = "projected"
    ) -> dict[int, dict[int, Any]]:
        """All layers of a request.

        Args:
            request_id: of `list_requests`, or the name of its folder.
            reconstruct: rows; False: a dict with ``activations``, ``positions`` and ``token_ids``, and of npz files and
                rp8 what is stored (``q``, ``scale``, ``zero``, ...).
            space: of rp8, as for `reconstruct_activations`.

        Returns:
            {sequence: {layer: [n, d]}}, layers ascending.
        """
        name = request_id
        if name not in self._sequences:  # perhaps its folder
            name = next((r for r in self._sequences if folder_of(r) == request_id), "")
        if not name:
            have = ", ".join(self.list_requests()[:5])
            raise WeirError(f"{self.output_dir} has no request {brief(request_id, 80)!r}; it has {have}", "request_id")
        out: dict[int, dict[int, Any]] = {}
        for sequence, request in sorted(self._sequences[name].items()):
            sites = [s for s in self.dataset[request].sites if s.hook == self.hook]
            out[sequence] = {s.layer: self._read(request, s, space) for s in sites}
            if reconstruct:
                out[sequence] = {
                    layer: reconstruct_activations(data, space=space) for layer, data in out[sequence].items()
                }
        return out

    def _read(self, request: str, site: Any, space: str) -> dict[str, Any]:
        blocks = self._blocks(request, site)
        projected = space == "projected" and all(block.header["method"] == "rp8" for block in blocks)
        found = self.dataset.rows(site, request, space="projected" if projected else "model")
        data = {"activations": found.rows.float(), "positions": found.positions, "token_ids": found.token_ids}
        data |= {k: torch.from_numpy(native(array)) for k, array in self._fields(request, site, blocks).items()}
        if self.device is None:
            return {key: value.numpy() for key, value in data.items()}
        return {key: value.to(self.device) for key, value in data.items()}

    def _fields(self, request: str, site: Any, blocks: list[Block]) -> dict[str, np.ndarray]:
        """What is stored, by the names that npz files have for it: of npz files that hold codes, and of rp8, from which
        rows in either space are made; of anything else none."""
        if len(blocks) != 1:
            return {}
        block, index = blocks[0], self.dataset.index
        if isinstance(block, ArrayBlock):
            arrays = read_npz(block.store, block.name)
            return arrays if any(name in arrays for name in CODES) else {}
        which, at = self.dataset._ordered(self.dataset._runs(site, request))
        if block.header["method"] != "rp8" or not len(which):
            return {}
        ((_, records),) = index.gather(which, at).values()
        return to_arrays(records, block.header) | {"weir": np.frombuffer(json.dumps(block.header).encode(), np.uint8)}

    def _blocks(self, request: str, site: Any) -> list[Block]:
        """Where a site's rows of one request lie."""
        index = self.dataset.index
        runs = index.runs_of(index.code[request])
        runs = runs[index.site[runs] == self.dataset.sites.index(site)]
        return [index.blocks[code] for code in np.unique(index.block[runs]).tolist()]

    def compute_similarity(self, acts1: Matrix, acts2: Matrix, metric: str = "cosine") -> float:
        """See `vllm_weir.analysis.compute_similarity`."""
        return compute_similarity(acts1, acts2, metric)

    def create_token_timeline(self, sequence_activations: dict[int, Any], layer: int = 0) -> Any:
        """See `vllm_weir.analysis.create_token_timeline`."""
        return create_token_timeline(sequence_activations, layer)

    def compute_layer_statistics(self, sequence_activations: dict[int, Any]) -> dict[int, dict[str, float]]:
        """See `vllm_weir.analysis.compute_layer_statistics`."""
        return compute_layer_statistics(sequence_activations)


def quick_load(
    output_dir: str | PathLike, request_id: str | None = None, layer: int = 0, reconstruct: bool = True, **options: Any
) -> Any:
    """One layer of one request, in one call.

    Args:
        output_dir: any dataset that `vllm_weir.load` reads.
        request_id: None: the first.
        layer: a layer that was not stored is an error (Vllm_mi_patch returns all layers then).
        reconstruct: rows [n, d]; False: with positions and token ids, as `ActivationLoader.load_request` says.
        options: for `ActivationLoader`.
    """
    loader = ActivationLoader(output_dir, **options)
    requests = loader.list_requests()
    if not requests:
        raise WeirError(f"{output_dir} holds no requests")
    sequences = loader.load_request(requests[0] if request_id is None else request_id, reconstruct)
    first = sequences[min(sequences)]
    if layer not in first:
        raise WeirError(f"layer {layer} was not stored; there are {sorted(first)}", "layer")
    return first[layer]
