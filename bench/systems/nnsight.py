"""nnsight's vLLM engine, with taps at the blocks so that CUDA graphs stay on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from bench.systems.library import LibrarySystem
from vllm_weir.bench.plan import BatchSize, EngineChoice

PROMPTS_OF_A_TRACE = 100
"""Saved tensors of a step travel in one message, which msgpack limits to 4 GB."""


class NnsightSystem(LibrarySystem):
    """nnsight's vLLM engine: every prompt is one `invoke` that saves what its case asks for of the blocks' outputs."""

    name = "nnsight"
    needs_cuda = "its vLLM engine has a worker for CUDA only"

    def engine(self, choice: EngineChoice) -> dict[str, Any]:
        return super().engine(choice) | {"taps": [f"model.layers.{layer}.output" for layer in choice.layers]}

    def start(self, arguments: dict[str, Any]) -> Any:
        from nnsight.modeling.vllm import VLLM

        self._layers = [int(tap.split(".")[2]) for tap in arguments["taps"]]
        given = {key: value for key, value in arguments.items() if key not in ("model", "taps", "enforce_eager")}
        # It replays CUDA graphs where there are taps, and refuses to be told so as well.
        taps = [] if arguments["enforce_eager"] else arguments["taps"]
        return VLLM(arguments["model"], dispatch=True, taps=taps, **given)

    def fill(self, llm: Any) -> list[int]:
        return super().fill(llm.vllm_entrypoint)

    def params(self, case: str, size: BatchSize) -> list[Any]:
        return [case] * size.count

    def generate(self, llm: Any, prompts: list[dict[str, list[int]]], params: list[Any]) -> Sequence[Any]:
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        outputs = []
        for start in range(0, len(ids), PROMPTS_OF_A_TRACE):
            outputs += self._trace(llm, ids[start : start + PROMPTS_OF_A_TRACE], params[0])
        return outputs

    def _trace(self, llm: Any, ids: list[list[int]], case: str) -> list[Any]:
        """Run prompts; each saves the rows [n, d] of every block on the CPU."""
        layers, first, mean = self._layers, -1 if case == "last_mixed" else 0, case == "mean"
        # Every name that an invoke reads is sent to the engine's process with it, and its source is run there.
        with llm.trace(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False) as tracer:
            saved = dict().save()  # type: ignore[attr-defined]  # noqa: C408 - nnsight adds `save` to objects
            for request, prompt in enumerate(ids):
                with tracer.invoke(prompt):
                    rows = []
                    for layer in layers:
                        output = llm.model.layers[layer].output
                        stream = output[0][first:] + output[1][first:]  # the stream is the sum of both
                        rows.append((stream.float().mean(0, keepdim=True) if mean else stream).cpu())
                    saved[request] = rows
        return [
            SimpleNamespace(prompt_token_ids=ids[i], outputs=[SimpleNamespace(token_ids=[0])], rows=saved[i])
            for i in range(len(ids))
        ]

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        return [out.rows for out in outputs]
