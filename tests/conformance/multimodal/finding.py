"""What is written down of one multimodal architecture, and the table of them."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results" / "multimodal-cpu-0.32.json"
HEAD = """
## Models that take images and sound

Tiny ones too, in fp32 on a CPU (`python -m tests.conformance.multimodal`), with the bound 1e-5. Three prompts each: of
text alone, with one item, and with two; rows at every position of every point that is served, against transformers.
*added* is about vectors added at the items' positions, `{"modality": ...}`, at each point in turn: all rows that
follow. `router_logits` and the like are left out where the reference has none. The numbers are in
[models-multimodal.csv](models-multimodal.csv). Not in the table: `AyaVisionForConditionalGeneration`, which vLLM has
dropped (0.24), and Molmo, of which transformers has no model.

| architecture | takes | text | items | added | lens | refused, and why |
|---|---|:-:|:-:|:-:|:-:|---|
"""
COLUMNS = ("architecture", "vLLM's class", "takes", "text", "with items", "added at items", "lens", "refused, and why")
"""Of the file of numbers."""


@dataclass
class Finding:
    """One architecture's result.

    Attributes:
        modality: of the items.
        text, items, steered: largest max|d| / max|ref| of rows; None where nothing could be compared.
        lens: of the lens's log-probabilities.
        refused: reason -> the points, with their layers.
        failed: what went wrong; "" if nothing.
    """

    architecture: str
    modality: str
    model_class: str = ""
    text: float | None = None
    items: float | None = None
    steered: float | None = None
    lens: float | None = None
    refused: dict[str, str] = field(default_factory=dict)
    failed: str = ""
    vllm: str = ""


def load(path: Path = RESULTS) -> dict[str, Finding]:
    """Architecture -> finding, of a file that `save` wrote."""
    return {one["architecture"]: Finding(**one) for one in json.loads(path.read_text())} if path.exists() else {}


def save(findings: Iterable[Finding], path: Path = RESULTS, keep: Container[str] | None = None) -> None:
    """Put new findings in the place of older ones; `keep`: architectures to keep, None for all."""
    known = load(path) | {one.architecture: one for one in findings}
    wanted = [asdict(known[name]) for name in sorted(known) if keep is None or name in keep]
    path.write_text(json.dumps(wanted, indent=1) + "\n")


def table(findings: Iterable[Finding]) -> list[str]:
    """The lines of the page."""
    findings = list(findings)
    lines = [HEAD.rstrip("\n")] * bool(findings)
    for one in sorted(findings, key=lambda one: one.architecture.lower()):
        marks = "|".join("✗" if error is None else "✓" for error in _errors(one))
        why = "; ".join(filter(None, [one.failed, _why(one)]))
        lines.append(f"|{one.architecture}|{one.modality}|{marks}|{why}|")
    return lines


def cells(finding: Finding) -> list[str]:
    """The row of the file of numbers."""
    errors = [finding.failed or "not run" if error is None else f"{error:.0e}" for error in _errors(finding)]
    return [finding.architecture, finding.model_class, finding.modality, *errors, _why(finding) or "nothing"]


def _why(finding: Finding) -> str:
    return "; ".join(f"{points}: {reason}" for reason, points in finding.refused.items())


def _errors(finding: Finding) -> tuple[float | None, ...]:
    return finding.text, finding.items, finding.steered, finding.lens
