"""A chart of the time over stock vLLM's, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_weir.bench.cases import CASES, SYSTEMS, TITLES
from vllm_weir.bench.report import columns
from vllm_weir.bench.result import UNCOMPARED, BenchResult, CaseResult

COLOURS = {
    "stock": "#8a8a8a",
    "weir": "#2166ac",
    "vllm-lens": "#b35806",
    "native": "#5e3c99",
    "nnsight": "#1b7837",
    "interp-engine": "#c51b7d",
    "hotwire": "#b2182b",
    "transformers": "#35978f",
}
WORKLOADS_PANEL = "workloads, a call"
INK, FAINT = "#222222", "#8a8a8a"


def draw_chart(result: BenchResult, path: Path) -> list[Path]:
    """Draw a panel for each size of the steps and one for all workloads, and return the files.

    Each case and system is a dot at its ratio to stock, on a log scale. It is hollow where rows were not compared with
    a reference, and a cross where they were wrong. A bar at a workload is its first call's ratio.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "weir"  # the same data give the same file
    shown = [c for c in result.cases if c.system != "stock"]
    sizes = [s for s in columns(result) if any(c.label == s for c in shown)]
    if any(c.workload is not None for c in shown):
        sizes.append(WORKLOADS_PANEL)
    cases = [c for c in CASES if c != "startup" and any(x.case == c for x in shown)]
    ratios = [x for c in shown for x in (c.ratio_to_stock, c.first_ratio if c.workload else None) if x] or [1.0]
    limits = min(0.85, 0.85 * min(ratios)), 1.6 * max([1.3, *ratios])
    figure, axes = plt.subplots(
        1, max(1, len(sizes)), figsize=(2.4 + 2.3 * max(1, len(sizes)), 1.5 + 0.62 * len(cases)), sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    names = [s for s in SYSTEMS if any(c.system == s for c in shown)]
    step = min(0.15, 0.8 / max(1, len(names)))
    offsets = {name: step * (i - (len(names) - 1) / 2) for i, name in enumerate(names)}
    for axis, size in zip(axes[0], sizes, strict=False):
        panel = [c for c in shown if (WORKLOADS_PANEL if c.workload is not None else c.label) == size]
        _panel(axis, size, cases if size != "start" else cases[:1], panel, limits, offsets)
    axes[0][0].set_yticks(range(len(cases)), [TITLES[c].replace(", ", ",\n") for c in cases], fontsize=8)
    axes[0][0].set_ylim(len(cases) - 0.4, -0.6)
    marks = [plt.Line2D([], [], marker="o", linestyle="", color=COLOURS[n], label=n) for n in names]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    title = f"Time over stock vLLM {result.vllm}'s in the same run: {result.model}, {result.device}"
    figure.suptitle(title, fontsize=9.5, color=INK)
    files = [path.with_suffix(".svg"), path.with_suffix(".png")]
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
    return files


def _panel(
    axis: Any,
    size: str,
    cases: list[str],
    values: list[CaseResult],
    limits: tuple[float, float],
    offsets: dict[str, float],
) -> None:
    left, right = limits
    axis.axvline(1.0, color=FAINT, linewidth=0.9)
    axis.set_xscale("log")
    axis.set_xlim(left, right)
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 1.1, 1.5, 2, 3, 5, 10, 20, 50, 100) if left < t < right]
    ticks = ticks if right < 4 else [t for t in ticks if t not in (1.1, 1.5)]
    axis.set_xticks(ticks, [f"{t:g}x" for t in ticks], fontsize=7.5)
    axis.minorticks_off()
    axis.set_title(size, fontsize=9, color=INK)
    for c in values:
        case = "idle" if c.case == "startup" else c.case
        if case not in cases:
            continue
        place = cases.index(case) + offsets[c.system]
        colour = COLOURS[c.system]
        if c.ratio_to_stock is None:
            axis.text(0.98, place, c.absent, fontsize=7, color=colour, va="center",
                      ha="right", transform=axis.get_yaxis_transform())  # fmt: skip
            continue
        bare = UNCOMPARED in (c.note or "")
        style = {"marker": "x" if c.checked is False else "o", "markerfacecolor": "white" if bare else colour}
        axis.plot(c.ratio_to_stock, place, color=colour, markersize=6, zorder=3, **style)
        if c.workload is not None and c.first_ratio is not None:
            axis.plot(c.first_ratio, place, color=colour, marker="|", markersize=9)
        if c.ratios:
            axis.plot([min(c.ratios), max(c.ratios)], [place, place], color=colour, linewidth=1.2, alpha=0.6)
        text = f"{c.ratio_to_stock:.3f}" if c.ratio_to_stock < 1.995 else f"{c.ratio_to_stock:.1f}"
        end = (max([c.ratio_to_stock, *c.ratios]), place)
        axis.annotate(text, end, (5, 0), textcoords="offset points", fontsize=7, color=colour, va="center")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(colors=INK, length=2)
