"""interp-engine with its static backend: taps at fixed points in CUDA graphs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm_weir.bench.plan import BatchSize, EngineChoice
from vllm_weir.bench.systems.library import LibrarySystem
from vllm_weir.bench.systems.stock import chosen_rows


class InterpEngineSystem(LibrarySystem):
    """interp-engine with its static backend; every prompt is one `capture`, and all are in flight at once."""

    name = "interp-engine"
    needs_cuda = "its vLLM backends start on CUDA only"

    def engine(self, choice: EngineChoice) -> dict[str, Any]:
        arguments = super().engine(choice)
        extra = {key: arguments[key] for key in ("load_format",) if key in arguments}
        return {
            "hf_model_id": arguments["model"],
            "backend": "vllm-static",
            "dtype": arguments["dtype"],
            "static_points": [f"resid_post.{layer}" for layer in choice.layers],
            "static_writes": [],
            "max_model_len": arguments["max_model_len"],
            "gpu_memory_utilization": arguments["gpu_memory_utilization"],
            "extra_vllm_kwargs": extra,
        }

    def start(self, arguments: dict[str, Any]) -> Any:
        from interp_engine import load_model
        from interp_engine.sync import sync_model

        model = sync_model(load_model(**arguments))
        model.warmup()
        self._points = arguments["static_points"]
        return model

    def params(self, case: str, size: BatchSize) -> list[Any]:
        return [self._points] * size.count

    def generate(self, llm: Any, prompts: list[dict[str, list[int]]], params: list[Any]) -> Sequence[Any]:
        async def one(ids: list[int], points: list[str]) -> Any:
            found = await llm.model.capture(ids, points)
            return SimpleNamespace(
                prompt_token_ids=ids, outputs=[SimpleNamespace(token_ids=[0])], rows=list(found.values())
            )

        async def every() -> list[Any]:
            asked = zip(prompts, params, strict=True)
            return await asyncio.gather(*(one(prompt["prompt_token_ids"], points) for prompt, points in asked))

        return llm.runner.run(every(), what="weir bench")

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        import torch

        return [
            chosen_rows(case, torch.stack([r.cpu() for r in out.rows]), len(out.prompt_token_ids)) for out in outputs
        ]
