"""Tiny random-weight models, one for every text-generation architecture of vLLM's registry."""

from __future__ import annotations

from tests.conformance.zoo.backend import BACKEND
from tests.conformance.zoo.build import build
from tests.conformance.zoo.dense import DENSE
from tests.conformance.zoo.entry import Entry
from tests.conformance.zoo.hybrid import HYBRID
from tests.conformance.zoo.moe import MOE

ZOO: dict[str, Entry] = {entry.architecture: entry for entry in [*DENSE, *MOE, *HYBRID, *BACKEND]}

__all__ = ["ZOO", "Entry", "build"]
