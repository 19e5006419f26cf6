"""Similarities and statistics of rows, given as arrays or tensors and computed in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import plain

Matrix: TypeAlias = "np.ndarray | torch.Tensor"
SimilarityMetric = Literal["cosine", "l2", "correlation"]
METRICS: tuple[str, ...] = get_args(SimilarityMetric)


def compute_similarity(acts1: Matrix, acts2: Matrix, metric: SimilarityMetric = "cosine") -> float:
    """Return the similarity of two arrays of the same shape, each taken as one vector.

    Args:
        acts1: an array of any shape.
        acts2: one of the same shape; axes of length one do not count ([1, d] and [d] are the same).
        metric: ``"cosine"``, ``"correlation"`` (Pearson) or ``"l2"`` (minus the distance, so larger
            is more similar).

    Returns:
        NaN where it is undefined: cosine with a vector of zeros, correlation with a constant one.

    Raises:
        WeirError: if the shapes differ, or the metric is unknown.
    """
    a, b = as_array(acts1), as_array(acts2)
    if a.squeeze().shape != b.squeeze().shape or not a.size:
        raise WeirError(f"expected two arrays of the same shape, got {list(a.shape)} and {list(b.shape)}", "acts2")
    return float(similarity_matrix(a.reshape(1, -1), b.reshape(1, -1), metric)[0, 0])


def similarity_matrix(acts1: Matrix, acts2: Matrix | None = None, metric: SimilarityMetric = "cosine") -> np.ndarray:
    """Return the similarity of every row of `acts1` with every row of `acts2`, float64 [n, m].

    Args:
        acts1: [n, d].
        acts2: [m, d]; default: `acts1`.
        metric: see `compute_similarity`.

    Raises:
        WeirError: if the rows' widths differ, or the metric is unknown.
    """
    if metric not in METRICS:
        raise WeirError(f"unknown metric {brief(metric)!r}; choose from {', '.join(METRICS)}", "metric")
    a = as_array(acts1)
    b = a if acts2 is None else as_array(acts2)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise WeirError(f"expected rows [n, d] of the same width, got {list(a.shape)} and {list(b.shape)}", "acts2")
    if metric == "l2":
        # The expanded square would lose small distances between large rows.
        return np.stack([-np.linalg.norm(b - row, axis=-1) for row in a]) if len(a) else np.zeros((0, len(b)))
    if metric == "correlation":
        a, b = _centred(a), _centred(b)
    with np.errstate(invalid="ignore", divide="ignore"):
        units = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b)]
    return np.clip(units[0] @ units[1].T, -1, 1)


def _centred(rows: np.ndarray) -> np.ndarray:
    centred = rows - rows.mean(-1, keepdims=True)
    # The mean of a constant row may be rounded, and the rounding error would be all that is left of
    # the row.
    centred[(rows == rows[..., :1]).all(-1)] = 0
    return centred


def compare_tokens(
    acts1: Matrix, acts2: Matrix, token_idx1: int = 0, token_idx2: int = 0, metric: SimilarityMetric = "cosine"
) -> float:
    """Return the similarity of one row of `acts1` with one of `acts2`.

    Args:
        acts1: [n, d].
        acts2: [m, d].
        token_idx1: row of `acts1`; negative indices count from the end.
        token_idx2: row of `acts2`.
        metric: see `compute_similarity`.

    Raises:
        WeirError: if there is no such row, or the metric is unknown.
    """
    rows = []
    for number, acts, index in ((1, acts1, token_idx1), (2, acts2, token_idx2)):
        array = as_array(acts)
        if array.ndim != 2:
            raise WeirError(f"expected rows [tokens, d], got {list(array.shape)}", f"acts{number}")
        if not -len(array) <= index < len(array):
            raise WeirError(f"there is no row {index}, only {len(array)} rows", f"token_idx{number}")
        rows.append(array[index])
    return compute_similarity(rows[0], rows[1], metric)


def compute_layer_statistics(sequence_activations: Mapping[int, Any]) -> dict[int, dict[str, float]]:
    """Return statistics of each layer's values.

    Args:
        sequence_activations: layer -> rows [n, d], or what `load_sequence_activations` returns.

    Returns:
        layer -> ``mean``, ``std`` (of the population), ``min``, ``max``, ``norm`` (of all values
        together) and ``row_norm`` (mean of the rows' norms).

    Raises:
        WeirError: if a layer has no rows.
    """
    out = {}
    for layer in sorted(sequence_activations):
        values = as_array(rows_of(sequence_activations[layer]))
        if not values.size:
            raise WeirError(f"layer {layer} has no rows", "sequence_activations")
        out[layer] = {
            "mean": float(values.mean()),
            "std": float(values.std()),
            "min": float(values.min()),
            "max": float(values.max()),
            "norm": float(np.linalg.norm(values)),
            "row_norm": float(np.linalg.norm(values.reshape(-1, values.shape[-1]), axis=-1).mean()),
        }
    return out


def create_token_timeline(sequence_activations: Mapping[int, Any], layer: int = 0) -> Any:
    """Return one layer's rows in the order of the tokens, [tokens, d].

    Args:
        sequence_activations: see `compute_layer_statistics`.
        layer: which layer.

    Raises:
        WeirError: if the layer was not stored.
    """
    layer = plain(layer)
    if layer not in sequence_activations:
        raise WeirError(f"layer {layer} was not stored; stored layers: {sorted(sequence_activations)}", "layer")
    data = sequence_activations[layer]
    rows = rows_of(data)
    if isinstance(data, Mapping) and "positions" in data:
        order = np.argsort(as_array(data["positions"]), kind="stable")
        return rows[torch.from_numpy(order)] if isinstance(rows, torch.Tensor) else rows[order]
    return rows


def rows_of(data: Any) -> Any:
    """Return rows as they are, or reconstruct them from what a loader has returned."""
    if not isinstance(data, Mapping):
        return data
    from vllm_weir.analysis.reconstruct import reconstruct_activations

    return reconstruct_activations(data)


def as_array(values: Any) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, np.float64)
