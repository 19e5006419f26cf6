"""The style of plots, and the files they are written to."""

from __future__ import annotations

import html
import io
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief

INK, FAINT, BLUE = "#222222", "#8a8a8a", "#2166ac"
MAX_TOKEN_LABELS = 48
MAX_LAYER_LABELS = 24


def pyplot() -> Any:
    """Return pyplot set up to draw into files; raise WeirError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise WeirError("plots need matplotlib: pip install 'vllm-weir[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "weir"  # so that the same data give the same file
    return plt


def colours(numbers: np.ndarray, metric: str = "") -> dict[str, Any]:
    """Return the colour scale for some numbers, as arguments of imshow."""
    from matplotlib.colors import LogNorm

    low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
    if metric in ("cosine", "correlation"):
        if low < -0.1:
            return {"cmap": "RdBu", "vmin": -1, "vmax": 1}
        return {"cmap": "viridis", "vmin": min(low, 0), "vmax": 1}
    if low < 0 < high:
        largest = max(-low, high)
        return {"cmap": "RdBu", "vmin": -largest, "vmax": largest}
    if low > 0 and high / low > 30:
        return {"cmap": "viridis", "norm": LogNorm(low, high)}
    return {"cmap": "viridis"}


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
    """Label an axis with layers, as many as fit."""
    step = max(1, -(-len(layers) // MAX_LAYER_LABELS))
    axis.set_ticks(list(range(0, len(layers), step)), [str(n) for n in layers[::step]], fontsize=7.5)


def label_bar(bar: Any, label: str) -> None:
    """Label a colour bar."""
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
    """Set the title, and hide the frame."""
    axis.set_title(title, fontsize=9.5, color=INK, loc="left")
    axis.tick_params(colors=INK, labelsize=7.5, length=2.5)
    for side in axis.spines.values():
        side.set_visible(False)


def check_suffix(path: str | PathLike, field: str = "path") -> str:
    """Return the suffix of a plot's path; raise WeirError naming `field` if no plot has it."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".html"):
        raise WeirError(f"the path of a plot ends in .png, .svg or .html, not {brief(suffix)!r}", field)
    return suffix


def save(figure: Any, path: str | PathLike, title: str, table: list[list[str]]) -> Path:
    """Write a figure in the format of the path's suffix, and close it.

    Args:
        figure: the figure.
        path: ``.png``, ``.svg`` or ``.html``.
        title: of an HTML page.
        table: the numbers for an HTML page; the first row is the head.

    Raises:
        WeirError: if the suffix is another one, or the file cannot be written.
    """
    target = Path(path)
    try:
        suffix = check_suffix(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".html":
            target.write_text(page(figure, title, table), encoding="utf-8")
        else:
            figure.savefig(target, dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    except OSError as e:
        raise WeirError(f"cannot write {target}: {e.strerror or e}") from e
    finally:
        pyplot().close(figure)
    return target


def page(figure: Any, title: str, table: list[list[str]]) -> str:
    """Return an HTML page with the drawing and its numbers."""
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
