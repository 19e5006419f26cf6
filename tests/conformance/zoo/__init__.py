"""Tiny random-weight models: one for every text-generation architecture of vLLM's registry, and others of its kind."""

from __future__ import annotations

from dataclasses import replace

from tests.conformance.zoo.backend import BACKEND
from tests.conformance.zoo.build import build
from tests.conformance.zoo.dense import DENSE
from tests.conformance.zoo.elsewhere import ELSEWHERE, FOUND
from tests.conformance.zoo.entry import Entry
from tests.conformance.zoo.hybrid import HYBRID
from tests.conformance.zoo.moe import MOE
from tests.conformance.zoo.variants import OTHERS
from tests.conformance.zoo.vllm_only import OWN


def _known(entry: Entry) -> Entry:
    reason = FOUND.get(entry.architecture)
    return replace(entry, verdict="cannot run", reason=reason) if reason else entry


ZOO: dict[str, Entry] = {
    entry.architecture: _known(entry) for entry in [*DENSE, *MOE, *HYBRID, *BACKEND, *OWN, *ELSEWHERE]
}

VARIANTS: dict[str, Entry] = {entry.name: entry for entry in OTHERS}

__all__ = ["VARIANTS", "ZOO", "Entry", "build"]
