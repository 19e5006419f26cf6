"""Rows of a site by position, stacked over sequences, and collected."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
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


STREAM, QUERIES, KEYS, LAYERS, FACTS = "residual_stream", "attn_q", "attn_k", "qk_layers", "qk_meta"


@dataclass(frozen=True)
class Stacked:
    """Which blocks come as one tensor beside the rows of each site."""

    stream: tuple[int, ...] = ()  # blocks of `resid_post`, ascending: ``residual_stream``
    queries: tuple[int, ...] = ()  # blocks of `q_rot`, ascending: ``attn_q`` and ``qk_layers``
    keys: tuple[int, ...] = ()  # for each of `queries`, the block of `k_rot` whose keys it attends to: ``attn_k``
    # for each of `queries`, how its attention is computed, JSON data: ``qk_meta``
    facts: tuple[Mapping[str, Any], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What there is."""
        return (*self.tensors(), *self.values())

    def tensors(self) -> dict[str, list[Site]]:
        """Return the sites of each tensor, in the order of its first dimension."""
        found = {STREAM: [Site("resid_post", layer) for layer in self.stream]}
        found[QUERIES] = [Site("q_rot", layer) for layer in self.queries]
        found[KEYS] = [Site("k_rot", layer) for layer in self.keys]
        return {name: sites for name, sites in found.items() if sites}

    def values(self) -> dict[str, list[Any]]:
        """Return what is no tensor, JSON data."""
        return {LAYERS: list(self.queries), FACTS: [dict(one) for one in self.facts]} if self.queries else {}

    def to_metadata(self) -> dict[str, str]:
        """Return entries of a safetensors header."""
        qk = {"qk": json.dumps([self.queries, self.keys, self.facts])} if self.queries else {}
        return {"lens": json.dumps(self.stream), **qk}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Stacked:
        """Return what `to_metadata` has written; raise ValueError, KeyError or TypeError if it is something else."""
        queries, keys, facts = json.loads(metadata.get("qk", "[[], [], []]"))
        return cls(tuple(json.loads(metadata["lens"])), tuple(queries), tuple(keys), tuple(facts))


NOT_STACKED = Stacked()


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
