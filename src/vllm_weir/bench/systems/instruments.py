"""What Weir is asked for in instruments and for one user, and what it has to deliver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from vllm_weir.bench.cases import INSTRUMENTS, SETS
from vllm_weir.bench.plan import BenchPlan

SAE, PROBE = "bench", "bench"
"""Names of the autoencoder and of the probe."""
TOP_FEATURES, TOP_TOKENS = 32, 10
NEVER = "bench > 1e9"
"""A stop rule that does not end what is timed."""
FEATURES = {"features", "features_requests", "features_texts", "set_feature", "set_feature_each"}
"""Cases that need an autoencoder."""
ASKED = {*INSTRUMENTS, *SETS["instruments"], "one_user"} - {"sweep"}
"""Cases whose parameters are made here."""


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
    directions = vectors[torch.arange(4) % count]
    probes = [weir.Probe(name, row, layer=layer) for name, row in zip((PROBE, "second", "third"), directions)]
    few, outs = list(plan.few_layers), ("attn_out", "mlp_out")
    sampled = weir.Capture("resid_post", positions="sampled")
    pattern = {"capture": weir.Capture("pattern", positions="last_prompt")}
    features = {"features": weir.Features(SAE, top_k=TOP_FEATURES)}
    three = {"probes": probes, "stop_when": NEVER}
    every, last = (
        {"lens": weir.Lens(layers="all", top_k=TOP_TOKENS, positions=where)} for where in ("prompt", "last_prompt")
    )
    alike: dict[str, dict[str, Any]] = {
        "z_all": {"capture": weir.Capture("z")},
        "z_generated": {"capture": weir.Capture("z", positions="generated")},
        "mlp_post_one": {"capture": weir.Capture("mlp_post", layer)},
        "qkv_one": {"capture": [weir.Capture(hook, layer) for hook in "qkv"]},
        "attn_mlp_out": {"capture": [weir.Capture(hook, few, "prompt") for hook in outs]},
        "project_sampled": {"capture": weir.Capture("resid_post", positions="sampled", project=directions)},
        "probe_each": {"probes": probes[0]},
        "one_user": {"capture": sampled, "interventions": weir.Add(vectors[0], layer, positions="generated")},
        "lens_last": last,
        **dict.fromkeys(("pattern_last", "pattern_long"), pattern),
        **dict.fromkeys(("features", "features_requests", "features_texts"), features),
        **dict.fromkeys(("lens", "lens_prompt"), every),
        **dict.fromkeys(("probes_and_stop", "one_user_probes"), three),
    }
    if case in alike:
        return [weir.params(base, **alike[case])] * count
    if case in FEATURES:
        return [weir.params(base, interventions=weir.SetFeature(SAE, i % plan.d_sae, value=4.0)) for i in range(count)]
    when = weir.When(PROBE, above=0.0)
    return [
        weir.params(
            base,
            probes=weir.Probe(PROBE, vector, layer=layer),
            interventions=weir.Add(vector, layer + 1, 0.1, when=when),
        )
        for vector in vectors
    ]


def delivered(case: str, outputs: Sequence[Any]) -> list[Any]:
    """Return the tensors of every output, which are made when they are asked for; nothing else is."""
    return [_tensors(case, out) for out in outputs]


def _tensors(case: str, out: Any) -> list[torch.Tensor]:
    if case.startswith("set_feature"):
        return []
    if case.startswith("features"):
        return [out.features[SAE].values, out.features[SAE].ids]
    if case.startswith("lens"):
        return [likely.logprobs for likely in out.lens.values()]
    if "probe" in case or case == "gate_each":
        return list(out.scores.values())
    activations = out.activations
    return [activations[site] for site in activations.sites]


def verify(case: str, plan: BenchPlan, outputs: Sequence[Any]) -> None:
    """Raise ValueError if an output lacks a row, or an intervention did not act."""
    blocks, few = plan.layers, len(plan.few_layers)
    changed = case in ("set_feature", "set_feature_each", "one_user")
    count = {
        **dict.fromkeys(("features", "features_requests", "features_texts"), 2),
        **dict.fromkeys(("qkv_one", "probes_and_stop", "one_user_probes"), 3),
        **dict.fromkeys(("mlp_post_one", "probe_each", "probe_and_gate", "gate_each"), 1),
        **dict.fromkeys(("set_feature", "set_feature_each"), 0),
        "attn_mlp_out": 2 * few,
    }.get(case, blocks)
    for request, (out, tensors) in enumerate(zip(outputs, delivered(case, outputs), strict=True)):
        prompt, generated = len(out.prompt_token_ids), len(out.outputs[0].token_ids)
        rows = {
            **dict.fromkeys(("pattern_last", "pattern_long", "lens_last"), 1),
            **dict.fromkeys(("lens", "lens_prompt", "attn_mlp_out"), prompt),
            **dict.fromkeys(("project_sampled", "one_user"), generated),
            "z_generated": generated - 1,
        }.get(case, prompt + generated - 1)
        if changed and not any(out.receipt.steered):
            raise ValueError(f"request {request} should be steered; its receipt says that nothing was")
        if [len(tensor) for tensor in tensors] != [rows] * count:
            raise ValueError(f"request {request} has rows {[len(tensor) for tensor in tensors]}, not {[rows] * count}")


def sweep(llm: Any, plan: BenchPlan, clean: list[int], corrupt: list[int]) -> list[Any]:
    """Return the cells of a sweep over each token of the first blocks, in the form of outputs.

    Raises ValueError if a cell has no number.
    """
    import vllm_weir as weir

    layers = list(range(plan.workloads.cells // len(clean)))
    found = weir.sweep(llm, clean, corrupt, layers=layers, metric=weir.logit_diff(0, 1), progress=False).grid.array
    values = found.reshape(-1).tolist()
    if not all(map(math.isfinite, values)):
        raise ValueError("a cell of the sweep has no number")
    one = SimpleNamespace(prompt_token_ids=clean, outputs=[SimpleNamespace(token_ids=[0])])
    return [one] * len(values)
