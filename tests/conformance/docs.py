"""docs/models.md, the numbers beside it and those of multimodal models (CSV), from the results."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.checks import INNER, STREAM
from tests.conformance.inside import ATTENTION, MLP, ROUTING
from tests.conformance.multimodal.finding import COLUMNS, Finding, cells, table
from tests.conformance.verdict import CANNOT, CONFORMS, REFUSED, Verdict
from tests.conformance.zoo.gpu import NOT_THERE

HEAD = """# Models

Which [hook points](reference/hook-points.md) each architecture serves: every text-generation
architecture of vLLM {version}'s registry, and some that reach vLLM through its Transformers backend.
`weir sites MODEL` says it of your model, with the reason for each point that is refused.
`python -m tests.conformance docs` writes this page from what `make conformance` measured.

✓ served in every block that has it · ◐ in some of the blocks, or some of the points · ✗ refused ·
– the model has none · ? not measured

A mark also says that the rows were right: each architecture ran as a tiny model with random weights
in fp32 on {backend}, every point was read, and added to, at prompt and generated positions of every
block, and all rows that follow were compared with the same model in transformers. The largest
max|difference| / max|reference| is at most 1e-5; for routed experts and latent attention 1e-4.
[models.csv](models.csv) has the numbers (captured rows / all that follows from an addition), the
reference, what differs in the other configurations, and why a point is refused. Where transformers
lacks the model the reference is *identities*: those between hook points, those that the model's own
projections make of a point inside a block, and what an addition may move and what not.

* attention: {attention}
* MLP: {mlp}
* lens: the logit lens of all blocks, as log-probabilities over the vocabulary
* more: other configurations that conform, which take another way through the model, through
  transformers or through Weir: {good} of {all}
"""

GROUPS = {
    "attention": ATTENTION,
    "MLP": ("mlp_in", *ROUTING, *MLP[1:]),
}
"""Columns for several hook points."""
POINTS = (*STREAM, *GROUPS, "lens")
NUMBERS = (
    *("architecture", "verdict", "vLLM's class", "what differs", "where", "dtype", "bound", "reference"),
    *(*POINTS, "why a point is not there"),
)
"""Columns of the file beside the page."""

ROUNDED = """
{count} numbers are beyond 1e-5 (marked † in the file) and within four times the error of fp32 itself
there: transformers in fp32 against transformers in float64 differs by {least:.0e} to {most:.0e}. Two
implementations that round in different orders cannot agree better."""

ON_A_GPU = """
GPU: on {device} ran what the CPU cannot run, and some of what it can
(`tests/gpu/conformance.py`). In fp32, without the tensor cores' shorter numbers, the bound is 1e-4.
Where vLLM's kernels take bfloat16 alone, or make it themselves, the identities are checked up to
its rounding, 2e-2."""

LACKS = re.compile(r"has no (experts|gate|MLP|attention)\b")
"""Reasons that say that there is no such point, where no reference says it."""


def write_docs(
    results: dict[str, Verdict],
    gpu: dict[str, Verdict],
    path: Path,
    not_there: Mapping[str, str] = NOT_THERE,
    multimodal: Iterable[Finding] = (),
) -> None:
    """Write the page from what a CPU and what a GPU found; `not_there`: why the GPU does not run an architecture.

    Its numbers are in `NAME.csv` beside it, those of multimodal models in `NAME-multimodal.csv`.
    """
    ordered = [results[a] for a in sorted(results, key=str.lower)]
    verdicts = [v for v in ordered if not v.differs]
    variants = [v for v in ordered if v.differs]
    by = {kind: [v for v in verdicts if v.verdict == kind] for kind in (CONFORMS, REFUSED, CANNOT)}
    on_gpu = [gpu[a] for a in sorted(gpu, key=str.lower)]
    judged = {v.architecture for v in on_gpu if v.verdict in (CONFORMS, REFUSED)}
    by[CANNOT] = [v for v in by[CANNOT] if v.architecture not in judged]
    by[REFUSED] += [v for v in on_gpu if v.verdict == REFUSED and results[v.architecture].verdict != REFUSED]
    others = [v for v in [*verdicts, *on_gpu] if v.verdict not in by]
    on_gpu = [v for v in on_gpu if v.verdict == CONFORMS]
    more = [v for v in on_gpu if results[v.architecture].verdict == CANNOT]
    version = ", ".join(sorted({v.vllm for v in verdicts if v.vllm}))
    backend = ", ".join(sorted({v.backend for v in verdicts}))
    good = [v for v in variants if v.verdict == CONFORMS]
    lines = [HEAD.format(version=version, backend=backend, good=len(good), all=len(variants), **_names())]
    counts = [(len(found), kind) for kind, found in [*by.items(), ("fail", others)] if found]
    counts[1:1] = [(len(more), f"more {CONFORMS} on {_device(more[0])}")] if more else []
    lines.append(" · ".join(f"{count} {kind}" for count, kind in counts) + "\n")
    lines += _ticks([*by[CONFORMS], *more], on_gpu, good)
    lines += _rounded([*by[CONFORMS], *good]) + _why([*by[CONFORMS], *more])
    findings = list(multimodal)
    lines += table(findings)
    lines.append("\n## Refused\n\n| architecture | where | why |\n|---|---|---|")
    refused = [*by[REFUSED], *(v for v in variants if v.verdict == REFUSED)]
    lines += [f"| {_named(v)} | {_device(v)} | {_cell(v.reason)} |" for v in refused]
    cpu = _device(by[CANNOT][0]) if by[CANNOT] else ""
    lines.append(f"\n## Cannot be run here\n\n| architecture | {cpu} | known | on a GPU |\n|---|---|---|---|")
    for v in by[CANNOT]:
        tried = gpu.get(v.architecture)
        there = not_there.get(v.architecture) or (f"{tried.reason} ({tried.dtype})" if tried else "not tried")
        lines.append(f"| {v.architecture} | {_cell(v.reason)} | {v.checked} | {_cell(there)} |")
    others += [v for v in variants if v.verdict not in (CONFORMS, REFUSED)]
    if others:
        lines.append("\n## Fail\n\n| architecture | where | what |\n|---|---|---|")
        lines += [f"| {_named(v)} | {_device(v)} | {_cell(v.reason)} |" for v in others]
    path.write_text("\n".join(lines) + "\n")
    measured = [*by[CONFORMS], *on_gpu, *variants]
    _write_csv(path.with_suffix(".csv"), NUMBERS, map(_numbers, measured))
    if findings:
        _write_csv(path.with_name(f"{path.stem}-multimodal.csv"), COLUMNS, map(cells, findings))


def _names() -> dict[str, str]:
    attention, mlp = (", ".join(f"`{hook}`" for hook in group) for group in GROUPS.values())
    return {"attention": attention, "mlp": mlp}


def _ticks(verdicts: list[Verdict], on_gpu: list[Verdict], variants: list[Verdict]) -> list[str]:
    """One row an architecture, without spaces between cells: two words a row."""
    where = {v.architecture: v for v in on_gpu}
    names = ["architecture", *(f"`{hook}`" for hook in STREAM), *GROUPS, "lens", "more", "GPU"]
    lines = ["## Conform\n", f"| {' | '.join(names)} |", "|---" + "|:-:" * (len(names) - 1) + "|"]
    for v in sorted(verdicts, key=lambda v: v.architecture.lower()):
        more = sum(one.architecture.partition(":")[0] == v.architecture for one in variants) or ""
        tried = where.get(v.architecture)
        lines.append(
            f"|{v.architecture}|{'|'.join(_marks(v))}|{more}|{'only' if tried is v else '✓' if tried else ''}|"
        )
    return lines + [ON_A_GPU.format(device=_device(v)) for v in on_gpu[:1]]


def _marks(verdict: Verdict) -> list[str]:
    marks = [_mark(verdict, (hook,)) for hook in STREAM] + [_mark(verdict, group) for group in GROUPS.values()]
    return [*marks, "✓" if verdict.lens.get("error") is not None else "✗" if verdict.lens else "?"]


def _mark(verdict: Verdict, hooks: Sequence[str]) -> str:
    """✓, ◐, ✗, – or ?, of the points that the reference has."""
    found = [verdict.hooks[hook] for hook in hooks if hook in verdict.hooks]
    if not any(point["of"] for point in found):
        return "?"
    there = [point for point in found if point["layers"] or not _lacks(point)]
    if not there:
        return "–"
    if not any(point["layers"] for point in there):
        return "✗"
    return "✓" if all(point["layers"] == (point["has"] or point["of"]) or _lacks(point) for point in there) else "◐"


def _lacks(point: Mapping[str, Any]) -> bool:
    """Whether the blocks where a point is refused have none."""
    if point["has"] is not None:
        return point["has"] == point["layers"]
    return all(map(LACKS.search, point["refused"].split("; ")))


def _numbers(v: Verdict) -> list[str]:
    """The row of the file."""
    reference = v.checked + (f", {v.note}" if v.note else "")
    head = [v.architecture, v.verdict, v.model_class, v.differs, _device(v), v.dtype, f"{v.bound:.0e}", reference]
    why = [v.reason] if v.reason else [f"{', '.join(hooks)}: {reason}" for reason, hooks in _reasons(v).items()]
    return [*head, *(_cells(v) if v.verdict == CONFORMS else [""] * len(POINTS)), "; ".join(why)]


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def _rounded(verdicts: list[Verdict]) -> list[str]:
    rounded = [error for v in verdicts for found in v.hooks.values() for error in found.get("rounding", {}).values()]
    return [ROUNDED.format(count=len(rounded), least=min(rounded), most=max(rounded))] if rounded else []


def _named(verdict: Verdict) -> str:
    return verdict.architecture + (f", {_cell(verdict.differs)}" if verdict.differs else "")


def _device(verdict: Verdict) -> str:
    return f"{verdict.backend}, vLLM {verdict.vllm}"


def _why(verdicts: list[Verdict]) -> list[str]:
    """Reason -> its points, and how many architectures have it; those of a single one are in the file alone."""
    found: dict[str, tuple[dict[str, None], set[str]]] = {}
    for verdict in verdicts:
        for reason, hooks in _reasons(verdict).items():
            points, names = found.setdefault(reason, ({}, set()))
            points |= dict.fromkeys(f"`{hook}`" for hook in hooks)
            names.add(verdict.architecture)
    found = {reason: those for reason, those in found.items() if len(those[1]) > 1}
    lines = ["\nWhy a point is not there, or not in every block:\n\n| why | points | architectures |\n|---|---|---:|"]
    return lines * bool(found) + [
        f"| {_cell(reason)} | {', '.join(points)} | {len(names)} |"
        for reason, (points, names) in sorted(found.items(), key=lambda one: -len(one[1][1]))
    ]


def _cells(verdict: Verdict) -> list[str]:
    cells = []
    for hook in STREAM:
        found = verdict.hooks.get(hook)
        if not found or found["capture"] is None:
            cells.append("none" if found and found.get("has") == 0 else "refused")
            continue
        of = f" ({found['layers']} of {found['of']})" if found["layers"] < found["of"] else ""
        errors = []
        for way in ("capture", "steer"):
            mark = "†" if way in found.get("rounding", {}) else ""
            errors.append("-" if found[way] is None else f"{found[way]:.0e}{mark}")
        cells.append(" / ".join(errors) + of)
    lens = verdict.lens.get("error")
    cells += [_group_cell(verdict, group) for group in GROUPS.values()]
    return [*cells, f"{lens:.0e}" if lens is not None else "refused" if verdict.lens else "not measured"]


def _group_cell(verdict: Verdict, group: tuple[str, ...]) -> str:
    """Which of several points are served, and the largest errors among them."""
    found = {hook: verdict.hooks[hook] for hook in group if hook in verdict.hooks}
    if not any(point["of"] for point in found.values()):
        return "not measured"
    there = [hook for hook, point in found.items() if point["has"] != 0]
    served = [hook for hook in there if found[hook]["layers"]]
    if not served:
        return "refused" if there else "none"
    names = "all" if served == there else ", ".join(f"`{hook}`" for hook in served)
    errors = []
    for way in ("capture", "steer"):
        measured = [found[hook][way] for hook in served if found[hook][way] is not None]
        mark = "†" if any(way in found[hook]["rounding"] for hook in served) else ""
        errors.append(f"{max(measured):.0e}{mark}" if measured else "-")
    layers = {found[hook]["layers"] for hook in served}
    of = found[served[0]]["of"]
    some = f" ({'-'.join(map(str, sorted({min(layers), max(layers)})))} of {of})" if min(layers) < of else ""
    return f"{names}: {' / '.join(errors)}{some}"


def _reasons(verdict: Verdict) -> dict[str, list[str]]:
    """Reason, of any block -> the points it is about; not of points inside a block that no reference has."""
    reasons: dict[str, list[str]] = {}
    for hook, found in [*verdict.hooks.items(), ("lens", verdict.lens)]:
        if found.get("refused") and not (hook in INNER and found["has"] == 0):
            for reason in dict.fromkeys(map(_of_any_block, found["refused"].split("; "))):
                reasons.setdefault(reason, []).append(hook)
    return reasons


def _of_any_block(reason: str) -> str:
    """A reason without the point that it was handed on from, and without numbers of blocks."""
    reason = re.sub(
        r"^(read only: )?((it is computed from )?\w+(\[\d+\]| of this block)(, which)? is refused: )+", "", reason
    )
    reason = re.sub(r"\bbetween block \d+ and block \d+\b", "between two blocks", reason)
    return re.sub(r"^block \d+\b", "this block", re.sub(r"(?<=\w)\[\d+\]", "", reason))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
