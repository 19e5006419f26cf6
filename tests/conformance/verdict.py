"""What is written down of one architecture."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CONFORMS, REFUSED, CANNOT, FAILS = "conforms", "refused", "cannot run", "fails"


@dataclass
class Verdict:
    """One architecture's result.

    Attributes:
        verdict: "conforms": every site that is served is right; "refused": none is served, `reason` says why; "cannot
            run": not on this backend; "fails": something served is wrong, or a check could not be made.
        checked: "transformers" or, where it lacks the model, "identities"; of what was not run, how it is known.
        hooks: hook point -> {"layers": how many of "of" blocks serve it, "has": in how many the reference has it (None
            without a reference), "capture" and "steer": largest max|d| / max|ref|, or None where nothing is served,
            "refused": why some or all blocks do not}.
        note: why identities were checked although transformers has the model.
        steady: whether stock vLLM gives the same answers to the bit, asked twice.
        differs: what is other than in the architecture's first entry of the zoo; "" for that.
        lens: {"error": largest max|d| / max|ref| of the log-probabilities of the lens of all blocks, None if none is
            served, "refused": why not}; empty if it was not measured.
        stock_error: how far vLLM itself is from transformers in the log-probabilities, max|d| / max|ref|.
    """

    architecture: str
    verdict: str = FAILS
    reason: str = ""
    model_class: str = ""
    checked: str = "transformers"
    note: str = ""
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    lens: dict[str, Any] = field(default_factory=dict)
    stock_error: float | None = None
    bound: float = 0.0
    dtype: str = "float32"
    steady: bool = True
    differs: str = ""
    vllm: str = ""
    backend: str = "cpu"
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Verdict:
        """Read one that was written."""
        return cls(**json.loads(path.read_text()))


def load_results(path: Path) -> dict[str, Verdict]:
    """Architecture -> verdict, of a file that `save_results` wrote; nothing if there is none."""
    return {v["architecture"]: Verdict(**v) for v in json.loads(path.read_text())} if path.exists() else {}


def save_results(verdicts: Iterable[Verdict], path: Path, keep: Container[str] | None = None) -> None:
    """Put new verdicts in the place of older ones; `keep`: architectures to keep, None for all."""
    known = load_results(path) | {v.architecture: v for v in verdicts}
    path.parent.mkdir(parents=True, exist_ok=True)
    wanted = [asdict(known[a]) for a in sorted(known) if keep is None or a in keep]
    path.write_text(json.dumps(wanted, indent=1) + "\n")
