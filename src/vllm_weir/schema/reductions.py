"""Reductions made by the taps: how positions are grouped, and the fields of the plan that say so."""

from __future__ import annotations

GROUP = 128
"""Positions of a group."""

SPAN, MAXIMUM, SEEDED = 255, 1 << 8, 1 << 9
"""In the plan, of a group's first token: how many tokens follow each other from it to the group's last one; whether the
largest values are wanted and not the sum; whether the cells hold what an earlier step has made of the group."""

CONTINUED, COMPLETE = 1, 2
"""Of a fold that earlier steps began: whether its first group is their last one, or their last one is complete."""

FIELDS = ("row_seq", "cell", "groups", "columns", "resumed", "count", "done", "maximum")

STRAND, CELL, GROUPS, COLUMNS, RESUMED, COUNT, DONE, LARGEST = range(len(FIELDS))
