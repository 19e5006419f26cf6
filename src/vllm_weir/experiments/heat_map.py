"""Heat maps of grids: a figure for each hook point."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.analysis.plot_style import INK, colours, finish, label_bar, label_tokens, pyplot
from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.grid import Grid

MAX_ROW_LABELS = 48


class HeatMapTable(NamedTuple):
    """The numbers of a figure.

    Attributes:
        numbers: [rows, columns].
        rows: their labels.
        columns: their labels.
        what: what the rows are.
    """

    numbers: np.ndarray
    rows: list[str]
    columns: list[str]
    what: str


class HeatMap(NamedTuple):
    """A figure, its title, and its numbers as a table of texts."""

    figure: Any
    title: str
    cells: list[list[str]]


def hooks_to_draw(grid: Grid, hook: str | None) -> list[str]:
    """Return the hook points of a grid, or the one that was asked for; raise WeirError if it has none of the name."""
    hooks = [str(label) for label in grid.axes["hook"]]
    if hook is not None and hook not in hooks:
        raise WeirError(f"there is no {brief(hook)!r}; the hook points are {', '.join(hooks)}", "hook")
    return hooks if hook is None else [hook]


def paths_by_hook(path: Path, hooks: list[str]) -> list[Path]:
    """Return a file for each hook point: with its name in the path if there are several."""
    return [path if len(hooks) == 1 else path.with_name(f"{path.stem}.{name}{path.suffix}") for name in hooks]


def draw_heat_map(table: HeatMapTable, label: str, title: str) -> HeatMap:
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


def by_head(part: Grid) -> tuple[np.ndarray, list[str]]:
    """Return numbers [layers * heads, positions] of a grid with axes layer, position, head, and the rows' labels."""
    labels = [f"{layer}.{head}" for layer in part.axes["layer"] for head in part.axes["head"]]
    return part.array.transpose(0, 2, 1).reshape(len(labels), -1), labels
