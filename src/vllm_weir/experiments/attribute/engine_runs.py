"""Runs of an engine beside its twin: rows to patch with, patched runs, and whether the two are one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_weir.api import engine, params
from vllm_weir.errors import WeirError
from vllm_weir.experiments.adapter import Adapter
from vllm_weir.experiments.attribute.question import LogitsMetric
from vllm_weir.experiments.attribute.twin import RowPatch, Twin
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.interventions import Replace

EXACT, ROUGH = 1e-3, 0.1
"""How far rows of the engine may be from the twin's, mean |difference| / |row| of a site: in float32, and in
any other dtype."""


class EngineRuns:
    """Runs of a ``vllm.LLM`` that Weir serves, under an adapter if one is given.

    Raises:
        WeirError: naming `field`, for any other object.
    """

    def __init__(self, llm: Any, field: str = "llm", adapter: Adapter | None = None) -> None:
        if not hasattr(llm, "llm_engine"):  # an LLMEngine and an AsyncLLM have no `generate` that takes a batch
            wanted = "a vllm.LLM" if field == "llm" else "a vllm.LLM, the path of a checkpoint or a transformers model"
            raise WeirError(f"expected {wanted}, got {type(llm).__name__}", field)
        self._engine, self.llm = engine(llm), llm
        self.model, self.tokenizer = self._engine.model, self._engine.tokenizer
        self._options = {} if adapter is None else adapter.load(self._engine)

    def load_twin(self, device: Any) -> Twin:
        if not self._engine.has_first_weights():
            raise WeirError(
                f"the engine has other weights than those that it loaded from {self.model.model!r} at its start; give "
                "the checkpoint of those that it has: weir.attribute(path, ..., llm=llm)",
                "model",
            )
        options = {"trust_remote_code": self.model.trust_remote_code, "revision": self.model.revision}
        return Twin.load(self.model.model, device, **{name: value for name, value in options.items() if value})

    def rows(self, ids: Sequence[int], sites: Sequence[Site]) -> dict[Site, torch.Tensor]:
        """Return the rows of a prompt, site -> [tokens, ...]."""
        layers: dict[str, list[int]] = {}
        for site in sites:
            layers.setdefault(site.hook, []).append(site.layer)
        capture = [Capture(hook, at, "prompt", dtype="float32") for hook, at in layers.items()]
        (out,) = self._generate([(ids, {"capture": capture})])
        return {site: out.activations[site.hook, site.layer] for site in sites}

    def metrics(
        self, ids: Sequence[int], patches: Sequence[RowPatch | None], twin: Twin, metric: LogitsMetric
    ) -> list[float]:
        """Return the metric of a prompt under each patch, in one batch.

        The engine's last row of the stream is read after the patch; the final norm and the
        unembedding are the twin's, in float32.
        """
        read = Capture("resid_post", twin.num_layers - 1, "last_prompt", dtype="float32")
        asked = [(ids, {"capture": read, "interventions": [] if p is None else [_replace(p)]}) for p in patches]
        outs = self._generate(asked)
        rows = torch.cat([out.activations["resid_post", twin.num_layers - 1] for out in outs])
        return [float(metric(logits)) for logits in twin.finish(rows)]

    def check_twin(self, rows: dict[Site, torch.Tensor], of_twin: dict[Site, torch.Tensor]) -> float:
        """Compare rows of the engine with the twin's; return the largest error of a site."""
        errors = {site: _error(rows[site], of_twin[site].cpu(), site) for site in rows}
        worst = max(errors, key=lambda site: errors[site])
        bound = EXACT if self.model.dtype == torch.float32 else ROUGH
        if not errors[worst] <= bound:
            raise WeirError(
                f"{worst} of the engine, in {self.model.dtype}, differs from the twin's by {errors[worst]:.2g} of a "
                f"row's length (at most {bound} is taken for rounding): is it the same checkpoint, unquantised, under "
                "the same adapter (lora=) or none?",
                "model",
            )
        return errors[worst]

    def _generate(self, asked: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> list[Any]:
        from vllm import SamplingParams

        plain = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        prompts = [{"prompt_token_ids": list(ids)} for ids, _ in asked]
        sampling = [params(plain, **wanted) for _, wanted in asked]
        return self.llm.generate(prompts, sampling, use_tqdm=False, **self._options)


def _replace(patch: RowPatch) -> Replace:
    heads = None if patch.head is None else [patch.head]
    return Replace(patch.row, patch.site.layer, hook=patch.site.hook, positions=[patch.position], heads=heads)


def _error(rows: torch.Tensor, expected: torch.Tensor, site: Site) -> float:
    if rows.shape != expected.shape:
        raise WeirError(
            f"{site} has rows {list(rows.shape)} in the engine and {list(expected.shape)} on the twin; "
            "is it the same checkpoint?",
            "model",
        )
    lengths = expected.flatten(1).norm(dim=1).clamp_min(1e-30)
    return float(((rows - expected).flatten(1).norm(dim=1) / lengths).mean())
