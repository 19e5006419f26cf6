"""Blocks: rows of several sites that lie together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from vllm_weir.schema.hooks import Site

ALONE = 32_767
"""Values that torch converts in the thread that asks for it."""


def alone(rows: torch.Tensor) -> torch.Tensor:
    """The rows without the memory beside them: a tensor is pickled with all that it is a part of."""
    return rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows


class SiteSlices(Mapping):
    """Rows [n, d] of several sites, cut out of [n, columns, d] when one of them is first looked at.

    Args:
        places: which column each site's is; None if they are in order.
    """

    def __init__(self, sites: Sequence[Site], places: list[int] | None, rows: torch.Tensor) -> None:
        self._sites, self._places, self.rows = sites, places, rows
        self._every: dict[Site, torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "rows": alone(self.rows), "_every": None}

    @property
    def every(self) -> dict[Site, torch.Tensor]:
        """All sites' rows."""
        if self._every is None:
            rows = self.rows.unbind(1)
            self._every = dict(zip(self._sites, [rows[k] for k in self._places] if self._places else rows, strict=True))
        return self._every

    def to(self, dtype: torch.dtype) -> SiteSlices:
        """All sites' rows in another dtype, in memory of their own."""
        rows = torch.empty_like(self.rows, dtype=dtype)
        # Piece by piece, as torch would call its threads together for the whole, and wait for them.
        step = max(1, ALONE // (rows[:, :1].numel() or 1))
        for first in range(0, rows.shape[1], step):
            rows[:, first : first + step] = self.rows[:, first : first + step]
        return SiteSlices(self._sites, self._places, rows)

    def together(self) -> np.ndarray:
        """A copy of all sites' rows, uint8 [sites, n, bytes of a row]; numpy makes it, in this thread alone."""
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
