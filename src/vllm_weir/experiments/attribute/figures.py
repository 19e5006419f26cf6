"""Heat maps of an attribution."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_weir.analysis.plot_style import INK, colours, finish, label_bar, label_tokens, pyplot, save
from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.sweep.axes import Grid

if TYPE_CHECKING:
    from vllm_weir.experiments.attribute.result import Attribution

MAX_ROW_LABELS = 48


def draw(result: Attribution, path: Path, hook: str | None) -> list[Path]:
    """Draw an attribution; for the arguments see `Attribution.plot`."""
    hooks = [str(label) for label in result.grid.axes["hook"]]
    if hook is not None and hook not in hooks:
        raise WeirError(f"there is no {brief(hook)!r}; the hook points are {', '.join(hooks)}", "hook")
    hooks = hooks if hook is None else [hook]
    paths = [path if len(hooks) == 1 else path.with_name(f"{path.stem}.{name}{path.suffix}") for name in hooks]
    return [_figure(result, name, target) for name, target in zip(hooks, paths, strict=True)]


def _figure(result: Attribution, hook: str, path: Path) -> Path:
    part = result.grid.sel(hook=hook)
    assert isinstance(part, Grid)
    numbers, rows, what = table_of(part)
    columns = [result.tokens[int(position)] for position in part.axes["position"]]
    plt = pyplot()
    size = (max(4.6, min(15.0, 2.6 + 0.27 * len(columns))), 1.5 + min(40.0, 0.24 * max(4, len(rows))))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    image = axis.imshow(numbers, aspect="auto", origin="lower", interpolation="nearest", **colours(numbers))
    label_tokens(axis.xaxis, columns)
    step = max(1, -(-len(rows) // MAX_ROW_LABELS))
    axis.yaxis.set_ticks(list(range(0, len(rows), step)), rows[::step], fontsize=7.5)
    axis.set_ylabel(what, color=INK, fontsize=8.5)
    label_bar(figure.colorbar(image, ax=axis, pad=0.015, aspect=30), f"estimated change of {result.metric}")
    title = f"{hook}: attribution, {result.mode}"
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
