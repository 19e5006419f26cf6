"""A result as tables, in the terminal and as Markdown, and as a chart of the time over stock vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_weir.bench.cases import CAPTURES, CASES, SYSTEMS, TITLES, WORKLOADS
from vllm_weir.bench.result import UNCOMPARED, BenchResult, CaseResult

Cell = tuple[str, str]
"""A text, and a ratio to stock."""
WORKLOAD_COLUMNS = ("workload", "system", "s a call", "over stock", "first call, s", "over stock's first")


def order(cases: Iterable[CaseResult]) -> list[CaseResult]:
    return sorted(cases, key=lambda c: (CASES.index(c.case), SYSTEMS.index(c.system)))


def columns(result: BenchResult) -> list[str]:
    """Return the labels of the steps' sizes in the order of the plan; the start has a column of its own."""
    labels = list(dict.fromkeys(c.label for c in result.cases if c.workload is None))
    decode = sorted((x for x in labels if x.startswith("batch")), key=lambda x: int(x.split()[1]))
    return decode + [x for x in labels if x.startswith("prefill")] + [x for x in labels if x == "start"]


def tables(result: BenchResult) -> list[tuple[list[str], list[list[Cell]]]]:
    """Return the columns and the rows of the tables of steps and of workloads, as far as there are any."""
    steps: dict[tuple[str, str], dict[str, list[CaseResult]]] = {}
    workloads: dict[tuple[str, str, str], list[CaseResult]] = {}
    for c in order(result.cases):  # stock has several results where runs were merged
        if c.workload is not None:
            workloads.setdefault((c.label, c.case, c.system), []).append(c)
            continue
        case = "idle" if c.case == "startup" and c.system != "native" else c.case
        steps.setdefault((case, c.system), {}).setdefault(c.label, []).append(c)
    out = []
    if sizes := columns(result):
        rows = [
            [(TITLES[case], ""), (system, ""), *((figure(f := found.get(s, [])), ratio(f)) for s in sizes)]
            for (case, system), found in steps.items()
        ]
        out.append((["case", "system", *map(header, sizes)], rows))
    kinds = list(dict.fromkeys(WORKLOADS.values()))
    by_kind = sorted(workloads, key=lambda of: kinds.index(of[0].split()[0]))  # type: ignore[arg-type]
    if by_kind:
        out.append((list(WORKLOAD_COLUMNS), [_workload_row(*key, workloads[key]) for key in by_kind]))
    return out


def _workload_row(label: str, case: str, system: str, values: list[CaseResult]) -> list[Cell]:
    name = f"{TITLES[case]} ({label})" if case == "idle" else f"`{case}`: {TITLES[case]}"
    firsts = " / ".join(_three_digits(c.first / 1e3) for c in values if c.first is not None)
    ratios = " / ".join(f"{c.first_ratio:.3f}" for c in values if c.first_ratio is not None and system != "stock")
    return [(name, ""), (system, ""), (figure(values), ""), ("", ratio(values)), (firsts, ""), ("", ratios)]


def figure(values: list[CaseResult]) -> str:
    """Return median, smallest and largest; ms, seconds for a start or a workload, thousand tokens a second."""
    known = [c for c in values if c.median is not None]
    if not known:
        return " / ".join(dict.fromkeys(c.absent for c in values))
    unit = 1e3 if known[0].case == "startup" or known[0].workload is not None else 1.0

    def show(x: float) -> str:
        return _three_digits(x / unit)

    medians = sorted(c.median for c in known if c.median is not None)
    low, high = min(c.min or 0.0 for c in known), max(c.max or 0.0 for c in known)
    middle = show(medians[0])
    if show(medians[-1]) != middle:
        middle += f"-{show(medians[-1])}"
    return f"{middle} ({show(low)}-{show(high)})"


def _three_digits(x: float) -> str:
    return f"{x:.3g}" if x < 100 else f"{x:.0f}"


def ratio(values: list[CaseResult]) -> str:
    """Return the ratio to stock of the same run, with a word where rows were wrong or not compared."""
    known = [c for c in values if c.ratio_to_stock is not None]
    if not known or known[0].system == "stock":
        return ""
    doubt = " WRONG" if any(c.checked is False for c in known) else ""
    if not doubt and any(UNCOMPARED in (c.note or "") for c in known):
        doubt = " not compared"
    return " / ".join(f"{c.ratio_to_stock:.3f}{_spread(c.ratios)}" for c in known) + doubt


def _spread(ratios: list[float]) -> str:
    return f" ({min(ratios):.3f}-{max(ratios):.3f})" if len(ratios) > 1 else ""


def header(label: str) -> str:
    return {"b": f"{label}, ms/step", "p": f"{label}, ktok/s", "s": "start, s"}[label[0]]


def as_tables(result: BenchResult) -> list[Table]:
    """Return the tables for the terminal."""
    title = f"{result.model} on {result.device}, vLLM {result.vllm}; ratio: over stock of the same run"
    out = []
    for names, rows in tables(result):
        out.append(table := Table(*names[:2], title=title))
        for name in names[2:]:
            table.add_column(name, justify="right", overflow="fold")
        for row in rows:
            table.add_row(*("\n".join(filter(None, cell)) for cell in row))
    return out


def as_markdown(result: BenchResult) -> str:
    """Return the tables for the README: medians with the smallest and the largest, ratios in bold, notes below."""
    out = []
    for names, rows in tables(result):
        out += [f"| {' | '.join(names)} |", "|---|---|" + "---:|" * (len(names) - 2)]
        for row in rows:
            cells = (" ".join(filter(None, [text, times and f"**x{times}**"])) for text, times in row)
            out.append(f"| {' | '.join(cells)} |")
        out.append("")
    return "\n".join([*out, *_below(result)]) + "\n"


def _below(result: BenchResult) -> list[str]:
    repeats = sorted({c.repeats for c in result.cases if c.median is not None and c.case != "startup"})
    spread = f"{repeats[0]}" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}" if repeats else "no"
    out = [
        f"{result.model}; {result.device}; vLLM {result.vllm}, torch {result.torch}. Medians of {spread} calls "
        "(smallest-largest); bold: over stock vLLM's in the same run, above 1 is slower.",
    ]
    if most := max((len(c.ratios) for c in result.cases), default=0):
        out[0] += f" Where {most} or fewer runs were made one, it is the median of theirs (smallest-largest)."
    for name, about in result.systems.items():
        if about.get("status") != "measured":
            out.append(f"* {name} was {about.get('status')}: {about.get('reason')}")
        reasons: dict[str, list[str]] = {}
        for case, reason in about.get("cannot", {}).items():
            reasons.setdefault(reason, []).append(case)
        out += [f"* {name} has no {', '.join(cases)}: {reason}." for reason, cases in reasons.items()]
    for c in order(result.cases):
        if c.note:
            out.append(f"* {c.system}, {TITLES[c.case]}, {c.label}: {c.note}")
    compared = [c for c in result.checks if c.case in CAPTURES]
    for name in dict.fromkeys(c.system for c in compared):
        mine = [c for c in compared if c.system == name]
        out.append(
            f"* Rows of {name}: {sum(c.rows for c in mine):,} delivered in timed runs, 1 - cosine to transformers in "
            f"fp32 at most {max(c.value for c in mine):.1e}"
            + (f" (transformers' own, in the engine's dtype: {own:.1e})." if (own := _own(mine)) else ".")
        )
    return out


def _own(checks: list) -> float:
    return max((c.detail.get("transformers_in_this_dtype", 0.0) for c in checks), default=0.0)


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
