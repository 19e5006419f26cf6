"""The columns of a step's plan, and the sets of sites that tokens capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vllm_weir import messages
from vllm_weir.errors import WeirError


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


class SiteSets:
    """Site sets by content, counted by the requests that use them.

    Attributes:
        ranks: int32 [capacity, num_columns], a column's place in a site set, or -1.
        columns_of: site set -> its columns, ascending; one whose rows take several rows of the ring
            is repeated that often.
    """

    def __init__(self, capacity: int, num_columns: int) -> None:
        self.ranks = np.full((capacity, num_columns), -1, np.int32)
        self._changed = False
        self.columns_of: dict[int, tuple[int, ...]] = {}
        self._number_of: dict[tuple[tuple[int, ...], bool], int] = {}
        self._key_of: dict[int, tuple[tuple[int, ...], bool]] = {}
        self._users: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        """Rows of `ranks`, from the first on, that hold all site sets in use."""
        return max(self._users, default=-1) + 1

    def write_changes(self, write: Callable[[np.ndarray], object]) -> None:
        """Call `write` with the rows of `ranks` in use, int32 [n, num_columns], unless it was and none has changed."""
        if self._changed:
            write(self.ranks[: self.used].copy())
            self._changed = False

    def __len__(self) -> int:
        return len(self._users)

    def hold(self, columns: tuple[int, ...], reduced: bool = False) -> int:
        """Add a user to the site set of these columns, as in `columns_of`, and return its number.

        The rank of a column is that of its first ring row.

        Reduced rows have site sets of their own (`reduced`): their ranks count cells of a group, whereas a streamed
        step replaces the ranks of other rows by places in bands. Raises WeirError if the table is full.
        """
        key = columns, reduced
        number = self._number_of.get(key)
        if number is None:
            if not self._free:
                raise WeirError(
                    f"live requests capture more than {len(self.ranks)} different sets of sites; send fewer of them at "
                    "a time, or let them capture the same sites",
                    "capture",
                )
            number = self._number_of[key] = self._free.pop()
            self._key_of[number] = key
            self.columns_of[number] = columns
            self.ranks[number] = -1
            self.ranks[number, list(reversed(columns))] = np.arange(len(columns) - 1, -1, -1)
            self._changed = True
        self._users[number] = self._users.get(number, 0) + 1
        return number

    def release(self, number: int) -> None:
        """Drop one user; the last one frees the site set's row."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number], self.columns_of[number], self._number_of[self._key_of.pop(number)]
            self._free.append(number)
