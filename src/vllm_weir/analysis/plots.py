"""Pictures of activations: PNG or SVG, or one HTML page that needs nothing else (by the path's suffix)."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from vllm_weir.analysis.measure import METRICS, as_array, rows_of, similarity_matrix
from vllm_weir.errors import WeirError, brief
from vllm_weir.spec.hooks import normalise_hook

INK, FAINT, BLUE = "#222222", "#8a8a8a", "#2166ac"
MOST_LABELS = 48


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
    plt = _pyplot()
    width = min(15.0, 2.6 + 0.27 * len(names))
    figure, axis = plt.subplots(figsize=(max(4.6, width), 1.5 + 0.24 * max(4, len(layers))), layout="constrained")
    image = axis.imshow(numbers, aspect="auto", origin="lower", interpolation="nearest", **_colours(numbers))
    _label_tokens(axis.xaxis, names)
    _label_layers(axis.yaxis, list(layers))
    axis.set_ylabel("layer", color=INK, fontsize=8.5)
    _label_bar(figure.colorbar(image, ax=axis, pad=0.015, aspect=30), label)
    _finish(axis, title or f"{normalise_hook(hook)}: {label}, by layer and token")
    table = [["layer", *names], *([str(n), *(f"{v:.4g}" for v in row)] for n, row in zip(layers, numbers))]
    return _save(figure, path, title or f"{label}, by layer and token", table)


def plot_norms(activations: Any, path: str | PathLike, *, hook: str = "resid_post", title: str = "") -> Path:
    """Norms of the rows, by layer: median, middle half, all. For the arguments see `plot_heat_map`."""
    layers = by_layer(activations, hook)
    numbers = [_norms(x) for x in layers.values()]
    quantiles = np.array([np.quantile(n, [0, 0.25, 0.5, 0.75, 1]) for n in numbers])
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    x = list(layers)
    axis.fill_between(
        x, quantiles[:, 0], quantiles[:, 4], color=BLUE, alpha=0.12, linewidth=0, label="smallest to largest"
    )
    axis.fill_between(x, quantiles[:, 1], quantiles[:, 3], color=BLUE, alpha=0.28, linewidth=0, label="middle half")
    axis.plot(x, quantiles[:, 2], color=BLUE, marker="o", markersize=3.5, linewidth=1.6, label="median")
    if quantiles[:, 0].min() > 0 and quantiles.max() / quantiles[:, 0].min() > 30:
        axis.set_yscale("log")
        _plain_log(axis.yaxis)
    axis.set_xticks(x[:: max(1, -(-len(x) // 16))])
    axis.set_xlabel("layer", color=INK, fontsize=8.5)
    axis.set_ylabel("norm of a row", color=INK, fontsize=8.5)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.legend(frameon=False, fontsize=8, loc="best")
    _finish(axis, title or f"{normalise_hook(hook)}: norm by layer ({len(numbers[0]):,} rows a layer)")
    head = ["layer", "smallest", "lower quartile", "median", "upper quartile", "largest"]
    return _save(
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
    if layer is not None and layer not in layers:
        raise WeirError(f"layer {layer} is not there; there are {list(layers)}", "layer")
    names = _tokens(tokens, layers)
    if layer is not None:
        numbers = similarity_matrix(layers[layer], metric=metric)
    else:
        each = np.stack(list(layers.values()), 1)  # [tokens, layers, d]
        numbers = np.mean([similarity_matrix(x, metric=metric) for x in each], axis=0)
        names = [str(n) for n in layers]
    plt = _pyplot()
    side = min(11.0, 2.6 + 0.24 * len(names))
    figure, axis = plt.subplots(figsize=(max(4.4, side) + 0.9, max(4.2, side)), layout="constrained")
    image = axis.imshow(numbers, interpolation="nearest", **_colours(numbers, metric))
    for way in (axis.xaxis, axis.yaxis):
        _label_tokens(way, names) if layer is not None else _label_layers(way, list(layers))
    if layer is None:
        axis.set_xlabel("layer", color=INK, fontsize=8.5)
        axis.set_ylabel("layer", color=INK, fontsize=8.5)
    _label_bar(figure.colorbar(image, ax=axis, pad=0.02, shrink=0.85), "-distance" if metric == "l2" else metric)
    what = f"tokens in layer {layer}" if layer is not None else "layers, mean over tokens"
    _finish(axis, title or f"{normalise_hook(hook)}: {metric} of {what}")
    table = [["", *names], *([n, *(f"{v:.4g}" for v in row)] for n, row in zip(names, numbers))]
    return _save(figure, path, title or f"{metric} of {what}", table)


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
    chosen = list(layers) if layers is not None else spread
    for n in chosen:
        if n not in every:
            raise WeirError(f"layer {n} is not there; there are {have}", "layers")
    names = _tokens(tokens, every)
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(max(6.0, min(14.0, 2.4 + 0.26 * len(names))), 3.8), layout="constrained")
    colours = plt.get_cmap("viridis")(np.linspace(0.08, 0.86, len(chosen)))
    lines = {n: (value or _norms)(every[n]) for n in chosen}
    for n, colour in zip(chosen, colours):
        axis.plot(lines[n], color=colour, linewidth=1.6, marker="o", markersize=2.8, label=f"layer {n}")
    low, high = (f(np.concatenate(list(lines.values()))) for f in (np.min, np.max))
    if low > 0 and high / low > 30:
        axis.set_yscale("log")
        _plain_log(axis.yaxis)
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
    _label_tokens(axis.xaxis, names)
    axis.set_ylabel(label, color=INK, fontsize=8.5)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _finish(axis, title or f"{normalise_hook(hook)}: {label}, token by token")
    table = [["token", *(f"layer {n}" for n in chosen)]]
    table += [[name, *(f"{lines[n][i]:.4g}" for n in chosen)] for i, name in enumerate(names)]
    return _save(figure, path, title or f"{label}, token by token", table)


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


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise WeirError("pictures need matplotlib: pip install 'vllm-weir[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "weir"  # the same data give the same file
    return plt


def _colours(numbers: np.ndarray, metric: str = "") -> dict[str, Any]:
    from matplotlib.colors import LogNorm

    low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
    if metric in ("cosine", "correlation"):
        return (
            {"cmap": "RdBu_r", "vmin": -1, "vmax": 1}
            if low < -0.1
            else {"cmap": "viridis", "vmin": min(low, 0), "vmax": 1}
        )
    if low < 0 < high:
        most = max(-low, high)
        return {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
    if low > 0 and high / low > 30:
        return {"cmap": "viridis", "norm": LogNorm(low, high)}
    return {"cmap": "viridis"}


def _label_tokens(way: Any, names: list[str]) -> None:
    every = max(1, -(-len(names) // MOST_LABELS))
    places = list(range(0, len(names), every))
    short = [names[i] if len(names[i]) <= 12 else names[i][:11] + "…" for i in places]
    # dollar signs would be taken for mathematics
    way.set_ticks(places, [s.replace("$", r"\$") for s in short], fontsize=7.5)
    if way.axis_name == "x" and any(len(s) > 2 for s in short):
        for text in way.get_ticklabels():
            text.set_rotation(60)
            text.set_ha("right")
            text.set_rotation_mode("anchor")


def _label_layers(way: Any, layers: list[int]) -> None:
    every = max(1, -(-len(layers) // 24))
    way.set_ticks(list(range(0, len(layers), every)), [str(n) for n in layers[::every]], fontsize=7.5)


def _label_bar(bar: Any, label: str) -> None:
    from matplotlib.colors import LogNorm

    bar.set_label(label, color=INK, fontsize=8.5)
    if isinstance(bar.norm, LogNorm):
        _plain_log(bar.ax.yaxis)
    bar.ax.tick_params(colors=INK, labelsize=7.5, length=2.5)
    bar.outline.set_visible(False)


def _plain_log(way: Any) -> None:
    """Ticks at 1, 2, 5, 10, 20, ... as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    way.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    way.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    way.set_minor_locator(NullLocator())


def _finish(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=9.5, color=INK, loc="left")
    axis.tick_params(colors=INK, labelsize=7.5, length=2.5)
    for side in axis.spines.values():
        side.set_visible(False)


def _save(figure: Any, path: str | PathLike, title: str, table: list[list[str]]) -> Path:
    target = Path(path)
    kind = target.suffix.lower()
    if kind not in (".png", ".svg", ".html"):
        raise WeirError(f"a picture ends in .png, .svg or .html, not {brief(kind)!r}", "path")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == ".html":
            target.write_text(_page(figure, title, table), encoding="utf-8")
        else:
            figure.savefig(target, dpi=160, metadata={"Date": None} if kind == ".svg" else None)
    except OSError as e:
        raise WeirError(f"cannot write {target}: {e.strerror or e}") from e
    finally:
        _pyplot().close(figure)
    return target


def _page(figure: Any, title: str, table: list[list[str]]) -> str:
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    svg = drawing.getvalue()
    svg = svg[svg.index("<svg") :]
    head, *rows = [[html.escape(cell) for cell in row] for row in table]
    cells = "".join(f"<tr><th>{row[0]}</th>" + "".join(f"<td>{c}</td>" for c in row[1:]) + "</tr>" for row in rows)
    names = "".join(f"<th>{name}</th>" for name in head)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; color: {INK}; margin: 2rem; }}
svg {{ max-width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 12px; }}
th, td {{ padding: 2px 8px; text-align: right; white-space: nowrap; }}
tr:nth-child(even) {{ background: #f5f5f5; }}
thead th {{ border-bottom: 1px solid #cccccc; }}
</style></head><body>
{svg}
<details><summary>numbers</summary><div class="wide"><table>
<thead><tr>{names}</tr></thead>
<tbody>{cells}</tbody></table></div></details>
</body></html>
"""
