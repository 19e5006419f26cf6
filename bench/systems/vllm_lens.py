"""vllm-lens, used as its README says."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch

from vllm_weir.bench.cases import CAPTURES
from vllm_weir.bench.plan import BatchSize, BenchPlan
from vllm_weir.bench.systems.stock import StockSystem, chosen_rows, with_path


class VllmLensSystem(StockSystem):
    """vllm-lens, used as its README says; the caller takes the positions and the means that a case asks for."""

    name = "vllm-lens"
    plugin = "activations"
    one_pass = False

    @classmethod
    def environ(cls, plan: BenchPlan) -> dict[str, str]:
        return super().environ(plan) | with_path(plan.lens_path)

    def missing(self) -> str | None:
        try:
            import vllm_lens  # noqa: F401
        except ImportError as e:
            return f"cannot import vllm_lens: {e}"
        return super().missing()

    def version(self) -> str:
        return importlib.metadata.version("vllm-lens")

    def params(self, case: str, size: BatchSize) -> list[Any]:
        if case == "idle":
            return [self.base(size)] * size.count
        if case in CAPTURES:  # positions cannot be chosen: all are captured
            layers = list(self.plan.captured_layers(case))
            asked = True if len(layers) == self.plan.layers else layers
            return [self.base(size, {"output_residual_stream": asked}) for _ in range(size.count)]
        return self._steering(self.vectors(size.count), self.steered_layers(case), size)

    def _steering(self, vectors: torch.Tensor, layers: list[int], size: BatchSize, **extra: Any) -> list[Any]:
        from vllm_lens import SteeringVector

        def one(v: torch.Tensor) -> Any:
            return SteeringVector(activations=v.expand(len(layers), -1).contiguous(), layer_indices=layers)

        # Its generate() empties extra_args: these serve one call.
        return [self.base(size, {"apply_steering_vectors": [one(v)], **extra}) for v in vectors]

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        if case not in CAPTURES:
            return []
        rows = [out.activations["residual_stream"] for out in outputs]
        return [chosen_rows(case, r, len(out.prompt_token_ids)) for r, out in zip(rows, outputs, strict=True)]

    def steered_pair(self, llm: Any, prompts: list[Any], vectors: torch.Tensor, case: str, size: BatchSize) -> Any:
        # Nothing is returned from before a steering: only its first block, and the prompt's rows, can be compared.
        layers = self.steered_layers(case)
        capture = {"output_residual_stream": [layers[0]]}

        def rows(asked: list[Any]) -> torch.Tensor:
            outputs = llm.generate(prompts, asked, use_tqdm=False)
            return torch.stack([o.activations["residual_stream"][:, : size.prompt] for o in outputs])

        before = rows([self.base(size, dict(capture)) for _ in prompts])
        return layers[:1], before, rows(self._steering(vectors, layers, size, **capture))
