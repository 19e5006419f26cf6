"""The experts that a MoE layer chooses, and their weights, from its router's logits."""

from __future__ import annotations

import torch

from vllm_weir.schema.model_facts import RoutingFacts, Scoring


def choose_experts(logits: torch.Tensor, facts: RoutingFacts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's experts and their weights, best first.

    "Best" is by the score that decided: with the bias that a model adds for the choice alone.

    Args:
        logits: [rows, experts].

    Returns:
        (ids int64 [rows, top_k], weights float32 [rows, top_k]).
    """
    if facts.in_float32:
        logits = logits.float()
    if not (facts.groups or facts.bias or facts.scoring == "sqrtsoftplus"):
        # Scores grow with the logits, and equal logits are less frequent than equal scores.
        ids = _top(logits, facts.top_k, facts.lowest_first)
        weights = _weights(logits, ids, facts)
        return ids, (weights * facts.scale).float()
    scores = _scores(logits, facts.scoring)
    deciding = scores + torch.tensor(facts.bias) if facts.bias else scores
    if facts.groups:
        deciding = _in_best_groups(deciding, facts)
    ids = _top(deciding, facts.top_k, facts.lowest_first)
    weights = scores.gather(-1, ids)
    if facts.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, (weights * facts.scale).float()


def _weights(logits: torch.Tensor, ids: torch.Tensor, facts: RoutingFacts) -> torch.Tensor:
    """Return the weights of experts that the logits alone have decided."""
    chosen = logits.gather(-1, ids)
    if facts.scoring == "softmax":
        if facts.renormalize:
            return chosen.softmax(-1)
        return (chosen - logits.logsumexp(-1, keepdim=True)).exp()
    weights = chosen.sigmoid()
    return weights / weights.sum(-1, keepdim=True) if facts.renormalize else weights


def _scores(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    if scoring == "softmax":
        return logits.softmax(-1)
    if scoring == "sigmoid":
        return logits.sigmoid()
    return torch.nn.functional.softplus(logits).sqrt()


def _in_best_groups(scores: torch.Tensor, facts: RoutingFacts) -> torch.Tensor:
    """Return the scores, -inf outside the best groups.

    A group is as good as its best expert, or, where a bias takes part, as the sum of its best two.
    """
    by_group = scores.unflatten(-1, (facts.groups, -1))
    merit = by_group.topk(2, -1).values.sum(-1) if facts.bias else by_group.amax(-1)
    best = _top(merit, facts.top_groups, facts.lowest_first)
    outside = torch.ones_like(merit, dtype=torch.bool).scatter_(-1, best, False)
    return by_group.masked_fill(outside[..., None], -torch.inf).flatten(-2)


def _top(scores: torch.Tensor, count: int, lowest_first: bool) -> torch.Tensor:
    """Return the places of the `count` largest scores of each row, largest first, equal ones by their number."""
    if lowest_first:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    chosen = scores.topk(count, -1, sorted=False).indices.sort(-1).values
    order = scores.gather(-1, chosen).sort(dim=-1, descending=True, stable=True).indices
    return chosen.gather(-1, order)
