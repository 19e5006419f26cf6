"""One reference a model, shared by all tests of a process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tests.support.probe_reference import GatedOracle


@lru_cache(maxsize=8)
def reference(model_dir: Path) -> GatedOracle:
    """Return a model's reference: of plain requests, under interventions, and under probes and gates."""
    return GatedOracle(model_dir)
