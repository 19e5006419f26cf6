"""Taps and columns: the numbers of the places where sites are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vllm_weir.schema.hooks import BLOCK_HOOKS, DERIVED_HOOKS, ROUTING, Site

STAGES = 3
"""Stages of a tap at which rows are read: before its interventions, after them, and at a boundary
of two blocks also after those at the next block's `resid_pre`."""

SCORES = 4096
"""In a mask of taps, bit t stands for tap t, and bit SCORES + t for the probes that read there."""

TAPS = (1 << SCORES) - 1
"""The bits of a mask that stand for taps."""

NO_GRAPH = 2 * SCORES
"""Bit of a mask of taps which says that the step cannot be replayed from a CUDA graph."""

CELLS, GROUPS = NO_GRAPH + 1, NO_GRAPH + 2
"""Bits of a mask of taps. CELLS: nodes may write or read cells of their tokens, or take the row that a
function returned. GROUPS: rows may be reduced. Without these bits the taps launch a smaller kernel."""

REPLAY = NO_GRAPH + 3
"""Bit of a mask of taps which says that routers may be made to choose experts."""

EARLY_SCORES = NO_GRAPH + 4
"""Bit of a mask of taps from which on each stands for a column whose probes score before the tap goes on,
because a gate there needs them; there are two for each tap, one for each stage but the last."""

FUNCTIONS = EARLY_SCORES + (STAGES - 1) * SCORES
"""Bit of a mask of taps from which on each stands for a `Place`."""

ALL_STAGES = (1 << STAGES) - 1
"""Mask of the stages of a tap."""


class Place(NamedTuple):
    """Where a compiled function is called: its number, the tap, and whether at the next block's resid_pre."""

    function: int
    tap: int
    after_post: bool

    @property
    def bit(self) -> int:
        """Its bit in a mask of taps."""
        return FUNCTIONS + 2 * (SCORES * self.function + self.tap) + self.after_post


def early_bit(tap: int, stage: int) -> int:
    """Return the bit of a mask which says that what probes read at a stage of a tap is scored before the next one."""
    return EARLY_SCORES + (STAGES - 1) * tap + stage


def early_stages(mask: int, tap: int) -> int:
    """Return the stages of a tap, as bits, that are scored before the next ones; a mask of all taps has none."""
    return mask >> early_bit(tap, 0) & ALL_STAGES >> 1 if mask > 0 else 0


def exact_bits(mask: int) -> int:
    """Return the bits of a mask for which no graph of all taps stands; a negative mask, of all taps, has none."""
    return mask >> REPLAY if mask > 0 else 0


def function_bits(mask: int) -> int:
    """Return the bits of a mask that stand for places of functions; a negative mask, of all taps, has none."""
    return mask >> FUNCTIONS if mask > 0 else 0


def places_in(mask: int) -> Iterator[Place]:
    """Yield the places of functions in a mask of taps, in the order of functions."""
    bits = function_bits(mask)
    while bits:
        number, of_tap = divmod((bits & -bits).bit_length() - 1, 2 * SCORES)
        bits &= bits - 1
        yield Place(number, of_tap // 2, bool(of_tap % 2))


_AFTER_LOGITS = BLOCK_HOOKS.index("router_logits") + 1
_INSIDE = (*BLOCK_HOOKS[1:_AFTER_LOGITS], ROUTING, *BLOCK_HOOKS[_AFTER_LOGITS:-1])
_TAPPED = tuple(hook for hook in _INSIDE if hook not in DERIVED_HOOKS)
"""Hook points of a block between its boundaries that have a tap, in the order in which a token meets them."""
_PER_BLOCK = len(_TAPPED) + 1
_PLACE = {hook: k for k, hook in enumerate(_TAPPED, 1)}


def tap_of(site: Site) -> int:
    """Return the tap that serves a site; `DERIVED_HOOKS` have none.

    Tap 0 is `embed`, 1 `final_norm`, 2 what enters block 0. Then come, block by block, the taps of
    the hook points inside the block in the order in which a token meets them, and one that is the
    block's `resid_post` and the next block's `resid_pre`.
    """
    if site.hook == "embed":
        return 0
    if site.hook == "final_norm":
        return 1
    if site.hook == "resid_post":
        return _PER_BLOCK * (site.layer + 1) + 2
    place = 0 if site.hook == "resid_pre" else _PLACE[site.hook]
    return _PER_BLOCK * site.layer + 2 + place


def site_of(served: Site, after_post: bool) -> Site:
    """Return where a node of a tap acts, given the hook point that the tap serves, or its `resid_post`."""
    if not after_post:
        return served
    return Site("resid_pre", 0 if served.hook == "resid_pre" else served.layer + 1)


def comes_before(tap: int, other: int) -> bool:
    """Return whether a token meets one tap before another."""
    return other != tap and (other == 1 or (tap != 1 and tap < other))


def reads_in_time(column: int, site: Site) -> bool:
    """Return whether a token's row is read at a column before it is changed at a site."""
    (tap, stage), acts = divmod(column, STAGES), tap_of(site)
    return comes_before(tap, acts) or (tap == acts and stage <= (site.hook == "resid_pre"))


def is_boundary(tap: int) -> bool:
    """Return whether a tap is between two blocks, before the first or after the last."""
    return tap >= 2 and (tap - 2) % _PER_BLOCK == 0


def num_taps(num_layers: int) -> int:
    """Return the number of taps of a model of `num_layers` blocks, placed or not."""
    return _PER_BLOCK * num_layers + 3


def num_columns(num_layers: int) -> int:
    """Return the number of columns of a model of `num_layers` blocks."""
    return num_taps(num_layers) * STAGES


def shard_column(column: int, shard: int, num_layers: int) -> int:
    """Return what a column is called in messages of the worker that holds a shard of its rows.

    Of rows that tensor-parallel workers hold together, each sends its own part; the first shard has
    the column's own number.
    """
    return column + shard * num_columns(num_layers)


def column_of(site: Site, before: bool) -> int:
    """Return the site's column in the rank table, which has one for each tap and stage."""
    stage = (1 if before else 2) if site.hook == "resid_pre" else (0 if before else 1)
    return tap_of(site) * STAGES + stage
