"""Figures of experiments: heat maps of a grid, the AUC by block, and checks of the files that will be written."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.analysis.plot_style import (
    BLUE,
    FAINT,
    INK,
    check_matplotlib,
    check_suffix,
    draw_map,
    finish,
    finished,
    label_axis,
    map_width,
    new_figure,
    number_table,
    page,
    save,
)
from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.grid import Grid
from vllm_weir.util import notebook

MAX_ROW_LABELS = 48
MAX_HOOKS = 8
"""Hook points that a notebook shows."""


class HeatMapTable(NamedTuple):
    """The numbers of one hook point."""

    title: str  # of its heat map
    numbers: np.ndarray  # [rows, columns]
    rows: list[str]  # their labels
    columns: list[str]  # their labels
    what: str  # what the rows are

    @property
    def cells(self) -> list[list[str]]:
        """The same as texts, the first row being the head."""
        return number_table(self.what, self.columns, self.rows, self.numbers)


def grid_tables(grid: Grid, columns: Sequence[str], about: str = "", hook: str | None = None) -> list[HeatMapTable]:
    """Return the numbers of each hook point of a grid, or of one; `about` follows the hook point in the titles.

    The grid's axes are ``hook``, ``layer``, ``position``, and ``head`` if heads are told apart.
    """
    hooks = [str(name) for name in grid.axes["hook"]]
    if hook is not None and hook not in hooks:
        raise WeirError(f"there is no {brief(hook)!r}; the hook points are {', '.join(hooks)}", "hook")
    hooks = hooks if hook is None else [hook]
    return [_table(grid.sel(hook=name), columns, f"{name}: {about}" if about else name) for name in hooks]


def draw_grid(tables: Sequence[HeatMapTable], label: str, path: str | PathLike | None, one_page: bool) -> Any:
    """Draw a heat map for each hook point; return the figure with all of them, or with a path the files.

    Several hook points get a file each, with their names in it, or with `one_page` one ``.html`` for all.
    """
    if path is None:
        return _draw(tables, label)
    target = Path(path)
    if one_page and target.suffix.lower() == ".html" and len(tables) > 1:
        return [_one_page([page(_draw([one], label), one.title, one.cells) for one in tables], tables[0].title, target)]
    names = [one.title.partition(":")[0] for one in tables]
    paths = [target if len(names) == 1 else target.with_name(f"{target.stem}.{n}{target.suffix}") for n in names]
    return [save(_draw([one], label), where, one.title, one.cells) for one, where in zip(tables, paths, strict=True)]


def grid_html(title: str, tables: Sequence[HeatMapTable], label: str) -> str:
    maps = [
        f"<div>{notebook.escaped(one.title)}</div>"
        + notebook.heat_map(one.rows, one.columns, one.numbers, label, one.what, upwards=True)
        for one in tables[:MAX_HOOKS]
    ]
    return notebook.result(title, *maps, notebook.left_out(len(tables), len(maps), "hook points"))


def _table(part: Any, columns: Sequence[str], title: str) -> HeatMapTable:
    layers = [str(layer) for layer in part.axes["layer"]]
    if "head" not in part.axes:
        return HeatMapTable(title, part.array, layers, list(columns), "layer")
    heads = part.axes["head"]
    if len(columns) == 1:
        return HeatMapTable(title, part.array[:, 0], layers, [f"head {n}" for n in heads], f"layer, at {columns[0]}")
    rows = [f"{layer}.{head}" for layer in layers for head in heads]
    return HeatMapTable(title, part.array.transpose(0, 2, 1).reshape(len(rows), -1), rows, list(columns), "layer.head")


def _draw(tables: Sequence[HeatMapTable], label: str) -> Any:
    """Return a figure with a heat map for each hook point; `label` says what the numbers are."""
    width = max(map_width(len(one.columns)) for one in tables)
    heights = [1.5 + min(40.0, 0.24 * max(4, len(one.rows))) for one in tables]
    figure, axes = new_figure((width, sum(heights)), len(tables), squeeze=False, height_ratios=heights)
    for axis, (title, numbers, rows, columns, what) in zip(axes[:, 0], tables, strict=True):
        draw_map(figure, axis, numbers, columns, label, origin="lower")
        step = max(1, -(-len(rows) // MAX_ROW_LABELS))
        axis.yaxis.set_ticks(list(range(0, len(rows), step)), rows[::step], fontsize=7.5)
        label_axis(axis.yaxis, what)
        finish(axis, title)
    return figure


def _one_page(pages: list[str], title: str, path: Path) -> Path:
    """Write one page that holds several."""
    head = pages[0][: pages[0].index("</head>")]
    bodies = [text[text.index("<body>") + 6 : text.index("</body>")] for text in pages]
    head = head.replace(f"<title>{html.escape(title)}</title>", "<title>sweep</title>")
    text = head + "</head><body>" + "".join(bodies)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "</body></html>\n", encoding="utf-8")
    except OSError as e:
        raise WeirError(f"cannot write {path}: {e.strerror or e}", "path") from e
    return path


def draw_auc(areas: Mapping[int, float], best: int, title: str, path: str | PathLike | None) -> Any:
    """Draw the AUC by block; return the figure, or with a path (.png, .svg, .html) the path."""
    layers = list(areas)
    figure, axis = new_figure((max(4.6, 2.2 + 0.16 * len(layers)), 3.0))
    axis.axhline(0.5, color=FAINT, linewidth=0.8, linestyle="--")
    axis.plot(layers, list(areas.values()), color=BLUE, marker="o", markersize=3.5, linewidth=1.4)
    axis.plot([best], [areas[best]], color=INK, marker="o", markersize=6, fillstyle="none")
    axis.annotate(
        f"block {best}: {areas[best]:.2f}", (best, areas[best]), xytext=(0, -14), textcoords="offset points",
        ha="center", fontsize=8, color=INK,
    )  # fmt: skip
    axis.set_ylim(min(0.45, *areas.values()) - 0.02, 1.03)
    label_axis(axis.xaxis, "block")
    label_axis(axis.yaxis, "AUC, held out")
    axis.xaxis.get_major_locator().set_params(integer=True)
    finish(axis, title)
    return finished(figure, path, title, [["block", "AUC"], *([str(n), f"{area:.4f}"] for n, area in areas.items())])


def check_output(path: str, field: str) -> None:
    target = Path(path)
    if target.is_dir():
        raise WeirError(f"{brief(path, 200)} is a folder; name a file", field)
    if not target.parent.is_dir():
        raise WeirError(f"there is no folder {brief(str(target.parent), 200)}", field)
    if not os.access(target.parent, os.W_OK):
        raise WeirError(f"the folder {brief(str(target.parent), 200)} cannot be written to", field)


def check_plot(path: str, field: str = "plot") -> None:
    """Raise WeirError naming `field` unless a plot can be drawn and has the name of one; its folder may be missing."""
    check_suffix(path, field)
    check_matplotlib()
    if Path(path).parent.exists():
        check_output(path, field)
