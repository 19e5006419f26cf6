"""Rows of prompts, which are filed as they arrive and handed out in the order of the prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site


class RowCollection:
    """One row of each prompt at each of several sites, all of one width, in host memory."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = tuple(sites)
        self.failures: dict[str, str] = {}
        """Name of a prompt -> why it has no rows; "" stands for all."""
        self._rows: dict[str, torch.Tensor] = {}

    def put(self, name: str, rows: torch.Tensor) -> None:
        """Keep a prompt's rows, [sites, d]; they replace earlier ones."""
        self._rows[name] = rows

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())

    def at(self, site: Site, names: Sequence[str]) -> torch.Tensor:
        """Return the rows [prompts, d] at a site, in the order of the names; raise WeirError if a prompt has none."""
        for i, name in enumerate(names):
            if name not in self._rows:
                why = self.failures.get(name) or self.failures.get("") or "its rows did not arrive"
                raise WeirError(f"prompt {i} of both lists together cannot be read: {why}", "positive")
        index = self.sites.index(site)
        return torch.stack([self._rows[name][index] for name in names])
