"""Reference rows from transformers in fp32, and the error against them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_weir.util.transformers_reference import TransformersReference


def parameter_count(model: str) -> int | None:
    """Count a model's parameters from its configuration; None if transformers cannot build it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).num_parameters()
    except (ValueError, KeyError, ImportError, AttributeError, NotImplementedError):
        return None


def reference_rows(model: str, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return ``resid_post`` of every block, float32 [layers, tokens, d], for each sequence."""
    reference = TransformersReference.from_pretrained(model)
    return [reference.streams(ids)[1] for ids in token_ids]


def worst_error(rows: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the largest max|difference| / max|reference| of a layer of a sequence.

    Args:
        rows: [layers, tokens, d] for each sequence.
        reference: of the same shapes.
    """
    worst = 0.0
    for captured, expected in zip(rows, reference, strict=True):
        if captured.shape != expected.shape:
            raise ValueError(f"shapes differ: {tuple(captured.shape)} and {tuple(expected.shape)}")
        difference, scale = (captured - expected).abs().amax((1, 2)), expected.abs().amax((1, 2))
        worst = max(worst, float((difference / scale).max()))
    return worst
