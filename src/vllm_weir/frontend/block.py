"""Blocks: rows of several sites that lie together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch

from vllm_weir.spec.hooks import Site


class Block(Mapping):
    """Rows [n, d] of several sites, cut out of [n, columns, d] when one of them is first looked at.

    Args:
        places: which column each site's is; None if they are in order.
    """

    def __init__(self, sites: Sequence[Site], places: list[int] | None, rows: torch.Tensor) -> None:
        self._sites, self._places, self._rows = sites, places, rows

    @functools.cached_property
    def every(self) -> dict[Site, torch.Tensor]:
        """All sites' rows."""
        rows = self._rows.unbind(1)
        return dict(zip(self._sites, [rows[k] for k in self._places] if self._places else rows, strict=True))

    def __getitem__(self, site: Site) -> torch.Tensor:
        return self.every[site]

    def __contains__(self, site: object) -> bool:
        return site in self._sites

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)
