"""What is written down of one architecture."""

from __future__ import annotations

import json
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
    stock_error: float | None = None
    bound: float = 0.0
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
