"""Every served site against transformers: captured rows, and what follows from an addition at it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tests.conformance.against_identities import identity_errors
from tests.conformance.checks import (
    Wrong,
    beyond,
    by_expert,
    check_neighbours,
    check_refusals,
    conclude,
    middle,
    positions_for,
    served,
    steerable,
    summary,
    vector_for,
)
from tests.conformance.engine import STEERED, Answer, Engine
from tests.conformance.oracle import Rows
from tests.conformance.remote import RemoteOracle
from tests.conformance.verdict import Verdict
from tests.support.measure import rel_err


def stock_error(stock: Sequence[Answer], oracle: RemoteOracle) -> float:
    """How far vLLM's log-probabilities are from transformers', without Weir."""
    return max(logprob_error(answer, oracle.logits(answer.ids)) for answer in stock)


def logprob_error(answer: Answer, logits: torch.Tensor) -> float:
    """max|d| / max|ref| of the log-probabilities of the steps that sampled."""
    return rel_err(answer.logprobs, logits[len(answer.ids) - len(answer.made) :].log_softmax(-1))


def check_oracle(
    engine: Engine, oracle: RemoteOracle, sites: Iterable[Any], stock: Sequence[Answer], bound: float, verdict: Verdict
) -> None:
    """Fill in the verdict."""
    sites = list(sites)
    verdict.blocks = oracle.capabilities["kinds"]
    verdict.hooks = summary(sites)
    good = served(sites)
    missing = oracle.capabilities["missing"]
    for hook, found in verdict.hooks.items():
        found["has"] = found["of"] - sum((s.hook, s.layer) in missing for s in sites if s.hook == hook)
    for site in good:
        why = missing.get(site)
        if why:
            raise Wrong(f"{site[0]}[{site[1]}] is served, but the reference has none: {why}")
    check_refusals(engine, sites)

    captured = engine.ask(good)
    check_neighbours(stock, captured, "captured", bound, exact=verdict.steady)
    plain = [by_expert(oracle.points(answer.ids)[0]) for answer in captured]
    for rows in plain:
        broken = {
            hook: error
            for hook, error in identity_errors(rows, None, oracle.capabilities["gains"]).items()
            if error > 1e-6
        }
        if broken:
            raise Wrong(f"the reference breaks its own identities: {broken}")
    for hook, layer in good:
        factor = oracle.capabilities["experts_factor"]
        errors = [_off(by_expert(a.rows), p, (hook, layer), factor) for a, p in zip(captured, plain) if a.rows]
        verdict.hooks[hook]["capture"] = max(verdict.hooks[hook]["capture"] or 0.0, *errors)

    for seed, (hook, found) in enumerate(verdict.hooks.items()):
        site = middle(good, hook)
        if site is not None and steerable(hook):
            vector = vector_for(plain[STEERED][site], seed)
            found["steer"] = _steer_error(engine, oracle, good, site, vector, stock, verdict)
    for _, hook, way in beyond(verdict, bound):
        steer = None
        if way == "steer":
            site = middle(good, hook)
            assert site is not None
            vector = vector_for(plain[STEERED][site], list(verdict.hooks).index(hook))
            steer = (*site, vector, _positions(hook, captured[STEERED]))
        verdict.hooks[hook]["rounding"][way] = _rounding(oracle, captured, hook, steer)
    conclude(verdict, bound)


def _off(rows: Rows, reference: Rows, site: tuple[str, int], experts_factor: float) -> float:
    """How far a site's rows are from the reference; shapes that differ name the site.

    `experts_factor` is the model's factor of its experts, which transformers has in every weight. vLLM applies it
    there, or to the experts' sum.
    """
    if rows[site].shape != reference[site].shape:
        shapes = tuple(rows[site].shape), tuple(reference[site].shape)
        raise Wrong(f"{site[0]}[{site[1]}] has shape {shapes[0]}, the reference's is {shapes[1]}")
    off = rel_err(rows[site], reference[site])
    if site[0] == "expert_weights":
        return min(off, rel_err(rows[site] * experts_factor, reference[site]))
    return off


def _positions(hook: str, answer: Answer) -> list[int] | None:
    """Which positions `positions_for` selects; None for all."""
    return None if positions_for(hook) == "all" else list(range(len(answer.ids)))[::2]


def _rounding(oracle: RemoteOracle, captured: Sequence[Answer], hook: str, steer: Any) -> float:
    """How far the reference in fp32 is from itself in float64: at `hook`, or at all that an addition moves."""
    if steer is not None:
        return max(oracle.rounding(captured[STEERED].ids, steer).values())
    errors = [oracle.rounding(answer.ids) for answer in captured if answer.rows]
    return max(error for found in errors for at, error in found.items() if at[0] == hook)


def _steer_error(
    engine: Engine,
    oracle: RemoteOracle,
    good: Sequence[tuple[str, int]],
    site: tuple[str, int],
    vector: torch.Tensor,
    stock: Sequence[Answer],
    verdict: Verdict,
) -> float | None:
    """Add `vector` at a site of one request: all its rows and log-probabilities against the steered reference.

    None where the model lets the point be read alone.
    """
    import vllm_weir as weir

    (hook, layer), bound = site, verdict.bound
    try:
        answers = engine.ask(good, [weir.Add(vector, layers=layer, hook=hook, positions=positions_for(hook))])
    except weir.WeirError as e:
        if "can be read and not changed" not in e.message:
            raise
        verdict.hooks[hook]["refused"] = f"read only: {e.message}"
        return None
    check_neighbours(stock, answers, f"{hook}[{layer}] steered", bound, exact=verdict.steady and bound <= 1e-5)
    mine = answers[STEERED]
    rows, logits = oracle.steer(mine.ids, hook, layer, vector, _positions(hook, mine))
    rows, found = by_expert(rows), by_expert(mine.rows)
    before = oracle.logits(mine.ids)
    if logprob_error(mine, before) < 100 * bound:
        raise Wrong(f"adding at {hook}[{layer}] moved nothing: the check would see no error")
    errors = [_off(found, rows, at, oracle.capabilities["experts_factor"]) for at in found]
    return max(*errors, logprob_error(mine, logits))
