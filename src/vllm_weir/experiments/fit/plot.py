"""The picture of `weir fit`: the AUC by block."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from vllm_weir.analysis.plot_style import BLUE, FAINT, INK, finish, pyplot, save
from vllm_weir.errors import WeirError
from vllm_weir.experiments.directions import Directions


def plot_auc(directions: Directions, path: str | PathLike) -> Path:
    """Plot the AUC on held-out prompts by block.

    Args:
        directions: of `fit`.
        path: ``.png``, ``.svg`` or ``.html``.

    Raises:
        WeirError: if no AUC is known, for another ending, without matplotlib, or if the file cannot
            be written.
    """
    areas = directions.auc_by_layer
    if not areas:
        raise WeirError("no AUC is known: nothing was held out", "plot")
    layers, best = list(areas), directions.best
    figure, axis = pyplot().subplots(figsize=(max(4.6, 2.2 + 0.16 * len(layers)), 3.0), layout="constrained")
    axis.axhline(0.5, color=FAINT, linewidth=0.8, linestyle="--")
    axis.plot(layers, list(areas.values()), color=BLUE, marker="o", markersize=3.5, linewidth=1.4)
    axis.plot([best], [areas[best]], color=INK, marker="o", markersize=6, fillstyle="none")
    axis.annotate(
        f"block {best}: {areas[best]:.2f}", (best, areas[best]), xytext=(0, -14), textcoords="offset points",
        ha="center", fontsize=8, color=INK,
    )  # fmt: skip
    axis.set_ylim(min(0.45, *areas.values()) - 0.02, 1.03)
    axis.set_xlabel("block", color=INK, fontsize=8.5)
    axis.set_ylabel("AUC, held out", color=INK, fontsize=8.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    title = f"{directions.method} at {directions.hook}: AUC by block"
    finish(axis, title)
    return save(figure, path, title, [["block", "AUC"], *([str(n), f"{area:.4f}"] for n, area in areas.items())])
