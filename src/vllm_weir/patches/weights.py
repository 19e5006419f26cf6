"""The weights that a vLLM worker computes with, for their `fingerprint`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.worker.weights import fingerprint

BLOCK = 64
"""Columns of a packed matrix that are added up in one product."""


def weights_now(runner: Any) -> str | dict[str, str]:
    try:
        with torch.no_grad():
            return fingerprint(_tensors(runner.get_model()))
    except WeirError as e:
        return {"error": e.message}


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's parameters and the buffers that belong to its state, by name.

    Kernels of CPUs keep the matrices of linear modules in a form of their own, which cannot be read,
    and vLLM drops the parameter. Of such a module it yields products with vectors that between them
    have every column.

    Raises:
        WeirError: if weights can be read in neither way.
    """
    for prefix, module in model.named_modules():
        kept = {n: t for n, t in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for own, tensor in {**module._parameters, **kept}.items():
            name = f"{prefix}.{own}"
            if is_dropped(module, own, tensor):
                yield name, products(module, name)
            elif tensor is not None:
                yield name, tensor


def is_dropped(module: Any, own: str, tensor: torch.Tensor | None) -> bool:
    """Return whether a module's parameter, `tensor`, is empty because kernels keep it in a form of their own."""
    named = own.endswith(("weight", "weight_packed")) and hasattr(module, "quant_method")
    return named and (tensor is None or not tensor.numel())


def products(module: Any, name: str) -> torch.Tensor:
    """Return what a linear module makes of vectors with `BLOCK` columns each, and 1 to 2 in them."""
    width = getattr(module, "input_size_per_partition", getattr(module, "input_size", None))
    if width is None:
        raise WeirError(f"{name} is in a form that cannot be read, so that it cannot be told from other weights")
    column = torch.arange(width)
    vectors = torch.zeros(-(-width // BLOCK), width, dtype=module.params_dtype)
    vectors[column // BLOCK, column] = (1 + column % BLOCK / BLOCK).to(vectors.dtype)
    device = next((p.device for p in module.parameters()), vectors.device)
    return module.quant_method.apply(module, vectors.to(device), None)
