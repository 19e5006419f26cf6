"""What the libraries share that start vLLM by themselves, with taps at blocks fixed beforehand."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import ClassVar

from vllm_weir.bench.plan import BenchPlan, EngineChoice
from vllm_weir.bench.systems.stock import StockSystem, is_installed, with_path


class LibrarySystem(StockSystem):
    """A library with vLLM engines of its own, on CUDA; it starts one for each choice of blocks.

    Attributes:
        name: also of its distribution; its module has underscores for hyphens.
        needs_cuda: why it does not run on a CPU.
    """

    needs_cuda: ClassVar[str]

    @classmethod
    def environ(cls, plan: BenchPlan) -> dict[str, str]:
        return super().environ(plan) | with_path(plan.rivals_path)

    @classmethod
    def engine_choice(cls, plan: BenchPlan, case: str) -> EngineChoice:
        return EngineChoice(kind="workloads", layers=plan.captured_layers(case))

    def missing(self) -> str | None:
        if not is_installed(self.name) or importlib.util.find_spec(self.name.replace("-", "_")) is None:
            return f"{self.name} is not installed"
        return None if self.plan.cuda else self.needs_cuda

    def version(self) -> str:
        return importlib.metadata.version(self.name)
