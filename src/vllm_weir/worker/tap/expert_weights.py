"""The weights that a router gives to experts, whether it has chosen them or not."""

from __future__ import annotations

import torch

from vllm_weir.schema.model_facts import RoutingFacts, Scoring


def expert_weights(logits: torch.Tensor, ids: torch.Tensor, facts: RoutingFacts) -> torch.Tensor:
    """Return the weights of each row's experts, float32 [rows, top_k].

    Args:
        logits: [rows, experts].
        ids: int64 [rows, top_k].
    """
    if facts.in_float32:
        logits = logits.float()
    if facts.chosen_by_logits:
        weights = _of_logits(logits, ids, facts)
    else:
        weights = scores_of(logits, facts.scoring).gather(-1, ids)
        if facts.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
    return (weights * facts.scale).float()


def scores_of(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Return what a router makes of its logits."""
    if scoring == "softmax":
        return logits.softmax(-1)
    if scoring == "sigmoid":
        return logits.sigmoid()
    return torch.nn.functional.softplus(logits).sqrt()


def _of_logits(logits: torch.Tensor, ids: torch.Tensor, facts: RoutingFacts) -> torch.Tensor:
    """Return the weights of experts that a router chooses by the logits alone."""
    chosen = logits.gather(-1, ids)
    if facts.scoring == "softmax":
        if facts.renormalize:
            return chosen.softmax(-1)
        return (chosen - logits.logsumexp(-1, keepdim=True)).exp()
    weights = chosen.sigmoid()
    return weights / weights.sum(-1, keepdim=True) if facts.renormalize else weights
