"""The module tree of a model: the blocks, what is in them, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

OUTSIDE = -1
"""Block number of modules that belong to no block."""

Run = Callable[[], None]
"""Runs the model once, uncompiled, over a few tokens."""


@dataclass(frozen=True)
class ModuleTree:
    """A model, where its blocks are, and which modules mix tokens or look them up."""

    model: torch.nn.Module
    stack: str  # path of the list of blocks
    blocks: dict[int, torch.nn.Module]  # index -> block, for the blocks that live in this process
    num_layers: int  # blocks of the whole model
    width: int
    # whether a module mixes tokens (attention, linear attention, a state-space layer)
    is_mixer: Callable[[torch.nn.Module], bool]
    is_embedding: Callable[[torch.nn.Module], bool]  # whether a module looks tokens up
    entrance: str = ""  # path of the module that takes embeddings if tokens are looked up before the model runs
    # returns the embeddings of a few tokens as the model is given them in that case, [tokens, width]; None if unknown
    look_up: Callable[[], torch.Tensor] | None = None
    # returns the tensors, among the keyword arguments of the module that runs the blocks, that it may add to the stream
    # between them (features of images)
    beside_stream: Callable[[Mapping[str, Any]], Sequence[torch.Tensor]] = lambda _given: ()

    @cached_property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Every module by path; a module reachable by several paths appears under the first."""
        return dict(self.model.named_modules())

    def members(self) -> Iterator[tuple[int, str, str, torch.nn.Module]]:
        """Yield (block or OUTSIDE, path, path from the block, module) of every module.

        Leave out modules that contain the blocks. Yield a module that is reachable by several paths
        once, with the first.
        """
        prefix = f"{self.stack}."
        for path, module in self.modules.items():
            if path == "" or path == self.stack or self.stack.startswith(f"{path}."):
                continue
            if not path.startswith(prefix):
                yield OUTSIDE, path, path, module
                continue
            number, _, local_path = path.removeprefix(prefix).partition(".")
            if int(number) in self.blocks:
                yield int(number), path, local_path, module

    def shared(self) -> set[str]:
        """Return the paths of modules that are in several blocks."""
        prefix = f"{self.stack}."
        places: dict[int, list[tuple[str, str]]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            if path.startswith(prefix):
                block = path.removeprefix(prefix).split(".")[0]
                places.setdefault(id(module), []).append((block, path))
        several = (found for found in places.values() if len({block for block, _ in found}) > 1)
        return {path for found in several for _, path in found}

    def only_scales(self, path: str) -> bool:
        """Return whether a module has no matrix: a norm, a dropout, an activation."""
        return all(parameter.dim() < 2 for parameter in self.modules[path].parameters())
