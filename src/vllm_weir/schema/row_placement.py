"""Instructions for a part of a row: lowered for the part alone, then moved to its place in the row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from vllm_weir.schema.instructions import (
    BLEND,
    KEEP_NORM,
    NORM,
    NOTHING,
    Instruction,
    LoweredIntervention,
    VectorCollector,
)


def on_heads(
    lowered: Sequence[LoweredIntervention], heads: Sequence[int], d_head: int, positions: int
) -> LoweredIntervention:
    """Return the instructions of several heads, each for [d_head], as those of one intervention.

    `positions` is how many positions have instructions of their own; 0 if none have.
    """
    rows: dict[str, np.ndarray] = {}
    by_head: list[list[Instruction]] = []
    for one, head in zip(lowered, heads, strict=True):
        rows.update(one.rows)
        start, stop = head * d_head, (head + 1) * d_head
        by_head.append(
            [term._replace(start=start, stop=stop) if term.u or term.key else term for term in one.instructions]
        )
    if not any(by_head):
        return LoweredIntervention((), {})
    if not positions:
        return LoweredIntervention(tuple(itertools.chain.from_iterable(by_head)), rows)
    filled = [terms or [NOTHING] * positions for terms in by_head]
    return LoweredIntervention(tuple(itertools.chain.from_iterable(zip(*filled, strict=True))), rows)


def on_neurons(lowered: LoweredIntervention, neurons: Sequence[int], width: int) -> LoweredIntervention:
    """Return the instructions for some neurons, [neurons picked], as instructions for a row of `width` values.

    What is added is a vector with zeros for the other neurons. A BLEND is done to each run of
    neighbouring neurons.
    """
    collector, places = VectorCollector(), np.array(neurons)

    def spread(digest: str) -> str:
        if not digest:
            return ""
        row = np.zeros(width, np.float32)
        row[places] = lowered.rows[digest]
        return collector.add(row)

    def placed(term: Instruction) -> Iterator[Instruction]:
        assert term.kind not in (NORM, KEEP_NORM), "refused when the intervention is made"
        if term.kind != BLEND:
            yield term._replace(u=spread(term.u), w=spread(term.w))
            return
        values = lowered.rows[term.u]
        for run in runs:
            start = int(places[run[0]])
            yield term._replace(u=collector.add(values[run]), start=start, stop=start + len(run))

    order = np.argsort(places)
    runs = np.split(order, np.flatnonzero(np.diff(places[order]) > 1) + 1)
    instructions = tuple(itertools.chain.from_iterable(map(placed, lowered.instructions)))
    return LoweredIntervention(instructions, collector.rows)
