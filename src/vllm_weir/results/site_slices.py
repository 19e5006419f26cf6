"""Rows of several sites that lie together in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import RowShard

SINGLE_THREAD_VALUES = 32_767
"""Values up to which torch converts in the calling thread alone."""


def without_base(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows, copied if they are a view of more memory. A view would be pickled with all of that memory."""
    return rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows


class SiteSlices(Mapping):
    """Rows [n, d] by site, sliced out of one tensor when somebody looks at one of them.

    Args:
        sites: the sites.
        places: the column of each site; None if they are in order.
        rows: [n, columns, d].
    """

    def __init__(self, sites: Sequence[Site | RowShard], places: list[int] | None, rows: torch.Tensor) -> None:
        self._sites, self._places, self.rows = sites, places, rows
        self._every: dict[Site | RowShard, torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "rows": without_base(self.rows), "_every": None}

    @property
    def every(self) -> dict[Site | RowShard, torch.Tensor]:
        """The rows of all sites."""
        if self._every is None:
            rows = self.rows.unbind(1)
            self._every = dict(zip(self._sites, [rows[k] for k in self._places] if self._places else rows, strict=True))
        return self._every

    def to(self, dtype: torch.dtype) -> SiteSlices:
        """Return the rows of all sites in another dtype, in memory of their own."""
        rows = torch.empty_like(self.rows, dtype=dtype)
        # Piece by piece, because torch would start its threads for the whole, and wait for them.
        step = max(1, SINGLE_THREAD_VALUES // (rows[:, :1].numel() or 1))
        for first in range(0, rows.shape[1], step):
            rows[:, first : first + step] = self.rows[:, first : first + step]
        return SiteSlices(self._sites, self._places, rows)

    def together(self) -> np.ndarray:
        """Return a copy of the rows of all sites, uint8 [sites, n, bytes of a row].

        It is made by numpy, which uses no other thread.
        """
        rows = self.rows.view(torch.uint8).numpy()
        rows = rows if self._places is None else rows[:, self._places]
        return np.ascontiguousarray(rows.swapaxes(0, 1))

    def __getitem__(self, site: Site | RowShard) -> torch.Tensor:
        return self.every[site]

    def __contains__(self, site: object) -> bool:
        return site in self._sites

    def __iter__(self) -> Iterator[Site | RowShard]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)
