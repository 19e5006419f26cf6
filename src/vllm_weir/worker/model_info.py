"""What is known of the loaded model, and what a worker reports of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_weir.config.settings import Settings
from vllm_weir.schema.engine_traits import PLAIN_ENGINE, EngineTraits
from vllm_weir.schema.taps import tap_of
from vllm_weir.worker.discovery.site_map import UNTAPPED, SiteMap
from vllm_weir.worker.tap.routing import FoundRouters


@dataclass(frozen=True)
class ModelInfo:
    """What the worker needs to know of its engine.

    Attributes:
        d_model, dtype, device: of the stream.
        max_tokens: of a step.
        rank, ranks: this worker's rank in its tensor-parallel group, and the group's size. All
            ranks hold the same stream.
        runner: which of vLLM's model runners drives the worker.
        engine: number of its data-parallel engine.
        traits: of the engine.
    """

    d_model: int
    dtype: torch.dtype
    device: torch.device
    max_tokens: int
    rank: int = 0
    ranks: int = 1
    runner: str = ""
    engine: int = 0
    traits: EngineTraits = PLAIN_ENGINE


def worker_report(
    model_info: ModelInfo, sites: SiteMap, settings: Settings, taps: Sequence[int], step_rows: int, no_lens: str
) -> dict[str, Any]:
    """Return what a worker serves; `step_rows` is the most rows of a step, `no_lens` why it serves no lens, or ""."""
    return {
        "ok": True,
        "runner": model_info.runner,
        "taps": list(taps),
        "sites": _verdicts(sites, settings, taps),
        "num_layers": sites.num_layers,
        "d_model": model_info.d_model,
        "dtype": str(model_info.dtype).removeprefix("torch."),
        "ring_rows": step_rows,
        "no_lens": no_lens,
        "shapes": [(*site, list(shape)) for site, shape in sites.shapes.items()],
        "embeds_media": sites.embeddings_given,
        "read_only": [(*site, why) for site, why in sites.read_only.items()],
        "shards": [(*site, *shard) for site, shard in sites.shards.items()],
        "routers": _routers(sites.routers, taps),
        **sites.read_facts().report(),
    }


def _routers(routers: FoundRouters, taps: Sequence[int]) -> dict[str, Any]:
    """Return the routers of a worker whose choices it tells, or why it does not."""
    if routers.blocks is None:
        return {"refused": routers.refused}
    if tap_of(routers.blocks.site) not in taps:
        return {"refused": UNTAPPED.replace("include it", "include router_logits")}
    return {"refused": "", **routers.blocks._asdict()}


def _verdicts(sites: SiteMap, settings: Settings, taps: Sequence[int]) -> list[tuple[str, int, str]]:
    """Return (hook point, layer, why it is refused or "") of a worker's sites."""
    tapped = set(taps)
    found = [
        (*site, "" if tap_of(site) in tapped else sites.why_left_out(site, settings) or UNTAPPED)
        for site in sites.anchors
    ]
    return found + [(*site, reason) for site, reason in sites.refused.items()]
