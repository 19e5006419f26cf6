"""Plots of what is inside attention and MLP: attention patterns, and the neurons that stand out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal

import numpy as np

from vllm_weir.analysis.metrics import as_array, rows_of
from vllm_weir.analysis.plot_style import (
    INK,
    colours,
    finish,
    finished,
    label_axis,
    label_bar,
    label_tokens,
    new_figure,
    number_table,
    row_names,
    token_map,
)
from vllm_weir.errors import WeirError
from vllm_weir.schema.fields import is_int, plain, right_words
from vllm_weir.schema.hooks import HookPoint, normalise_hook

MAX_HEADS = 64
BEST_KEYS = 5
"""Keys listed for each query in the table of an HTML page."""


@right_words
def plot_attention(
    activations: Any, path: str | PathLike | None = None, *,
    layer: int | None = None, heads: Sequence[int] | None = None,
    tokens: Sequence[str] | None = None, positions: Sequence[int] | None = None,
    hook: Literal["pattern", "attn_scores"] | str = "pattern",
    title: str = "",
) -> Any:  # fmt: skip
    """Plot attention patterns: a map of queries by keys for each head, all in one colour scale.

    Keys that a query does not see stay white in `attn_scores`, and are 0 in `pattern`.

    Args:
        activations: `Activations`, or values [rows, heads, keys].
        path: ``.png``, ``.svg`` or ``.html``, whose table lists the strongest keys of each query; None to get the
            figure.
        layer: which block of `Activations`; may be left out if they hold the hook point of one.
        heads: numbers of the heads for their titles, if the capture picked some; default: 0, 1, ...
        tokens: texts of the tokens at positions 0, 1, ..., at least one for each key.
        positions: positions of the rows, if values are given; default: the last ones.
        hook: ``"pattern"`` or ``"attn_scores"``.
        title: of the plot.

    Returns:
        The path; without one, a ``matplotlib.figure.Figure``.

    Raises:
        WeirError: if there is no such layer, the arguments do not fit the values, or the file
            cannot be written.
    """
    hook = normalise_hook(hook)
    values, at = _values(activations, hook, layer, positions)
    if values.ndim != 3 or 0 in values.shape:
        raise WeirError(f"expected values [rows, heads, keys], got {list(values.shape)}", "activations")
    numbers = np.where(np.isneginf(values), np.nan, values)
    if np.isnan(values).any() or not np.isfinite(numbers[~np.isnan(numbers)]).all():
        raise WeirError("values hold NaN or Inf", "activations")
    names = _position_names(tokens, values.shape[2], at)
    head_names = _head_names(heads, values.shape[1])
    figure = _head_maps(numbers, names, [names[p] for p in at], head_names, hook)
    title = title or f"{hook}: queries (down) by keys"
    figure.suptitle(title, fontsize=10, color=INK, x=0.01, ha="left")
    return finished(figure, path, title, _best_keys(numbers, names, at, head_names))


@right_words
def plot_top_neurons(
    activations: Any, path: str | PathLike | None = None, *,
    layer: int | None = None, k: int = 20,
    tokens: Sequence[str] | None = None, hook: HookPoint = "mlp_post", title: str = "",
) -> Any:  # fmt: skip
    """Plot the neurons with the largest absolute value at any token, as a map of neurons by tokens.

    Args:
        activations: `Activations`, or values [rows, neurons].
        path: ``.png``, ``.svg`` or ``.html``; None to get the figure.
        layer: see `plot_attention`.
        k: how many neurons; the strongest is on top.
        tokens: texts of the rows' tokens.
        hook: which hook point of `Activations`: `mlp_post`, `mlp_pre`, or any other with rows of
            one dimension.
        title: of the plot.

    Returns:
        The path; without one, a ``matplotlib.figure.Figure``.

    Raises:
        WeirError: as for `plot_attention`.
    """
    hook = normalise_hook(hook)
    values, _ = _values(activations, hook, layer, None)
    if values.ndim != 2 or 0 in values.shape:
        raise WeirError(f"expected values [rows, neurons], got {list(values.shape)}", "activations")
    if not np.isfinite(values).all():
        raise WeirError("values hold NaN or Inf", "activations")
    k = plain(k)
    if not is_int(k) or k < 1:
        raise WeirError("k is how many neurons to plot, at least 1", "k")
    names = row_names(tokens, len(values))
    neurons = np.argsort(-np.abs(values).max(0), kind="stable")[:k]
    numbers = values[:, neurons].T
    figure, axis = token_map(numbers, names, hook, 0.2)
    axis.set_yticks(range(len(neurons)), [str(n) for n in neurons], fontsize=7.5)
    label_axis(axis.yaxis, "neuron")
    title = title or f"{hook}: the {len(neurons)} strongest neurons, by token"
    finish(axis, title)
    return finished(figure, path, title, number_table("neuron", names, neurons, numbers))


def _values(
    activations: Any, hook: str, layer: int | None, positions: Sequence[int] | None
) -> tuple[np.ndarray, list[int]]:
    """Return the values and their positions; without Activations the last ones, or `positions`."""
    if hasattr(activations, "sites"):
        layers = [site.layer for site in activations.sites if site.hook == hook]
        layer = plain(layer)
        if layer is None and len(layers) == 1:
            layer = layers[0]
        if layer not in layers:
            there = f"the layers of {hook} are {layers}" if layers else f"the activations hold no {hook}"
            raise WeirError(f"name one layer; {there}" if layer is None else f"no layer {layer}; {there}", "layer")
        return as_array(rows_of(activations[hook, layer])), activations.positions_of(hook, layer).tolist()
    values = as_array(rows_of(activations))
    if positions is None:
        end = values.shape[-1] if values.ndim == 3 else len(values)
        return values, list(range(end - len(values), end))
    at = [plain(position) for position in positions]
    if len(at) != len(values):
        raise WeirError(f"there are {len(values)} rows but {len(at)} positions; give one a row", "positions")
    return values, at


def _position_names(tokens: Sequence[str] | None, keys: int, at: list[int]) -> list[str]:
    if any(not is_int(position) or not 0 <= position < keys for position in at):
        raise WeirError(f"rows are at positions 0..{keys - 1}, which have a key each", "positions")
    if tokens is not None and len(tokens) < keys:
        raise WeirError(f"there are {keys} keys but {len(tokens)} tokens; give those from position 0 on", "tokens")
    return row_names(None if tokens is None else tokens[:keys], keys)


def _head_names(heads: Sequence[int] | None, n: int) -> list[str]:
    if n > MAX_HEADS:
        raise WeirError(f"{n} heads, more than the {MAX_HEADS} that fit; capture some with heads=[...]", "heads")
    if heads is None:
        return [str(head) for head in range(n)]
    if len(heads) != n:
        raise WeirError(f"the values have {n} heads, but {len(heads)} are named", "heads")
    return [str(plain(head)) for head in heads]


def _head_maps(numbers: np.ndarray, names: list[str], queries: list[str], head_names: list[str], hook: str) -> Any:
    columns = min(len(head_names), max(1, math.ceil(math.sqrt(len(head_names) * len(queries) / len(names)))), 8)
    lines = -(-len(head_names) // columns)
    width = min(max(2.0, 0.16 * len(names)), 12.0 / columns + 1)
    height = min(max(0.5, 0.16 * len(queries)), 12.0 / lines + 1)
    size = (columns * width + 1.6, lines * (height + 0.3) + 1.2)
    figure, axes = new_figure(size, lines, columns, squeeze=False, sharex=True, sharey=True)
    scale = {"cmap": "viridis", "vmin": 0, "vmax": float(np.nanmax(numbers))} if hook == "pattern" else colours(numbers)
    for index, axis in enumerate(axes.flat):
        if index >= len(head_names):
            axis.set_axis_off()
            continue
        image = axis.imshow(numbers[:, index], aspect="auto", interpolation="nearest", **scale)
        finish(axis, f"head {head_names[index]}")
    for axis in axes[-1]:
        label_tokens(axis.xaxis, names)
    for axis in axes[:, 0]:
        label_tokens(axis.yaxis, queries)
    label_bar(figure.colorbar(image, ax=axes, pad=0.015, aspect=30), hook)
    return figure


def _best_keys(numbers: np.ndarray, names: list[str], at: list[int], head_names: list[str]) -> list[list[str]]:
    """Return a table of the strongest keys of each head and query, those that a query sees."""
    count = min(BEST_KEYS, len(names))
    table = [["head", "query", *(f"key {place}" for place in range(1, count + 1))]]
    for index, head in enumerate(head_names):
        for row, position in enumerate(at):
            values = np.nan_to_num(numbers[row, index], nan=-np.inf)
            best = np.argsort(-values, kind="stable")[:count]
            cells = [f"{key} {names[key]}: {values[key]:.4g}" if np.isfinite(values[key]) else "" for key in best]
            table.append([head, f"{position} {names[position]}", *cells])
    return table
