"""What Weir finds in a loaded model: its hook points, and its routers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling

from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.patches.model.facts import read_facts
from vllm_weir.patches.speculation import without_drafter
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.routing import RoutedBlocks
from vllm_weir.schema.rows import Shard
from vllm_weir.worker.discovery.block_stack import description_of, find_tree
from vllm_weir.worker.discovery.parts.recorder import AttentionShape, Features, LinearShape, PartModules
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.discovery.sites import map_sites
from vllm_weir.worker.model_info import ModelInfo
from vllm_weir.worker.tap.routing import FoundRouters, RoutedRows

# The routers of vLLM's MoE layers: which a model has, and the op behind each choice.
#
# vLLM's own flag ``enable_return_routed_experts`` reads them at the same place: after the choice, before experts are
# mapped to their copies on other ranks.

BUFFER = "weir_routing"
"""The buffer of a MoE layer that holds its router's number."""


def find_routers(model: torch.nn.Module, blocks: Mapping[int, torch.nn.Module], config: Any) -> FoundRouters:
    """Return the routers of a loaded model, in this process of its blocks by index, or why they are not served."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    owners: dict[int, Any] = {}
    experts, top_k, refused = 0, 0, ""
    for index, block in blocks.items():
        # The layer and what runs it may both hold the router.
        found = [m for m in block.modules() if isinstance(getattr(m, "router", None), BaseRouter)]
        if not found:
            continue
        owner: Any = found[-1]
        router = owner.router
        own = getattr(getattr(owner, "moe_config", None), "num_logical_experts", None) or router.global_num_experts
        if len({id(m.router) for m in found}) > 1:
            refused = refused or f"block {index} has several routers"
        elif _is_monolithic(found):
            refused = refused or (
                f"in block {index} the kernel of the experts chooses them itself; start the engine with another "
                "moe_backend, such as 'triton'"
            )
        elif getattr(router, "num_fused_shared_experts", 0):
            refused = refused or f"the router of block {index} appends the shared experts to the chosen ones"
        elif owners and (experts, top_k) != (own, router.top_k):
            refused = refused or "its blocks have different numbers of experts, or choose different numbers of them"
        owners[index], experts, top_k = owner, own, router.top_k
    if not owners:
        own_kind = _own_router(model)
        return FoundRouters(refused=f"its {own_kind} chooses experts in code of its own" if own_kind else "")
    if refused := _why_spread(config) or refused:
        return FoundRouters(refused=refused)
    return FoundRouters(RoutedBlocks(tuple(sorted(owners)), experts, top_k), install=partial(_install, owners))


def _why_spread(config: Any) -> str:
    """Return why the routers of a worker do not see its own tokens alone, or ""."""
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        return "with data parallelism, routers are given the tokens of several engines; start separate engines"
    if getattr(parallel, "use_sequence_parallel_moe", False):
        return "with sequence parallelism in MoE layers, a router sees only a part of the tokens; turn it off"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "with context parallelism, routers are given the tokens of several workers"
    return ""


def _is_monolithic(owners: list[Any]) -> bool:
    """Return whether the experts' kernel takes logits, and the router is never called."""
    methods = [getattr(owner, name, None) for owner in owners for name in ("_quant_method", "quant_method")]
    return any(bool(getattr(method, "is_monolithic", False)) for method in methods)


def _own_router(model: torch.nn.Module) -> str:
    """Return the name of a module that says it chooses experts, of a model without vLLM's routers, or ""."""
    return next((type(m).__name__ for m in model.modules() if hasattr(m, "capture_fn")), "")


def _install(owners: Mapping[int, Any], rows: RoutedRows) -> None:
    for index, owner in owners.items():
        owner.register_buffer(BUFFER, rows.register(index), persistent=False)
        owner.router._compute_routing = _recorded(owner, owner.router._compute_routing, rows)


def _recorded(owner: Any, compute: Any, rows: RoutedRows) -> Any:
    """Wrap ``BaseRouter._compute_routing`` of one router: change and record what it returns."""

    def wrapper(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = compute(*args, **kwargs)
        if is_compiling() or rows.wanted:
            logits = kwargs["router_logits"] if "router_logits" in kwargs else args[1]
            torch.ops.weir.routing(weights, ids, logits, getattr(owner, BUFFER))
        return weights, ids

    return wrapper


TOKENS = 8
"""Tokens of a probe pass."""


def find_sites(runner: Any, config: Any, model_info: ModelInfo, settings: Settings, v2: bool) -> SiteMap:
    """Find and verify every site of a loaded model; `settings` may describe it, `v2` says which runner it has.

    Raise WeirError if the model has no list of blocks, or cannot be run by itself.
    """
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    model = runner.get_model()
    num_layers = config.model_config.get_total_num_hidden_layers()
    description = description_of(type(model).__name__, settings.describe)
    # With LoRA a wrapper is what is called; a head that computes logits is a subclass too.
    embeddings = (VocabParallelEmbedding, VocabParallelEmbeddingWithLoRA)
    num_tokens = min(TOKENS, config.scheduler_config.max_num_batched_tokens)
    dummy_run_options = {"is_profile": True, "skip_eplb": True, **({"skip_attn": True} if v2 else {})}
    compiled = [m for m in model.modules() if getattr(m, "do_not_compile", None) is False]

    def run() -> None:
        for module in compiled:
            module.do_not_compile = True
        try:
            # Else parts with a compiler of their own (norms) would be compiled for these passes.
            with torch.compiler.set_stance("force_eager"), without_drafter(runner):
                runner._dummy_run(num_tokens, **dummy_run_options)
        finally:
            for module in compiled:
                module.do_not_compile = False

    def look_up() -> torch.Tensor:
        return model.embed_input_ids(torch.arange(num_tokens, device=model_info.device))

    try:
        with torch.inference_mode():
            tree = find_tree(
                model,
                model_info.d_model,
                num_layers,
                description,
                is_mixer=lambda module: isinstance(module, AttentionLayerBase) or _keeps_attention_apart(model, module),
                is_embedding=lambda module: isinstance(module, embeddings) and not isinstance(module, ParallelLMHead),
                run=run,
                compiled_whole=lambda module: hasattr(module, "do_not_compile"),
                look_up=look_up,
                beside_stream=_beside_stream,
            )
            site_map = map_sites(tree, run, model_info.dtype, description, part_modules(config, model_info))
    except WeirError:
        raise
    except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError, NotImplementedError, KeyError) as e:
        name = type(model).__name__
        raise WeirError(f"the probe pass through {name} failed ({type(e).__name__}: {str(e)[:300]})", "model") from e
    _refuse_unclear_queries(site_map, model)
    on_cpu = model_info.device.type == "cpu"
    routers = site_map.routers = find_routers(model, tree.blocks, config)
    if routers.blocks is not None:
        site_map.shapes[routers.blocks.site] = (math.prod(routers.blocks.shape),)
    site_map.read_facts = functools.partial(read_facts, model, tree.blocks, model_info.dtype, on_cpu, site_map.shards)
    return site_map


def _refuse_unclear_queries(site_map: SiteMap, model: torch.nn.Module) -> None:
    """Refuse queries and keys that are not the projections' outputs in the checkpoint's order of columns.

    The positions of a probe pass may be alike, and rotary changes nothing there. So where a model
    rotates inside attention's own code, what attention is given looks like the projection's output.
    """
    layers = range(site_map.num_layers)
    if hasattr(model, "permute_qk_weight_for_rotary"):
        why = "vLLM reorders the columns of this model's queries and keys when it loads them"
        return site_map.refuse(("q", "k", "q_rot", "k_rot"), layers, why)
    if not any("rotary" in type(module).__name__.lower() for module in model.modules()):
        return
    for hook, rotated in (("q", "q_rot"), ("k", "k_rot")):
        anchors = site_map.anchors
        same = [
            n for n in layers if (a := anchors.get(Site(hook, n))) is not None and a == anchors.get(Site(rotated, n))
        ]
        site_map.refuse((hook,), same, f"the model rotates it before any module has it, so there is only {rotated}")


def _beside_stream(given: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return what vLLM's models add to the stream between blocks: features of images ("DeepStack").

    They travel as keyword arguments, in the class that also carries the stream from one pipeline
    stage to the next.
    """
    from vllm.sequence import IntermediateTensors

    added = [v for k, v in given.items() if isinstance(v, IntermediateTensors) and k != "intermediate_tensors"]
    return [tensor for one in added for tensor in one.tensors.values()]


def _keeps_attention_apart(model: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Return whether a module calls an attention layer that is not in the module tree.

    Up to vLLM 0.28 the Transformers backend has them in a dict of the model, by the block's index.
    """
    apart = getattr(model, "attention_instances", None) or {}
    return getattr(module, "layer_idx", None) in apart and "Attention" in type(module).__name__


WEIGHTS_ONLY = ("awq", "bitsandbytes", "gguf", "gptq")
"""Beginnings of the names of quantisations that leave activations as they are, so that nothing is fused with them."""


def part_modules(config: Any, model_info: ModelInfo) -> PartModules:
    """Return how to recognise the modules inside attention and MLP."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.linear import LinearBase

    quantisation = getattr(config.model_config, "quantization", None) or ""
    fuses = model_info.device.type == "cuda" and not quantisation.startswith(WEIGHTS_ONLY)
    runner = _experts_class()

    def attention(module: torch.nn.Module) -> AttentionShape | None:
        if isinstance(module, MLAAttention):
            return AttentionShape(module.num_heads, module.num_heads, module.head_size, module.v_head_dim, True)
        if isinstance(module, Attention):
            size = module.head_size
            value_size = getattr(module, "head_size_v", size)
            return AttentionShape(module.num_heads, module.num_kv_heads, size, value_size)
        return None

    def linear(module: torch.nn.Module) -> LinearShape | None:
        if isinstance(module, BaseLinearLayerWithLoRA):
            # An adapter needs the input as it is, so nothing is fused with its quantisation.
            return _linear_shape(module.base_layer, False)
        if isinstance(module, LinearBase):
            return _linear_shape(module, fuses and _is_quantised(module))
        if isinstance(module, torch.nn.Linear):
            return LinearShape(Features.unsplit(module.in_features), (Features.unsplit(module.out_features),))
        return None

    def experts(module: torch.nn.Module) -> int | None:
        return _num_experts(module) if isinstance(module, runner) else None

    return PartModules(attention, linear, experts, model_info.ranks)


def _experts_class() -> type:
    """Return the class of layers that run experts in one kernel."""
    try:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface
    except ImportError:
        from vllm.model_executor.layers.fused_moe import FusedMoE

        return FusedMoE
    return MoERunnerInterface


def _num_experts(module: Any) -> int:
    """Return the number of experts that a router chooses among, without redundant copies."""
    moe_config = getattr(module, "moe_config", None)
    for holder, name in ((moe_config, "num_logical_experts"), (module, "logical_num_experts")):
        count = getattr(holder, name, None)
        if count is not None:
            return int(count)
    return int(module.global_num_experts)


def _is_quantised(module: Any) -> bool:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    return not isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod)


def _linear_shape(module: Any, quantises_input: bool) -> LinearShape:
    """Return the shape of one of vLLM's linear modules."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    rank, ranks = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    inputs = Features.unsplit(module.input_size)
    outputs: tuple[Features, ...] = (Features.unsplit(module.output_size),)
    if isinstance(module, RowParallelLinear):
        inputs = _divided(module.input_size, rank, ranks)
    elif isinstance(module, QKVParallelLinear) and len(module.output_sizes) == 3:
        outputs = _qkv(module, rank, ranks)
    elif isinstance(module, ColumnParallelLinear):
        sizes = getattr(module, "output_sizes", None) or [module.output_size]
        gathered = module.gather_output
        outputs = tuple(Features.unsplit(size) if gathered else _divided(size, rank, ranks) for size in sizes)
    elif (sizes := getattr(module, "output_sizes", None)) is not None:
        outputs = tuple(Features.unsplit(size) for size in sizes)
    return LinearShape(inputs, outputs, quantises_input)


def _divided(size: int, rank: int, ranks: int) -> Features:
    return Features(size, Shard(rank * (size // ranks), (rank + 1) * (size // ranks)))


def _qkv(module: Any, rank: int, ranks: int) -> tuple[Features, Features, Features]:
    """Return queries, keys and values; several workers may hold the same key-value heads."""
    queries = _divided(module.total_num_heads * module.head_size, rank, ranks)
    begin = rank // module.num_kv_head_replicas * module.num_kv_heads
    value_size = getattr(module, "v_head_size", module.head_size)
    keys, values = (
        Features(module.total_num_kv_heads * size, Shard(begin * size, (begin + module.num_kv_heads) * size))
        for size in (module.head_size, value_size)
    )
    return queries, keys, values
