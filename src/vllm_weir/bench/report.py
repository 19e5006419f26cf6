"""A result as a table: in the terminal, and as Markdown for the README."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from vllm_weir.bench.plan import CASES, SYSTEMS
from vllm_weir.bench.result import UNCOMPARED, BenchResult, CaseResult

TITLES = {
    "idle": "nothing asked",
    "steer_one": "steer one block, a vector per request",
    "steer_all_distinct": "steer all blocks, a vector per request",
    "capture_last_all_layers": "capture the last prompt token, all blocks",
    "capture_all_all_layers": "capture every token, all blocks",
    "capture_rp8": "capture every token, all blocks, rp8 k=64",
    "startup": "start of the engine",
}


def order(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """By case, then system."""
    return sorted(cases, key=lambda c: (CASES.index(c.case), SYSTEMS.index(c.system)))


def columns(result: BenchResult) -> list[str]:
    """Sizes in the order in which they were planned; the start has a column of its own."""
    labels = list(dict.fromkeys(c.label for c in result.cases))
    decode = sorted((x for x in labels if x.startswith("batch")), key=lambda x: int(x.split()[1]))
    return decode + [x for x in labels if x.startswith("prefill")] + [x for x in labels if x == "start"]


def lines(result: BenchResult) -> list[tuple[str, str, dict[str, list[CaseResult]]]]:
    """(case, system, size -> its results), several for stock where runs were merged."""
    out: dict[tuple[str, str], dict[str, list[CaseResult]]] = {}
    for c in order(result.cases):
        case = "idle" if c.case == "startup" and (c.system != "native") else c.case
        out.setdefault((case, c.system), {}).setdefault(c.label, []).append(c)
    return [(case, system, sizes) for (case, system), sizes in out.items()]


def figure(values: list[CaseResult]) -> str:
    """Median, smallest and largest; ms, seconds for a start, thousand tokens a second."""
    known = [c for c in values if c.median is not None]
    if not known:
        return " / ".join(dict.fromkeys(c.absent for c in values))
    unit = 1e3 if known[0].case == "startup" else 1.0

    def show(x: float) -> str:
        return f"{x / unit:.3g}" if x / unit < 100 else f"{x / unit:.0f}"

    medians = sorted(c.median for c in known if c.median is not None)
    low, high = min(c.min or 0.0 for c in known), max(c.max or 0.0 for c in known)
    middle = (
        show(medians[0])
        if len(medians) == 1 or show(medians[0]) == show(medians[-1])
        else f"{show(medians[0])}-{show(medians[-1])}"
    )
    return f"{middle} ({show(low)}-{show(high)})"


def ratio(values: list[CaseResult]) -> str:
    """Over stock of the same run."""
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
    """With the unit."""
    return {"b": f"{label}, ms/step", "p": f"{label}, ktok/s", "s": "start, s"}[label[0]]


def as_table(result: BenchResult) -> Table:
    """For the terminal."""
    table = Table(title=f"{result.model} on {result.device}, vLLM {result.vllm}; ratio: over stock of the same run")
    table.add_column("case")
    table.add_column("system")
    sizes = columns(result)
    for label in sizes:
        table.add_column(header(label), justify="right")
    for case, system, found in lines(result):
        cells = ["\n".join(filter(None, [figure(found.get(s, [])), ratio(found.get(s, []))])) for s in sizes]
        table.add_row(TITLES[case], system, *cells)
    return table


def as_markdown(result: BenchResult) -> str:
    """For the README: medians of the repeats with the smallest and the largest, ratios in bold, notes below."""
    sizes = columns(result)
    out = [f"| case | system | {' | '.join(header(s) for s in sizes)} |", "|---|---|" + "---:|" * len(sizes)]
    for case, system, found in lines(result):
        cells = []
        for size in sizes:
            values = found.get(size, [])
            times = ratio(values)
            cells.append(figure(values) + (f" **x{times}**" if times else ""))
        out.append(f"| {TITLES[case]} | {system} | {' | '.join(cells)} |")
    out += ["", *_below(result)]
    return "\n".join(out) + "\n"


def _below(result: BenchResult) -> list[str]:
    repeats = sorted({c.repeats for c in result.cases if c.median is not None and c.case != "startup"})
    spread = f"{repeats[0]}" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}" if repeats else "no"
    out = [
        f"{result.model}; {result.device}; vLLM {result.vllm}, torch {result.torch}. Medians of {spread} calls "
        "(smallest-largest); bold: over stock vLLM's median in the same run, above 1 is slower.",
    ]
    if most := max((len(c.ratios) for c in result.cases), default=0):
        out[0] += f" Where {most} or fewer runs were made one, it is the median of theirs (smallest-largest)."
    for name, about in result.systems.items():
        if about.get("status") != "measured":
            out.append(f"* {name} was {about.get('status')}: {about.get('reason')}")
    for c in order(result.cases):
        if c.note:
            out.append(f"* {c.system}, {TITLES[c.case]}, {c.label}: {c.note}")
    compared = [c for c in result.checks if c.case.startswith("capture")]
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
