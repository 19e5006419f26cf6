"""The routers of vLLM's MoE layers: which a model has, and the op behind each choice.

vLLM's own flag ``enable_return_routed_experts`` reads them at the same place: after the choice, before experts are
mapped to their copies on other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling

from vllm_weir.schema.routing import RoutedBlocks
from vllm_weir.worker.tap.routing import FoundRouters, RoutedRows

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
