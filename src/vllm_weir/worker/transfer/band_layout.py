"""How the columns of a streamed step share the ring.

A *column* is one stage at one tap; a *site set* names the columns that are captured of a token. A
*band* is a group of columns that are sent together: a token's rows of them stand side by side in
the ring, as they do at their destination. Every captured token of the step has a *lane* of the
band.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vllm_weir.schema.taps import STAGES

MAX_BAND_COLUMNS = 8
"""Columns of a band at most: the last band's rows leave when the model is done."""
MAX_TAP_ORDERS = 8
"""Orders of taps that are remembered."""


def layout_bands(
    site_sets: Mapping[int, tuple[int, ...]], tap_order: Sequence[int], lanes: int, capacity: int, wanted: int
) -> tuple[int, list[tuple[int, ...]]]:
    """Divide a step's columns into bands.

    Choose bands so narrow that the ring holds two, one leaving while the next is written, and all
    the bands that a single tap writes to.

    Args:
        site_sets: number of a site set -> its columns.
        tap_order: all their taps in the order in which the model reaches them. If it is not known
            (empty), every column is a band: then no two taps' rows have to be in the ring at the
            same time.
        lanes: captured tokens.
        capacity: rows of the ring.
        wanted: columns that a band should have.

    Returns:
        Columns of the widest band, and each band's columns, in the order of their taps.
    """
    width = min(1 << (wanted - 1).bit_length(), MAX_BAND_COLUMNS) if tap_order else 1
    while True:
        bands = _bands_of_width(site_sets, tap_order, width)
        widest = max(map(len, bands), default=1)
        if widest == 1 or max(2, _most_bands_of_a_tap(bands)) * widest * lanes <= capacity:
            return widest, bands
        width //= 2


def _bands_of_width(
    site_sets: Mapping[int, tuple[int, ...]], tap_order: Sequence[int], width: int
) -> list[tuple[int, ...]]:
    """Divide the columns into bands of up to `width` columns.

    A band's columns stand side by side in every site set that has one of them.
    """
    rank_of_tap = {tap: k for k, tap in enumerate(tap_order)}
    all_columns = {column for columns in site_sets.values() for column in columns}
    bands: list[tuple[int, ...]] = []
    for column in sorted(all_columns, key=lambda c: (rank_of_tap.get(c // STAGES, len(rank_of_tap)), c)):
        last = bands[-1] if bands else ()
        if last and len(last) < width and _can_append(column, last, site_sets.values()):
            bands[-1] = (*last, column)
        else:
            bands.append((column,))
    return bands


def _can_append(column: int, band: tuple[int, ...], site_sets: Iterable[tuple[int, ...]]) -> bool:
    """Return whether the column follows the band in every site set that has either."""
    for columns in site_sets:
        if (column in columns) != (band[0] in columns):
            return False
        if column in columns and columns.index(column) != columns.index(band[-1]) + 1:
            return False
    return True


def _most_bands_of_a_tap(bands: Iterable[tuple[int, ...]]) -> int:
    """Return how many bands one tap writes to, at most."""
    taps = [tap for band in bands for tap in {column // STAGES for column in band}]
    return max(map(taps.count, taps), default=0)


def learn_tap_order(orders: Sequence[tuple[int, ...]], reached: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the orders of taps that are known after a step.

    Args:
        orders: those known before it; orders that the step contradicts are dropped.
        reached: taps that the model has reached in the step, in order.
    """
    kept = [order for order in orders if [t for t in order if t in reached] == [t for t in reached if t in order]]
    if any(set(reached).issubset(order) for order in kept):
        return kept
    return [reached, *(order for order in kept if not set(order).issubset(reached))][:MAX_TAP_ORDERS]
