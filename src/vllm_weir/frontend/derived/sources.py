"""`DerivedPoints`: which derived sites an engine serves, and captures of them as captures of their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from vllm_weir.errors import WeirError
from vllm_weir.frontend.derived.recipe import AttentionRecipe, Recipe, RoutingRecipe, Source
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import SOURCE_HOOKS, Site
from vllm_weir.schema.model_facts import AttentionFacts, ModelFacts
from vllm_weir.schema.positions import ENDLESS, Positions
from vllm_weir.schema.request import MAX_CAPTURES
from vllm_weir.schema.sinks import Sink

ATTENTION = ("attn_scores", "pattern")
MAX_SELECTORS = MAX_CAPTURES + 1
"""Different selectors that one request's captures can have."""


class Capabilities(Protocol):
    """What this module needs of an engine's `EngineCapabilities`."""

    @property
    def sites(self) -> Mapping[Site, str]:
        """Every site of the model -> why it is refused; empty if it is served."""

    @property
    def num_layers(self) -> int:
        """Blocks of the model."""

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model's attention and MoE layers."""


class Expansion(NamedTuple):
    """A request's captures, those of derived sites replaced by what these are computed from.

    Attributes:
        captures: the captures of sites that taps read, as they were given.
        sources: captures of the rows that `recipes` need; their rows come back on no output. They
            name the fields of the captures that they stand for in errors.
        recipes: of each derived site.
    """

    captures: tuple[Capture, ...]
    sources: tuple[Capture, ...]
    recipes: tuple[Recipe, ...]


def derived_verdicts(sites: Mapping[Site, str], facts: ModelFacts) -> dict[Site, str]:
    """Return why each derived site is refused, or "" if it is served.

    Args:
        sites: the verdicts on the sites that taps read. A block without an entry for a source (a
            MoE's in a dense block) has none for what is derived from it.
    """
    layers = sorted({site.layer for site in sites})
    verdicts = {}
    for hook in SOURCE_HOOKS:
        for layer in layers:
            sources = sources_of(Site(hook, layer), facts)
            if all(source.site in sites for source in sources):
                verdicts[Site(hook, layer)] = _verdict(Site(hook, layer), sources, sites, facts)
    return verdicts


def sources_of(site: Site, facts: ModelFacts) -> tuple[Source, ...]:
    if site.hook not in ATTENTION:
        return tuple(Source(Site(hook, site.layer), False) for hook in SOURCE_HOOKS[site.hook])
    attention = facts.attention.get(site.layer)
    keys_layer = site.layer if attention is None or attention.refused else attention.keys_layer
    return Source(Site("q_rot", site.layer), False), Source(Site("k_rot", keys_layer), True)


def _verdict(site: Site, sources: Sequence[Source], sites: Mapping[Site, str], facts: ModelFacts) -> str:
    for source in sources:
        if why := sites[source.site]:
            return f"it is computed from {source.site}, which is refused: {why}"
    layers: Mapping[int, object] = facts.attention if site.hook in ATTENTION else facts.routing
    if site.layer not in layers:
        what = "attention layer" if site.hook in ATTENTION else "router"
        return f"the block has no {what} of vLLM's from which Weir could read how it is computed"
    refused = (facts.attention if site.hook in ATTENTION else facts.routing)[site.layer].refused
    return refused


@dataclass
class DerivedPoints:
    """Turns captures of derived sites into captures of their sources and recipes.

    Args:
        capabilities: what the engine serves, the derived sites included.
        has_media: whether the prompt, or a part of it, is given as embeddings or as images and the
            like.
    """

    capabilities: Capabilities
    has_media: bool = False
    _recipes: dict[Site, Recipe] = field(default_factory=dict)
    _sources: dict[Capture, None] = field(default_factory=dict)

    @classmethod
    def expand(cls, captures: Sequence[Capture], capabilities: Capabilities, has_media: bool = False) -> Expansion:
        """Split a request's captures; see `Expansion`.

        Raise WeirError naming the field, for a derived site that is not served, or what cannot be done to one.
        """
        if not any(capture.hook in SOURCE_HOOKS for capture in captures):
            return Expansion(tuple(captures), (), ())
        return cls(capabilities, has_media)._expand(captures)

    def _expand(self, captures: Sequence[Capture]) -> Expansion:
        plain = tuple(capture for capture in captures if capture.hook not in SOURCE_HOOKS)
        for capture in captures:
            if capture.hook in SOURCE_HOOKS:
                _check_options(capture)
                for layer in capture.resolve_layers(self.capabilities.num_layers):
                    self._add(capture, Site(capture.hook, layer))
        selectors = {capture.positions for capture in (*plain, *self._sources)}
        if len(selectors) > MAX_SELECTORS:
            raise WeirError(
                f"these captures need rows at {len(selectors)} different choices of positions, more than the limit of "
                f"{MAX_SELECTORS}; send separate requests",
                "capture",
            )
        return Expansion(plain, tuple(self._sources), tuple(self._recipes.values()))

    def _add(self, capture: Capture, site: Site) -> None:
        """Add the recipe of one site, and the captures that it needs."""
        self._check_site(capture, site)
        recipe = self._recipe(capture, site)
        earlier = self._recipes.get(site)
        if earlier is not None:
            merged = replace(recipe, positions=tuple(dict.fromkeys((*earlier.positions, *recipe.positions))))
            if merged != replace(earlier, positions=merged.positions):
                raise WeirError(f"{site} is wanted in two ways; send separate requests", f"{capture.path}.hook")
            recipe = merged
        self._recipes[site] = recipe
        for source in recipe.sources:
            for positions in up_to(capture.positions) if source.whole else (capture.positions,):
                self._sources[_source_capture(capture, source.site, positions)] = None

    def _check_site(self, capture: Capture, site: Site) -> None:
        sites, facts = self.capabilities.sites, self.capabilities.facts
        if why := sites.get(site, "no worker has this point in this block"):
            served = any(s.hook == site.hook and not w for s, w in sites.items())
            raise WeirError(f"{site} is refused: {why}", f"{capture.path}.{'layers' if served else 'hook'}")
        if self.has_media and site.hook in ATTENTION and facts.attention[site.layer].media:
            raise WeirError(
                f"{site} is refused for this request: its prompt, or a part of it, is given as embeddings or images, "
                "and tokens of one image see each other in this model; send text, or capture q_rot and k_rot",
                f"{capture.path}.hook",
            )

    def _recipe(self, capture: Capture, site: Site) -> Recipe:
        facts = self.capabilities.facts
        sources, selectors = sources_of(site, facts), (capture.positions,)
        if site.hook in ATTENTION:
            attention = facts.attention[site.layer]
            dtype = _dtype(capture, torch.float32)
            heads = _heads(capture, attention)
            return AttentionRecipe(site, selectors, sources, False, attention, heads, dtype)
        dtype = torch.int64 if site.hook == "expert_ids" else _dtype(capture, torch.float32)
        return RoutingRecipe(site, selectors, sources, capture.before, facts.routing[site.layer], dtype)


def up_to(positions: Positions) -> tuple[Positions, ...]:
    """Return selectors that together choose every position from 0 to the last that `positions` chooses."""
    if positions.kind == "list":
        # The later of the last position counted from the start and the last counted from the prompt's end.
        ends = [max(some) + 1 for some in (_signed(positions, False), _signed(positions, True)) if some]
    elif positions.interval is None or positions.interval.stop == ENDLESS:
        return (Positions("all"),)
    else:
        ends = [positions.interval.stop]
    return tuple(Positions("slice", (None, end, None)) if end else Positions("prompt") for end in ends)


def _signed(positions: Positions, negative: bool) -> list[int]:
    return [number for number in positions.numbers if (number < 0) == negative]


def _source_capture(capture: Capture, site: Site, positions: Positions) -> Capture:
    before = capture.before and site.hook not in ("q_rot", "k_rot")
    return Capture(hook=site.hook, layers=site.layer, positions=positions, before=before, path=capture.path)


def _check_options(capture: Capture) -> None:
    """Raise WeirError for options that a derived hook point does not have."""
    hook, path = capture.hook, capture.path
    sources = " and ".join(SOURCE_HOOKS[hook])
    if capture.sink != Sink():
        raise WeirError(
            f"{hook} is computed when an output is read, so no sink gets it; send it {sources}", f"{path}.sink"
        )
    for name, value in (("reduce", capture.reduce), ("project", capture.project), ("compress", capture.compress)):
        if value is not None:
            raise WeirError(f"{hook} is computed when an output is read; leave {name} out", f"{path}.{name}")
    if capture.before and hook in ATTENTION:
        raise WeirError(
            f"{hook} has no value before interventions: none acts there; leave before out", f"{path}.before"
        )
    if capture.dtype is not None and hook == "expert_ids":
        raise WeirError("expert_ids are numbers of experts, int64; leave dtype out", f"{path}.dtype")


def _dtype(capture: Capture, default: torch.dtype) -> torch.dtype:
    return default if capture.dtype is None else getattr(torch, capture.dtype)


def _heads(capture: Capture, facts: AttentionFacts) -> tuple[int, ...] | None:
    """Return the heads that a capture picks; raise WeirError if one does not exist."""
    heads = capture.heads
    if heads is None:
        return None
    for head in heads:
        if not 0 <= head < facts.heads:
            raise WeirError(
                f"head {head} does not exist: the model has heads 0..{facts.heads - 1}", f"{capture.path}.heads"
            )
    return tuple(heads)
