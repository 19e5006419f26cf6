"""Naming lenses in an engine, and the rows of its unembedding that their directions need."""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable
from typing import Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.frontend.lookup import ask_workers, engine_of
from vllm_weir.lenses.files import LensFile
from vllm_weir.lenses.fitted import FittedLens

UNEMBEDDING = "weir_unembedding"


def load(llm: Any, frontend: EngineFrontend, name: str, lens: Any) -> FittedLens:
    """Name a lens in an ``LLM``; see `vllm_weir.api.load_lens`."""
    engine = engine_of(llm)
    if inspect.iscoroutinefunction(engine.collective_rpc):
        raise WeirError("this engine answers only asynchronously; await load_lens_async", "llm")

    def row(token_id: int) -> torch.Tensor:
        _check_token(frontend, token_id)
        return _row_of(engine.collective_rpc(UNEMBEDDING, args=([token_id],)))

    return FittedLens(_named(frontend, name, lens), frontend.engine.require_capabilities().num_layers, row)


async def load_async(engine: Any, frontend: EngineFrontend, name: str, lens: Any) -> FittedLens:
    """Do what `load` does, for an ``AsyncLLM``."""
    await ask_workers(engine)
    client = engine_of(engine)

    async def row(token_id: int) -> torch.Tensor:
        return _row_of(await client.collective_rpc(UNEMBEDDING, args=([token_id],)))

    def checked(token_id: int) -> Awaitable[torch.Tensor]:
        _check_token(frontend, token_id)
        return row(token_id)

    return FittedLens(_named(frontend, name, lens), frontend.engine.require_capabilities().num_layers, checked)


def _named(frontend: EngineFrontend, name: str, lens: Any) -> LensFile:
    path = lens.path if isinstance(lens, FittedLens) else lens
    if not isinstance(path, (str, os.PathLike)):
        raise WeirError(f"expected the path of a lens, or one that is fitted, got {type(lens).__name__}", "path")
    return frontend.names.load_lens(name, path)


def _check_token(frontend: EngineFrontend, token_id: int) -> None:
    size = frontend.engine.vocabulary.size
    if size and token_id >= size:
        raise WeirError(f"token ids count from 0 to {size - 1}", "token_id")


def _row_of(answers: list[dict[str, Any]]) -> torch.Tensor:
    """Return the row that the first worker has read, as all have; raise WeirError if it could not."""
    if "error" in answers[0]:
        raise WeirError(answers[0]["error"], "token_id")
    return torch.from_numpy(np.frombuffer(answers[0]["rows"], np.float32).copy())
