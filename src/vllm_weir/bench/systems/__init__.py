"""The systems that are timed: how a user of each asks for a case, and how rows come into the user's hands."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from vllm_weir.bench.systems.stock import StockSystem
from vllm_weir.bench.systems.weir import WeirSystem

__all__ = ["StockSystem", "WeirSystem", "known_systems"]

_INSTALLED = Path(__file__).parents[3]
REPOSITORY = _INSTALLED.parent if _INSTALLED.name == "src" else None
"""The checkout that an editable installation is of; None for an installed package."""


@cache
def known_systems() -> dict[str, type[StockSystem]]:
    """Return the systems that can be timed, by name: stock and Weir, and in a checkout those of its bench/systems."""
    systems: list[type[StockSystem]] = [StockSystem, WeirSystem]
    if REPOSITORY is not None:
        sys.path.append(str(REPOSITORY))
        from bench.systems import RIVALS

        systems += RIVALS
    return {system.name: system for system in systems}
