"""Heat maps of a sweep."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.analysis.plot_style import INK, colours, finish, label_bar, label_tokens, page, pyplot, save
from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.sweep.axes import Grid


class Drawing(NamedTuple):
    """What a figure shows.

    Attributes:
        grid: its numbers.
        label: what the numbers are.
        about: follows the hook point in the title.
        position_labels: of the positions' axis.
    """

    grid: Grid
    label: str
    about: str
    position_labels: tuple[str, ...]


def draw(drawing: Drawing, path: Path, hook: str | None) -> list[Path]:
    """Draw a heat map for each hook point, or for one; see `Sweep.plot`."""
    hooks = [str(label) for label in drawing.grid.axes["hook"]]
    if hook is not None and hook not in hooks:
        raise WeirError(f"there is no {brief(hook)!r}; the hook points are {', '.join(hooks)}", "hook")
    hooks = hooks if hook is None else [hook]
    figures = [_figure(drawing, name) for name in hooks]
    if path.suffix.lower() == ".html" and len(figures) > 1:
        return [_one_page(figures, path)]
    paths = [path if len(hooks) == 1 else path.with_name(f"{path.stem}.{name}{path.suffix}") for name in hooks]
    return [save(figure, target, title, table) for target, (figure, title, table) in zip(paths, figures, strict=True)]


def _figure(drawing: Drawing, hook: str) -> tuple[Any, str, list[list[str]]]:
    """Return the figure of a hook point, its title, and its numbers as a table."""
    part = drawing.grid.sel(hook=hook)
    assert isinstance(part, Grid)
    numbers, rows, columns, what = _laid_out(part, drawing.position_labels)
    plt = pyplot()
    size = (max(4.6, min(15.0, 2.6 + 0.27 * len(columns))), 1.5 + min(40.0, 0.24 * max(4, len(rows))))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    image = axis.imshow(numbers, aspect="auto", origin="lower", interpolation="nearest", **colours(numbers))
    label_tokens(axis.xaxis, columns)
    step = max(1, -(-len(rows) // 48))
    axis.yaxis.set_ticks(list(range(0, len(rows), step)), rows[::step], fontsize=7.5)
    axis.set_ylabel(what, color=INK, fontsize=8.5)
    label_bar(figure.colorbar(image, ax=axis, pad=0.015, aspect=30), drawing.label)
    title = f"{hook}: {drawing.about}"
    finish(axis, title)
    table = [[what, *columns], *([row, *(f"{v:.4g}" for v in values)] for row, values in zip(rows, numbers))]
    return figure, title, table


def _laid_out(part: Grid, labels: tuple[str, ...]) -> tuple[np.ndarray, list[str], list[str], str]:
    """Return a table of numbers, the labels of its rows and columns, and what its rows are."""
    layers = [str(n) for n in part.axes["layer"]]
    if "head" not in part.axes:
        return part.array, layers, list(labels), "layer"
    heads = [str(n) for n in part.axes["head"]]
    if len(labels) == 1:
        return part.array[:, 0], layers, [f"head {n}" for n in heads], f"layer, at {labels[0]}"
    numbers = part.array.transpose(0, 2, 1).reshape(-1, len(labels))
    return numbers, [f"{n}.{h}" for n in layers for h in heads], list(labels), "layer.head"


def _one_page(figures: list[tuple[Any, str, list[list[str]]]], path: Path) -> Path:
    """Write a page with several figures."""
    pages = [page(figure, title, table) for figure, title, table in figures]
    for figure, _, _ in figures:
        pyplot().close(figure)
    head = pages[0][: pages[0].index("</head>")]
    title = html.escape(figures[0][1])
    bodies = [text[text.index("<body>") + 6 : text.index("</body>")] for text in pages]
    text = head.replace(f"<title>{title}</title>", "<title>sweep</title>") + "</head><body>" + "".join(bodies)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "</body></html>\n", encoding="utf-8")
    except OSError as e:
        raise WeirError(f"cannot write {path}: {e.strerror or e}", "path") from e
    return path
