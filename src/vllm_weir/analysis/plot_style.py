"""How pictures look, and the files they become."""

from __future__ import annotations

import html
import io
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief

INK, FAINT, BLUE = "#222222", "#8a8a8a", "#2166ac"
MOST_LABELS = 48


def pyplot() -> Any:
    """pyplot that draws into files; raises WeirError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise WeirError("pictures need matplotlib: pip install 'vllm-weir[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "weir"  # the same data give the same file
    return plt


def colours(numbers: np.ndarray, metric: str = "") -> dict[str, Any]:
    """Colour scale for some numbers, as arguments of imshow."""
    from matplotlib.colors import LogNorm

    low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
    if metric in ("cosine", "correlation"):
        return (
            {"cmap": "RdBu_r", "vmin": -1, "vmax": 1}
            if low < -0.1
            else {"cmap": "viridis", "vmin": min(low, 0), "vmax": 1}
        )
    if low < 0 < high:
        most = max(-low, high)
        return {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
    if low > 0 and high / low > 30:
        return {"cmap": "viridis", "norm": LogNorm(low, high)}
    return {"cmap": "viridis"}


def label_tokens(way: Any, names: list[str]) -> None:
    """Tokens along an axis, not more than fit."""
    every = max(1, -(-len(names) // MOST_LABELS))
    places = list(range(0, len(names), every))
    short = [names[i] if len(names[i]) <= 12 else names[i][:11] + "…" for i in places]
    # dollar signs would be taken for mathematics
    way.set_ticks(places, [s.replace("$", r"\$") for s in short], fontsize=7.5)
    if way.axis_name == "x" and any(len(s) > 2 for s in short):
        for text in way.get_ticklabels():
            text.set_rotation(60)
            text.set_ha("right")
            text.set_rotation_mode("anchor")


def label_layers(way: Any, layers: list[int]) -> None:
    """Layers along an axis."""
    every = max(1, -(-len(layers) // 24))
    way.set_ticks(list(range(0, len(layers), every)), [str(n) for n in layers[::every]], fontsize=7.5)


def label_bar(bar: Any, label: str) -> None:
    """Label of a colour bar."""
    from matplotlib.colors import LogNorm

    bar.set_label(label, color=INK, fontsize=8.5)
    if isinstance(bar.norm, LogNorm):
        plain_log(bar.ax.yaxis)
    bar.ax.tick_params(colors=INK, labelsize=7.5, length=2.5)
    bar.outline.set_visible(False)


def plain_log(way: Any) -> None:
    """Ticks at 1, 2, 5, 10, 20, ... as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    way.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    way.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    way.set_minor_locator(NullLocator())


def finish(axis: Any, title: str) -> None:
    """Title and a quiet frame."""
    axis.set_title(title, fontsize=9.5, color=INK, loc="left")
    axis.tick_params(colors=INK, labelsize=7.5, length=2.5)
    for side in axis.spines.values():
        side.set_visible(False)


def save(figure: Any, path: str | PathLike, title: str, table: list[list[str]]) -> Path:
    """Write a figure by the path's suffix, and close it. `table`: the numbers, for HTML; its first row is the head."""
    target = Path(path)
    kind = target.suffix.lower()
    try:
        if kind not in (".png", ".svg", ".html"):
            raise WeirError(f"a picture ends in .png, .svg or .html, not {brief(kind)!r}", "path")
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == ".html":
            target.write_text(page(figure, title, table), encoding="utf-8")
        else:
            figure.savefig(target, dpi=160, metadata={"Date": None} if kind == ".svg" else None)
    except OSError as e:
        raise WeirError(f"cannot write {target}: {e.strerror or e}") from e
    finally:
        pyplot().close(figure)
    return target


def page(figure: Any, title: str, table: list[list[str]]) -> str:
    """One HTML page: the drawing and its numbers."""
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
