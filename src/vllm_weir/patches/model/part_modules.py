"""The modules inside attention and MLP, as vLLM's classes have them, for `worker.discovery`."""

from __future__ import annotations

from typing import Any

import torch

from vllm_weir.schema.row_shapes import Shard
from vllm_weir.worker.discovery.parts.modules import AttentionShape, Features, LinearShape, PartModules
from vllm_weir.worker.model_info import ModelInfo

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
