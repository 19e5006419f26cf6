"""`Stacked`: rows of several blocks as one tensor, under the names that vllm-lens gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_weir.schema.hooks import Site

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
