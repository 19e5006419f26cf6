"""Axes of an intervention's vectors: which of them are rows, heads and values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import HEAD_HOOKS, PART_HOOKS
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.row_parts import RowPart
from vllm_weir.schema.row_shapes import RowShape, row_width

ONE, EACH, TOGETHER = range(3)
"""What several rows of a field mean: they are refused; each is for one selected position; all make
one change."""


class VectorAxes(NamedTuple):
    """How the vectors of one field are read.

    A vector is [width], or of a row's shape, [heads, d_head]. With heads picked it is [d_head], the
    same for every one of them, or [heads picked, d_head]; with neurons, [neurons picked]. Rows are
    an axis before that. [m, d_head] with m heads picked could be either; it is one vector for each
    head where m rows are impossible, and refused elsewhere.

    Attributes:
        hook: the hook point.
        part: what is picked of a row.
        meaning: of several rows, `ONE`, `EACH` or `TOGETHER`.
        positions: selector of the intervention.
        field: named by errors.
    """

    hook: str
    part: RowPart
    meaning: int
    positions: Positions
    field: str

    def count_rows(self, array: np.ndarray) -> int | None:
        """Return how many rows there are; None if that depends on the row's shape."""
        if array.ndim == 1:
            return 1
        if self.part.heads is None:
            return None if array.ndim == 2 and self.hook in HEAD_HOOKS else len(array)
        if array.ndim == 2:
            return 1 if self._is_one_for_each_head(array) else len(array)
        if array.shape[1] not in (1, len(self.part.heads)):
            raise WeirError(
                f"shape {list(array.shape)} has vectors for {array.shape[1]} heads, and {len(self.part.heads)} are "
                "picked",
                self.field,
            )
        return len(array)

    def split(self, array: np.ndarray, shape: RowShape) -> list[np.ndarray]:
        """Return what each picked head gets, or the one array for the whole row, or for the neurons.

        Args:
            array: checked by `count_rows`.
            shape: of a row of the model.

        Returns:
            Arrays [values], or [n, values] if they have several rows; the very same array where
            heads get the same.

        Raises:
            WeirError: for a width that does not match.
        """
        if self.part.heads is None:
            return [self._flat(array, shape)]
        if array.shape[-1] != shape[-1]:
            raise WeirError(
                f"width {array.shape[-1]} does not match the {shape[-1]} values of a head of {self.hook}", self.field
            )
        count = len(self.part.heads)
        if array.ndim == 3:
            if array.shape[1] == 1:
                return [self._rows(array[:, 0])] * count
            return [self._rows(array[:, k]) for k in range(count)]
        if array.ndim == 2 and self._is_one_for_each_head(array):
            return list(array)
        return [self._rows(array)] * count

    def _flat(self, array: np.ndarray, shape: RowShape) -> np.ndarray:
        """Return [values] or [n, values] for a row, or for the neurons that are picked of it."""
        if self.part.neurons is not None:
            if array.shape[-1] != len(self.part.neurons):
                raise WeirError(f"{array.shape[-1]} values for {len(self.part.neurons)} neurons", self.field)
            return array
        if len(shape) == 2 and array.shape[-2:] == shape:
            return self._rows(array.reshape(*array.shape[:-2], row_width(shape)))
        if array.ndim == 3 or array.shape[-1] != row_width(shape):
            raise WeirError(self._mismatch(array, shape), self.field)
        return self._rows(array)

    def _mismatch(self, array: np.ndarray, shape: RowShape) -> str:
        if len(shape) == 1:
            what = (
                f"the {shape[0]} values of a row of {self.hook}"
                if self.hook in PART_HOOKS
                else f"the model's {shape[0]}"
            )
            return f"width {array.shape[-1]} does not match {what}"
        heads, width = shape
        hint = "; say which heads= a vector of one head is for" if array.shape[-1] == width else ""
        return (
            f"shape {list(array.shape)} does not match a row of {self.hook}, [{heads}, {width}] or "
            f"[{heads * width}]{hint}"
        )

    def _rows(self, array: np.ndarray) -> np.ndarray:
        """Return [1, values] as [values] where that means the same."""
        return array[0] if array.ndim == 2 and len(array) == 1 and self.meaning != TOGETHER else array

    def _is_one_for_each_head(self, array: np.ndarray) -> bool:
        """Return whether [m, d_head] is a vector for each picked head, and not m rows."""
        count = len(array)
        if self.part.heads is None or count == 1 or count != len(self.part.heads):
            return False
        if self.meaning == ONE:
            return True
        if self.meaning == EACH and (self.positions.is_open or self.positions.count() not in (None, count)):
            return True
        rows = "one for each position" if self.meaning == EACH else "that make one change"
        raise WeirError(
            f"[{count}, d_head] for {count} heads can be a vector for each head, or {count} vectors {rows}; give "
            f"[1, {count}, d_head] or [{count}, 1, d_head]",
            self.field,
        )
