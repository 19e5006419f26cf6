"""Reductions on the device: groups of positions, and the plan's fields that describe them."""

from __future__ import annotations

GROUP = 128
"""Positions of a group, of which the tap makes one partial result."""

SPAN, MAXIMUM, SEEDED = 255, 1 << 8, 1 << 9
"""In the plan, at a group's first token: a mask of the number of consecutive tokens up to the
group's last one, a flag for maxima instead of sums, and a flag that the cells already hold the
result of an earlier step."""

CONTINUED, COMPLETE = 1, 2
"""Where a step resumes a reduction that earlier steps began: inside their last group, or after it,
as that group is complete."""
