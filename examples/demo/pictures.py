"""The demo's figures, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INK, FAINT = "#222222", "#8a8a8a"
LINES = ("#2166ac", "#b35806")
RED = "#b2182b"


@dataclass(frozen=True)
class TokenScores:
    """Scores of one text's tokens at every layer.

    Attributes:
        title: what the text is.
        words: its tokens, [tokens].
        scores: [layers, tokens].
    """

    title: str
    words: Sequence[str]
    scores: torch.Tensor


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


def heat_map(texts: Sequence[TokenScores], path: Path, caption: str) -> Path:
    """Draw scores as layers x tokens, one panel for each text, all on one colour scale."""
    plt = _pyplot()
    longest = max(len(text.words) for text in texts)
    layers = max(len(text.scores) for text in texts)
    magnitudes = torch.cat([text.scores.abs().flatten() for text in texts])
    # The few largest scores must not wash out the rest.
    limit = float(magnitudes.quantile(0.95)) or 1.0
    height = max(1.1, 0.17 * layers)
    figure, axes = plt.subplots(
        len(texts),
        1,
        figsize=(max(6.0, 1.6 + 0.19 * longest), len(texts) * (height + 1.25) + 0.4),
        squeeze=False,
        layout="constrained",
    )
    image = None
    for axis, text in zip(axes[:, 0], texts, strict=True):
        image = axis.imshow(
            text.scores.numpy(), origin="lower", aspect="auto", cmap="RdBu", vmin=-limit, vmax=limit,
            interpolation="nearest",
        )  # fmt: skip
        axis.set_title(text.title, loc="left", fontsize=9, color=INK)
        axis.set_xticks(range(len(text.words)), text.words, rotation=90, fontsize=6.5)
        axis.set_yticks(range(0, len(text.scores), max(1, len(text.scores) // 8)))
        axis.tick_params(length=0, labelsize=6.5, colors=INK)
        axis.set_ylabel("block", fontsize=8, color=INK)
        for side in axis.spines.values():
            side.set_visible(False)
    bar = figure.colorbar(image, ax=axes[:, 0].tolist(), pad=0.01, fraction=0.02, extend="both")
    bar.set_label(caption, fontsize=7.5, color=INK)
    bar.ax.tick_params(labelsize=6.5)
    return _save(plt, figure, path)


def curves(values_by_name: dict[str, Sequence[float]], path: Path, label: str) -> Path:
    """Draw one line per name over the layers."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(6.2, 3.2), layout="constrained")
    for (name, values), colour in zip(values_by_name.items(), LINES, strict=False):
        axis.plot(range(len(values)), values, marker="o", markersize=4, color=colour, label=name)
    axis.axhline(0.5, color=FAINT, linewidth=0.8, linestyle=":")
    low = min(0.45, *(min(values) for values in values_by_name.values()))
    axis.set_ylim(low - 0.02, 1.02)
    axis.set_xlabel("block (residual stream leaving it)", fontsize=8.5)
    axis.set_ylabel(label, fontsize=8.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(labelsize=8, colors=INK)
    axis.legend(frameon=False, fontsize=8, loc="center right")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return _save(plt, figure, path)


def doses(
    scales: Sequence[float],
    shares: Mapping[str, Sequence[float]],
    scores: Sequence[Sequence[float]],
    path: Path,
    label: str,
) -> Path:
    """Draw shares by scale, one line per name, and beside them each text's score by scale."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.4), layout="constrained")
    ticks = range(len(scales))
    for (name, values), colour in zip(shares.items(), (LINES[0], RED, FAINT), strict=False):
        dashes = "--" if colour == FAINT else "-"
        left.plot(ticks, [100 * v for v in values], dashes, marker="o", markersize=4, color=colour, label=name)
    left.set_ylim(-4, 104)
    left.set_ylabel("% of stories", fontsize=8.5)
    left.legend(frameon=False, fontsize=8, loc="center left")
    for tick, values in zip(ticks, scores, strict=True):
        right.plot([tick] * len(values), values, "o", markersize=3, alpha=0.35, color=FAINT, markeredgewidth=0)
    means = [sum(values) / len(values) for values in scores]
    right.plot(ticks, means, marker="o", markersize=4, color=INK)
    right.axhline(0, color=FAINT, linewidth=0.8, linestyle=":")
    right.set_ylabel(label, fontsize=8.5)
    for axis in (left, right):
        axis.set_xticks(ticks, [f"{s:+g}" if s else "0" for s in scales], fontsize=8)
        axis.set_xlabel("scale of the steering vector (not evenly spaced)", fontsize=8.5)
        axis.tick_params(labelsize=8, colors=INK)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return _save(plt, figure, path)


def moods_by_value(values: Sequence[float], panels: Sequence[MoodShares], plain: float, path: Path) -> Path:
    """Draw shares by value, a panel for each thing that is held; `plain` is the share of happy ones without."""
    plt = _pyplot()
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.4), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        lines = (("happy", panel.happy, LINES[0]), ("sad", panel.sad, RED), ("well-formed", panel.well_formed, FAINT))
        for name, shares, colour in lines:
            dashes = "--" if colour == FAINT else "-"
            points = [100 * share for share in shares]
            axis.plot(values, points, dashes, marker="o", markersize=4, color=colour, label=name)
        axis.axhline(100 * plain, color=LINES[0], linewidth=0.8, linestyle=":")
        middle = (values[0] + values[-1]) / 2
        axis.text(middle, 100 * plain - 1, "happy if not held", fontsize=7, color=LINES[0], ha="center", va="top")
        axis.set_ylim(-4, 104)
        axis.set_title(panel.title, loc="left", fontsize=9, color=INK)
        axis.set_xlabel("activation at which it is held", fontsize=8.5)
        axis.tick_params(labelsize=8, colors=INK)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0, 0].set_ylabel("% of stories", fontsize=8.5)
    axes[0, -1].legend(frameon=False, fontsize=8, loc="center right")
    return _save(plt, figure, path)


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
