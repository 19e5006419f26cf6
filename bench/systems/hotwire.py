"""hotwire: vectors of files that a request names, added in CUDA graphs."""

from __future__ import annotations

import importlib.metadata
import json
import os
from typing import Any

import torch

from vllm_weir.bench.cases import STEERS
from vllm_weir.bench.plan import BatchSize, BenchPlan
from vllm_weir.bench.systems.stock import StockSystem, is_installed, with_path


class HotwireSystem(StockSystem):
    """hotwire: every request names its vector, whose file the engine has read at its start.

    It returns no rows, so what it adds is not compared. The number of a block is a constant in what it compiles, so its
    engine compiles every block by itself, where stock vLLM's compiles one for all: a cold start takes minutes longer.
    """

    name = "hotwire"
    plugin = "hotwire"
    compares_steering = False

    @classmethod
    def environ(cls, plan: BenchPlan) -> dict[str, str]:
        return super().environ(plan) | with_path(plan.rivals_path)

    def missing(self) -> str | None:
        if not is_installed("hotwire-vllm"):
            return "hotwire-vllm is not installed"
        return super().missing() if self.plan.cuda else "its kernel is compiled for CUDA only"

    def version(self) -> str:
        return importlib.metadata.version("hotwire-vllm")

    def start(self, arguments: dict[str, Any]) -> Any:
        folder = self.scratch / "vectors"
        folder.mkdir(parents=True, exist_ok=True)
        most = max(self.plan.batches)
        for request, vector in enumerate(self.vectors(most)):
            torch.save(vector, folder / f"{request}.pt")
        # Its engine reads both at the start. A vector takes a slot, one row of a tensor, for each block that it steers.
        blocks = max((len(self.steered_layers(case)) for case in STEERS if case in self.plan.cases), default=1)
        os.environ["HOTWIRE_VECTORS"] = str(folder)
        os.environ["HOTWIRE_SLOTS"] = str(most * blocks)
        return super().start(arguments)

    def params(self, case: str, size: BatchSize) -> list[Any]:
        if case not in STEERS:
            return [self.base(size)] * size.count
        layers = self.steered_layers(case)

        def named(request: int) -> str:
            return json.dumps([{"id": str(request), "layer": layer, "scale": 1.0} for layer in layers])

        return [self.base(size, {"hotwire": named(request)}) for request in range(size.count)]
