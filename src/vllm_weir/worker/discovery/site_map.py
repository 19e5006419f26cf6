"""`SiteMap`: verdicts on every site of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import BLOCK_HOOKS, HOOKS, MODEL_HOOKS, Site, place_of
from vllm_weir.schema.taps import tap_of
from vllm_weir.worker.discovery.anchors import Anchor


@dataclass
class SiteMap:
    """Verdicts on every site of the blocks that live in this process.

    Attributes:
        num_layers: blocks of the whole model.
        anchors: where the supported sites are; `resid_pre` past the first block here is where the last one ended.
        refused: why the others are not supported.
    """

    num_layers: int
    anchors: dict[Site, Anchor] = field(default_factory=dict)
    refused: dict[Site, str] = field(default_factory=dict)

    def refuse(self, hooks: Iterable[str], layers: Iterable[int], why: str) -> None:
        """These sites are not supported, whatever was found."""
        for layer in layers:
            for hook in hooks:
                self.anchors.pop(Site(hook, layer), None)
                self.refused.setdefault(Site(hook, layer), why)


def chosen(sites: SiteMap, settings: Settings) -> dict[int, Anchor]:
    """Taps that the settings ask for and the model has here: tap -> place, in the order in which they are to act.

    Raises:
        WeirError: if a layer does not exist, or, with ``refused="start"``, if a site of a hook point that the settings
            name is refused, or all sites are.
    """
    layers = range(sites.num_layers) if settings.layers == "all" else settings.layers
    hooks = settings.hooks or HOOKS
    wanted = {Site(h, layer) for h in hooks if h in BLOCK_HOOKS for layer in layers}
    wanted |= {Site(h, 0) for h in hooks if h in MODEL_HOOKS}
    for layer in layers:
        if layer >= sites.num_layers:
            raise WeirError(
                f"block {layer} does not exist: the model has blocks 0..{sites.num_layers - 1}", "settings.layers"
            )
    if "resid_post" in hooks and 0 in layers:
        wanted.add(Site("resid_pre", 0))
    if settings.refused == "start" and settings.hooks is not None:
        for site in sorted(wanted & sites.refused.keys(), key=place_of):
            raise WeirError(f"{site} is refused: {sites.refused[site]}", "settings.hooks")
    placed: dict[int, Anchor] = {}
    for site in sorted(wanted, key=place_of):
        source = site
        if site.hook == "resid_pre" and Site("resid_post", site.layer - 1) in sites.anchors:
            source = Site("resid_post", site.layer - 1)
        if site in sites.anchors and source in sites.anchors:
            placed.setdefault(tap_of(site), sites.anchors[source])
    if settings.refused == "start" and sites.refused and not sites.anchors:
        site, why = next(iter(sites.refused.items()))
        raise WeirError(f"every site is refused; {site}: {why}", "settings.refused")
    return dict(sorted(placed.items(), key=lambda p: (p[0] == 1, p[0])))
