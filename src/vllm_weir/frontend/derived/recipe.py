"""`Recipe`: how the values of one derived site are computed from rows of other sites."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from vllm_weir.frontend.derived.formulas import (
    CHUNK_VALUES,
    attention_pattern,
    attention_scores,
    choose_experts,
    first_keys,
)
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.model_facts import AttentionFacts, RoutingFacts
from vllm_weir.schema.positions import Positions

JOINED_KEYS = 1 << 18
"""Values of keys, of all layers that are computed together; with more, joining them takes longer than calls do."""


class Source(NamedTuple):
    """A site whose rows a recipe needs.

    Attributes:
        site: one that a tap reads.
        whole: whether the rows of all positions from 0 to the last wanted one are needed, also for
            an output that begins later; otherwise those of the wanted positions.
    """

    site: Site
    whole: bool


@dataclass(frozen=True)
class Recipe(ABC):
    """How to compute one derived site.

    Attributes:
        positions: selectors of its rows; a row is wanted if any selects it.
        sources: the sites whose rows `compute` takes.
        before: whether those are the rows from before interventions.
    """

    site: Site
    positions: tuple[Positions, ...]
    sources: tuple[Source, ...]
    before: bool

    @abstractmethod
    def compute(
        self, rows: Mapping[Site, torch.Tensor], positions: Mapping[Site, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values, [rows, ...], and the positions they are at, int64 [rows].

        A position whose sources are not all there (the worker had no room for them, or the request
        was aborted) has no value.

        Args:
            rows: the rows of each source, whole, in the model's dtype: [n, heads, head size], or
                [n, experts].
            positions: the positions of these, ascending, int64 [n].
        """

    @abstractmethod
    def empty(self) -> torch.Tensor:
        """Return the values of no rows, for a request that reaches none of the positions."""

    @abstractmethod
    def width(self, positions: int) -> int:
        """Return how many values a row has in a sequence of so many positions, at most."""


@dataclass(frozen=True)
class AttentionRecipe(Recipe):
    """The recipe of `attn_scores` and `pattern`, [rows, heads, keys].

    There are keys up to the last of the rows' positions.

    Attributes:
        heads: which heads, in this order; None: all.
        dtype: of the values.
    """

    facts: AttentionFacts
    heads: tuple[int, ...] | None
    dtype: torch.dtype

    @functools.cached_property
    def kind(self) -> Hashable:
        """Equal for layers that can be computed together, if the positions of their rows are equal."""
        return self.site.hook, replace(self.facts, keys_layer=0), self.heads, self.dtype, self.positions

    def compute(
        self, rows: Mapping[Site, torch.Tensor], positions: Mapping[Site, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = (source.site for source in self.sources)
        at = positions[queries]
        k = _by_position(rows[keys], positions[keys], int(at[-1]) + 1 if len(at) else 0)
        there = torch.zeros(len(k) + 1, dtype=torch.int64)
        there[positions[keys][positions[keys] < len(k)] + 1] = 1
        keys_before = there.cumsum(0)  # [p]: how many keys at positions below p are here
        first = first_keys(at, self.facts)
        complete = keys_before[at + 1] - keys_before[first] == at + 1 - first
        at, q = at[complete], rows[queries][complete]
        if not len(at):
            return self.empty(), at
        compute = attention_scores if self.site.hook == "attn_scores" else attention_pattern
        values = compute(q, k[: int(at[-1]) + 1], at, self.facts, self.heads)
        return values.to(self.dtype), at

    def empty(self) -> torch.Tensor:
        heads = self.facts.heads if self.heads is None else len(self.heads)
        return torch.empty(0, heads, 0, dtype=self.dtype)

    def width(self, positions: int) -> int:
        return (self.facts.heads if self.heads is None else len(self.heads)) * positions


class Inputs(NamedTuple):
    """What one recipe is computed from: the arguments of `Recipe.compute`."""

    rows: Mapping[Site, torch.Tensor]
    positions: Mapping[Site, torch.Tensor]


def compute_all(recipes: Sequence[Recipe], inputs: Sequence[Inputs]) -> dict[Site, tuple[torch.Tensor, torch.Tensor]]:
    """Compute recipes; layers whose attention is alike go together, as if their heads were one layer's."""
    found: dict[Site, tuple[torch.Tensor, torch.Tensor]] = {}
    alike: dict[object, list[tuple[AttentionRecipe, Inputs]]] = {}
    for recipe, given in zip(recipes, inputs, strict=True):
        if isinstance(recipe, AttentionRecipe):
            # Groups of query heads that share a key follow from the numbers of heads, which differ between layers.
            shapes = tuple(given.rows[source.site].shape[1:] for source in recipe.sources)
            alike.setdefault((recipe.kind, shapes), []).append((recipe, given))
        else:
            found[recipe.site] = recipe.compute(*given)
    for group in alike.values():
        for part in _parts(group):
            found |= _joined(part) if len(part) > 1 else {part[0][0].site: part[0][0].compute(*part[0][1])}
    return found


def _parts(group: list[tuple[AttentionRecipe, Inputs]]) -> list[list[tuple[AttentionRecipe, Inputs]]]:
    """Divide layers into runs with the same positions, each with at most `CHUNK_VALUES` values and `JOINED_KEYS`."""
    parts: list[list[tuple[AttentionRecipe, Inputs]]] = []
    for recipe, given in group:
        queries, keys = (given.rows[source.site] for source in recipe.sources)
        values = recipe.width(len(keys)) * len(queries)
        most = min(CHUNK_VALUES // max(1, values), JOINED_KEYS // max(1, keys.numel()))
        if parts and len(parts[-1]) < most and _same_positions(parts[-1][0], (recipe, given)):
            parts[-1].append((recipe, given))
        else:
            parts.append([(recipe, given)])
    return parts


def _same_positions(a: tuple[AttentionRecipe, Inputs], b: tuple[AttentionRecipe, Inputs]) -> bool:
    pairs = zip(a[0].sources, b[0].sources, strict=True)
    both = ((a[1].positions[x.site], b[1].positions[y.site]) for x, y in pairs)
    return all(len(mine) == len(theirs) and torch.equal(mine, theirs) for mine, theirs in both)


def _joined(part: list[tuple[AttentionRecipe, Inputs]]) -> dict[Site, tuple[torch.Tensor, torch.Tensor]]:
    """Compute several layers with the same positions as one whose heads are those of all."""
    first, given = part[0]
    count, facts = len(part), first.facts
    whole = replace(
        first,
        facts=replace(facts, heads=count * facts.heads, sinks=count * facts.sinks, alibi=count * facts.alibi),
        heads=first.heads and tuple(k * facts.heads + head for k in range(count) for head in first.heads),
    )
    rows = {
        source.site: torch.cat([inputs.rows[recipe.sources[i].site] for recipe, inputs in part], 1)
        for i, source in enumerate(first.sources)
    }
    values, at = whole.compute(rows, given.positions)
    by_layer = values.view(len(values), count, values.shape[1] // count, values.shape[2])
    return {recipe.site: (by_layer[:, k].contiguous(), at) for k, (recipe, _) in enumerate(part)}


@dataclass(frozen=True)
class RoutingRecipe(Recipe):
    """The recipe of `expert_ids`, int64, and `expert_weights`, [rows, top_k]."""

    facts: RoutingFacts
    dtype: torch.dtype

    def compute(
        self, rows: Mapping[Site, torch.Tensor], positions: Mapping[Site, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (source,) = self.sources
        ids, weights = choose_experts(rows[source.site], self.facts)
        return (ids if self.site.hook == "expert_ids" else weights).to(self.dtype), positions[source.site]

    def empty(self) -> torch.Tensor:
        return torch.empty(0, self.facts.top_k, dtype=self.dtype)

    def width(self, positions: int) -> int:
        return self.facts.top_k


def _by_position(rows: torch.Tensor, positions: torch.Tensor, end: int) -> torch.Tensor:
    """Return the rows at positions 0..end-1, zeros where there is none; positions ascend."""
    if 0 < end <= len(positions) and positions[end - 1] == end - 1:  # all are there
        return rows[:end]
    rows, positions = rows[positions < end], positions[positions < end]
    if len(rows) == end:
        return rows
    out = rows.new_zeros(end, *rows.shape[1:])
    out[positions] = rows
    return out
