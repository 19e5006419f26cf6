"""The style of plots, and the files they are written to."""

from __future__ import annotations

import functools
import html
import io
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.util.notebook import Scale

INK, FAINT, BLUE = "#222222", "#8a8a8a", "#2166ac"
MAX_TOKEN_LABELS = 48
MAX_LAYER_LABELS = 24
SAME_FILE: dict[Any, Any] = {"svg.hashsalt": "weir"}
"""With which the same data give the same file."""


def new_figure(size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a figure of `size` inches and its axes, an array if they are several; raise WeirError without matplotlib.

    It is none of pyplot's, whose backend stays the user's: a notebook shows it where it is returned, and only there.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]  # what IPython asks for
    return figure, figure.subplots(rows, columns, **options)


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise WeirError("plots need matplotlib: pip install 'vllm-weir[plot]'") from None


def _png(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()


def colours(numbers: np.ndarray, metric: str = "") -> dict[str, Any]:
    """Return the colour scale for some numbers, as arguments of imshow; notebooks have the same, see `Scale`."""
    from matplotlib.colors import LogNorm

    scale = Scale.of(numbers, metric)
    ends = {"norm": LogNorm(scale.low, scale.high)} if scale.log else {"vmin": scale.low, "vmax": scale.high}
    return {"cmap": scale.name, **ends}


def token_map(numbers: np.ndarray, tokens: list[str], label: str, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure of numbers [rows, tokens] as a heat map, and its axes, whose rows are not labelled yet.

    Rows are `height` inches; `label` says what the numbers are, `options` are further ones of imshow.
    """
    figure, axis = new_figure((map_width(len(tokens)), 1.5 + height * max(4, len(numbers))))
    draw_map(figure, axis, numbers, tokens, label, **options)
    return figure, axis


def map_width(columns: int) -> float:
    return max(4.6, min(15.0, 2.6 + 0.27 * columns))


def draw_map(figure: Any, axis: Any, numbers: np.ndarray, columns: list[str], label: str, **options: Any) -> None:
    """Draw numbers [rows, columns] as a heat map with its colour bar."""
    image = axis.imshow(numbers, aspect="auto", interpolation="nearest", **colours(numbers), **options)
    label_tokens(axis.xaxis, columns)
    label_bar(figure.colorbar(image, ax=axis, pad=0.015, aspect=30), label)


def style_lines(axis: Any, low: float, high: float) -> None:
    """Set the scale of a plot of lines whose values lie between these, and draw lines to read them by."""
    if low > 0 and high / low > 30:
        axis.set_yscale("log")
        plain_log(axis.yaxis)
    elif low < 0 < high:
        axis.axhline(0, color=FAINT, linewidth=0.8)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)


def label_axis(axis: Any, text: str) -> None:
    axis.set_label_text(text, color=INK, fontsize=8.5)


def number_table(corner: str, columns: Sequence[str], rows: Iterable[Any], numbers: np.ndarray) -> list[list[str]]:
    """Return numbers [rows, columns] as texts, below a head and beside the rows' names."""
    lines = zip(rows, numbers, strict=True)
    return [[corner, *columns], *([str(name), *(f"{value:.4g}" for value in line)] for name, line in lines)]


def row_names(tokens: Sequence[str] | None, count: int) -> list[str]:
    """Return a text for each row: its token's, if there are tokens, with what has no width made visible."""
    if tokens is None:
        return [str(i) for i in range(count)]
    if len(tokens) != count:
        raise WeirError(f"there are {count} rows but {len(tokens)} tokens; give one token a row", "tokens")
    return [str(t).replace("\n", "\\n").replace("Ġ", " ").replace("▁", " ").strip() or "␣" for t in tokens]


def label_tokens(axis: Any, names: list[str]) -> None:
    """Label an axis with tokens, as many as fit."""
    step = max(1, -(-len(names) // MAX_TOKEN_LABELS))
    places = list(range(0, len(names), step))
    short = [names[i] if len(names[i]) <= 12 else names[i][:11] + "…" for i in places]
    # matplotlib takes text between dollar signs for mathematics.
    axis.set_ticks(places, [s.replace("$", r"\$") for s in short], fontsize=7.5)
    if axis.axis_name == "x" and any(len(s) > 2 for s in short):
        for text in axis.get_ticklabels():
            text.set_rotation(60)
            text.set_ha("right")
            text.set_rotation_mode("anchor")


def label_layers(axis: Any, layers: list[int]) -> None:
    step = max(1, -(-len(layers) // MAX_LAYER_LABELS))
    axis.set_ticks(list(range(0, len(layers), step)), [str(n) for n in layers[::step]], fontsize=7.5)


def label_bar(bar: Any, label: str) -> None:
    from matplotlib.colors import LogNorm

    bar.set_label(label, color=INK, fontsize=8.5)
    if isinstance(bar.norm, LogNorm):
        plain_log(bar.ax.yaxis)
    bar.ax.tick_params(colors=INK, labelsize=7.5, length=2.5)
    bar.outline.set_visible(False)


def plain_log(axis: Any) -> None:
    """Set ticks at 1, 2, 5, 10, 20, ... and label them with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_minor_locator(NullLocator())


def finish(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=9.5, color=INK, loc="left")
    axis.tick_params(colors=INK, labelsize=7.5, length=2.5)
    for side in axis.spines.values():
        side.set_visible(False)


def check_suffix(path: str | PathLike, field: str = "path") -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".html"):
        raise WeirError(f"the path of a plot ends in .png, .svg or .html, not {brief(suffix)!r}", field)
    return suffix


def finished(figure: Any, path: str | PathLike | None, title: str, table: list[list[str]]) -> Any:
    """Return a figure, or with a path (.png, .svg, .html) the path, after it was written there.

    An HTML page has a title and the table, whose first row is its head. WeirError says why it cannot be written.
    """
    return figure if path is None else save(figure, path, title, table)


def save(figure: Any, path: str | PathLike, title: str, table: list[list[str]]) -> Path:
    """Write a figure in the format of the path's suffix; for the rest see `finished`."""
    import matplotlib

    target = Path(path)
    try:
        suffix = check_suffix(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".html":
            target.write_text(page(figure, title, table), encoding="utf-8")
        else:
            with matplotlib.rc_context(SAME_FILE):
                figure.savefig(target, dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    except OSError as e:
        raise WeirError(f"cannot write {target}: {e.strerror or e}") from e
    return target


def page(figure: Any, title: str, table: list[list[str]]) -> str:
    """Return an HTML page with the drawing and its numbers."""
    import matplotlib

    drawing = io.StringIO()
    with matplotlib.rc_context(SAME_FILE):
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
