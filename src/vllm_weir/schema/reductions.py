"""Reductions made by the taps: how positions are grouped, and how the plan says so."""

from __future__ import annotations

GROUP = 128
"""Positions of a group."""

SPAN, MAXIMUM, SEEDED = 255, 1 << 8, 1 << 9
"""Parts of the span of a group's first token in a plan: how many tokens there are from it to the
group's last one; whether the largest values are wanted, not the sum; whether the cells hold what an
earlier step left of the group."""

CONTINUED, COMPLETE = 1, 2
"""Of a reduction that earlier steps began: its first group is their last one, or their last one is
complete."""
