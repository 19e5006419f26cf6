"""What vLLM's attention and MoE layers are set up to do, read from the loaded model.

`read_facts` gives the facts from which derived hook points are computed. It reads attributes that
vLLM does not document: one that a version lacks, or a layer of another kind, makes a fact that says
why nothing is derived from that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_weir.schema.hooks import Site
from vllm_weir.schema.model_facts import AttentionFacts, ModelFacts, RoutingFacts
from vllm_weir.schema.rows import Shard

KNOWN_ATTENTION = ("Attention", "ChunkedLocalAttention")
"""vLLM's attention layers that do nothing but mask and multiply; its other ones are subclasses."""


def read_facts(
    model: torch.nn.Module,
    blocks: Mapping[int, torch.nn.Module],
    dtype: torch.dtype,
    on_cpu: bool,
    shards: Mapping[Site, Shard],
) -> ModelFacts:
    """Read the facts of a loaded model, in this process of its blocks by index.

    A CPU's vLLM chooses experts with other functions; `shards` are the parts of rows that this worker holds.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    # Up to vLLM 0.28 the Transformers backend has its attention layers here and not in the blocks.
    apart: Mapping[int, Any] = getattr(model, "attention_instances", None) or {}
    layers: dict[int, list[Any]] = {}
    routing: dict[int, RoutingFacts] = {}
    for index, block in blocks.items():
        layers[index] = _unique(m for m in block.modules() if isinstance(m, AttentionLayerBase))
        if not layers[index] and index in apart:
            layers[index] = [apart[index]]
        # The layer and what runs it may both hold the router, or not have one.
        owners = [m for m in block.modules() if isinstance(getattr(m, "router", None), BaseRouter)]
        if owners:
            routing[index] = _routing(owners, on_cpu)
    owner_of = {getattr(layer, "layer_name", ""): index for index, some in layers.items() for layer in some}
    attention = {
        index: _attention(some, [layer for layer in some if isinstance(layer, Attention)], index, owner_of, dtype)
        for index, some in layers.items()
        if some
    }
    first_head = {
        index: shards[Site("q_rot", index)].start // facts.head_size
        for index, facts in attention.items()
        if facts.head_size and Site("q_rot", index) in shards
    }
    return ModelFacts(attention, routing, first_head)


def _unique(items: Any) -> list[Any]:
    return list({id(item): item for item in items}.values())


def _attention(
    layers: list[Any], with_keys: list[Any], index: int, owner_of: Mapping[str, int], dtype: torch.dtype
) -> AttentionFacts:
    """Return the facts of one block's attention.

    `layers` mix its tokens, of which `with_keys` have queries and keys for each head; `owner_of`
    maps the name of an attention layer to its block.
    """
    if not with_keys:
        return AttentionFacts(refused=f"its {type(layers[0]).__name__} has no queries and keys for each head")
    if len(with_keys) > 1:
        return AttentionFacts(refused=f"the block has {len(with_keys)} attention layers")
    (layer,) = with_keys
    try:
        facts = _decoder_attention(layer, index, owner_of)
    except AttributeError as e:
        return AttentionFacts(refused=f"this vLLM's attention layer cannot be read ({e})")
    if why := _why_not(layer, dtype):
        return replace(facts, refused=why)
    return facts


def _decoder_attention(layer: Any, index: int, owner_of: Mapping[str, int]) -> AttentionFacts:
    impl = layer.impl
    target = layer.kv_sharing_target_layer_name
    if target is not None and target not in owner_of:
        return AttentionFacts(refused=f"it uses the keys of {target}, which is in no block of this worker")
    window = layer.sliding_window
    return AttentionFacts(
        heads=layer.num_heads,
        head_size=layer.head_size,
        scale=float(impl.scale),
        window=window if window is not None and window > 0 else None,
        chunk=getattr(layer, "attention_chunk_size", None),  # of ChunkedLocalAttention alone
        soft_cap=float(impl.logits_soft_cap or 0),
        sinks=_floats(getattr(impl, "sinks", None)),  # backends that support no sinks have no attribute for them
        alibi=_floats(impl.alibi_slopes),
        keys_layer=index if target is None else owner_of[target],
        media=bool(getattr(layer, "use_mm_prefix", False)),  # not in every version
        name=layer.layer_name,
    )


def _why_not(layer: Any, dtype: torch.dtype) -> str:
    """Return why the scores of a layer do not follow from its facts, or ""."""
    name = type(layer).__name__
    if name not in KNOWN_ATTENTION:
        return f"{name} hides other keys than those after the query, or adds some"
    if layer.attn_type != "decoder":
        return f"it is {layer.attn_type} attention, in which a query sees more than the tokens before it"
    if layer.kv_cache_torch_dtype != dtype:
        return (
            f"the KV cache keeps keys as {layer.kv_cache_dtype}, so attention multiplies others than k_rot; start with "
            "kv_cache_dtype='auto'"
        )
    # Options of single backends.
    if getattr(layer, "has_sink", False) and getattr(layer.impl, "sinks", None) is None:
        return "its attention sinks cannot be read"
    if getattr(layer.impl, "use_alibi_sqrt", False):
        return "it adds ALiBi as a square root"
    if getattr(layer.impl, "chunk_lookback", -1) > -1:
        return "its chunks look back into the chunks before them"
    return ""


def _floats(values: Any) -> tuple[float, ...]:
    if values is None:
        return ()
    return tuple(torch.as_tensor(values).detach().float().flatten().tolist())


def _routing(owners: list[Any], on_cpu: bool) -> RoutingFacts:
    """Return the facts of one block's router, which all of `owners` hold."""
    routers = _unique(owner.router for owner in owners)
    if len(routers) > 1:
        return RoutingFacts(refused=f"the block has {len(routers)} routers")
    (router,) = routers
    name = type(router).__name__
    reader = _READERS.get(name)
    if reader is None:
        return RoutingFacts(refused=f"vLLM's {name} does not choose by the logits alone")
    config = getattr(owners[0], "moe_config", None)
    # With EPLB the router's own number counts copies of experts too; the logits have no column for these.
    experts = getattr(config, "num_logical_experts", None) or router.global_num_experts
    try:
        facts = reader(router, experts)
        why = _why_not_routed(router, facts)
    except AttributeError as e:
        return RoutingFacts(refused=f"this vLLM's {name} cannot be read ({e})")
    if why:
        return replace(facts, refused=why)
    return _as_on_cpu(facts) if on_cpu else facts


def _why_not_routed(router: Any, facts: RoutingFacts) -> str:
    """Return why a choice does not follow from a router's facts, or ""."""
    if facts.refused:
        return facts.refused
    # Attributes of some routers, of some versions.
    if getattr(router, "_hash_indices_table", None) is not None:
        return "it chooses experts by the token, not by the logits"
    if getattr(router, "bias_vl", None) is not None:
        return "it chooses experts of image tokens with another bias"
    if getattr(router, "num_fused_shared_experts", 0):
        return "it appends the shared experts to the chosen ones"
    if facts.scoring not in ("softmax", "sigmoid", "sqrtsoftplus"):
        return f"its scores are a {facts.scoring} of the logits, which Weir does not know"
    return ""


def _plain(router: Any, _experts: int) -> RoutingFacts:
    return RoutingFacts(router.top_k, router.scoring_func, bool(router.renormalize))


def _biased(router: Any, experts: int) -> RoutingFacts:
    return replace(
        _plain(router, experts),
        bias=_floats(router.e_score_correction_bias),
        scale=float(router.routed_scaling_factor),
    )


def _grouped(router: Any, experts: int) -> RoutingFacts:
    facts, groups = _biased(router, experts), router.num_expert_group
    if experts > groups and experts % groups == 0:
        # Without a bias vLLM scores in the logits' dtype; its kernel for biased ones does so in float32.
        return replace(facts, groups=groups, top_groups=router.topk_group, in_float32=bool(facts.bias))
    # vLLM then chooses among all, and without a bias by softmax, whatever it was told, and does not scale.
    return facts if facts.bias else replace(facts, scoring="softmax", scale=1.0)


def _custom(router: Any, _experts: int) -> RoutingFacts:
    """Return the facts of a router with a function of the model's; two of these are known."""
    function = router.custom_routing_function
    name = getattr(function, "__qualname__", type(function).__name__)  # a partial has no name
    if name == "Llama4MoE.custom_routing_function":
        return RoutingFacts(router.top_k, "sigmoid", False)
    if name == "token_choice_with_bias":  # of Cohere's MoE; its bias is in the logits
        return RoutingFacts(router.top_k, "sigmoid", bool(router.renormalize))
    return RoutingFacts(refused=f"the model chooses experts with a function of its own, {name}")


def _on_cpu(router: Any, experts: int) -> RoutingFacts:
    """Return the facts of the router that serves every scheme on a CPU."""
    if router.use_grouped_topk:
        return replace(_biased(router, experts), groups=router.num_expert_group, top_groups=router.topk_group)
    if router.scoring_func == "sqrtsoftplus":
        return _biased(router, experts)
    if router.custom_routing_function is not None:
        return _custom(router, experts)
    return _plain(router, experts)


def _as_on_cpu(facts: RoutingFacts) -> RoutingFacts:
    """Return the facts as vLLM's functions for CPUs have them.

    They take the largest logits with `torch.topk`. The plain softmax is in the logits' dtype, and
    knows neither bias nor scale.
    """
    if facts.scoring == "softmax" and not facts.groups:
        return replace(facts, bias=(), scale=1.0, in_float32=False, lowest_first=False)
    return replace(facts, in_float32=True, lowest_first=facts.scoring == "sqrtsoftplus")


_READERS: dict[str, Callable[[Any, int], RoutingFacts]] = {
    "FusedTopKRouter": _plain,
    "FusedTopKBiasRouter": _biased,
    "GroupedTopKRouter": _grouped,
    "CustomRoutingRouter": _custom,
    "CPURouter": _on_cpu,
}
