"""What the tests of probes, gates and stops share: random probes of every kind, their engine, and the comparisons."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import vllm_weir as weir
from tests.engine.common import directory, scheduler
from tests.support.engines import get_llm
from tests.support.measure import logit_bound, rel_err
from tests.support.probe_reference import Act, GatedOracle, ProbeCase, Traced

D = 128
LAYERS = 4
WIDTHS = {"z": 128, "q": 128, "mlp_post": 192, "k": 64}
HEADS = {"z": 4, "q": 4, "k": 2}
BOUND = 1e-5
SMALL = {"block_size": 32, "num_gpu_blocks_override": 10, "max_model_len": 160, "max_num_seqs": 6,
         "max_num_batched_tokens": 48}  # fmt: skip
"""A KV cache that holds two of six requests to their ends: the others are thrown out and computed again."""
SITES = [
    ("resid_post", 1), ("z", 1), ("mlp_post", 2), ("resid_pre", 0), ("attn_out", 2), ("resid_mid", 1), ("mlp_out", 0),
    ("attn_in", 3), ("resid_post", 3), ("q", 2), ("mlp_in", 1), ("resid_pre", 2),
]  # fmt: skip
POSITIONS: list[Any] = [
    "all", "prompt", "generated", "last_prompt", "sampled", [0, -1, 5], "2:40:3", {"token_ids": list(range(0, 510, 2))},
]  # fmt: skip
ACTIVATIONS = ("none", "sigmoid", "softmax")
SMOOTHINGS: list[tuple[Any, ...] | None] = [None, ("ema", 0.3), ("max",), ("mean", 5)]


def small_engine(root: Path, **more: Any) -> Any:
    """An engine of that size, beside the one that runs."""
    return get_llm(directory(root), **SMALL, **more, keep=2)


@lru_cache(maxsize=2)
def reference(model_dir: Path) -> GatedOracle:
    return GatedOracle(model_dir)


def random_tensors(kind: str, width: int, outputs: int, seed: int) -> dict[str, torch.Tensor]:
    """Weights of a probe whose outputs are about one on rows of the tiny models."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = 0.4 / width**0.5
    if kind == "linear":
        return {"weight": normal(outputs, width) * rows, "bias": normal(outputs)}
    if kind == "mlp":
        tensors = {"w_in": normal(6, width) * rows, "b_in": normal(6)}
        return tensors | {"w_out": normal(outputs, 6), "b_out": normal(outputs)}
    tensors = {"query": normal(2, width) * rows, "value": normal(2, outputs, width) * rows}
    return tensors | {"bias": normal(outputs)}


def random_probe(name: str, kind: str, site: tuple[str, int], seed: int, outputs: int = 1, **more: Any) -> ProbeCase:
    hook = site[0]
    width = WIDTHS.get(hook, D)
    if hook in HEADS and kind == "linear" and seed % 2:
        width //= HEADS[hook]
        more["head"] = seed % HEADS[hook]
    if outputs == 1 and more.get("activation") == "softmax":  # always 1
        more["activation"] = "sigmoid"
    return ProbeCase(name, *site, kind, random_tensors(kind, width, outputs, seed), **more)


def every_kind() -> list[ProbeCase]:
    """Each kind with each activation and smoothing, at sites and positions that go round."""
    kinds: list[tuple[str, int, str]] = [("linear", 1, "relu"), ("linear", 3, "relu")]
    kinds += [("mlp", 1 + (k % 2), hidden) for k, hidden in enumerate(("relu", "gelu", "silu", "tanh"))]
    kinds += [("attention", 1, "relu"), ("attention", 2, "relu")]
    probes = []
    for kind, outputs, hidden in kinds:
        for activation in ACTIVATIONS:
            for smooth in SMOOTHINGS:
                n = len(probes)
                more = {"activation": activation, "smooth": smooth, "hidden": hidden}
                more["positions"] = POSITIONS[(n // 3) % len(POSITIONS)]
                probes.append(random_probe(f"p{n}", kind, SITES[n % len(SITES)], n, outputs, **more))
    return probes


def ids_of(out: Any, completion: Any) -> list[int]:
    return list(out.prompt_token_ids) + list(completion.token_ids)


def check_scores(
    out: Any, probes: Sequence[ProbeCase], oracle: GatedOracle, completion: Any = None, bound: float = BOUND
) -> None:
    """The scores of a request without interventions."""
    completion = completion or out.outputs[0]
    ids = ids_of(out, completion)[:-1]
    rows = oracle.rows(ids)
    for probe in probes:
        at, scores = probe.scores(rows[probe.site], len(out.prompt_token_ids), ids)
        same_scores(completion.scores, probe, at, scores, bound)
    assert set(completion.scores) == {probe.name for probe in probes}


def same_scores(got: Any, probe: ProbeCase, at: list[int], scores: torch.Tensor, bound: float = BOUND) -> None:
    """What was got is what the reference says; the error is relative to the largest score."""
    assert got[probe.name].dtype == torch.float32 and got.positions[probe.name].dtype == torch.int64
    assert got.positions[probe.name].tolist() == at, probe
    if at:
        assert got[probe.name].shape == scores.shape, probe
        scale = max(1.0, float(scores.abs().max()))
        error = float((got[probe.name].double() - scores).abs().max()) / scale
        assert error <= bound, f"{probe}: {error:.2e}"


def check_gated(
    out: Any,
    probes: Sequence[ProbeCase],
    acts: Sequence[Act],
    oracle: GatedOracle,
    completion: Any = None,
    bound: float = BOUND,
    margin: float = 0.0,
) -> Traced | None:
    """Rows wherever captured, scores, greedy tokens and receipts are those of the reference.

    With a `margin`, a request is left out (None) if a score of the reference comes so near a threshold, or the
    likeliest token so near the next, that rounding decides.
    """
    completion = completion or out.outputs[0]
    prompt_len, ids = len(out.prompt_token_ids), ids_of(out, completion)
    traced = oracle.gated(ids[:-1], prompt_len, probes, acts)
    if margin and nearest(traced, acts, prompt_len) < margin:
        return None
    check_greedy(completion.token_ids, traced.logits[prompt_len - 1 :])
    for probe in probes:
        same_scores(completion.scores, probe, *traced.scores[probe.name], bound)
    acted = completion.activations
    for site in acted.sites if acted is not None else ():
        at = acted.positions_of(*site)
        if len(at):
            error = rel_err(acted[site], traced.rows[tuple(site)][at])
            assert error <= bound, f"{site}: max|d| / max|ref| = {error:.2e}"
    return traced


def check_greedy(token_ids: Sequence[int], logits: torch.Tensor) -> None:
    """Each token is the likeliest by its row of logits; of tokens that rounding cannot tell apart, any."""
    logits = logits.double()
    behind = logits.max(-1).values - logits.gather(1, torch.tensor(list(token_ids))[:, None])[:, 0]
    assert float(behind.max()) <= 2 * logit_bound(logits), f"a token that is not the likeliest: {behind.tolist()}"


def nearest(traced: Traced, acts: Sequence[Act], prompt_len: int) -> float:
    """How near the reference comes to deciding otherwise: a score to a threshold, a token to the next likely."""
    best = traced.logits[prompt_len - 1 :].topk(2).values
    found = [float((best[:, 0] - best[:, 1]).min())]
    for act in acts:
        if act.gate is not None and act.gate.sharpness is None:
            scores = traced.scores[act.gate.probe][1][:, act.gate.output]
            found += (scores - act.gate.threshold).abs().tolist()
    return min(found)


@contextlib.contextmanager
def preemptions(llm: Any) -> Iterator[list[int]]:
    """How many tokens had been computed of each request that is thrown out while this lasts."""
    core, found = scheduler(llm), []
    original = core._preempt_request

    def counting(request: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(request.num_computed_tokens)
        return original(request, *args, **kwargs)

    core._preempt_request = counting
    try:
        yield found
    finally:
        core._preempt_request = original


def asked(params: Any, probes: Sequence[ProbeCase], acts: Sequence[Act] = (), **more: Any) -> Any:
    """SamplingParams with the probes and the gated interventions."""
    interventions = [act.public() for act in acts]
    return weir.params(params, probes=[probe.public() for probe in probes], interventions=interventions, **more)
