"""transformers with experts forced on its routers: those that a `Replay` covers, each router's own elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def forced(oracle: Any, array: np.ndarray, experts: int, start: int = 0) -> Iterator[None]:
    """While this holds, a pass over one sequence has these experts, [positions, blocks, top_k], from `start` on.

    A router takes its experts by one `torch.topk` over all of them, and their weights by the model's own rule from what
    this returns, or by its indices. Blocks whose rows are all 0 have no router.
    """
    own, calls = torch.topk, [0]
    wanted = torch.from_numpy(array.astype(np.int64))
    routed = [block for block in range(wanted.shape[1]) if wanted[:, block].any()]

    def topk(values: torch.Tensor, k: int, *args: Any, **more: Any) -> Any:
        found = own(values, k, *args, **more)
        if values.shape[-1] != experts or k != wanted.shape[2]:
            return found
        block, calls[0] = routed[calls[0] % len(routed)], calls[0] + 1
        indices = found[1].clone()
        rows = wanted[: max(0, len(indices) - start), block]
        indices[start : start + len(rows)] = rows
        return torch.return_types.topk((values.gather(-1, indices), indices))

    torch.topk = topk
    try:
        yield
    finally:
        torch.topk = own


def random_experts(shape: tuple[int, int, int], experts: int, seed: int, dense: tuple[int, ...] = ()) -> np.ndarray:
    """Different experts of each token and block; 0 at the dense blocks."""
    positions, blocks, top_k = shape
    draw = torch.Generator().manual_seed(seed)
    array = torch.rand(positions, blocks, experts, generator=draw).argsort(-1)[..., :top_k].numpy().astype(np.uint8)
    array[:, list(dense)] = 0
    return array
