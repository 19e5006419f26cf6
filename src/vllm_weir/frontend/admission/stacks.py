"""What comes as one tensor of several blocks, as vllm-lens has it: the stream, and attention's queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.derived.sources import sources_of
from vllm_weir.results.stacked import NOT_STACKED, Stacked
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.model_facts import AttentionFacts
from vllm_weir.schema.request import RequestSpec


class Stacks(NamedTuple):
    """What is stacked, and the captures that its rows need beside those that the request names."""

    entries: Stacked = NOT_STACKED
    captures: tuple[Capture, ...] = ()


def stack(spec: RequestSpec, capabilities: EngineCapabilities, has_media: bool) -> Stacks:
    """Return what a request wants stacked.

    Args:
        spec: what it asks.
        capabilities: what the engine serves.
        has_media: whether the prompt, or a part of it, is given as embeddings or as images and the like.

    Raises:
        WeirError: naming the field.
    """
    stream = () if spec.stacked is None else spec.stacked.resolve_layers(capabilities.num_layers)
    if spec.qk is None:
        return Stacks(Stacked(stream)) if stream else Stacks()
    path, facts = spec.qk.path, capabilities.facts
    queries = _queries(spec.qk, capabilities)
    for layer in queries:
        _check(layer, facts.attention[layer], has_media, f"{path}.layers")
    pairs = [[source.site for source in sources_of(Site("pattern", layer), facts)] for layer in queries]
    keys = tuple(key.layer for _, key in pairs)
    shapes = {layer: tuple(map(capabilities.shape, pair)) for layer, pair in zip(queries, pairs, strict=True)}
    other = next((layer for layer in queries if shapes[layer] != shapes[queries[0]]), None)
    if other is not None:
        raise WeirError(
            f"blocks {queries[0]} and {other} have heads of other numbers or sizes, which are no one tensor; send "
            "separate requests, or capture q_rot and k_rot",
            f"{path}.layers",
        )
    told = tuple(_meta(facts.attention[layer], *shapes[layer]) for layer in queries)
    captures = (
        Capture("q_rot", layers=list(queries), path=path),
        Capture("k_rot", layers=sorted(set(keys)), path=path),
    )
    return Stacks(Stacked(stream, queries, keys, told), captures)


def _queries(asked: Capture, capabilities: EngineCapabilities) -> tuple[int, ...]:
    """Return the blocks that are asked for; of all those that have heads with queries and keys.

    Raises:
        WeirError: if one of them is not served, or there is none.
    """
    layers, attention = asked.resolve_layers(capabilities.num_layers), capabilities.facts.attention
    if asked.layers == "all":
        with_heads = tuple(layer for layer in layers if layer in attention and attention[layer].heads)
        layers = with_heads or layers  # without any, the first block says why
    for layer in layers:
        if why := capabilities.sites.get(Site("pattern", layer), "the block has no attention"):
            raise WeirError(f"the attention of block {layer} is refused: {why}", f"{asked.path}.layers")
    return layers


def _check(layer: int, facts: AttentionFacts, has_media: bool, field: str) -> None:
    """Raise WeirError if ``qk_meta`` cannot say what a layer does with its queries and keys."""
    if facts.chunk is not None:
        raise WeirError(
            f"block {layer} attends in chunks of {facts.chunk} positions, for which qk_meta has no field; capture "
            "pattern, or q_rot and k_rot",
            field,
        )
    if has_media and facts.media:
        raise WeirError(
            f"block {layer} lets tokens of one image see each other, for which qk_meta has no field; send text, or "
            "capture q_rot and k_rot",
            field,
        )


def _meta(facts: AttentionFacts, queries: tuple[int, ...], keys: tuple[int, ...]) -> dict[str, Any]:
    """Return an entry of ``qk_meta``; `queries` and `keys` are the shapes of rows, [heads, head size]."""
    return {
        "layer_name": facts.name,
        "scale": facts.scale,
        "logits_soft_cap": facts.soft_cap,
        "sliding_window": [-1, -1] if facts.window is None else [facts.window - 1, 0],
        "alibi_slopes": list(facts.alibi) or None,
        "sinks": list(facts.sinks) or None,
        "use_alibi_sqrt": False,
        "num_heads_local": queries[0],
        "num_kv_heads_local": keys[0],
        "head_size": facts.head_size,
        "num_kv_heads_total": keys[0],
    }
