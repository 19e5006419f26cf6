"""Facts about a model: from its configuration, its modules, and what was found about its hook points."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import STREAM_HOOKS, layers_of
from vllm_weir.schema.rows import RowShape
from vllm_weir.util.shipped import check_folder, model_path

_OVERRIDES = ("config_format", "hf_config_path", "hf_overrides")
"""Options of ``vllm.LLM`` with which the model is another one than its ``config.json`` describes."""
_TEXT = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where models that take more than text describe the part that reads it."""
_LAYERS, _WIDTH = ("num_hidden_layers", "n_layer", "n_layers"), ("hidden_size", "n_embd", "d_model")
_HEADS = re.compile(r"(?:.*_)?(?:heads?|heads_per_layer)")


class ModelConfig(NamedTuple):
    """Facts of a model; None for what its ``config.json`` does not say.

    Attributes:
        layers: number of blocks.
        heads: the most heads that a hook point has.
        width: of the stream.
    """

    layers: int | None = None
    heads: int | None = None
    width: int | None = None

    @classmethod
    def read(cls, model: str, options: Mapping[str, Any]) -> ModelConfig:
        """Read what is on this machine.

        Args:
            model: directory or hub id, or ``demo``.
            options: of ``vllm.LLM``.

        Raises:
            WeirError: naming ``model``, for a directory that does not exist.
        """
        check_folder(model)
        path = _path(model_path(model), options.get("revision"))
        if path is None or not os.path.isfile(path) or any(options.get(name) for name in _OVERRIDES):
            return cls()
        try:
            config = json.loads(Path(path).read_bytes())
        except (OSError, ValueError):
            return cls()  # vLLM will say it
        while isinstance(config, dict) and (part := next((name for name in _TEXT if name in config), None)):
            config = config[part]
        if not isinstance(config, dict) or config.get("is_encoder_decoder"):
            return cls()
        heads = [n for name, value in config.items() if _HEADS.fullmatch(name) for n in _ints(value)]
        known = {"num_attention_heads", "n_head", "n_heads"} & set(config)
        return cls(_first(config, _LAYERS), max(heads) if heads and known else None, _first(config, _WIDTH))

    def check_layers(self, hook: str, layers: Any, field: str = "layers") -> None:
        """Raise WeirError for a block that the model lacks; `layers` is as `parse_layers` returns it."""
        if self.layers is not None:
            layers_of(hook, layers, self.layers, field)

    def check_heads(self, heads: Any, field: str = "heads") -> None:
        """Raise WeirError for a head, of those listed, that no hook point of the model has."""
        if self.heads is None or isinstance(heads, str):
            return
        for head in _ints(heads):
            if head >= self.heads:
                raise WeirError(f"head {head} does not exist: the model has heads 0..{self.heads - 1}", field)

    def check_width(self, hook: str, width: int, field: str) -> None:
        """Raise WeirError if rows of a hook point cannot have this width."""
        if self.width is not None and hook in STREAM_HOOKS and width % self.width:
            raise WeirError(f"it reads {width} values, and a row of {hook} has {self.width}", field)


def _path(model: str, revision: str | None) -> str | None:
    """Return where a model's ``config.json`` is on this machine, if it is."""
    if not model:
        return None
    if Path(model).expanduser().is_dir():
        return os.path.join(Path(model).expanduser(), "config.json")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return None  # no id: a file, say
    return found if isinstance(found, str) else None


def _ints(value: Any) -> Iterator[int]:
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if type(one) is int:
            yield one


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = [config[name] for name in names if type(config.get(name)) is int]
    return max(found, default=None)


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

    @property
    def chosen_by_logits(self) -> bool:
        """Whether the experts with the largest logits are chosen; else scores decide, which are more often equal."""
        return not (self.groups or self.bias or self.scoring == "sqrtsoftplus")


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


class SiteVerdict(NamedTuple):
    """Whether one hook point of one block is served.

    Attributes:
        hook: hook point.
        layer: block index; 0 for `embed` and `final_norm`.
        supported: whether it can be captured, and steered unless it is one of `READ_ONLY_HOOKS` or
            `read_only` says why not.
        reason: why not, in one sentence; empty if it can.
        shape: of a row, say (d_model,) or (heads, d_head); a 0 in it stands for the number of keys,
            which differs from row to row. Empty if the site is not supported.
        read_only: why the site can be captured and not steered, if that is so in this model.
    """

    hook: str
    layer: int
    supported: bool
    reason: str = ""
    shape: RowShape = ()
    read_only: str = ""
