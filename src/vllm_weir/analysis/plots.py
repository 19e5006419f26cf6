"""Pictures of activations: PNG or SVG, or one HTML page that needs nothing else (by the path's suffix)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from vllm_weir.analysis.metrics import METRICS, as_array, rows_of, similarity_matrix
from vllm_weir.analysis.plot_style import (
    BLUE,
    FAINT,
    INK,
    colours,
    finish,
    label_bar,
    label_layers,
    label_tokens,
    plain_log,
    pyplot,
    save,
)
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hooks import normalise_hook
from vllm_weir.schema.scalars import plain


def plot_heat_map(
    activations: Any, path: str | PathLike, *, tokens: Sequence[str] | None = None, hook: str = "resid_post",
    value: Callable[[np.ndarray], np.ndarray] | None = None, label: str = "norm of the row", title: str = "",
) -> Path:  # fmt: skip
    """Layer x token: one number for every row.

    Args:
        activations: `Activations`, or layer -> rows [n, d].
        path: ``.png``, ``.svg`` or ``.html``.
        tokens: texts for the columns.
        hook: of `Activations`.
        value: rows [n, d] -> [n]; default: their norms. A direction v: ``lambda x: x @ v``.
        label, title: words for the picture. Values of both signs are shown around 0.
    """
    layers = by_layer(activations, hook)
    names = _tokens(tokens, layers)
    numbers = np.stack([(value or _norms)(x) for x in layers.values()])
    if numbers.shape != (len(layers), len(names)):
        raise WeirError(f"value gives one number a row, got {list(numbers.shape)}", "value")
    plt = pyplot()
    width = min(15.0, 2.6 + 0.27 * len(names))
    figure, axis = plt.subplots(figsize=(max(4.6, width), 1.5 + 0.24 * max(4, len(layers))), layout="constrained")
    image = axis.imshow(numbers, aspect="auto", origin="lower", interpolation="nearest", **colours(numbers))
    label_tokens(axis.xaxis, names)
    label_layers(axis.yaxis, list(layers))
    axis.set_ylabel("layer", color=INK, fontsize=8.5)
    label_bar(figure.colorbar(image, ax=axis, pad=0.015, aspect=30), label)
    finish(axis, title or f"{normalise_hook(hook)}: {label}, by layer and token")
    table = [["layer", *names], *([str(n), *(f"{v:.4g}" for v in row)] for n, row in zip(layers, numbers))]
    return save(figure, path, title or f"{label}, by layer and token", table)


def plot_norms(activations: Any, path: str | PathLike, *, hook: str = "resid_post", title: str = "") -> Path:
    """Norms of the rows, by layer: median, middle half, all. For the arguments see `plot_heat_map`."""
    layers = by_layer(activations, hook)
    numbers = [_norms(x) for x in layers.values()]
    quantiles = np.array([np.quantile(n, [0, 0.25, 0.5, 0.75, 1]) for n in numbers])
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    x = list(layers)
    axis.fill_between(
        x, quantiles[:, 0], quantiles[:, 4], color=BLUE, alpha=0.12, linewidth=0, label="smallest to largest"
    )
    axis.fill_between(x, quantiles[:, 1], quantiles[:, 3], color=BLUE, alpha=0.28, linewidth=0, label="middle half")
    axis.plot(x, quantiles[:, 2], color=BLUE, marker="o", markersize=3.5, linewidth=1.6, label="median")
    if quantiles[:, 0].min() > 0 and quantiles.max() / quantiles[:, 0].min() > 30:
        axis.set_yscale("log")
        plain_log(axis.yaxis)
    axis.set_xticks(x[:: max(1, -(-len(x) // 16))])
    axis.set_xlabel("layer", color=INK, fontsize=8.5)
    axis.set_ylabel("norm of a row", color=INK, fontsize=8.5)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.legend(frameon=False, fontsize=8, loc="best")
    finish(axis, title or f"{normalise_hook(hook)}: norm by layer ({len(numbers[0]):,} rows a layer)")
    head = ["layer", "smallest", "lower quartile", "median", "upper quartile", "largest"]
    return save(
        figure,
        path,
        title or "norm by layer",
        [head, *([str(n), *(f"{v:.4g}" for v in q)] for n, q in zip(x, quantiles))],
    )


def plot_similarity(
    activations: Any, path: str | PathLike, *, layer: int | None = None, tokens: Sequence[str] | None = None,
    metric: str = "cosine", hook: str = "resid_post", title: str = "",
) -> Path:  # fmt: skip
    """Similarity of every token's row with every other's in one layer; without a layer, of layers (mean over tokens).

    For the other arguments see `plot_heat_map`; `metric` is that of `compute_similarity`.
    """
    layers = by_layer(activations, hook)
    if metric not in METRICS:
        raise WeirError(f"unknown metric {brief(metric)!r}; choose from {', '.join(METRICS)}", "metric")
    layer = plain(layer)
    if layer is not None and layer not in layers:
        raise WeirError(f"layer {layer} is not there; there are {list(layers)}", "layer")
    names = _tokens(tokens, layers)
    if layer is not None:
        numbers = similarity_matrix(layers[layer], metric=metric)
    else:
        each = np.stack(list(layers.values()), 1)  # [tokens, layers, d]
        numbers = np.mean([similarity_matrix(x, metric=metric) for x in each], axis=0)
        names = [str(n) for n in layers]
    plt = pyplot()
    side = min(11.0, 2.6 + 0.24 * len(names))
    figure, axis = plt.subplots(figsize=(max(4.4, side) + 0.9, max(4.2, side)), layout="constrained")
    image = axis.imshow(numbers, interpolation="nearest", **colours(numbers, metric))
    for way in (axis.xaxis, axis.yaxis):
        label_tokens(way, names) if layer is not None else label_layers(way, list(layers))
    if layer is None:
        axis.set_xlabel("layer", color=INK, fontsize=8.5)
        axis.set_ylabel("layer", color=INK, fontsize=8.5)
    label_bar(figure.colorbar(image, ax=axis, pad=0.02, shrink=0.85), "-distance" if metric == "l2" else metric)
    what = f"tokens in layer {layer}" if layer is not None else "layers, mean over tokens"
    finish(axis, title or f"{normalise_hook(hook)}: {metric} of {what}")
    table = [["", *names], *([n, *(f"{v:.4g}" for v in row)] for n, row in zip(names, numbers))]
    return save(figure, path, title or f"{metric} of {what}", table)


def plot_timeline(
    activations: Any, path: str | PathLike, *, layers: Sequence[int] | None = None, tokens: Sequence[str] | None = None,
    prompt_tokens: int | None = None, value: Callable[[np.ndarray], np.ndarray] | None = None,
    label: str = "norm of the row", hook: str = "resid_post", title: str = "",
) -> Path:  # fmt: skip
    """One number along the tokens, a line for each of some layers.

    Args:
        layers: which; default: up to five, spread evenly.
        prompt_tokens: where generation begins is marked, if given.
        activations, path, tokens, value, label, hook, title: as for `plot_heat_map`.
    """
    every = by_layer(activations, hook)
    have = list(every)
    spread = sorted({have[round(i)] for i in np.linspace(0, len(have) - 1, min(5, len(have)))})
    chosen = [plain(n) for n in layers] if layers is not None else spread
    for n in chosen:
        if n not in every:
            raise WeirError(f"layer {n} is not there; there are {have}", "layers")
    if not chosen:
        raise WeirError("at least one layer", "layers")
    names = _tokens(tokens, every)
    lines = {n: np.asarray((value or _norms)(every[n])) for n in chosen}
    for line in lines.values():
        if line.shape != (len(names),):
            raise WeirError(f"value gives one number a row, got {list(line.shape)}", "value")
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(max(6.0, min(14.0, 2.4 + 0.26 * len(names))), 3.8), layout="constrained")
    shades = plt.get_cmap("viridis")(np.linspace(0.08, 0.86, len(chosen)))
    for n, colour in zip(chosen, shades):
        axis.plot(lines[n], color=colour, linewidth=1.6, marker="o", markersize=2.8, label=f"layer {n}")
    low, high = (f(np.concatenate(list(lines.values()))) for f in (np.min, np.max))
    if low > 0 and high / low > 30:
        axis.set_yscale("log")
        plain_log(axis.yaxis)
    elif low < 0 < high:
        axis.axhline(0, color=FAINT, linewidth=0.8)
    if prompt_tokens is not None and 0 < prompt_tokens < len(names):
        axis.axvline(prompt_tokens - 0.5, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        axis.annotate(
            "generated", (prompt_tokens - 0.5, 1), xycoords=("data", "axes fraction"), xytext=(4, -10),
            textcoords="offset points", fontsize=7.5, color=FAINT,
        )  # fmt: skip
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    label_tokens(axis.xaxis, names)
    axis.set_ylabel(label, color=INK, fontsize=8.5)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    finish(axis, title or f"{normalise_hook(hook)}: {label}, token by token")
    table = [["token", *(f"layer {n}" for n in chosen)]]
    table += [[name, *(f"{lines[n][i]:.4g}" for n in chosen)] for i, name in enumerate(names)]
    return save(figure, path, title or f"{label}, token by token", table)


def by_layer(activations: Any, hook: str = "resid_post") -> dict[int, np.ndarray]:
    """layer -> float64 [n, d], of `Activations` or a mapping from layers; all with the same rows."""
    wanted = normalise_hook(hook)
    if hasattr(activations, "sites"):
        found: dict[int, Any] = {s.layer: activations[s] for s in activations.sites if s.hook == wanted}
        activations.positions  # noqa: B018  (raises if the sites have different rows)
    elif isinstance(activations, Mapping):
        found = dict(activations)
    else:
        raise WeirError(f"Activations or a mapping from layers, got {type(activations).__name__}", "activations")
    out = {layer: as_array(rows_of(found[layer])) for layer in sorted(found)}
    shapes = {x.shape for x in out.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2 or 0 in next(iter(shapes)):
        raise WeirError(f"every layer has the same rows [n, d], got {sorted(map(list, shapes))[:3]}", "activations")
    if not all(np.isfinite(x).all() for x in out.values()):
        raise WeirError("rows hold NaN or Inf", "activations")
    return out


def _norms(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=-1)


def _tokens(tokens: Sequence[str] | None, layers: dict[int, np.ndarray]) -> list[str]:
    n = len(next(iter(layers.values())))
    if tokens is None:
        return [str(i) for i in range(n)]
    if len(tokens) != n:
        raise WeirError(f"{n} rows want {n} tokens, got {len(tokens)}", "tokens")
    return [str(t).replace("\n", "\\n").replace("Ġ", " ").replace("▁", " ").strip() or "␣" for t in tokens]
