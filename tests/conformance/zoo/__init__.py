"""Tiny random-weight models, one for every text-generation architecture of vLLM's registry."""

from __future__ import annotations

from tests.conformance.zoo.backend import BACKEND
from tests.conformance.zoo.build import build
from tests.conformance.zoo.dense import DENSE
from tests.conformance.zoo.elsewhere import ELSEWHERE
from tests.conformance.zoo.entry import Entry
from tests.conformance.zoo.hybrid import HYBRID
from tests.conformance.zoo.moe import MOE
from tests.conformance.zoo.vllm_only import OWN

ZOO: dict[str, Entry] = {entry.architecture: entry for entry in [*DENSE, *MOE, *HYBRID, *BACKEND, *OWN, *ELSEWHERE]}

__all__ = ["ZOO", "Entry", "build"]
