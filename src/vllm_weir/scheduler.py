"""The scheduler's half: prefix-cache hits never pass a wanted position, and a step never records more than fits.

Reads only the engine wire form of a request: ``first`` (its first wanted position, or None) and ``width`` (the most
rows that one of its tokens can give).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def hit_limit(wire: Mapping[str, Any] | None) -> int | None:
    """The most tokens that may come from the prefix cache, or None for no limit."""
    return None if wire is None else wire.get("first")


class StepBudget:
    """Bounds a step's tokens so that what it records fits the ring."""

    def __init__(self, ring_rows: int) -> None:
        self._ring_rows = ring_rows
        self._widths: dict[str, int] = {}

    def join(self, request_id: str, wire: Mapping[str, Any]) -> None:
        """A capturing request has entered the scheduler."""
        self._widths[request_id] = max(1, int(wire.get("width", 1)))

    def tokens(self, live: Iterable[str] | Mapping[str, Any], limit: int) -> int:
        """Tokens that the coming step may hold, at most `limit`; forgets requests that are no longer `live`."""
        if not self._widths:
            return limit
        self._widths = {r: w for r, w in self._widths.items() if r in live}
        if not self._widths:
            return limit
        return max(1, min(limit, self._ring_rows // max(self._widths.values())))
