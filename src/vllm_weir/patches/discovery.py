"""Patches for discovery: the model is run a few times, uncompiled, between being loaded and being compiled."""

from __future__ import annotations

from typing import Any

import torch

from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.worker.discovery.overrides import described
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.discovery.sites import find_tree, map_sites
from vllm_weir.worker.runtime import ModelInfo

TOKENS = 8


def find_sites(runner: Any, config: Any, capabilities: ModelInfo, settings: Settings, v2: bool) -> SiteMap:
    """Every site of a loaded model, with its verdict.

    Raises:
        WeirError: if the model has no stack of blocks, or cannot be run by itself.
    """
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    model = runner.get_model()
    layers = config.model_config.get_total_num_hidden_layers()
    family = described(type(model).__name__, settings.describe)
    # With LoRA a wrapper is what is called; a head that computes logits is a subclass too.
    tables = (VocabParallelEmbedding, VocabParallelEmbeddingWithLoRA)
    tokens = min(TOKENS, config.scheduler_config.max_num_batched_tokens)
    dummy = {"is_profile": True, "skip_eplb": True, **({"skip_attn": True} if v2 else {})}
    compiled = [m for m in model.modules() if getattr(m, "do_not_compile", None) is False]

    def run() -> None:
        for module in compiled:
            module.do_not_compile = True
        try:
            # Parts that are compiled by themselves (a norm, a rotary embedding) would be, for these passes alone.
            with torch.compiler.set_stance("force_eager"):
                runner._dummy_run(tokens, **dummy)
        finally:
            for module in compiled:
                module.do_not_compile = False

    def look_up() -> torch.Tensor:
        return model.embed_input_ids(torch.arange(tokens, device=capabilities.device))

    try:
        with torch.inference_mode():
            tree = find_tree(
                model,
                capabilities.d_model,
                layers,
                family,
                is_core=lambda module: isinstance(module, AttentionLayerBase) or _keeps_attention_apart(model, module),
                is_embedding=lambda module: isinstance(module, tables) and not isinstance(module, ParallelLMHead),
                run=run,
                whole=lambda module: hasattr(module, "do_not_compile"),
                look_up=look_up,
            )
            return map_sites(tree, run, capabilities.dtype, family)
    except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError, NotImplementedError, KeyError) as e:
        if isinstance(e, WeirError):
            raise
        raise WeirError(
            f"the probe pass through {type(model).__name__} failed ({type(e).__name__}: {str(e)[:300]})", "model"
        ) from e


def _keeps_attention_apart(model: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Return whether a module calls an attention layer that is not in the module tree.

    Up to vLLM 0.28 the Transformers backend has them in a dict of the model, by the block's index.
    """
    apart = getattr(model, "attention_instances", None) or {}
    return getattr(module, "layer_idx", None) in apart and "Attention" in type(module).__name__
