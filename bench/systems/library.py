"""What the libraries share that start vLLM by themselves, with taps at blocks fixed beforehand."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from typing import Any, ClassVar

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

    def engine(self, choice: EngineChoice) -> dict[str, Any]:
        """Return arguments of ``vllm.LLM`` for a model with a tokenizer, which these libraries load in any case."""
        arguments = super().engine(choice)
        del arguments["skip_tokenizer_init"]
        return arguments | {"model": self._with_tokenizer()} if self.plan.dummy else arguments

    def _with_tokenizer(self) -> str:
        """Return a copy of the plan's model, with a token for each id: the other systems start without one."""
        from vllm_weir.bench.reference import add_tokenizer

        folder = shutil.copytree(self.plan.model, self.scratch / "model", dirs_exist_ok=True)
        add_tokenizer(str(folder), self.plan.vocab)
        return str(folder)

    def missing(self) -> str | None:
        if not is_installed(self.name) or importlib.util.find_spec(self.name.replace("-", "_")) is None:
            return f"{self.name} is not installed"
        return None if self.plan.cuda else self.needs_cuda

    def version(self) -> str:
        return importlib.metadata.version(self.name)
