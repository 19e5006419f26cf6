"""nnsight's vLLM engine, with taps at the blocks so that CUDA graphs stay on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from vllm_weir.bench.plan import BatchSize, EngineChoice
from vllm_weir.bench.systems.library import LibrarySystem
from vllm_weir.bench.systems.stock import chosen_rows

PROMPTS_OF_A_TRACE = 100
"""Saved tensors of one trace travel in one message, which msgpack limits to 4 GB."""


class NnsightSystem(LibrarySystem):
    """nnsight's vLLM engine: every prompt is one `invoke` that saves the blocks' outputs."""

    name = "nnsight"
    needs_cuda = "its vLLM engine has a worker for CUDA only"

    def engine(self, choice: EngineChoice) -> dict[str, Any]:
        arguments = super().engine(choice)
        del arguments["skip_tokenizer_init"]
        return arguments | {"taps": [f"model.layers.{layer}.output" for layer in choice.layers]}

    def start(self, arguments: dict[str, Any]) -> Any:
        from nnsight.modeling.vllm import VLLM

        self._layers = [int(tap.split(".")[2]) for tap in arguments["taps"]]
        given = {key: value for key, value in arguments.items() if key != "model"}
        return VLLM(arguments["model"], dispatch=True, **given)

    def params(self, case: str, size: BatchSize) -> list[Any]:
        return [None] * size.count

    def generate(self, llm: Any, prompts: list[dict[str, list[int]]], params: list[Any]) -> Sequence[Any]:
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        outputs = []
        for start in range(0, len(ids), PROMPTS_OF_A_TRACE):
            outputs += self._trace(llm, ids[start : start + PROMPTS_OF_A_TRACE])
        return outputs

    def _trace(self, llm: Any, ids: list[list[int]]) -> list[Any]:
        layers = self._layers
        with llm.trace(temperature=0.0, max_tokens=1, ignore_eos=True) as tracer:
            saved = dict().save()  # type: ignore[attr-defined]  # noqa: C408 - nnsight adds `save` to objects
            for request, prompt in enumerate(ids):
                with tracer.invoke(prompt):
                    rows = []
                    for layer in layers:
                        output = llm.model.layers[layer].output
                        rows.append((output[0] + output[1]).cpu())  # the stream is the sum of both
                    saved[request] = rows
        return [
            SimpleNamespace(prompt_token_ids=ids[i], outputs=[SimpleNamespace(token_ids=[0])], rows=saved[i])
            for i in range(len(ids))
        ]

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        return [chosen_rows(case, torch.stack(out.rows), len(out.prompt_token_ids)) for out in outputs]
