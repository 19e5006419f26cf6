"""Named columns of the integer arrays that make up a step's plan.

Each dtype consists of fields of one integer type, so that an array of it can be viewed as plain
integers without a copy. numpy copies and concatenates such views an order of magnitude faster than
the structured arrays themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_weir import messages


def _columns(integer: str, *names: str) -> np.dtype:
    return np.dtype([(name, integer) for name in names])


PLACEMENT = _columns("i8", "token", "place", "size", "ring_rows", "codec")
"""A captured token while the step is planned.

place, size: where its rows go in the arena, in rows; for records, in bytes.
ring_rows: how many rows it has in the ring.
codec: number of the codec, -1 for rows that are sent as they are.
"""
TOKEN_RUN = _columns(
    "i8", "token", "count", "place", "size", "ring_rows", "codec", "endpoint", "row_seq", "rank", "position"
)
"""`count` consecutive tokens and positions whose rows go to consecutive places. The other fields
are the placement and arrival of the first token."""

ROW_COPY = _columns("i8", "ring_row", "arena_row", "rows")
"""Consecutive rows to copy from the ring to the arena; `ring_row` counts from the step's first."""
COPY_RUN = _columns("i8", "first", "end")
"""A slice ``[first:end]`` of a plan's copies whose tokens are consecutive in step and arena."""
RECORD = _columns("i8", "ring_row", "arena_byte", "bytes", "ring_rows", "codec")
"""A token that is sent as records of a codec.

ring_row, ring_rows: its first row in the ring, and how many.
arena_byte, bytes: where the records go in the arena, and their size.
"""
REDUCTION = _columns("i8", "row_seq", "cell", "groups", "columns", "resumed", "count", "done", "maximum")
"""What a step contributes to one request's reduction.

cell: of its first group, counted in cells (float32 rows in the ring); a group has `columns` cells.
groups: groups of positions that have tokens in the step.
resumed: 0 if it begins in this step, else CONTINUED or COMPLETE of `vllm_weir.schema.rows`.
count: rows reduced so far, including this step's.
done: whether the step completes it.
maximum: whether the largest values are wanted, not the mean.
"""
JOIN_FIELDS = (
    "cell", "groups", "columns", "resumed", "count", "done", "maximum", "kept_from", "kept_to",
)  # fmt: skip
JOIN = _columns("<i4", *JOIN_FIELDS)
"""How the device joins the groups of a reduction: fields of `REDUCTION`, and two rows of the memory
kept between steps: where earlier steps left their part (`kept_from`), and where this step leaves
its own (`kept_to`); -1 for none."""

RUN = _columns("<i4", "due", "tap", "probe", "token", "count", "fresh")
"""`count` consecutive tokens from `token` on of a request, for a probe that reads at `tap`.

due: whether a controller is asked about the request after the step: 0, DUE, or FIRST_DUE for the
first time.
probe: row in the table of probes.
fresh: whether the probe and its gates begin anew.
"""
DUE, FIRST_DUE = 1, 2
SCORE_READ = _columns("i8", "endpoint", "series", "position", "count", "token", "cells")
"""`count` consecutive tokens and positions whose first `cells` cells are sent to the reader."""

ARRIVAL = _columns("<i4", *messages.MARK_FIELDS)
"""What a reader is told of captured rows, in the layout of the message."""
STEERED = _columns("<i4", *messages.STEER_FIELDS)
"""What a reader is told of steered positions, in the layout of the message."""

SCORED = _columns("<i4", *messages.SCORED_FIELDS)
"""What a reader is told of scored positions, in the layout of the message."""


def as_integers(array: np.ndarray) -> np.ndarray:
    """View a contiguous array [n] of one of these dtypes as plain integers [n, fields]."""
    return array.view(array.dtype[0]).reshape(len(array), array.dtype.itemsize // array.dtype[0].itemsize)


def concatenate(parts: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Join contiguous arrays of one of these dtypes, which may be none at all."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return np.empty(0, dtype)
    return np.concatenate([part.view(dtype[0]) for part in parts]).view(dtype)


def copied(array: np.ndarray) -> np.ndarray:
    """Return a copy of a contiguous array of one of these dtypes."""
    return array.view(array.dtype[0]).copy().view(array.dtype)
