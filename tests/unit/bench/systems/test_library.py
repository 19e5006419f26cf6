"""nnsight and interp-engine as systems of `weir bench`, without their packages: what their engines are started with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.systems.interp_engine import LLM_DEFAULTS, InterpEngineSystem
from bench.systems.library import LibrarySystem
from bench.systems.nnsight import NnsightSystem
from tests.unit.bench.fakes import plan
from vllm_weir.bench.plan import BenchPlan
from vllm_weir.bench.reference import LLAMA_8B, make_model

SYSTEMS = (NnsightSystem, InterpEngineSystem)


@pytest.fixture
def gpu_plan(tmp_path: Path) -> BenchPlan:
    return plan(
        model=make_model(tmp_path / "shared", LLAMA_8B | {"vocab_size": 100}), dummy=True, cuda=True, eager=False,
        dtype="bfloat16", cases=("extract", "last_mixed"), batches=(), prefill=None,
    )  # fmt: skip


def started_with(system: LibrarySystem, case: str = "extract") -> dict[str, Any]:
    return system.engine(system.engine_choice(system.plan, case))


@pytest.mark.parametrize("kind", SYSTEMS)
def test_a_dummy_model_has_a_tokenizer_where_they_look(
    kind: type[LibrarySystem], gpu_plan: BenchPlan, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    arguments = started_with(kind(gpu_plan, tmp_path / "scratch"))
    folder = arguments["model" if kind is NnsightSystem else "hf_model_id"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 100 and tokenizer.encode("w3 w99 other") == [3, 99, 0] and tokenizer.pad_token == "w0"
    assert json.loads((Path(folder) / "config.json").read_text())["vocab_size"] == 100
    assert [path.name for path in Path(gpu_plan.model).iterdir()] == ["config.json"], "the other systems' model"


def test_a_checkpoint_stays_as_it_is(gpu_plan: BenchPlan, tmp_path: Path) -> None:
    system = NnsightSystem(gpu_plan.model_copy(update={"dummy": False}), tmp_path / "scratch")
    assert started_with(system)["model"] == gpu_plan.model and not (tmp_path / "scratch").exists()


def test_points_are_the_blocks_of_the_case(gpu_plan: BenchPlan, tmp_path: Path) -> None:
    assert started_with(NnsightSystem(gpu_plan, tmp_path))["taps"] == [f"model.layers.{n}.output" for n in (0, 1, 3, 4)]
    arguments = started_with(InterpEngineSystem(gpu_plan, tmp_path), "last_mixed")
    assert arguments["static_points"] == [f"resid_post.{n}" for n in range(6)]
    assert arguments["backend"] == "vllm-static" and arguments["dtype"] == "bfloat16"
    rest = arguments["extra_vllm_kwargs"]
    assert rest == LLM_DEFAULTS | {"seed": 0, "disable_log_stats": True, "load_format": "dummy"}


def test_interp_engine_picks_the_last_row_in_the_worker(gpu_plan: BenchPlan, tmp_path: Path) -> None:
    asked: list[Any] = []

    async def capture(ids: list[int], points: list[str], rows: list[int] | None) -> dict[str, torch.Tensor]:
        asked.append(rows)
        return {point: torch.full((len(rows or ids), 8), float(point[-1])) for point in reversed(points)}

    def run(awaited: Any, what: str) -> Any:
        import asyncio

        return asyncio.run(awaited)

    system = InterpEngineSystem(gpu_plan, tmp_path)
    system._points = ["resid_post.2", "resid_post.5"]
    llm = SimpleNamespace(model=SimpleNamespace(capture=capture), runner=SimpleNamespace(run=run))
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4]}]
    for case, rows, picked in (("last_mixed", [1, 1], [[2], [0]]), ("long", [3, 1], [None, None])):
        asked.clear()
        delivered = system.deliver(case, system.generate(llm, prompts, [case] * 2))
        assert asked == picked
        assert [[len(of_block) for of_block in out] for out in delivered] == [[n, n] for n in rows]
        assert [[float(of_block[0, 0]) for of_block in out] for out in delivered] == [[2.0, 5.0]] * 2
    delivered = system.deliver("mean", system.generate(llm, prompts, ["mean"] * 2))
    assert [of_block.shape for of_block in delivered[0]] == [(1, 8)] * 2
