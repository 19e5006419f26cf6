"""Heat maps of a sweep."""

from __future__ import annotations

import html
from pathlib import Path
from typing import NamedTuple

from vllm_weir.analysis.plot_style import page, pyplot, save
from vllm_weir.errors import WeirError
from vllm_weir.experiments.grid import Grid
from vllm_weir.experiments.heat_map import (
    HeatMap,
    HeatMapTable,
    by_head,
    draw_heat_map,
    hooks_to_draw,
    paths_by_hook,
)


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
    hooks = hooks_to_draw(drawing.grid, hook)
    figures = [_figure(drawing, name) for name in hooks]
    if path.suffix.lower() == ".html" and len(figures) > 1:
        return [_one_page(figures, path)]
    return [save(one.figure, target, one.title, one.cells) for target, one in zip(paths_by_hook(path, hooks), figures)]


def _figure(drawing: Drawing, hook: str) -> HeatMap:
    part = drawing.grid.sel(hook=hook)
    assert isinstance(part, Grid)
    return draw_heat_map(_table(part, drawing.position_labels), drawing.label, f"{hook}: {drawing.about}")


def _table(part: Grid, labels: tuple[str, ...]) -> HeatMapTable:
    """Return the numbers of a hook point, layer by position, or by head."""
    layers = [str(n) for n in part.axes["layer"]]
    if "head" not in part.axes:
        return HeatMapTable(part.array, layers, list(labels), "layer")
    if len(labels) == 1:
        heads = [f"head {n}" for n in part.axes["head"]]
        return HeatMapTable(part.array[:, 0], layers, heads, f"layer, at {labels[0]}")
    numbers, rows = by_head(part)
    return HeatMapTable(numbers, rows, list(labels), "layer.head")


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
