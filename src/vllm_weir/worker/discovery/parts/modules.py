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
    """Values that a linear module takes or returns for a token: how many there are, and which are here.

    Attributes:
        whole: how many the whole model has.
        shard: which of them this worker's module takes or returns.
    """

    whole: int
    shard: Shard

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
    """A linear module.

    Attributes:
        inputs: of its input.
        outputs: of the matrices that it merges, in the order in which their results lie in a row.
        quantises_input: whether vLLM may fuse the quantisation of its input with what comes before.
    """

    inputs: Features
    outputs: tuple[Features, ...]
    quantises_input: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """A softmax attention layer, called with queries, keys and values.

    Attributes:
        heads: query heads of this worker.
        kv_heads: its key-value heads.
        head_size: of queries and keys.
        value_size: of a head of the result.
        latent: whether it takes latent vectors in place of keys and values (MLA).
    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    latent: bool = False


@dataclass(frozen=True)
class PartModules:
    """Recognises the modules inside attention and MLP.

    Attributes:
        attention: the shape of a softmax attention layer; None for any other module.
        linear: the shape of a linear module; None for any other module.
        experts: the number of experts of a layer that runs them in one kernel; None for any other
            module.
        ranks: workers among which rows are divided.
    """

    attention: Callable[[torch.nn.Module], AttentionShape | None]
    linear: Callable[[torch.nn.Module], LinearShape | None]
    experts: Callable[[torch.nn.Module], int | None]
    ranks: int = 1
