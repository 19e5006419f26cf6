"""Heat maps of an attribution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vllm_weir.analysis.plot_style import INK, colours, finish, label_bar, label_tokens, pyplot, save
from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.sweep.axes import Grid

MAX_ROW_LABELS = 48


def draw(grid: Grid, tokens: Sequence[str], label: str, mode: str, path: Path, hook: str | None) -> list[Path]:
    """Draw an attribution: what `Attribution.plot` does.

    Args:
        grid: the estimates.
        tokens: texts of all tokens of the prompt.
        label: what an estimate is.
        mode: for the titles.
        path: see `Attribution.plot`.
        hook: see `Attribution.plot`.
    """
    hooks = [str(name) for name in grid.axes["hook"]]
    if hook is not None and hook not in hooks:
        raise WeirError(f"there is no {brief(hook)!r}; the hook points are {', '.join(hooks)}", "hook")
    hooks = hooks if hook is None else [hook]
    paths = [path if len(hooks) == 1 else path.with_name(f"{path.stem}.{name}{path.suffix}") for name in hooks]
    drawn = []
    for name, target in zip(hooks, paths, strict=True):
        part = grid.sel(hook=name)
        assert isinstance(part, Grid)
        columns = [tokens[int(position)] for position in part.axes["position"]]
        drawn.append(_figure(part, columns, label, f"{name}: attribution, {mode}", target))
    return drawn


def _figure(part: Grid, columns: list[str], label: str, title: str, path: Path) -> Path:
    numbers, rows, what = table_of(part)
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
    table = [[what, *columns], *([row, *(f"{v:.4g}" for v in values)] for row, values in zip(rows, numbers))]
    return save(figure, path, title, table)


def table_of(part: Grid) -> tuple[np.ndarray, list[str], str]:
    """Return a hook point's estimates, rows by positions, the labels of the rows, and what rows are."""
    layers = [str(layer) for layer in part.axes["layer"]]
    if "head" not in part.axes:
        return part.array, layers, "layer"
    heads = part.axes["head"]
    numbers = part.array.transpose(0, 2, 1).reshape(len(layers) * len(heads), -1)
    return numbers, [f"{layer}.{head}" for layer in layers for head in heads], "layer.head"
