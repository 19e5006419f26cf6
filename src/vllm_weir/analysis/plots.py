"""Plots of activations: figures, or PNG, SVG or a self-contained HTML page, by the path's suffix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from vllm_weir.analysis.metrics import METRICS, SimilarityMetric, as_array, rows_of, similarity_matrix
from vllm_weir.analysis.plot_style import (
    BLUE,
    FAINT,
    colours,
    finish,
    finished,
    label_axis,
    label_bar,
    label_layers,
    label_tokens,
    new_figure,
    number_table,
    row_names,
    style_lines,
    token_map,
)
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import plain, right_words
from vllm_weir.schema.hooks import HookPoint, normalise_hook


@right_words
def plot_heat_map(
    activations: Any, path: str | PathLike | None = None, *,
    tokens: Sequence[str] | None = None, hook: HookPoint = "resid_post",
    value: Callable[[np.ndarray], np.ndarray] | None = None, label: str = "norm of the row", title: str = "",
) -> Any:  # fmt: skip
    """Plot one number of every row as a heat map, layer by token.

    Values of both signs get a colour scale that is symmetric around 0.

    Args:
        activations: `Activations`, or layer -> rows [n, d].
        path: ``.png``, ``.svg`` or ``.html``; None to get the figure, which a notebook shows.
        tokens: texts of the tokens.
        hook: which hook point of `Activations`.
        value: rows [n, d] -> numbers [n]; default: their norms. For a direction v:
            ``lambda rows: rows @ v``.
        label: what the numbers are.
        title: of the plot.

    Returns:
        The path; without one, a ``matplotlib.figure.Figure``.

    Raises:
        WeirError: if the layers have different rows, rows hold NaN or Inf, `tokens` or `value` do
            not fit the rows, or the file cannot be written.
    """
    layers = by_layer(activations, hook)
    names = row_names(tokens, len(next(iter(layers.values()))))
    numbers = np.stack([(value or _norms)(rows) for rows in layers.values()])
    if numbers.shape != (len(layers), len(names)):
        raise WeirError(f"`value` must return one number a row; the result has shape {list(numbers.shape)}", "value")
    figure, axis = token_map(numbers, names, label, 0.24, origin="lower")
    label_layers(axis.yaxis, list(layers))
    label_axis(axis.yaxis, "layer")
    finish(axis, title or f"{normalise_hook(hook)}: {label}, by layer and token")
    return finished(
        figure, path, title or f"{label}, by layer and token", number_table("layer", names, layers, numbers)
    )


@right_words
def plot_norms(
    activations: Any, path: str | PathLike | None = None, *, hook: HookPoint = "resid_post", title: str = ""
) -> Any:
    """Plot the norms of the rows by layer: their median, middle half and range.

    For the arguments see `plot_heat_map`.
    """
    layers = by_layer(activations, hook)
    norms = [_norms(rows) for rows in layers.values()]
    quantiles = np.array([np.quantile(layer_norms, [0, 0.25, 0.5, 0.75, 1]) for layer_norms in norms])
    figure, axis = new_figure((6.4, 3.6))
    layer_numbers = list(layers)
    for low, high, alpha, label in ((0, 4, 0.12, "smallest to largest"), (1, 3, 0.28, "middle half")):
        ends = quantiles[:, low], quantiles[:, high]
        axis.fill_between(layer_numbers, *ends, color=BLUE, alpha=alpha, linewidth=0, label=label)
    axis.plot(layer_numbers, quantiles[:, 2], color=BLUE, marker="o", markersize=3.5, linewidth=1.6, label="median")
    style_lines(axis, quantiles.min(), quantiles.max())
    axis.set_xticks(layer_numbers[:: max(1, -(-len(layer_numbers) // 16))])
    label_axis(axis.xaxis, "layer")
    label_axis(axis.yaxis, "norm of a row")
    axis.legend(frameon=False, fontsize=8, loc="best")
    finish(axis, title or f"{normalise_hook(hook)}: norm by layer ({len(norms[0]):,} rows a layer)")
    columns = ["smallest", "lower quartile", "median", "upper quartile", "largest"]
    return finished(figure, path, title or "norm by layer", number_table("layer", columns, layers, quantiles))


@right_words
def plot_similarity(
    activations: Any, path: str | PathLike | None = None, *,
    layer: int | None = None, tokens: Sequence[str] | None = None,
    metric: SimilarityMetric = "cosine", hook: HookPoint = "resid_post", title: str = "",
) -> Any:  # fmt: skip
    """Plot the similarity of all pairs of tokens in one layer, or of all pairs of layers.

    Args:
        activations: see `plot_heat_map`.
        path: see `plot_heat_map`.
        layer: the layer whose tokens are compared; None to compare layers (mean over tokens).
        tokens: see `plot_heat_map`.
        metric: see `compute_similarity`.
        hook: see `plot_heat_map`.
        title: see `plot_heat_map`.

    Returns:
        The path; without one, a ``matplotlib.figure.Figure``.

    Raises:
        WeirError: if there is no such layer or metric, or as for `plot_heat_map`.
    """
    layers = by_layer(activations, hook)
    if metric not in METRICS:
        raise WeirError(f"unknown metric {brief(metric)!r}; choose from {', '.join(METRICS)}", "metric")
    layer = plain(layer)
    if layer is not None and layer not in layers:
        raise WeirError(f"there is no layer {layer}; the layers are {list(layers)}", "layer")
    names = row_names(tokens, len(next(iter(layers.values()))))
    if layer is not None:
        numbers = similarity_matrix(layers[layer], metric=metric)
    else:
        by_token = np.stack(list(layers.values()), 1)  # [tokens, layers, d]
        numbers = np.mean([similarity_matrix(rows, metric=metric) for rows in by_token], axis=0)
        names = [str(n) for n in layers]
    size = min(11.0, 2.6 + 0.24 * len(names))
    figure, axis = new_figure((max(4.4, size) + 0.9, max(4.2, size)))
    image = axis.imshow(numbers, interpolation="nearest", **colours(numbers, metric))
    for side in (axis.xaxis, axis.yaxis):
        if layer is None:
            label_layers(side, list(layers))
            label_axis(side, "layer")
        else:
            label_tokens(side, names)
    label_bar(figure.colorbar(image, ax=axis, pad=0.02, shrink=0.85), "-distance" if metric == "l2" else metric)
    compared = f"tokens in layer {layer}" if layer is not None else "layers, mean over tokens"
    finish(axis, title or f"{normalise_hook(hook)}: {metric} of {compared}")
    return finished(figure, path, title or f"{metric} of {compared}", number_table("", names, names, numbers))


@right_words
def plot_timeline(
    activations: Any, path: str | PathLike | None = None, *,
    layers: Sequence[int] | None = None, tokens: Sequence[str] | None = None,
    prompt_tokens: int | None = None, value: Callable[[np.ndarray], np.ndarray] | None = None,
    label: str = "norm of the row", hook: HookPoint = "resid_post", title: str = "",
) -> Any:  # fmt: skip
    """Plot one number of every row along the tokens, a line for each layer.

    Args:
        activations: see `plot_heat_map`.
        path: see `plot_heat_map`.
        layers: which layers; default: up to five, spread evenly.
        tokens: see `plot_heat_map`.
        prompt_tokens: tokens of the prompt, after which a line marks the start of generation.
        value: see `plot_heat_map`.
        label: see `plot_heat_map`.
        hook: see `plot_heat_map`.
        title: see `plot_heat_map`.

    Returns:
        The path; without one, a ``matplotlib.figure.Figure``.

    Raises:
        WeirError: if there is no such layer, or as for `plot_heat_map`.
    """
    rows_by_layer = by_layer(activations, hook)
    chosen = _choose_layers(layers, list(rows_by_layer))
    names = row_names(tokens, len(next(iter(rows_by_layer.values()))))
    lines = {layer: np.asarray((value or _norms)(rows_by_layer[layer])) for layer in chosen}
    for line in lines.values():
        if line.shape != (len(names),):
            raise WeirError(f"`value` must return one number a row; the result has shape {list(line.shape)}", "value")
    figure, axis = new_figure((max(6.0, min(14.0, 2.4 + 0.26 * len(names))), 3.8))
    from matplotlib import colormaps

    shades = colormaps["viridis"](np.linspace(0.08, 0.86, len(chosen)))
    for layer, colour in zip(chosen, shades):
        axis.plot(lines[layer], color=colour, linewidth=1.6, marker="o", markersize=2.8, label=f"layer {layer}")
    numbers = np.stack(list(lines.values()), 1)  # [tokens, layers]
    style_lines(axis, numbers.min(), numbers.max())
    if prompt_tokens is not None and 0 < prompt_tokens < len(names):
        _mark_generation(axis, prompt_tokens - 0.5)
    axis.set_xlim(-0.6, len(names) - 0.4)
    label_tokens(axis.xaxis, names)
    label_axis(axis.yaxis, label)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    finish(axis, title or f"{normalise_hook(hook)}: {label}, token by token")
    table = number_table("token", [f"layer {layer}" for layer in chosen], names, numbers)
    return finished(figure, path, title or f"{label}, token by token", table)


def _choose_layers(layers: Sequence[int] | None, present: list[int]) -> list[int]:
    """Return the layers that were asked for, or up to five of those present."""
    if layers is None:
        return sorted({present[round(i)] for i in np.linspace(0, len(present) - 1, min(5, len(present)))})
    chosen = [plain(layer) for layer in layers]
    for layer in chosen:
        if layer not in present:
            raise WeirError(f"there is no layer {layer}; the layers are {present}", "layers")
    if not chosen:
        raise WeirError("name at least one layer, or leave `layers` out", "layers")
    return chosen


def _mark_generation(axis: Any, x: float) -> None:
    axis.axvline(x, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axis.annotate(
        "generated", (x, 1), xycoords=("data", "axes fraction"), xytext=(4, -10),
        textcoords="offset points", fontsize=7.5, color=FAINT,
    )  # fmt: skip


def by_layer(activations: Any, hook: HookPoint = "resid_post") -> dict[int, np.ndarray]:
    """Return layer -> float64 [n, d], from `Activations` or a mapping from layers to rows."""
    hook = normalise_hook(hook)
    if hasattr(activations, "sites"):
        layers: dict[int, Any] = {s.layer: activations[s] for s in activations.sites if s.hook == hook}
        activations.positions  # noqa: B018  (raises if the sites have rows at different positions)
    elif isinstance(activations, Mapping):
        layers = dict(activations)
    else:
        type_name = type(activations).__name__
        raise WeirError(f"expected Activations or a mapping from layers to rows, got {type_name}", "activations")
    arrays = {layer: as_array(rows_of(layers[layer])) for layer in sorted(layers)}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2 or 0 in next(iter(shapes)):
        given = sorted(map(list, shapes))[:3]
        hint = "; choose a head, or flatten the heads" if all(len(shape) == 3 for shape in shapes) else ""
        raise WeirError(f"all layers must have rows [n, d] of one shape, got {given}{hint}", "activations")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise WeirError("rows hold NaN or Inf", "activations")
    return arrays


def _norms(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows, axis=-1)
