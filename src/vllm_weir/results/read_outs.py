"""What is read off rows on the device: `FeatureValues` of a sparse autoencoder, `LensTokens` of a lens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class FeatureValues:
    """Features of a sparse autoencoder on the rows of one output.

    Attributes:
        positions: of the rows, int64 [rows].
        ids: int64 [rows, k]: the most active features, the largest activation first and equal ones
            by id; or the chosen ones, in their order.
        values: their activations, float32 [rows, k].
    """

    positions: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class LensTokens:
    """The likeliest next tokens by a lens on the rows of one output.

    Attributes:
        positions: of the rows, int64 [rows].
        token_ids: int64 [rows, k], the likeliest first and equally likely ones by id.
        logprobs: float32 [rows, k]: log-softmax over the whole vocabulary.
    """

    positions: torch.Tensor
    token_ids: torch.Tensor
    logprobs: torch.Tensor

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class ReadValues:
    """All that was read off the rows of one output.

    Attributes:
        features: by the autoencoder's name.
        lens: by block.
    """

    features: Mapping[str, FeatureValues]
    lens: Mapping[int, LensTokens]

    @property
    def rows(self) -> int:
        """How many rows these are of, each counted once for each read-out."""
        read: list[Any] = [*self.features.values(), *self.lens.values()]
        return sum(map(len, read))
