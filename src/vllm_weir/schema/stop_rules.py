"""`StopRule`: one comparison of ``stop_when``, resolved against a request's probes."""

from __future__ import annotations

from typing import NamedTuple


class StopRule(NamedTuple):
    """End generation with the first generated token whose score compares so.

    Attributes:
        name: of the probe; ``stop_reason`` is ``"probe:<name>"``.
        probe: its index among the request's probes.
        output: which of its scores.
        op: ``">"``, ``">="``, ``"<"`` or ``"<="``.
        threshold: compared with the score.
    """

    name: str
    probe: int
    output: int
    op: str
    threshold: float
