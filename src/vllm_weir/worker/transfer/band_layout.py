"""How the columns of a streamed step share the ring.

A *column* is one stage at one tap; a *site set* names the columns that are captured of a token. The
column of a row that takes several rows of the ring is repeated as often. A *strip* is a group of
columns that are sent together: a token's rows of them stand side by side in the ring, as they do at
their destination. A *band* is a piece of the ring with a *lane* for every captured token of the
step: its rows of one strip, or, if room is scarce, all that one tap writes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from vllm_weir.schema.taps import STAGES

MAX_STRIP_ROWS = 8
"""Rows of a strip at most, unless a single column has more: the last strip's rows leave when the
model is done."""
MAX_TAP_ORDERS = 8
"""Orders of taps that are remembered."""


class Strip(NamedTuple):
    """Columns side by side, each as often as it has rows; of one site set, or (None) of all that have them."""

    columns: tuple[int, ...]
    site_set: int | None = None


Band: TypeAlias = tuple[Strip, ...]
"""Strips of different site sets: each begins where a lane begins."""


def layout_bands(
    site_sets: Mapping[int, tuple[int, ...]], tap_order: Sequence[int], lanes: int, capacity: int, wanted: int
) -> tuple[int, list[Band]]:
    """Divide a step's columns into bands.

    Choose strips so narrow that the ring holds two bands of one strip each, one leaving while the
    next is written, and all the strips that a single tap writes. If there is no room even for those
    of one column each, give every tap one band.

    Args:
        site_sets: number of a site set -> its columns.
        tap_order: all their taps in the order in which the model reaches them. If it is not known
            (empty), every column is a strip: then no two taps' rows have to be in the ring at the
            same time.
        lanes: captured tokens.
        capacity: rows of the ring.
        wanted: rows that a strip should have.

    Returns:
        Rows of a lane, and the bands in the order of their taps.
    """
    width = min(1 << (wanted - 1).bit_length(), MAX_STRIP_ROWS) if tap_order else 1
    while width:
        strips = _strips_of_width(site_sets, tap_order, width)
        widest = max(map(len, strips), default=1)
        needed = _most_strips_of_a_tap(strips)
        if (needed if width == 1 else max(2, needed)) * widest * lanes <= capacity:
            return widest, [(Strip(columns),) for columns in strips]
        width //= 2
    bands = _bands_by_tap(site_sets)
    return max(len(strip.columns) for band in bands for strip in band), bands


def _strips_of_width(
    site_sets: Mapping[int, tuple[int, ...]], tap_order: Sequence[int], width: int
) -> list[tuple[int, ...]]:
    """Divide the columns into strips of up to `width` rows; columns with more are strips of their own.

    A strip's columns stand side by side in every site set that has one of them.
    """
    rank_of_tap = {tap: k for k, tap in enumerate(tap_order)}
    rows = {column: columns.count(column) for columns in site_sets.values() for column in columns}
    strips: list[tuple[int, ...]] = []
    for column in sorted(rows, key=lambda c: (rank_of_tap.get(c // STAGES, len(rank_of_tap)), c)):
        last, own = strips[-1] if strips else (), (column,) * rows[column]
        if last and len(last) + len(own) <= width and _can_append(column, last, site_sets.values()):
            strips[-1] = (*last, *own)
        else:
            strips.append(own)
    return strips


def _can_append(column: int, strip: tuple[int, ...], site_sets: Iterable[tuple[int, ...]]) -> bool:
    """Return whether the column follows the strip in every site set that has either."""
    for columns in site_sets:
        if (column in columns) != (strip[0] in columns):
            return False
        if column in columns and columns.index(column) != columns.index(strip[0]) + len(strip):
            return False
    return True


def _most_strips_of_a_tap(strips: Iterable[tuple[int, ...]]) -> int:
    """Return how many strips one tap writes, at most."""
    taps = [tap for strip in strips for tap in {column // STAGES for column in strip}]
    return max(map(taps.count, taps), default=0)


def _bands_by_tap(site_sets: Mapping[int, tuple[int, ...]]) -> list[Band]:
    """Return a band for each tap: a token's lane has what the tap writes of that token, and no more."""
    bands: dict[int, Band] = {}
    for number, columns in site_sets.items():
        for tap in sorted({column // STAGES for column in columns}):
            own = tuple(column for column in columns if column // STAGES == tap)
            bands[tap] = (*bands.get(tap, ()), Strip(own, number))
    return [bands[tap] for tap in sorted(bands)]


def learn_tap_order(orders: Sequence[tuple[int, ...]], reached: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the orders of taps that are known after a step.

    `orders`: those known before it; orders that the step contradicts are dropped. `reached`: taps that the model has
    reached in the step, in order.
    """
    kept = [order for order in orders if [t for t in order if t in reached] == [t for t in reached if t in order]]
    if any(set(reached).issubset(order) for order in kept):
        return kept
    return [reached, *(order for order in kept if not set(order).issubset(reached))][:MAX_TAP_ORDERS]
