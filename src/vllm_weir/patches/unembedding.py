"""The model's final norm and logits, as a lens calls them on rows between blocks."""

from __future__ import annotations

from typing import Any

import torch

from vllm_weir.schema.hooks import Site
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.lenses import Unembedding
from vllm_weir.worker.tap.install import untapped


def unembedding_of(model: Any, sites: SiteMap, config: Any) -> Unembedding:
    """Return what a lens needs of a loaded model, or why it serves none."""
    parallel, site = config.parallel_config, Site("final_norm", 0)
    if parallel.pipeline_parallel_size > 1:
        return _refused("only the last pipeline stage has the unembedding; start the engine with one stage")
    if parallel.tensor_parallel_size > 1:
        return _refused(
            "tensor-parallel workers hold the unembedding in parts; start the engine with tensor_parallel_size=1"
        )
    if config.model_config.runner_type == "pooling":
        return _refused("the engine pools, and vLLM has removed the model's unembedding")
    if site not in sites.anchors:
        return _refused(f"the model's final norm was not found: {sites.refused.get(site, 'it has none')}")
    if not hasattr(model, "compute_logits"):
        return _refused("the model computes no logits")
    anchor = sites.anchors[site]
    if anchor.when != "after":
        return _refused("the model's final norm is not a module whose output is its result")
    module = model.get_submodule(anchor.module)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        normed = untapped(module)(rows)
        return model.compute_logits(normed[0] if isinstance(normed, tuple) else normed)

    return Unembedding(logits, config.model_config.get_vocab_size(), "")


def _refused(why: str) -> Unembedding:
    return Unembedding(refused=f"no lens is served: {why}")
