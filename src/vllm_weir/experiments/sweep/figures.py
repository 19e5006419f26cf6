"""Heat maps of a sweep."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_weir.analysis.plot_style import INK, colours, finish, label_bar, label_tokens, page, pyplot, save
from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.sweep.axes import Grid

if TYPE_CHECKING:
    from vllm_weir.experiments.sweep.result import Sweep


def draw(sweep: Sweep, path: Path, hook: str | None, normalised: bool) -> list[Path]:
    """Draw a sweep; for the arguments see `Sweep.plot`."""
    hooks = [str(label) for label in sweep.grid.axes["hook"]]
    if hook is not None and hook not in hooks:
        raise WeirError(f"there is no {brief(hook)!r}; the hook points are {', '.join(hooks)}", "hook")
    hooks = hooks if hook is None else [hook]
    clean, corrupt = sweep.baseline
    share = normalised and clean != corrupt
    grid, label = (sweep.normalised, _share_label(sweep)) if share else (sweep.grid, sweep.metric)
    figures = [_figure(sweep, grid, name, label) for name in hooks]
    if path.suffix.lower() == ".html" and len(figures) > 1:
        return [_one_page(figures, path)]
    paths = [path if len(hooks) == 1 else path.with_name(f"{path.stem}.{name}{path.suffix}") for name in hooks]
    return [save(figure, target, title, table) for target, (figure, title, table) in zip(paths, figures, strict=True)]


def _share_label(sweep: Sweep) -> str:
    ends = "corrupt 0, clean 1" if sweep.mode == "denoise" else "clean 0, corrupt 1"
    return f"{sweep.metric}: {ends}"


def _figure(sweep: Sweep, grid: Grid, hook: str, label: str) -> tuple[Any, str, list[list[str]]]:
    """Return the figure of a hook point, its title, and its numbers as a table."""
    part = grid.sel(hook=hook)
    assert isinstance(part, Grid)
    numbers, rows, columns, what = _laid_out(part, sweep.position_labels)
    plt = pyplot()
    size = (max(4.6, min(15.0, 2.6 + 0.27 * len(columns))), 1.5 + min(40.0, 0.24 * max(4, len(rows))))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    image = axis.imshow(numbers, aspect="auto", origin="lower", interpolation="nearest", **colours(numbers))
    label_tokens(axis.xaxis, columns)
    step = max(1, -(-len(rows) // 48))
    axis.yaxis.set_ticks(list(range(0, len(rows), step)), rows[::step], fontsize=7.5)
    axis.set_ylabel(what, color=INK, fontsize=8.5)
    label_bar(figure.colorbar(image, ax=axis, pad=0.015, aspect=30), label)
    title = f"{hook}: {'path to ' + sweep.to + ', ' if sweep.to else ''}{sweep.mode}"
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
