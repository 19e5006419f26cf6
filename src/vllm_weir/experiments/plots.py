"""Figures of experiments: a heat map for each hook point of a grid, and the AUC by block."""

from __future__ import annotations

import html
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.analysis.plot_style import BLUE, FAINT, INK, colours, finish, label_bar, label_tokens, page, pyplot, save
from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.directions import Directions
from vllm_weir.experiments.grid import Grid

MAX_ROW_LABELS = 48


class HeatMapTable(NamedTuple):
    """The numbers [rows, columns] of a figure, their labels, and what the rows are."""

    numbers: np.ndarray
    rows: list[str]
    columns: list[str]
    what: str


class HeatMap(NamedTuple):
    """A figure, its title, and its numbers as a table of texts."""

    figure: Any
    title: str
    cells: list[list[str]]


def draw_grid(
    grid: Grid, columns: Sequence[str], label: str, about: str, path: Path, hook: str | None, one_page: bool
) -> list[Path]:
    """Draw a heat map for each hook point of a grid, or for one, and return the files.

    Args:
        grid: axes ``hook``, ``layer``, ``position``, and ``head`` if heads are told apart.
        columns: a text for each position.
        label: what the numbers are.
        about: follows the hook point in the titles.
        path: of the file; several hook points get one each, with their names in it.
        hook: draw this hook point alone.
        one_page: all hook points of an ``.html`` go into one file instead.
    """
    hooks = [str(name) for name in grid.axes["hook"]]
    if hook is not None and hook not in hooks:
        raise WeirError(f"there is no {brief(hook)!r}; the hook points are {', '.join(hooks)}", "hook")
    hooks = hooks if hook is None else [hook]
    figures = [_draw(_table(grid.sel(hook=name), columns), label, f"{name}: {about}") for name in hooks]
    if one_page and path.suffix.lower() == ".html" and len(figures) > 1:
        return [_one_page(figures, path)]
    names = [path if len(hooks) == 1 else path.with_name(f"{path.stem}.{name}{path.suffix}") for name in hooks]
    return [save(one.figure, target, one.title, one.cells) for target, one in zip(names, figures, strict=True)]


def _table(part: Any, columns: Sequence[str]) -> HeatMapTable:
    """Return the numbers of a hook point, layer by position, or by head."""
    layers = [str(layer) for layer in part.axes["layer"]]
    if "head" not in part.axes:
        return HeatMapTable(part.array, layers, list(columns), "layer")
    heads = part.axes["head"]
    if len(columns) == 1:
        return HeatMapTable(part.array[:, 0], layers, [f"head {n}" for n in heads], f"layer, at {columns[0]}")
    rows = [f"{layer}.{head}" for layer in layers for head in heads]
    return HeatMapTable(part.array.transpose(0, 2, 1).reshape(len(rows), -1), rows, list(columns), "layer.head")


def _draw(table: HeatMapTable, label: str, title: str) -> HeatMap:
    """Draw one figure; `label` says what the numbers are."""
    numbers, rows, columns, what = table
    plt = pyplot()
    size = (max(4.6, min(15.0, 2.6 + 0.27 * len(columns))), 1.5 + min(40.0, 0.24 * max(4, len(rows))))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    image = axis.imshow(numbers, aspect="auto", origin="lower", interpolation="nearest", **colours(numbers))
    label_tokens(axis.xaxis, columns)
    step = max(1, -(-len(rows) // MAX_ROW_LABELS))
    axis.yaxis.set_ticks(list(range(0, len(rows), step)), rows[::step], fontsize=7.5)
    axis.set_ylabel(what, color=INK, fontsize=8.5)
    label_bar(figure.colorbar(image, ax=axis, pad=0.015, aspect=30), label)
    finish(axis, title)
    cells = [[what, *columns], *([row, *(f"{v:.4g}" for v in values)] for row, values in zip(rows, numbers))]
    return HeatMap(figure, title, cells)


def _one_page(figures: list[HeatMap], path: Path) -> Path:
    """Write a page with several figures."""
    pages = [page(*one) for one in figures]
    for one in figures:
        pyplot().close(one.figure)
    head = pages[0][: pages[0].index("</head>")]
    title = html.escape(figures[0].title)
    bodies = [text[text.index("<body>") + 6 : text.index("</body>")] for text in pages]
    text = head.replace(f"<title>{title}</title>", "<title>sweep</title>") + "</head><body>" + "".join(bodies)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "</body></html>\n", encoding="utf-8")
    except OSError as e:
        raise WeirError(f"cannot write {path}: {e.strerror or e}", "path") from e
    return path


def plot_auc(directions: Directions, path: str | PathLike) -> Path:
    """Plot the AUC on held-out prompts by block.

    Args:
        directions: of `fit`.
        path: ``.png``, ``.svg`` or ``.html``.

    Raises:
        WeirError: if no AUC is known, for another ending, without matplotlib, or if the file cannot
            be written.
    """
    areas = directions.auc_by_layer
    if not areas:
        raise WeirError("no AUC is known: nothing was held out", "plot")
    layers, best = list(areas), directions.best
    figure, axis = pyplot().subplots(figsize=(max(4.6, 2.2 + 0.16 * len(layers)), 3.0), layout="constrained")
    axis.axhline(0.5, color=FAINT, linewidth=0.8, linestyle="--")
    axis.plot(layers, list(areas.values()), color=BLUE, marker="o", markersize=3.5, linewidth=1.4)
    axis.plot([best], [areas[best]], color=INK, marker="o", markersize=6, fillstyle="none")
    axis.annotate(
        f"block {best}: {areas[best]:.2f}", (best, areas[best]), xytext=(0, -14), textcoords="offset points",
        ha="center", fontsize=8, color=INK,
    )  # fmt: skip
    axis.set_ylim(min(0.45, *areas.values()) - 0.02, 1.03)
    axis.set_xlabel("block", color=INK, fontsize=8.5)
    axis.set_ylabel("AUC, held out", color=INK, fontsize=8.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    title = f"{directions.method} at {directions.hook}: AUC by block"
    finish(axis, title)
    return save(figure, path, title, [["block", "AUC"], *([str(n), f"{area:.4f}"] for n, area in areas.items())])
