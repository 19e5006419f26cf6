"""The demo's figures, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.demo.steering import DoseResult

INK, FAINT, BLUE, RED = "#222222", "#8a8a8a", "#2166ac", "#b2182b"
"""Blue is she and happy, and what is above 0; red is he and sad, and what is below."""


@dataclass(frozen=True)
class HeatMap:
    """Numbers by block and something else.

    Attributes:
        title: what they are.
        columns: names of the columns.
        numbers: [blocks, columns].
        of_columns: what the columns are.
    """

    title: str
    columns: Sequence[str]
    numbers: torch.Tensor
    of_columns: str = ""


@dataclass(frozen=True)
class MoodShares:
    """Shares of stories by the value at which something is held.

    Attributes:
        title: what is held.
        happy: share of happy stories at each value.
        sad: share of sad ones.
        well_formed: share of those that the grammar could have produced.
    """

    title: str
    happy: Sequence[float]
    sad: Sequence[float]
    well_formed: Sequence[float]


def heat_maps(
    panels: Sequence[HeatMap], path: Path, caption: str, limit: float | None = None, beside: bool = False
) -> Path:
    """Draw heat maps on one colour scale, below each other or beside each other.

    Args:
        panels: what is drawn.
        path: the file.
        caption: of the colour scale.
        limit: the number at either end of the scale; by default all but the largest twentieth are within.
        beside: whether the panels stand beside each other.
    """
    plt = _pyplot()
    widths = [len(panel.columns) for panel in panels]
    blocks = max(len(panel.numbers) for panel in panels)
    if limit is None:
        magnitudes = torch.cat([panel.numbers.abs().flatten() for panel in panels])
        # The few largest must not wash out the rest.
        limit = float(magnitudes.quantile(0.95)) or 1.0
    height = max(1.1, 0.17 * blocks)
    if beside:
        shape = {"nrows": 1, "ncols": len(panels), "figsize": (max(6.5, 2.5 + 0.33 * sum(widths)), height + 1.5)}
    else:
        shape = {"nrows": len(panels), "figsize": (max(6.0, 1.6 + 0.19 * max(widths)), len(panels) * (height + 1.25))}
    figure, axes = plt.subplots(**shape, squeeze=False, layout="constrained")
    image = None
    for axis, panel in zip(axes.flat, panels, strict=True):
        image = axis.imshow(
            panel.numbers.numpy(), origin="lower", aspect="auto", cmap="RdBu", vmin=-limit, vmax=limit,
            interpolation="nearest",
        )  # fmt: skip
        axis.set_title(panel.title, loc="left", fontsize=9, color=INK)
        # matplotlib takes text between dollar signs for mathematics.
        names = [name.replace("$", r"\$") for name in panel.columns]
        axis.set_xticks(range(len(names)), names, rotation=0 if panel.of_columns else 90, fontsize=6.5)
        axis.set_yticks(range(0, len(panel.numbers), max(1, len(panel.numbers) // 8)))
        axis.tick_params(length=0, labelsize=6.5, colors=INK)
        axis.set_ylabel("block", fontsize=8, color=INK)
        axis.set_xlabel(panel.of_columns, fontsize=8, color=INK)
        for side in axis.spines.values():
            side.set_visible(False)
    bar = figure.colorbar(image, ax=axes.flatten().tolist(), pad=0.01, fraction=0.04 if beside else 0.02, extend="both")
    bar.set_label(caption, fontsize=7.5, color=INK)
    bar.ax.tick_params(labelsize=6.5)
    return _save(plt, figure, path)


def doses(results: Sequence[DoseResult], grammar: bool, path: Path) -> Path:
    """Draw by scale how many stories are happy and sad, and beside them what the probe reads in each.

    Args:
        results: the stories by scale.
        grammar: whether to draw how many the grammar could have produced.
        path: the file.
    """
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.4), layout="constrained")
    ticks = range(len(results))
    total = len(results[0].stories)
    for sign, colour, name in ((1, BLUE, "happy"), (-1, RED, "sad")):
        counts = [dose.count(sign) for dose in results]
        left.plot(ticks, counts, marker="o", markersize=4, color=colour, label=name)
        for tick, dose in zip(ticks, results, strict=True):
            scores = [story.score for story in dose.stories if story.sign == sign]
            right.plot([tick] * len(scores), scores, "o", markersize=3, alpha=0.35, color=colour, markeredgewidth=0)
    right.plot(ticks, [dose.score for dose in results], marker="o", markersize=4, color=INK)
    if grammar:
        counts = [dose.well_formed for dose in results]
        left.plot(ticks, counts, "--", marker="o", markersize=4, color=FAINT, label="of the grammar")
    left.set_ylim(-0.04 * total, 1.04 * total)
    left.set_ylabel(f"stories, of {total}", fontsize=8.5)
    left.legend(frameon=False, fontsize=8, loc="center left")
    right.axhline(0, color=FAINT, linewidth=0.8, linestyle=":")
    right.set_ylabel("probe's log-odds of happy", fontsize=8.5)
    for axis in (left, right):
        axis.set_xticks(ticks, [f"{d.scale:+g}" if d.scale else "0" for d in results], fontsize=8)
        axis.set_xlabel("scale of the steering vector (not evenly spaced)", fontsize=8.5)
        _plain(axis)
    return _save(plt, figure, path)


def moods_by_value(values: Sequence[float], panels: Sequence[MoodShares], plain: float, path: Path) -> Path:
    """Draw shares by value, a panel for each thing that is held; `plain` is the share of happy ones without."""
    plt = _pyplot()
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.4), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        lines = (("happy", panel.happy, BLUE), ("sad", panel.sad, RED), ("well-formed", panel.well_formed, FAINT))
        for name, shares, colour in lines:
            dashes = "--" if colour == FAINT else "-"
            points = [100 * share for share in shares]
            axis.plot(values, points, dashes, marker="o", markersize=4, color=colour, label=name)
        axis.axhline(100 * plain, color=BLUE, linewidth=0.8, linestyle=":")
        middle = (values[0] + values[-1]) / 2
        axis.text(middle, 100 * plain - 1, "happy if not held", fontsize=7, color=BLUE, ha="center", va="top")
        axis.set_ylim(-4, 104)
        axis.set_title(panel.title, loc="left", fontsize=9, color=INK)
        axis.set_xlabel("activation at which it is held", fontsize=8.5)
        _plain(axis)
    axes[0, 0].set_ylabel("% of stories", fontsize=8.5)
    axes[0, -1].legend(frameon=False, fontsize=8, loc="center right")
    return _save(plt, figure, path)


def _plain(axis: Any) -> None:
    axis.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return path
