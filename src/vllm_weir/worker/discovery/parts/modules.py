"""What discovery is told of the modules inside attention and MLP: their kinds, and which part of a row they hold.

Structure does not tell a matrix from any other module, nor how a row is divided among workers. So
`patches.model.discovery` hands in a `PartModules`, which recognises the modules of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_weir.schema.rows import Shard


@dataclass(frozen=True)
class Features:
    """Values that a linear module takes or returns for a token: how many there are, and which are here."""

    whole: int  # how many the whole model has
    shard: Shard  # which of them this worker's module takes or returns

    @classmethod
    def unsplit(cls, width: int) -> Features:
        """Return the features of a module that is the same on every worker."""
        return cls(width, Shard(0, width))

    @property
    def width(self) -> int:
        """How many are here."""
        return self.shard.stop - self.shard.start

    def part(self, start: int, stop: int) -> Features:
        """Return a contiguous part of these; `start` and `stop` count from the first one here."""
        return Features(self.whole, Shard(self.shard.start + start, self.shard.start + stop))


@dataclass(frozen=True)
class LinearShape:
    """A linear module."""

    inputs: Features  # of its input
    outputs: tuple[Features, ...]  # of the matrices that it merges, in the order in which their results lie in a row
    quantises_input: bool = False  # whether vLLM may fuse the quantisation of its input with what comes before


@dataclass(frozen=True)
class AttentionShape:
    """A softmax attention layer, called with queries, keys and values."""

    heads: int  # query heads of this worker
    kv_heads: int  # its key-value heads
    head_size: int  # of queries and keys
    value_size: int  # of a head of the result
    latent: bool = False  # whether it takes latent vectors in place of keys and values (MLA)


@dataclass(frozen=True)
class PartModules:
    """Recognises the modules inside attention and MLP."""

    # the shape of a softmax attention layer; None for any other module
    attention: Callable[[torch.nn.Module], AttentionShape | None]
    linear: Callable[[torch.nn.Module], LinearShape | None]  # the shape of a linear module; None for any other module
    # the number of experts of a layer that runs them in one kernel; None for any other module
    experts: Callable[[torch.nn.Module], int | None]
    ranks: int = 1  # workers among which rows are divided
