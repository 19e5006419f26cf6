"""HTML of results for notebooks: tables, coloured text and heat maps, and the colours that plots have, too.

The HTML needs no script, style sheet or network. Coloured cells say both of their colours, and all else takes the
notebook's, so that it can be read on a light page and on a dark one. Everything that comes from a model or a user is
escaped, and long results are cut, which a note says.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

MAX_TOKENS = 512
"""Most tokens of a coloured text."""
MAX_COLUMNS, MAX_ROWS = 64, 48
"""Most cells of a heat map in each direction, and most rows of a table."""
MAX_LABEL, MAX_PIECE = 24, 200
"""Most characters of a label or cell, and of a token in a coloured text."""
LOG_RATIO = 30
"""Positive numbers that differ by more than this factor get a logarithmic scale."""
_VIRIDIS = (
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c "
    "1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725"
)
_RED_TO_BLUE = "67001f b1182b d6604d f3a481 fddbc7 f7f6f6 d1e5f0 90c4dd 4393c3 2065ab 053061"
_ANCHORS = {
    name: np.array([[int(colour[i : i + 2], 16) for i in (0, 2, 4)] for colour in text.split()], np.float64)
    for name, text in (("viridis", _VIRIDIS), ("RdBu", _RED_TO_BLUE))
}
"""matplotlib's colour maps at equal steps, for where it is not installed."""


@dataclass(frozen=True)
class Scale:
    """The colours of some numbers: blue above 0 and red below where both signs occur, else viridis.

    Attributes:
        low, high: the numbers at its ends.
        name: of matplotlib's colour map.
        log: whether the logarithms are equally far apart.
    """

    low: float
    high: float
    name: Literal["viridis", "RdBu"] = "viridis"
    log: bool = False

    @classmethod
    def of(cls, numbers: np.ndarray, metric: str = "") -> Scale:
        """Return the scale of numbers; those that are not finite do not count.

        `numbers`: of any shape; `metric`: ``"cosine"`` and ``"correlation"`` have 1 at the upper end.
        """
        finite = np.asarray(numbers, np.float64)
        finite = finite[np.isfinite(finite)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        if metric in ("cosine", "correlation"):
            return cls(-1.0, 1.0, "RdBu") if low < -0.1 else cls(min(low, 0.0), 1.0)
        if low < 0 < high:
            return cls(-max(-low, high), max(-low, high), "RdBu")
        return cls(low, high, log=low > 0 and high / low > LOG_RATIO)

    def css(self, number: float) -> str:
        """Return background and text colour of a number; neither if it is not finite."""
        if not np.isfinite(number):
            return ""
        red, green, blue = self._rgb(self._place(number))
        ink = "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 127 else "#fff"
        return f"background:#{red:02x}{green:02x}{blue:02x};color:{ink}"

    def bar(self, label: str) -> str:
        """Return a legend."""
        colours = ",".join("#{:02x}{:02x}{:02x}".format(*self._rgb(place)) for place in np.linspace(0, 1, 9))
        bar = (
            f'<span style="display:inline-block;width:8em;height:.7em;background:linear-gradient(to right,{colours})">'
        )
        log = ", logarithmic" if self.log else ""
        return f"<div>{escaped(label)}: {self.low:.3g} {bar}</span> {self.high:.3g}{log}</div>"

    def _place(self, number: float) -> float:
        low, high = (np.log(self.low), np.log(self.high)) if self.log else (self.low, self.high)
        if high == low:
            return 0.0
        at = np.log(max(number, self.low)) if self.log else number
        return float(np.clip((at - low) / (high - low), 0, 1))

    def _rgb(self, place: float) -> list[int]:
        anchors = _ANCHORS[self.name]
        at = np.linspace(0, 1, len(anchors))
        return [round(float(np.interp(place, at, anchors[:, channel]))) for channel in range(3)]


def escaped(text: object, limit: int = 2000) -> str:
    shown = str(text)
    shown = shown if len(shown) <= limit else shown[: limit - 1] + "…"
    return html.escape(shown.encode("utf-8", "backslashreplace").decode())


def visible(text: str) -> str:
    """Return a token's text as a label: line breaks as a sign, and a sign for nothing."""
    return text.replace("\n", "⏎") or "∅"


def left_out(total: int, shown: int, what: str) -> str:
    """Return a note of how many there are more than were shown; empty for none."""
    return f"<div>{total - shown:,} more of {total:,} {escaped(what)} are left out</div>" if total > shown else ""


def result(title: str, *parts: str) -> str:
    head = f'<div style="margin-bottom:.3em"><b>{escaped(title)}</b></div>'
    return f'<div style="overflow-x:auto;max-width:100%;font-size:13px">{head}{"".join(parts)}</div>'


def coloured_text(pieces: Sequence[str], numbers: np.ndarray, label: str, total: int | None = None) -> str:
    """Return a text whose tokens are coloured by a number each.

    `numbers`: [tokens]; `label`: what the numbers are; `total`: how many tokens there are, if these are the first of
    them.
    """
    shown = min(len(pieces), MAX_TOKENS)
    scale = Scale.of(numbers[:shown])
    spans = "".join(
        f'<span style="{scale.css(number)}" title="{number:.4g}">'
        f"{escaped(piece, MAX_PIECE).replace(chr(10), '⏎' + chr(10)) or '∅'}</span>"
        for piece, number in zip(pieces[:shown], numbers[:shown].tolist(), strict=True)
    )
    text = f'<div style="white-space:pre-wrap;font-family:monospace;line-height:1.7">{spans}</div>'
    return text + scale.bar(label) + left_out(total or len(pieces), shown, "tokens")


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    numbers: np.ndarray,
    label: str,
    corner: str = "",
    cells: Sequence[Sequence[str]] | None = None,
    total: tuple[int, int] | None = None,
    upwards: bool = False,
) -> str:
    """Return a table whose cells are coloured by a number each, which is also their tool tip.

    Args:
        rows: their labels, texts.
        columns: likewise.
        numbers: [rows, columns].
        label: what the numbers are.
        corner: what the rows are.
        cells: texts in the cells; None for none.
        total: how many rows and columns there are, if these are the first of them.
        upwards: whether the first row is at the bottom, as blocks are in plots.
    """
    height, width = min(len(rows), MAX_ROWS), min(len(columns), MAX_COLUMNS)
    numbers = np.asarray(numbers, np.float64)[:height, :width]
    scale = Scale.of(numbers)
    head = [_cell("th", corner), *(_cell("th", visible(column)) for column in columns[:width])]
    lines = ["".join(head)]
    for i, row in enumerate(numbers.tolist()):
        shown = [
            _cell("td", "" if cells is None else visible(cells[i][k]), scale.css(number), f"{number:.4g}")
            for k, number in enumerate(row)
        ]
        lines.insert(1 if upwards else len(lines), _cell("th", rows[i]) + "".join(shown))
    all_rows, all_columns = total or (len(rows), len(columns))
    notes = left_out(all_rows, height, "rows") + left_out(all_columns, width, "columns")
    return _table(lines) + scale.bar(label) + notes


def table(head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[Sequence[str]] | None = None) -> str:
    """Return a table. `rows`: texts, as many in each row; `styles`: CSS of each cell, as `Scale.css` returns it."""
    shown = rows[:MAX_ROWS]
    lines = ["".join(_cell("th", name) for name in head)]
    for i, row in enumerate(shown):
        lines.append("".join(_cell("td", one, styles[i][k] if styles else "") for k, one in enumerate(row)))
    return _table(lines) + left_out(len(rows), len(shown), "rows")


def _cell(tag: str, text: str, style: str = "", title: str = "") -> str:
    tip = f' title="{escaped(title)}"' if title else ""
    css = f"padding:1px 6px;white-space:pre;text-align:center;{style}"
    return f'<{tag} style="{css}"{tip}>{escaped(text, MAX_LABEL)}</{tag}>'


def _table(lines: Sequence[str]) -> str:
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="border-collapse:collapse;font-size:12px;margin:0">{rows}</table>'
