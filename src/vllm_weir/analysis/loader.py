"""Vllm_mi_patch's loader, for every dataset that Weir reads, and its readers of single files."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch

from vllm_weir.analysis.metrics import (
    Matrix,
    SimilarityMetric,
    compute_layer_statistics,
    compute_similarity,
    create_token_timeline,
)
from vllm_weir.analysis.reconstruct import check_mode, native, reconstruct_activations
from vllm_weir.errors import MissingFile, WeirError, brief
from vllm_weir.results.activations import Activations
from vllm_weir.schema.fields import plain
from vllm_weir.schema.hooks import Site, normalise_hook
from vllm_weir.storage.atomic_file import split_url
from vllm_weir.storage.dataset import ActivationDataset
from vllm_weir.storage.index import Index, short_names
from vllm_weir.storage.layouts.npz import CODES, folder_of, home_of, read_npz, to_arrays, unpack_own
from vllm_weir.storage.loading import load
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import ArrayBlock, RecordBlock

_SEQUENCE = re.compile(r"(.+)/seq(\d+)")


class ActivationLoader:
    """Vllm_mi_patch's loader, for any dataset that `vllm_weir.load` reads.

    The dataset is opened at the first question and stays open; an empty folder is looked into
    again.

    Args:
        output_dir: path or fsspec URL of the dataset.
        mode: checked, but not used: the data say how they are compressed.
        device: where to put tensors; None for numpy arrays.
        hook: the hook point whose layers are read.
        options: more arguments for `vllm_weir.load` (``hidden_size``, ``layer_ids``,
            ``storage_options``).
    """

    def __init__(
        self, output_dir: str | PathLike, mode: str | None = None, device: str | None = None, *,
        hook: str = "resid_post", **options: Any,
    ) -> None:  # fmt: skip
        check_mode(mode)
        self.output_dir, self.mode, self.device = output_dir, mode, device
        self.hook = normalise_hook(hook)
        self._options = options

    @functools.cached_property
    def dataset(self) -> ActivationDataset:
        """The dataset; raises what `vllm_weir.load` raises."""
        return load(self.output_dir, **self._options)

    @functools.cached_property
    def _sequences(self) -> dict[str, dict[int, str]]:
        """Name of a request -> sequence -> its request in the dataset."""
        sequences: dict[str, dict[int, str]] = {}
        folders = _folders(self.dataset.index)
        for request in self.dataset.requests:
            match = _SEQUENCE.fullmatch(request) if self.dataset.layout == "vllm_mi_patch" else None
            name, sequence = (match[1], int(match[2])) if match else (folders.get(request, request), 0)
            sequences.setdefault(name, {})[sequence] = request
        return sequences

    def list_requests(self) -> list[str]:
        """Return the requests' names, sorted: folders (``req_...``) for npz files, else ids."""
        try:
            return sorted(self._sequences)
        except WeirError:
            store = ObjectStore(self.output_dir, self._options.get("storage_options"))
            if store.is_file() or store.names(deep=True) or not store.exists():
                raise
            return []  # no engine has written into the folder yet

    def load_request(
        self, request_id: str, reconstruct: bool = False, *, space: str = "projected"
    ) -> dict[int, dict[int, Any]]:
        """Read all layers of a request.

        Args:
            request_id: a name of `list_requests`, or the request's id; a folder of that name comes
                first.
            reconstruct: whether to return rows. If not, a layer is a dict with ``activations``,
                ``positions`` and ``token_ids``, and for npz files and rp8 also what is stored
                (``q``, ``scale``, ``zero``, ...). There are no ``activations`` where
                Vllm_mi_patch's files do not determine them: topk8 without a width, and scales per
                dimension of one row.
            space: for rp8, see `reconstruct_activations`.

        Returns:
            {sequence: {layer: [n, d]}}, layers ascending; [n, heads, d_head] for points that have a
            row for each head.

        Raises:
            MissingFile: if there is no such request.
            WeirError: if a file, which it names, is damaged.
        """
        out: dict[int, dict[int, Any]] = {}
        for sequence, request in sorted(self._find(request_id).items()):
            acts = self.dataset[request]
            layers = {s.layer: self._read(request, acts, s, space, reconstruct) for s in self._sites(acts)}
            if reconstruct:
                layers = {layer: reconstruct_activations(data, space=space) for layer, data in layers.items()}
            out[sequence] = layers
        return out

    def load_sequence(
        self, request_id: str, sequence_id: int | str = 0, layers: Sequence[int] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Read one sequence as it is stored, see `load_sequence_activations`.

        Reads only the files of these layers.
        """
        sequences = self._find(request_id)
        request = {str(number): name for number, name in sequences.items()}.get(str(sequence_id))
        if request is None:
            raise WeirError(f"request {brief(request_id, 80)!r} has sequences {sorted(sequences)}", "sequence_id")
        acts = self.dataset[request]
        sites = {site.layer: site for site in self._sites(acts)}
        wanted = list(sites) if layers is None else [plain(layer) for layer in layers]
        if not wanted and sites:
            raise WeirError("the list of layers is empty; name some, or leave `layers` out for all", "layers")
        for layer in wanted:
            if layer not in sites:
                raise WeirError(f"layer {layer} was not stored; stored layers: {sorted(sites)}", "layers")
        chosen = {n: site for n, site in sites.items() if n in wanted}
        return {layer: self._read(request, acts, site, "projected") for layer, site in chosen.items()}

    def _find(self, request_id: str) -> dict[int, str]:
        names = self.list_requests()
        if request_id in names:
            return self._sequences[request_id]
        for name in names:
            if request_id in (*self._sequences[name].values(), folder_of(name)):
                return self._sequences[name]
        present = f"it has {', '.join(names[:5])}" if names else "it is empty"
        raise MissingFile(f"{self.output_dir} has no request {brief(request_id, 80)!r}; {present}", "request_id")

    def _sites(self, acts: Activations) -> list[Site]:
        return [site for site in acts.sites if site.hook == self.hook]

    def _read(self, request: str, acts: Activations, site: Site, space: str, decoded: bool = False) -> dict[str, Any]:
        """Return what `load_request` gives for one layer.

        `decoded`: raise WeirError if rows cannot be decoded.
        """
        blocks = self._blocks(request, site)
        projected = space == "projected" and all(block.header["method"] == "rp8" for block in blocks)
        data = {"positions": acts.positions_of(*site), "token_ids": acts.token_ids_of(*site)}
        try:
            rows = self.dataset.rows(site, request, space="projected" if projected else "model").rows
            data = {"activations": rows.float() if rows.is_floating_point() else rows} | data
        except WeirError:
            if decoded or not all(map(_is_foreign, blocks)):
                raise
        data |= {k: torch.from_numpy(native(array)) for k, array in self._fields(request, site, blocks).items()}
        if self.device is None:
            return {key: value.numpy() for key, value in data.items()}
        return {key: value.to(self.device) for key, value in data.items()}

    def _fields(self, request: str, site: Any, blocks: list[RecordBlock]) -> dict[str, np.ndarray]:
        """Return the stored arrays by their names in npz files.

        Only for npz files that hold codes, and for rp8, of which rows in either space can be made;
        else nothing.
        """
        if len(blocks) != 1:
            return {}
        block, index = blocks[0], self.dataset.index
        if isinstance(block, ArrayBlock):
            arrays = read_npz(block.store, block.name)
            return arrays if any(name in arrays for name in CODES) else {}
        runs, rows = self.dataset.ordered(self.dataset.runs_of(site, request))
        if block.header["method"] != "rp8" or not len(runs):
            return {}
        ((_, records),) = index.gather(runs, rows).values()
        return to_arrays(records, block.header) | {"weir": np.frombuffer(json.dumps(block.header).encode(), np.uint8)}

    def _blocks(self, request: str, site: Any) -> list[RecordBlock]:
        index = self.dataset.index
        runs = index.runs_of(index.request_codes[request])
        runs = runs[index.run_site[runs] == self.dataset.sites.index(site)]
        return [index.blocks[code] for code in np.unique(index.run_block[runs]).tolist()]

    def compute_similarity(self, acts1: Matrix, acts2: Matrix, metric: SimilarityMetric = "cosine") -> float:
        """Return a similarity, see `vllm_weir.analysis.compute_similarity`."""
        return compute_similarity(acts1, acts2, metric)

    def create_token_timeline(self, sequence_activations: dict[int, Any], layer: int = 0) -> Any:
        """Return rows in order of tokens, see `vllm_weir.analysis.create_token_timeline`."""
        return create_token_timeline(sequence_activations, layer)

    def compute_layer_statistics(self, sequence_activations: dict[int, Any]) -> dict[int, dict[str, float]]:
        """Return statistics by layer, see `vllm_weir.analysis.compute_layer_statistics`."""
        return compute_layer_statistics(sequence_activations)


def _is_foreign(block: RecordBlock) -> bool:
    return isinstance(block, ArrayBlock) and block.readable and block.unpack is not unpack_own


def quick_load(
    output_dir: str | PathLike, request_id: str | None = None, layer: int = 0, reconstruct: bool = True, **options: Any
) -> Any:
    """Read one layer of one request.

    Args:
        output_dir: any dataset that `vllm_weir.load` reads.
        request_id: which request; None for the first.
        layer: which layer.
        reconstruct: whether to return rows [n, d]; if not, a dict, see
            `ActivationLoader.load_request`.
        options: more arguments for `ActivationLoader`.

    Raises:
        MissingFile: if there is no such request.
        WeirError: if the layer was not stored (Vllm_mi_patch returns all layers then).
    """
    loader = ActivationLoader(output_dir, **options)
    requests = loader.list_requests()
    if not requests:
        raise WeirError(f"{output_dir} holds no requests")
    sequences = loader.load_request(requests[0] if request_id is None else request_id, reconstruct)
    first, layer = sequences[min(sequences)], plain(layer)
    if layer not in first:
        raise WeirError(f"layer {layer} was not stored; stored layers: {sorted(first)}", "layer")
    return first[layer]


def _folders(index: Index) -> dict[str, str]:
    """Return request -> its folder, for Weir's npz files."""
    homes = {}
    for code, request in enumerate(index.requests):
        for block in (index.blocks[b] for b in index.run_block[index.runs_of(code)[:1]].tolist()):
            if isinstance(block, ArrayBlock) and block.unpack is unpack_own:
                homes[request] = home_of(block.name)[0]
    short = short_names(homes.values())
    # A request without rows has no file, and in a dataset that is one request's folder no folder
    # has a name.
    named = {request: short[home] for request, home in homes.items() if home}
    return {r: named.get(r, folder_of(r)) for r in index.requests if index.layout == "npz" or r in homes}


def load_sequence_activations(
    output_dir: str | PathLike, request_id: str, sequence_id: int | str = 0, layers: Sequence[int] | None = None,
    return_torch: bool = False, device: str | None = None, **options: Any,
) -> dict[int, dict[str, Any]]:  # fmt: skip
    """Read the layers of one sequence as they are stored.

    Args:
        output_dir: any dataset that `vllm_weir.load` reads.
        request_id: a request of the dataset, or the name of its folder.
        sequence_id: which of the request's sequences.
        layers: which layers; None for all.
        return_torch: see `load_activation_file`.
        device: see `load_activation_file`.
        options: more arguments for `vllm_weir.load`, such as the ``hidden_size`` that
            Vllm_mi_patch's topk8 needs.

    Returns:
        layer -> arrays, by ascending layer, for `reconstruct_activations`.

    Raises:
        MissingFile: if there is no such request.
        WeirError: if there is no such sequence or layer, or a file, which it names, is damaged.
    """
    loader = ActivationLoader(output_dir, device=(device or "cpu") if return_torch else None, **options)
    return loader.load_sequence(request_id, sequence_id, layers)


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
