"""transformers with forward hooks: what a user would do without an engine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from vllm_weir.bench.plan import BatchSize, BenchPlan, EngineChoice
from vllm_weir.bench.systems.stock import StockSystem, chosen_rows
from vllm_weir.util.transformers_reference import blocks_of

BATCH_TOKENS = 16_384
"""Tokens of a padded batch, at most; a longer prompt is a batch of its own."""


class TransformersSystem(StockSystem):
    """transformers' model in the engine's dtype: prompts of like lengths in padded batches, a hook on each block."""

    name = "transformers"

    @classmethod
    def engine_choice(cls, plan: BenchPlan, case: str) -> EngineChoice:
        return EngineChoice(kind="workloads", layers=plan.captured_layers(case))

    def version(self) -> str:
        return importlib.metadata.version("transformers")

    def engine(self, choice: EngineChoice) -> dict[str, Any]:
        return {"model": self.plan.model, "dtype": self.plan.dtype, "layers": list(choice.layers)}

    def start(self, arguments: dict[str, Any]) -> Any:
        from vllm_weir.bench.reference import transformers_model

        return HookedModel(transformers_model(self.plan), arguments["layers"])

    def fill(self, llm: HookedModel) -> list[int]:
        """Its weights are drawn when it is made."""
        return []

    def params(self, case: str, size: BatchSize) -> list[Any]:
        return [case] * size.count

    def generate(self, llm: HookedModel, prompts: list[dict[str, list[int]]], params: list[Any]) -> Sequence[Any]:
        return llm.read([prompt["prompt_token_ids"] for prompt in prompts], params[0])

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        return [out.rows for out in outputs]


class HookedModel:
    """A causal language model of transformers with a hook on some of its blocks."""

    def __init__(self, network: Any, layers: Sequence[int]) -> None:
        self.network = network.eval()
        self._rows: list[torch.Tensor] = []
        blocks = blocks_of(network)
        for layer in layers:
            blocks[layer].register_forward_hook(self._keep)

    def _keep(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._rows.append(output[0] if isinstance(output, tuple) else output)

    @torch.inference_mode()
    def read(self, prompts: Sequence[list[int]], case: str) -> list[Any]:
        """Run prompts, and return for each its ids, the most likely next token, and the rows of a case on the CPU.

        Rows are [blocks, n, d], reduced on the model's device where the case asks for it.
        """
        outputs: list[Any] = [None] * len(prompts)
        device = next(self.network.parameters()).device
        for batch in batches([len(prompt) for prompt in prompts]):
            longest = len(prompts[batch[-1]])
            # Padded behind the prompt, where a causal model's rows do not see it.
            padded = [prompts[i] + [0] * (longest - len(prompts[i])) for i in batch]
            self._rows.clear()
            last = self.network.base_model(input_ids=torch.tensor(padded, device=device), use_cache=False)[0]
            for request, i in enumerate(batch):
                length = len(prompts[i])
                logits = self.network.get_output_embeddings()(last[request, length - 1])
                rows = torch.stack([chosen_rows(case, of_block[request][None], length)[0] for of_block in self._rows])
                outputs[i] = SimpleNamespace(
                    prompt_token_ids=prompts[i],
                    outputs=[SimpleNamespace(token_ids=[int(logits.argmax())])],
                    rows=rows.cpu(),
                )
        self._rows.clear()
        return outputs


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of prompts, shortest first, in batches of up to `BATCH_TOKENS` tokens with the padding."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[i] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
