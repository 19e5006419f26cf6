"""Rows of several sites that lie together in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from vllm_weir.schema.hooks import Site
from vllm_weir.schema.row_shapes import RowShape, ring_rows, row_width

SINGLE_THREAD_VALUES = 32_767
"""Values up to which torch converts in the calling thread alone."""


def without_base(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows, copied if they are a view of more memory.

    A view would be pickled with all of that memory.
    """
    return rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows


class SiteSlices(Mapping):
    """Rows [n, d] by site, sliced out of one tensor when somebody looks at one of them.

    Args:
        sites: the sites.
        places: the first column of each site; None if they are in order.
        rows: [n, columns, d].
        shapes: the shape of each site's row; None if all are (d,). A row of more than d values
            takes the columns from its first on; in its last, and in the column of a row of fewer
            values, what follows the row means nothing.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        places: list[int] | None,
        rows: torch.Tensor,
        shapes: Sequence[RowShape] | None = None,
    ) -> None:
        self._sites, self._places, self.rows = sites, places, rows
        self.shapes = None if shapes is None or all(shape == rows.shape[2:] for shape in shapes) else tuple(shapes)
        self._every: dict[Site, torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "rows": without_base(self.rows), "_every": None}

    @property
    def every(self) -> dict[Site, torch.Tensor]:
        """The rows of all sites."""
        if self._every is None:
            self._every = dict(zip(self._sites, self._sliced(), strict=True))
        return self._every

    def _sliced(self) -> Sequence[torch.Tensor]:
        if self.shapes is None:
            rows = self.rows.unbind(1)
            return [rows[k] for k in self._places] if self._places else rows
        d = self.rows.shape[2]
        columns = [ring_rows(row_width(shape), d) for shape in self.shapes]
        places = self._places or [0, *itertools.accumulate(columns[:-1])]
        return [
            self.rows[:, first : first + count].flatten(1)[:, : row_width(shape)].unflatten(1, shape)
            for first, count, shape in zip(places, columns, self.shapes, strict=True)
        ]

    def to(self, dtype: torch.dtype) -> SiteSlices:
        """Return the rows of all sites in another dtype, in memory of their own."""
        rows = torch.empty_like(self.rows, dtype=dtype)
        # Piece by piece, because torch would start its threads for the whole, and wait for them.
        step = max(1, SINGLE_THREAD_VALUES // (rows[:, :1].numel() or 1))
        for first in range(0, rows.shape[1], step):
            rows[:, first : first + step] = self.rows[:, first : first + step]
        return SiteSlices(self._sites, self._places, rows, self.shapes)

    def together(self) -> np.ndarray:
        """Return a copy of the rows of all sites, uint8 [sites, n, bytes of a row].

        Only for rows of one shape. It is made by numpy, which uses no other thread.
        """
        assert self.shapes is None
        rows = self.rows.view(torch.uint8).numpy()
        rows = rows if self._places is None else rows[:, self._places]
        return np.ascontiguousarray(rows.swapaxes(0, 1))

    def __getitem__(self, site: Site) -> torch.Tensor:
        return self.every[site]

    def __contains__(self, site: object) -> bool:
        return site in self._sites

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)
