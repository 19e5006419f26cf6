"""Similarities and statistics of rows. Arrays and tensors alike; sums are made in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.scalars import plain

Matrix: TypeAlias = "np.ndarray | torch.Tensor"
METRICS = ("cosine", "l2", "correlation")


def compute_similarity(acts1: Matrix, acts2: Matrix, metric: str = "cosine") -> float:
    """How alike two sets of values of the same shape are, taken as one vector each.

    Args:
        acts1, acts2: any shape, the same; axes of length one do not count ([1, d] and [d] are one vector each).
        metric: ``"cosine"``; ``"correlation"`` (Pearson); ``"l2"``: minus the distance, so that more is more alike.

    Returns:
        NaN where it is undefined: cosine with a vector of zeros, correlation with a constant one.
    """
    a, b = as_array(acts1), as_array(acts2)
    if a.squeeze().shape != b.squeeze().shape or not a.size:
        raise WeirError(f"two arrays of the same shape, got {list(a.shape)} and {list(b.shape)}", "acts2")
    return float(similarity_matrix(a.reshape(1, -1), b.reshape(1, -1), metric)[0, 0])


def similarity_matrix(acts1: Matrix, acts2: Matrix | None = None, metric: str = "cosine") -> np.ndarray:
    """Similarity of every row of `acts1` [n, d] with every row of `acts2` [m, d] (default: `acts1`): float64 [n, m]."""
    if metric not in METRICS:
        raise WeirError(f"unknown metric {brief(metric)!r}; choose from {', '.join(METRICS)}", "metric")
    a = as_array(acts1)
    b = a if acts2 is None else as_array(acts2)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise WeirError(f"rows [n, d] of the same width, got {list(a.shape)} and {list(b.shape)}", "acts2")
    if metric == "l2":
        # differences, because the expanded square loses small distances between large rows
        return np.stack([-np.linalg.norm(b - row, axis=-1) for row in a]) if len(a) else np.zeros((0, len(b)))
    if metric == "correlation":
        a, b = _centred(a), _centred(b)
    with np.errstate(invalid="ignore", divide="ignore"):
        units = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b)]
    return np.clip(units[0] @ units[1].T, -1, 1)


def _centred(x: np.ndarray) -> np.ndarray:
    out = x - x.mean(-1, keepdims=True)
    # The mean of a constant row may be off by a rounding, which would then be all that is compared.
    out[(x == x[..., :1]).all(-1)] = 0
    return out


def compare_tokens(
    acts1: Matrix, acts2: Matrix, token_idx1: int = 0, token_idx2: int = 0, metric: str = "cosine"
) -> float:
    """Similarity of one row of `acts1` [n, d] with one of `acts2` [m, d]; negative indices count from the end."""
    rows = []
    for number, acts, index in ((1, acts1, token_idx1), (2, acts2, token_idx2)):
        array = as_array(acts)
        if array.ndim != 2:
            raise WeirError(f"rows [tokens, d], got {list(array.shape)}", f"acts{number}")
        if not -len(array) <= index < len(array):
            raise WeirError(f"row {index} of {len(array)} does not exist", f"token_idx{number}")
        rows.append(array[index])
    return compute_similarity(rows[0], rows[1], metric)


def compute_layer_statistics(sequence_activations: Mapping[int, Any]) -> dict[int, dict[str, float]]:
    """Statistics of each layer's values.

    Args:
        sequence_activations: layer -> rows [n, d], or the dicts of `load_sequence_activations`.

    Returns:
        layer -> ``mean``, ``std`` (of the population), ``min``, ``max``, ``norm`` (of all values together) and
        ``row_norm`` (mean of the rows' norms).
    """
    out = {}
    for layer in sorted(sequence_activations):
        x = as_array(rows_of(sequence_activations[layer]))
        if not x.size:
            raise WeirError(f"layer {layer} has no rows", "sequence_activations")
        out[layer] = {
            "mean": float(x.mean()),
            "std": float(x.std()),
            "min": float(x.min()),
            "max": float(x.max()),
            "norm": float(np.linalg.norm(x)),
            "row_norm": float(np.linalg.norm(x.reshape(-1, x.shape[-1]), axis=-1).mean()),
        }
    return out


def create_token_timeline(sequence_activations: Mapping[int, Any], layer: int = 0) -> Any:
    """One layer's rows in the order of the tokens, [tokens, d]; see `compute_layer_statistics` for the argument."""
    layer = plain(layer)
    if layer not in sequence_activations:
        raise WeirError(f"layer {layer} was not stored; there are {sorted(sequence_activations)}", "layer")
    data = sequence_activations[layer]
    rows = rows_of(data)
    if isinstance(data, Mapping) and "positions" in data:
        order = np.argsort(as_array(data["positions"]), kind="stable")
        return rows[torch.from_numpy(order)] if isinstance(rows, torch.Tensor) else rows[order]
    return rows


def rows_of(data: Any) -> Any:
    """Rows of what a loader returned: themselves, or reconstructed."""
    if not isinstance(data, Mapping):
        return data
    from vllm_weir.analysis.reconstruct import reconstruct_activations

    return reconstruct_activations(data)


def as_array(values: Any) -> np.ndarray:
    """As float64 on the host."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, np.float64)
