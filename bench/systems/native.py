"""vLLM's own ``extract_hidden_states``: files that its example connector writes, read here."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_weir.bench.plan import BatchSize, BenchPlan, EngineChoice
from vllm_weir.bench.systems.stock import StockSystem, chosen_rows


class ExtractHiddenStatesSystem(StockSystem):
    """vLLM's own ``extract_hidden_states``: files that its example connector writes, read here.

    The blocks are fixed at the start of an engine, so `extract` and `long_one` have engines of their own.
    """

    name = "native"

    @classmethod
    def engine_choice(cls, plan: BenchPlan, case: str) -> EngineChoice:
        return EngineChoice(kind="workloads", layers=plan.captured_layers(case))

    def missing(self) -> str | None:
        if not self.plan.cuda:
            return "vLLM's ExampleHiddenStatesConnector copies with CUDA streams; there is no CUDA device here"
        return super().missing()

    def engine(self, choice: EngineChoice) -> dict[str, Any]:
        # Its layer i is the stream entering block i, so block L's output is i = L + 1.
        layers = [layer + 1 for layer in choice.layers or range(self.plan.layers)]
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        }
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(self.scratch)},
        }
        return super().engine(choice) | {"speculative_config": speculative, "kv_transfer_config": transfer}

    def params(self, case: str, size: BatchSize) -> list[Any]:
        extra = {"kv_transfer_params": {"include_output_tokens": case == "capture_all_all_layers"}}
        return [self.base(size, extra) for _ in range(size.count)]

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        rows = [_load(out.kv_transfer_params["hidden_states_path"]).transpose(0, 1) for out in outputs]
        return [chosen_rows(case, r, len(out.prompt_token_ids)) for r, out in zip(rows, outputs, strict=True)]

    def clean(self, outputs: Sequence[Any]) -> None:
        for out in outputs:
            path = Path((out.kv_transfer_params or {}).get("hidden_states_path", ""))
            for file in (path, path.with_name(path.name + ".lock")):
                if file.is_file():
                    file.unlink()


def _load(path: str) -> torch.Tensor:
    """Return rows [tokens, layers, d]; wait for the writer as the connector's own ``load_hidden_states`` does."""
    from safetensors.torch import load_file

    with open(path + ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return load_file(path)["hidden_states"]
