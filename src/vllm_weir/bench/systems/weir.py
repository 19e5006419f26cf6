"""vLLM with this package's plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from vllm_weir.bench.cases import ABLATED_HOOKS, CAPTURES, CHAT_ROLES, COMPRESSION
from vllm_weir.bench.plan import BatchSize, EngineChoice
from vllm_weir.bench.systems import instruments
from vllm_weir.bench.systems.stock import StockSystem


class WeirSystem(StockSystem):
    """vLLM with this package's plugin."""

    name = "weir"
    plugin = "weir"
    environment: ClassVar[dict[str, str]] = {"WEIR_DISABLE": ""}

    def version(self) -> str:
        import vllm_weir

        return vllm_weir.__version__

    def engine(self, choice: EngineChoice) -> dict[str, Any]:
        config = self.plan.weir_config
        return super().engine(choice) | ({"additional_config": {"weir": config}} if config else {})

    def start(self, arguments: dict[str, Any]) -> Any:
        llm = super().start(arguments)
        if instruments.FEATURES & set(self.plan.cases):
            instruments.load_autoencoder(llm, self.plan)
        return llm

    def params(self, case: str, size: BatchSize) -> list[Any]:
        import vllm_weir as weir

        base = self.base(size)
        if case in instruments.ASKED:
            return instruments.params(case, self.plan, base, self.vectors(size.count))
        if case in ("idle", "sweep"):
            return [case if case == "sweep" else base] * size.count
        if case == "chat_mix":
            return self._chats(size)
        if case == "ablate_everywhere":
            return [
                weir.params(base, interventions=[weir.Ablate(v, hook=hook) for hook in ABLATED_HOOKS])
                for v in self.vectors(size.count)
            ]
        if case in CAPTURES or case == "capture_rp8":
            return [weir.params(base, capture=self._capture(case))] * size.count
        layers = self.steered_layers(case)
        return [weir.params(base, interventions=weir.Add(v, layers=layers)) for v in self.vectors(size.count)]

    def _capture(self, case: str) -> Any:
        """Return what every request of a capture case asks for."""
        import vllm_weir as weir

        if case == "capture_rp8":
            return weir.Capture("resid_post", compress=COMPRESSION)
        if case == "capture_all_all_layers":
            return weir.Capture("resid_post")
        if case in ("capture_last_all_layers", "last_mixed"):
            return weir.Capture("resid_post", positions="last_prompt")
        if case == "mean":
            return weir.Capture("resid_post", positions="prompt", reduce="mean")
        layers = "all" if case == "long" else list(self.plan.captured_layers(case))
        return weir.Capture("resid_post", layers, "prompt")

    def _chats(self, size: BatchSize) -> list[Any]:
        """Return the parameters of `chat_mix`; those that ablate share a direction, the others have vectors."""
        import vllm_weir as weir

        base, layer = self.base(size), self.plan.steered_layer
        vectors = self.vectors(size.count)

        def steer(vector: torch.Tensor, layer: int) -> Any:
            return weir.Add(vector, layers=layer, positions="generated")

        def chat(vector: torch.Tensor, role: str | None) -> Any:
            directions = torch.stack([vector, vectors[0]])
            asked: dict[str | None, dict[str, Any]] = {
                "steer": {"interventions": steer(vector, layer)},
                "capture": {"capture": weir.Capture("resid_post", positions="last_prompt")},
                "project": {"capture": weir.Capture("resid_post", positions="sampled", project=directions)},
                "ablate": {"interventions": weir.Ablate(vectors[0])},
                "steer and capture": {
                    "capture": weir.Capture("resid_post", positions="sampled"),
                    "interventions": steer(vector, layer + 1),
                },
            }
            return weir.params(base, **asked[role]) if role else base

        return [chat(vector, CHAT_ROLES[i % len(CHAT_ROLES)]) for i, vector in enumerate(vectors)]

    def generate(self, llm: Any, prompts: list[dict[str, list[int]]], params: list[Any]) -> Sequence[Any]:
        if params[0] == "sweep":
            return instruments.sweep(llm, self.plan, *(prompt["prompt_token_ids"] for prompt in prompts[:2]))
        return super().generate(llm, prompts, params)

    def deliver(self, case: str, outputs: Sequence[Any]) -> list[Any]:
        if case == "capture_rp8":
            records = [[acts.compressed(site)[0] for site in acts.sites] for acts in (o.activations for o in outputs)]
            if {(len(r), len(r[0])) for r in records} != {(self.plan.layers, len(outputs[0].activations.positions))}:
                raise ValueError("records are missing")
            return records
        if case in instruments.ASKED:
            return instruments.delivered(case, outputs)
        if case not in CAPTURES:
            return []
        return [[acts[site] for site in acts.sites] if (acts := out.activations) else None for out in outputs]

    def verify(self, case: str, outputs: Sequence[Any]) -> None:
        if case in instruments.ASKED:
            instruments.verify(case, self.plan, outputs)
        if case not in ("chat_mix", "ablate_everywhere", "steer_everywhere"):
            return
        for request, out in enumerate(outputs):
            role = CHAT_ROLES[request % len(CHAT_ROLES)] if case == "chat_mix" else "steer"
            if role in ("steer", "ablate", "steer and capture") and not any(out.receipt.steered):
                raise ValueError(f"request {request} should {role}; its receipt says that nothing was steered")

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
            weir.Capture("resid_pre", [layer + 1 for layer in layers], "all", before=True),
        ]

        def interventions(vector: torch.Tensor) -> list[Any]:
            if case == "ablate_everywhere":
                return [weir.Ablate(vector, hook=hook) for hook in ABLATED_HOOKS]
            return [weir.Add(vector, layers=steered)]

        hooks = ABLATED_HOOKS if case == "ablate_everywhere" else ("resid_post",)
        asked = [weir.params(self.base(size), capture=capture, interventions=interventions(v)) for v in vectors]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        rows_of_each = size.prompt + size.generated - 1
        intended = [{weir.Site(hook, layer): rows_of_each for layer in steered} for hook in hooks]
        for out in outputs:
            if list(out.receipt.steered) != intended:
                raise ValueError(f"the receipt says {out.receipt.steered}, not {intended}")

        def rows(hook: str, later: int) -> torch.Tensor:
            return torch.stack([torch.stack([o.activations[hook, layer + later] for layer in layers]) for o in outputs])

        return layers, rows("resid_post", 0), rows("resid_pre", 1)
