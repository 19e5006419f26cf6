"""What a worker needs to know of its engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_weir.schema.engine_traits import PLAIN_ENGINE, EngineTraits


@dataclass(frozen=True)
class ModelInfo:
    """What the worker needs to know of its engine.

    Attributes:
        d_model, dtype, device: of the stream.
        max_tokens: of a step.
        rank, ranks: this worker's rank in its tensor-parallel group, and the group's size. All
            ranks hold the same stream.
        runner: which of vLLM's model runners drives the worker.
        engine: number of its data-parallel engine.
        traits: of the engine.
    """

    d_model: int
    dtype: torch.dtype
    device: torch.device
    max_tokens: int
    rank: int = 0
    ranks: int = 1
    runner: str = ""
    engine: int = 0
    traits: EngineTraits = PLAIN_ENGINE
