"""Files of lenses: directories of the package `tuned-lens`, and Jacobian lenses as they are published.

A Jacobian lens has a matrix J_l for each block but the last: what leaves block l, times J_l, is what would leave the
last block, to first order and on average over texts. Files of these are read, and no code in them is run:

* ``.pt`` of `jlens`, TransformerLens and vllm-lens: ``J`` {block: [d, d]};
* checkpoints of their fits: ``jacobian_sum`` {block: [d, d]} and how many prompts it is a sum of;
* ``.pt`` of J++: ``parameters.jacobians``;
* ``.npz``: ``J_{block}``.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.util.foreign_files import damage_refused, load_torch, npz_arrays, open_regular, read_regular

COUNTS = ("n_prompts", "n_done", "n", "num_prompts_trained_on")
MAX_BLOCKS = 4096


class Translator(NamedTuple):
    """What a lens does to rows h of the stream before the final norm: h becomes A h + b.

    Attributes:
        matrix: A [d_model, d_model], float16, bfloat16 or float32.
        bias: b [d_model], float32; None for none.
    """

    matrix: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what becomes of rows [n, d_model], computed in float32, in their dtype."""
        new = rows.float() @ self.matrix.float().T
        return (new if self.bias is None else new + self.bias).to(rows.dtype)

    def to(self, device: torch.device) -> Translator:
        """Return it on a device, in memory of its own."""
        bias = None if self.bias is None else self.bias.to(device, copy=True)
        return Translator(self.matrix.to(device, copy=True), bias)


@dataclass(frozen=True, eq=False)
class LensFile:
    """A lens on disk.

    Attributes:
        kind: ``"tuned"`` or ``"jacobian"``.
        path: of the directory or file.
        layers: blocks of which it reads what leaves them; the last block needs none.
        d_model: width of the stream.
        num_layers: of the model it is for; None if the file does not say.
        n_prompts: which a Jacobian lens was fitted on; None if the file does not say.
        target: the block to what leaves which it leads; None if the file does not say: the last one.
    """

    kind: str
    path: Path
    layers: tuple[int, ...]
    d_model: int
    num_layers: int | None
    n_prompts: int | None
    target: int | None
    _read: Callable[[int], Translator] = field(repr=False)

    def translator(self, layer: int) -> Translator:
        """Return what it does to rows that leave a block, mapped from the file."""
        if layer not in self.layers:
            raise WeirError(f"this lens has no matrix for block {layer}; it has {told_layers(self.layers)}", "layers")
        found = self._read(layer)
        for one in found:
            if one is not None and not one.isfinite().all():
                raise WeirError(f"the lens has numbers for block {layer} that are not finite", "path")
        return found

    def check_fits(self, num_layers: int, d_model: int, field: str) -> None:
        """Raise WeirError, naming `field`, unless the lens is for a model of this size."""
        layers = max(self.layers, default=-1) + 2 if self.num_layers is None else self.num_layers
        if d_model != self.d_model or layers > num_layers or (self.num_layers or num_layers) != num_layers:
            blocks = f"at least {layers}" if self.num_layers is None else str(layers)
            raise WeirError(
                f"it is for {blocks} blocks of width {self.d_model}, and the model has {num_layers} of width {d_model}",
                field,
            )
        if self.target not in (None, num_layers - 1):
            raise WeirError(
                f"it leads to what leaves block {self.target}, not the last one; fit it with the last block as target",
                field,
            )


def told_layers(layers: tuple[int, ...]) -> str:
    if layers and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"those from {layers[0]} to {layers[-1]}"
    return f"those of {brief(list(layers), 200)}"


TUNED_FILES = ("config.json", "params.pt")
"""Of the directory that holds a lens of the package `tuned-lens`."""


def open_lens(path: str | os.PathLike, field: str = "path") -> LensFile:
    """Open the files of a lens; matrices are read when they are asked for.

    Args:
        path: a directory of `tuned-lens`, or the file of a Jacobian lens.
        field: named by errors.
    """
    path = Path(path)
    content = path / TUNED_FILES[1] if path.is_dir() else path
    try:
        status = os.stat(content)
    except (OSError, ValueError) as e:
        raise WeirError(f"{brief(str(path), 200)} has no lens: {str(e)[:200]}", field) from None
    return _opened(path, status.st_mtime_ns, status.st_size, field)


@functools.lru_cache(maxsize=16)
def _opened(path: Path, _modified: int, _size: int, field: str) -> LensFile:
    if path.is_dir():
        return _tuned(path, field)
    return _npz(path, field) if path.suffix == ".npz" else _torch(path, field)


def _tuned(path: Path, field: str) -> LensFile:
    """Open a directory of the package `tuned-lens`: translator i, h + (A h + b), is for what enters block i."""
    try:
        config = json.loads(read_regular(path / "config.json"))
        kind, layers, width = config.get("lens_type"), config["num_hidden_layers"], config["d_model"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise WeirError(
            f"{path} is no tuned lens with config.json and params.pt: {type(e).__name__}: {e}", field
        ) from None
    if kind not in (None, "linear_tuned_lens"):
        raise WeirError(f"its lens_type is {kind!r}; served is 'linear_tuned_lens'", field)
    if not all(isinstance(one, int) and one > 0 for one in (layers, width)) or layers > MAX_BLOCKS:
        raise WeirError("its config.json says no number of blocks and no width", field)

    @functools.lru_cache(maxsize=1)
    def state() -> dict[str, torch.Tensor]:
        found = load_torch(path / "params.pt", field)
        if not isinstance(found, dict) or set(found) != {f"{k}.{name}" for k in range(layers) for name in _PARTS}:
            raise WeirError("its params.pt does not have one weight and one bias for each block", field)
        for k in range(layers):
            for name, shape in zip(_PARTS, ((width, width), (width,)), strict=True):
                _check(found[f"{k}.{name}"], shape, f"the {name} of block {k}", field)
        return found

    def read(layer: int) -> Translator:
        matrix, bias = (state()[f"{layer + 1}.{name}"].float() for name in _PARTS)
        return Translator(matrix + torch.eye(width), bias.clone())

    return LensFile("tuned", path, tuple(range(layers - 1)), width, layers, None, None, read)


_PARTS = ("weight", "bias")


def _torch(path: Path, field: str) -> LensFile:
    state = load_torch(path, field)
    if not isinstance(state, Mapping):
        raise WeirError(f"it holds a {type(state).__name__}, not the matrices of a lens by block", field)
    parameters, config = state.get("parameters"), state.get("config")
    told: dict[str, Any] = {}
    for one in (state, state.get("provenance"), state.get("metadata"), config):
        told = (dict(one) if isinstance(one, Mapping) else {}) | told
    count = next((told[name] for name in COUNTS if isinstance(told.get(name), int)), None)
    sums = "J" not in state and "jacobian_sum" in state
    found = state.get("J", state.get("jacobian_sum"))
    if found is None and isinstance(parameters, Mapping):
        found = parameters.get("jacobians")
    if not isinstance(found, Mapping):
        keys = brief(sorted(map(str, state)), 200)
        raise WeirError(
            f"it has none of the keys J, jacobian_sum and parameters.jacobians, which Jacobian lenses have; it has "
            f"{keys}",
            field,
        )
    if sums and not count:
        raise WeirError("it has a jacobian_sum, and does not say of how many prompts (n_done or n_prompts)", field)
    return _jacobian(path, found, told, count, count if sums else None, field)


def _npz(path: Path, field: str) -> LensFile:
    with damage_refused("damaged, or no npz file of a lens", field), open_regular(path) as file:
        arrays, _ = npz_arrays(file)
    found = {name.removeprefix("J_"): array for name, array in arrays.items() if name.startswith("J_")}
    told: dict[str, Any] = {
        name: arrays[name].item() for name in ("n_prompts", "d_model") if name in arrays and arrays[name].size == 1
    }
    if not found:
        raise WeirError("it has no arrays J_0, J_1, .., which Jacobian lenses have", field)
    count = told.get("n_prompts")
    return _jacobian(path, found, told, count if isinstance(count, int) else None, None, field)


def _jacobian(
    path: Path, found: Mapping[Any, Any], told: Mapping[str, Any], count: int | None, of: int | None, field: str
) -> LensFile:
    """Return a Jacobian lens.

    Args:
        path: of the file.
        found: block -> matrix.
        told: what the file says beside them.
        count: of prompts.
        of: what the matrices are the sums of; None if they are means.
        field: named by errors.
    """
    matrices: dict[int, torch.Tensor] = {}
    for key, value in found.items():
        if not (isinstance(key, int) or (isinstance(key, str) and key.isdecimal())) or int(key) in matrices:
            raise WeirError(f"a block is named {brief(key)!r}, not by its number", field)
        matrices[int(key)] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if not matrices or len(matrices) > MAX_BLOCKS or min(matrices) < 0:
        raise WeirError("it has no matrix, or too many", field)
    width = told.get("d_model")
    if width is None:
        first = next(iter(matrices.values()))
        width = len(first) if isinstance(first, torch.Tensor) and first.dim() else 0
    source = told.get("d_source", width)
    if source != width or told.get("stream_reduce") not in (None, "none"):
        raise WeirError(
            f"it is for a model whose stream is several rows wide (d_source {source}, d_model {width}), which is not "
            "served",
            field,
        )
    for layer, matrix in matrices.items():
        _check(matrix, (width, width), f"J of block {layer}", field)
    target, end = told.get("target_layer"), told.get("relative_end_transport_layer", -1)
    if not isinstance(target, int) or target < 0:
        target = None
    if end != -1:
        raise WeirError(f"it leads to another block than the last (relative_end_transport_layer {end})", field)
    listed = told.get("source_layers")
    if isinstance(listed, (list, tuple)) and sorted(map(str, listed)) != sorted(map(str, matrices)):
        raise WeirError("its source_layers are not the blocks that it has matrices of", field)

    def read(layer: int) -> Translator:
        matrix = matrices[layer]
        return Translator(matrix.float() / of if of is not None else matrix)

    return LensFile("jacobian", path, tuple(sorted(matrices)), width, None, count, target, read)


def _check(tensor: Any, shape: tuple[int, ...], what: str, field: str) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or not tensor.is_floating_point():
        got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise WeirError(f"{what} is {got}; expected floats {list(shape)}", field)
