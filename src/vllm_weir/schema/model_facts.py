"""`ModelFacts`: what a worker knows of its attention and MoE layers, for hook points that are derived."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias

Scoring: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""What a router makes of its logits; the last is ``sqrt(softplus(logit))``."""


@dataclass(frozen=True)
class AttentionFacts:
    """How an attention layer makes scores of queries and keys.

    Attributes:
        heads: query heads: of this worker, and after `ModelFacts.merge` of the whole model.
        head_size: values of a head's query and key.
        scale: factor of the dot products.
        window: keys that a query sees, itself included; None: all before it.
        chunk: queries see keys of their own chunk of so many positions only; None: no chunks.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0: they do not.
        sinks: each head's logit that takes part in the softmax without a key; empty: none.
        alibi: each head's slope: ``slope * (key's position - query's)`` is added; empty: none.
        keys_layer: the block whose keys are used; another one where layers share their KV cache.
        media: whether tokens of one image see each other, whatever their order.
        refused: why scores cannot be computed from queries and keys; empty if they can.
        name: vLLM's of the layer, such as ``model.layers.3.self_attn.attn``; equal layers may differ in it.
    """

    heads: int = 0
    head_size: int = 0
    scale: float = 1.0
    window: int | None = None
    chunk: int | None = None
    soft_cap: float = 0.0
    sinks: tuple[float, ...] = ()
    alibi: tuple[float, ...] = ()
    keys_layer: int = 0
    media: bool = False
    refused: str = ""
    name: str = field(default="", compare=False)

    def joined(self, other: AttentionFacts) -> AttentionFacts:
        """Return the facts of this worker's heads and those of the next tensor-parallel worker."""
        return replace(
            self,
            heads=self.heads + other.heads,
            sinks=self.sinks + other.sinks,
            alibi=self.alibi + other.alibi,
            refused=self.refused or other.refused,
        )


@dataclass(frozen=True)
class RoutingFacts:
    """How a MoE layer chooses experts from its router's logits.

    Attributes:
        top_k: experts of a token.
        scoring: what becomes of the logits.
        renormalize: whether the weights of the chosen experts are divided by their sum.
        groups: groups of experts, of which `top_groups` are chosen first; 0: no groups.
        top_groups: see `groups`.
        bias: added to the scores by which experts are chosen, not to their weights; empty: none.
        scale: factor of the weights.
        in_float32: whether scores are computed in float32; otherwise in the logits' dtype.
        lowest_first: whether of equal scores the expert with the lowest number is chosen; otherwise
            the one that `torch.topk` finds.
        refused: why the choice cannot be computed from the logits; empty if it can.
    """

    top_k: int = 0
    scoring: Scoring = "softmax"
    renormalize: bool = False
    groups: int = 0
    top_groups: int = 0
    bias: tuple[float, ...] = ()
    scale: float = 1.0
    in_float32: bool = True
    lowest_first: bool = True
    refused: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of the blocks that have them.

    Attributes:
        attention: block -> facts of its attention layer.
        routing: block -> facts of its MoE layer.
        first_head: block -> number of this worker's first query head; left out where it is 0.
    """

    attention: Mapping[int, AttentionFacts] = field(default_factory=dict)
    routing: Mapping[int, RoutingFacts] = field(default_factory=dict)
    first_head: Mapping[int, int] = field(default_factory=dict)

    @property
    def from_weights(self) -> bool:
        """Whether some facts are values of weights, and change when these are replaced."""
        return any(one.sinks for one in self.attention.values()) or any(one.bias for one in self.routing.values())

    def report(self) -> dict[str, Any]:
        """Return plain data, a part of a worker's report."""
        return {
            "attention": [
                [layer, self.first_head.get(layer, 0), _plain(facts)] for layer, facts in self.attention.items()
            ],
            "routing": [[layer, _plain(facts)] for layer, facts in self.routing.items()],
        }

    @classmethod
    def merge(cls, reports: Iterable[Mapping[str, Any]]) -> Self:
        """Combine the reports of all workers; heads of tensor-parallel workers are put in order.

        Workers that hold the same heads report the same.
        """
        parts: dict[int, dict[int, AttentionFacts]] = {}
        routing: dict[int, RoutingFacts] = {}
        for report in reports:
            for layer, first_head, facts in report.get("attention", ()):
                parts.setdefault(layer, {})[first_head] = _parse(AttentionFacts, facts)
            for layer, facts in report.get("routing", ()):
                routing[layer] = _parse(RoutingFacts, facts)
        attention = {}
        for layer in sorted(parts):
            first, *others = (facts for _, facts in sorted(parts[layer].items()))
            for facts in others:
                first = first.joined(facts)
            attention[layer] = first
        return cls(attention, dict(sorted(routing.items())))


def _plain(facts: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(facts)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(facts).items()
        if value != defaults[name]
    }


def _parse(kind: Any, values: Mapping[str, Any]) -> Any:
    return kind(**{name: tuple(v) if _is_list(v) else v for name, v in values.items()})


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
