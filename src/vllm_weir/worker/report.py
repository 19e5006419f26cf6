"""What a worker tells the caller's process of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_weir.config.settings import Settings
from vllm_weir.schema.taps import tap_of
from vllm_weir.worker.discovery.site_map import UNTAPPED, SiteMap
from vllm_weir.worker.model_info import ModelInfo
from vllm_weir.worker.tap.routing import FoundRouters


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
