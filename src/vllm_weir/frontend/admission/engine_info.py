"""`EngineCapabilities`: what an engine serves, as its workers report it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.frontend.derived.sources import derived_verdicts
from vllm_weir.schema.engine_traits import PLAIN_ENGINE, EngineTraits
from vllm_weir.schema.hooks import Site, place_of
from vllm_weir.schema.model_facts import ModelFacts
from vllm_weir.schema.routing import ModelRouting
from vllm_weir.schema.rows import RowShape, Shard, ShardWidths


@dataclass(frozen=True)
class EngineCapabilities:
    """Which sites the workers serve, and the model's sizes.

    Attributes:
        sites: every site of the model -> why it is refused; empty if it is served.
        num_layers: decoder blocks.
        d_model: values of a row.
        dtype: the model's, e.g. ``"bfloat16"``.
        ring_rows: rows that the smallest ring of the workers holds.
        shapes: site -> shape of a row, where that is not (d_model,).
        shards: site -> the parts of its row that tensor-parallel workers hold, ascending; only of
            sites whose rows are spread over several.
        facts: of the model's attention and MoE layers, for sites that are derived.
        read_only: site -> why it cannot be changed in this model.
        no_lens: why no lens is served; "" if it is.
        workers: site -> the workers, by number, that have it; pipeline stages have different ones.
        traits: how the engine is configured.
        routing: the routers of its MoE layers.
        embeds_media: whether `embed` is read where the embeddings of images and the like have
            joined those of the tokens.
    """

    sites: Mapping[Site, str]
    num_layers: int
    d_model: int
    dtype: str
    ring_rows: int
    shapes: Mapping[Site, RowShape] = field(default_factory=dict)
    shards: Mapping[Site, tuple[Shard, ...]] = field(default_factory=dict)
    facts: ModelFacts = field(default_factory=ModelFacts)
    read_only: Mapping[Site, str] = field(default_factory=dict)
    no_lens: str = "no lens is served: the workers have not said that the model has an unembedding"
    workers: Mapping[Site, frozenset[int]] = field(default_factory=dict)
    traits: EngineTraits = PLAIN_ENGINE
    embeds_media: bool = False
    routing: ModelRouting = field(default_factory=ModelRouting)

    def shape(self, site: Site) -> RowShape:
        """Return the shape of a row of a site; 0 stands for as many values as there are keys."""
        if site in self.shapes:
            return self.shapes[site]
        attention, routing = self.facts.attention.get(site.layer), self.facts.routing.get(site.layer)
        if site.hook in ("pattern", "attn_scores") and attention is not None:
            return attention.heads, 0
        if site.hook in ("expert_ids", "expert_weights") and routing is not None:
            return (routing.top_k,)
        return (self.d_model,)

    @functools.cached_property
    def shard_widths(self) -> ShardWidths:
        return ShardWidths(self.shapes, self.shards, self.d_model)

    @functools.cached_property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @functools.cached_property
    def largest(self) -> float:
        return torch.finfo(getattr(torch, self.dtype)).max

    @classmethod
    def merge(cls, reports: Sequence[Mapping[str, Any]], traits: EngineTraits = PLAIN_ENGINE) -> EngineCapabilities:
        """Combine the reports of all workers of an engine with these traits.

        Raises:
            WeirError: with the reason of the first that is not working.
        """
        if not reports:
            raise WeirError("no worker answered; see `weir doctor`")
        for report in reports:
            if not report.get("ok"):
                raise WeirError(f"Weir is not working in this engine: {report.get('reason', 'unknown')}")
        first, facts = reports[0], ModelFacts.merge(reports)
        sites = _merge_sites(reports)
        sites |= derived_verdicts(sites, facts)
        rows = [r["ring_rows"] for r in reports if r["ring_rows"] > 1]
        return cls(
            sites=dict(sorted(sites.items(), key=lambda entry: place_of(entry[0]))),
            num_layers=first["num_layers"],
            d_model=first["d_model"],
            dtype=first["dtype"],
            ring_rows=min(rows, default=0),
            shapes={Site(hook, layer): tuple(shape) for r in reports for hook, layer, shape in r.get("shapes", ())},
            shards=_merge_shards(reports),
            facts=facts,
            read_only={Site(hook, layer): why for r in reports for hook, layer, why in r.get("read_only", ())},
            no_lens=next((why for r in reports if (why := r.get("no_lens", cls.no_lens))), ""),
            workers=_workers_of(reports),
            embeds_media=any(r.get("embeds_media", False) for r in reports),
            traits=traits,
            routing=ModelRouting.merge(reports, first["num_layers"]),
        )


def _merge_shards(reports: Sequence[Mapping[str, Any]]) -> dict[Site, tuple[Shard, ...]]:
    shards: dict[Site, set[Shard]] = {}
    for report in reports:
        for hook, layer, start, stop in report.get("shards", ()):
            shards.setdefault(Site(hook, layer), set()).add(Shard(start, stop))
    return {site: tuple(sorted(parts)) for site, parts in shards.items()}


def _workers_of(reports: Sequence[Mapping[str, Any]]) -> dict[Site, frozenset[int]]:
    workers: dict[Site, set[int]] = {}
    for number, report in enumerate(reports):
        for hook, layer, _ in report["sites"]:
            workers.setdefault(Site(hook, layer), set()).add(number)
    return {site: frozenset(numbers) for site, numbers in workers.items()}


def _merge_sites(reports: Sequence[Mapping[str, Any]]) -> dict[Site, str]:
    """Combine the verdicts of workers: a site is served if every worker that has it serves it."""
    sites: dict[Site, str] = {}
    for report in reports:
        for hook, layer, why in report["sites"]:
            site = Site(hook, layer)
            sites[site] = sites.get(site) or why
    return sites
