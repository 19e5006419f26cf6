"""What Weir is asked for in the cases of `INSTRUMENTS`, and what it has to deliver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_weir.bench.plan import BenchPlan

SAE, PROBE = "bench", "bench"
"""Names of the autoencoder and of the probe."""
TOP_FEATURES, TOP_TOKENS = 32, 10


def load_autoencoder(llm: Any, plan: BenchPlan) -> None:
    """Load a random JumpReLU autoencoder of `d_sae` features, in bfloat16 on a GPU, at the steered block."""
    import vllm_weir as weir

    source = torch.Generator().manual_seed(11)
    shape = plan.d_sae, plan.width
    dtype = torch.bfloat16 if plan.cuda else torch.float32
    decoder = torch.nn.functional.normalize(torch.randn(shape, generator=source), dim=-1)
    sae = weir.SAE.from_tensors(
        "jumprelu",
        ("resid_post", plan.steered_layer),
        W_enc=decoder.T.contiguous().to(dtype),
        W_dec=decoder.to(dtype),
        b_enc=torch.zeros(plan.d_sae, dtype=dtype),
        b_dec=torch.zeros(plan.width, dtype=dtype),
        threshold=torch.full((plan.d_sae,), 0.5, dtype=dtype),
    )
    weir.load_sae(llm, SAE, sae)


def params(case: str, plan: BenchPlan, base: Any, vectors: torch.Tensor) -> list[Any]:
    """Return the parameters of every request; `vectors` float32 [requests, d]."""
    import vllm_weir as weir

    layer, count = plan.steered_layer, len(vectors)
    match case:
        case "z_all":
            asked: list[dict[str, Any]] = [{"capture": weir.Capture("z")}] * count
        case "mlp_post_one":
            asked = [{"capture": weir.Capture("mlp_post", layer)}] * count
        case "pattern_last":
            asked = [{"capture": weir.Capture("pattern", positions="last_prompt")}] * count
        case "features":
            asked = [{"features": weir.Features(SAE, top_k=TOP_FEATURES)}] * count
        case "set_feature":
            asked = [{"interventions": weir.SetFeature(SAE, i % plan.d_sae, value=4.0)} for i in range(count)]
        case "lens":
            asked = [{"lens": weir.Lens(layers="all", top_k=TOP_TOKENS, positions="prompt")}] * count
        case "probe_each":
            asked = [{"probes": weir.Probe(PROBE, vectors[0], layer=layer)}] * count
        case _:
            when = weir.When(PROBE, above=0.0)
            asked = [
                {
                    "probes": weir.Probe(PROBE, vector, layer=layer),
                    "interventions": weir.Add(vector, layer + 1, 0.1, when=when),
                }
                for vector in vectors
            ]
    return [weir.params(base, **one) for one in asked]


def delivered(case: str, outputs: Sequence[Any]) -> list[Any]:
    """Return the tensors of every output, which are made when they are asked for."""
    if case in ("z_all", "mlp_post_one", "pattern_last"):
        return [[acts[site] for site in acts.sites] for acts in (out.activations for out in outputs)]
    if case == "features":
        return [[out.features[SAE].values, out.features[SAE].ids] for out in outputs]
    if case == "lens":
        return [[likely.logprobs for likely in out.lens.values()] for out in outputs]
    if case in ("probe_each", "probe_and_gate"):
        return [[out.scores[PROBE]] for out in outputs]
    return []


def verify(case: str, plan: BenchPlan, outputs: Sequence[Any]) -> None:
    """Raise ValueError if an output lacks a row, or an intervention did not act."""
    for request, (out, tensors) in enumerate(zip(outputs, delivered(case, outputs) or [[]] * len(outputs))):
        prompt = len(out.prompt_token_ids)
        everywhere = prompt + len(out.outputs[0].token_ids) - 1
        rows = {"pattern_last": 1, "lens": prompt}.get(case, everywhere)
        count = plan.layers if case in ("z_all", "pattern_last", "lens") else 2 if case == "features" else 1
        if case == "set_feature":
            if not any(out.receipt.steered):
                raise ValueError(f"request {request} should clamp a feature; its receipt says that nothing was steered")
        elif [len(tensor) for tensor in tensors] != [rows] * count:
            raise ValueError(f"request {request} has rows {[len(tensor) for tensor in tensors]}, not {[rows] * count}")
