"""Noise in place of a model's tensors: an equation between noisy tensors holds only where the model really adds."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from vllm_weir.worker.discovery.anchors import TensorKey
from vllm_weir.worker.discovery.module_tree import ModuleTree
from vllm_weir.worker.discovery.recorder import ModuleCall, Override
from vllm_weir.worker.discovery.resolve import StreamPorts, alike


def noise(name: str, like: torch.Tensor) -> torch.Tensor:
    """Standard normal float32 of `like`'s shape, the same for a name on every rank and in every pass."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator).to(like.device)


def enter_noise(ports: StreamPorts) -> Override:
    """Noise instead of a block's stream."""

    def enter(_block: int, path: str, call: ModuleCall, live: Mapping[TensorKey, torch.Tensor]) -> None:
        for port in (ports.hidden_in, ports.residual_in):
            key = alike(port, live) if port is not None else None
            if key is not None and key in live:
                live[key].copy_(noise(f"{path}:{key.name or key.index}", live[key]))

    return enter


def leave_noise(tree: ModuleTree, mode: str, cores: set[str]) -> Override:
    """Noise instead of what parts of a block, the embedding and the final norm leave behind.

    Parts are the block's children, or with ``mode="leaves"`` modules that have no parts themselves: some blocks make
    their additions deeper down.
    """

    def leave(block: int, path: str, call: ModuleCall, live: Mapping[TensorKey, torch.Tensor]) -> None:
        module = tree.modules[path]
        if block < 0:
            part = tree.is_embedding(module) or next(module.children(), None) is None
        elif mode == "children":
            part = path in cores or (bool(call.local) and "." not in call.local)
        else:
            part = path in cores or (bool(call.local) and next(module.children(), None) is None)
        if part:
            fill(path, call, live)

    return leave


def fill(path: str, call: ModuleCall, live: Mapping[TensorKey, torch.Tensor]) -> None:
    """Noise instead of what a call leaves behind: what it wrote into, or the first of its results.

    Which it is goes by the module's own calls: a pass may have calls of others that the next has not (warm-ups).
    """
    keys = [k for k in live if k.kind == "arg"] or list(live)[:1]
    for key in keys:
        live[key].copy_(noise(f"{path}:{call.turn}:{key.index}", live[key]))
