"""interp-engine with its static backend: taps at fixed points in CUDA graphs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from bench.systems.library import LibrarySystem
from vllm_weir.bench.plan import BatchSize, EngineChoice

LLM_DEFAULTS = {"max_num_batched_tokens": 16_384, "max_num_seqs": 1024}
"""What `vllm.LLM` takes for workloads on a large GPU; the asynchronous engine under interp-engine has far less."""


class InterpEngineSystem(LibrarySystem):
    """interp-engine with its static backend; every prompt is one `capture`, and all are in flight at once."""

    name = "interp-engine"
    needs_cuda = "its vLLM backends start on CUDA only"

    def engine(self, choice: EngineChoice) -> dict[str, Any]:
        arguments = super().engine(choice)
        own = ("dtype", "max_model_len", "gpu_memory_utilization")
        rest = {key: arguments[key] for key in arguments if key not in (*own, "model", "enforce_eager")}
        return {
            "hf_model_id": arguments["model"],
            # Its other backend that captures runs without CUDA graphs, and takes its points with each request.
            "backend": "vllm" if arguments["enforce_eager"] else "vllm-static",
            **{key: arguments[key] for key in own if key in arguments},
            "static_points": [f"resid_post.{layer}" for layer in choice.layers],
            "static_writes": [],
            "extra_vllm_kwargs": LLM_DEFAULTS | rest,
        }

    def start(self, arguments: dict[str, Any]) -> Any:
        from interp_engine import load_model
        from interp_engine.sync import sync_model

        self._points = arguments["static_points"]
        if arguments["backend"] == "vllm":
            arguments = {key: value for key, value in arguments.items() if not key.startswith("static_")}
        model = sync_model(load_model(**arguments))
        model.warmup()
        return model

    def fill(self, llm: Any) -> list[int]:
        from vllm_weir.bench.reference import fill_engine

        asked = llm.model.engine.collective_rpc("apply_model", args=(fill_engine,))
        filled: list[int] = llm.runner.run(asked, what="weir bench")
        return filled

    def params(self, case: str, size: BatchSize) -> list[Any]:
        return [case] * size.count

    def generate(self, llm: Any, prompts: list[dict[str, list[int]]], params: list[Any]) -> Sequence[Any]:
        async def one(ids: list[int], case: str) -> Any:
            last = [len(ids) - 1] if case == "last_mixed" else None
            found = await llm.model.capture(ids, self._points, rows=last)
            rows = {str(address): tensor for address, tensor in found.items()}
            return SimpleNamespace(
                prompt_token_ids=ids,
                outputs=[SimpleNamespace(token_ids=[0])],
                rows=[rows[point] for point in self._points],
            )

        async def every() -> list[Any]:
            asked = zip(prompts, params, strict=True)
            return await asyncio.gather(*(one(prompt["prompt_token_ids"], case) for prompt, case in asked))

        found: list[Any] = llm.runner.run(every(), what="weir bench")
        return found

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        if case == "mean":
            return [[of_block.float().mean(0, keepdim=True) for of_block in out.rows] for out in outputs]
        return [out.rows for out in outputs]
