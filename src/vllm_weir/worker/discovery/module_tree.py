"""The module tree as the probe sees it: the blocks, what is in them, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

OUTSIDE = -1
"""Block number of modules that belong to none."""


@dataclass(frozen=True)
class ModuleTree:
    """The module tree as the probe sees it.

    Attributes:
        model: all of it.
        stack: path of the blocks' list; `blocks`: index -> block, for those that are here.
        width: of the stream.
        is_core: whether a module mixes tokens (attention, linear attention, a state-space layer).
        is_embedding: whether a module looks tokens up.
        entrance: path of the module that is given embeddings where tokens are looked up before the model runs.
        look_up: gives the model's embeddings of a few tokens, as they are given then, [tokens, width]; None: not known.
    """

    model: torch.nn.Module
    stack: str
    blocks: dict[int, torch.nn.Module]
    num_layers: int
    width: int
    is_core: Callable[[torch.nn.Module], bool]
    is_embedding: Callable[[torch.nn.Module], bool]
    entrance: str = ""
    look_up: Callable[[], torch.Tensor] | None = None

    @cached_property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Every module of the model by path; one that stands in several places comes with the first."""
        return dict(self.model.named_modules())

    def members(self) -> Iterator[tuple[int, str, str, torch.nn.Module]]:
        """(block or OUTSIDE, path, path in the block, module); ancestors of the blocks are left out.

        A module that stands in several places comes with the first.
        """
        prefix = f"{self.stack}."
        for path, module in self.modules.items():
            if path == "" or path == self.stack or self.stack.startswith(f"{path}."):
                continue
            if not path.startswith(prefix):
                yield OUTSIDE, path, path, module
                continue
            number, _, local = path.removeprefix(prefix).partition(".")
            if int(number) in self.blocks:
                yield int(number), path, local, module

    def shared(self) -> set[str]:
        """Paths of modules in a block that other blocks use as well."""
        places: dict[int, list[tuple[str, str]]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            if path.startswith(f"{self.stack}."):
                places.setdefault(id(module), []).append((path.removeprefix(f"{self.stack}.").split(".")[0], path))
        return {path for found in places.values() if len({b for b, _ in found}) > 1 for _, path in found}
