"""What both ways of checking share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tests.conformance.engine import STEERED, Answer, Engine
from tests.conformance.inside import ATTENTION, INNER, MLP, ROUTING, STEERABLE
from tests.conformance.oracle import ENDS, FIVE
from tests.conformance.rounding import widened
from tests.conformance.verdict import CONFORMS, FAILS, Verdict

STREAM = ("embed", *FIVE, "final_norm")
HOOKS = (
    "embed", "resid_pre", *ATTENTION, "attn_out", "resid_mid", "mlp_in", *ROUTING, *MLP[1:], "mlp_out", "resid_post",
    "final_norm",
)  # fmt: skip
"""In the order in which a token meets them."""
SOME = "::2"
"""Where is added inside a block: the same for all keys would change no pattern."""


class Wrong(AssertionError):
    """A check that failed; the message is what the table says."""


def served(sites: Iterable[Any]) -> list[tuple[str, int]]:
    """The sites that Weir serves."""
    return [(site.hook, site.layer) for site in sites if site.supported]


def summary(sites: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """`Verdict.hooks`, without the errors yet."""
    sites = list(sites)
    found: dict[str, dict[str, Any]] = {}
    for hook in HOOKS:
        mine = [site for site in sites if site.hook == hook]
        reasons = dict.fromkeys(site.reason for site in mine if not site.supported)
        found[hook] = {
            "layers": sum(bool(site.supported) for site in mine),
            "of": len(mine),
            "has": None,
            "capture": None,
            "steer": None,
            "rounding": {},
            "refused": "; ".join(reasons),
        }
    return found


def middle(sites: Sequence[tuple[str, int]], hook: str) -> tuple[str, int] | None:
    """The middle one of the sites of a hook point."""
    layers = sorted(layer for name, layer in sites if name == hook)
    return (hook, layers[(len(layers) - 1) // 2]) if layers else None


def steerable(hook: str) -> bool:
    """Whether something may be added at a hook point."""
    return hook in STEERABLE or hook in STREAM


def positions_for(hook: str) -> str:
    """Where the checks add at a hook point."""
    return SOME if hook in INNER else "all"


def vector_for(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """A random direction as long as the rows at a site usually are, in their shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows.shape[1:], generator=generator) * float(rows.float().pow(2).mean().sqrt())


def by_expert(rows: dict[tuple[str, int], torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
    """The rows with the experts of each token in the order of their ids: a router may list them in any."""
    rows = dict(rows)
    for layer in {layer for hook, layer in rows if hook == "expert_ids"}:
        rows["expert_ids", layer], order = rows["expert_ids", layer].long().sort(-1)
        if ("expert_weights", layer) in rows:
            rows["expert_weights", layer] = rows["expert_weights", layer].gather(-1, order)
    return rows


def check_refusals(engine: Engine, sites: Iterable[Any]) -> None:
    """A site that is not served is refused when asked for, one of each hook point."""
    import vllm_weir as weir

    done = set()
    for site in sites:
        if site.supported or site.hook in done:
            continue
        done.add(site.hook)
        if not site.reason:
            raise Wrong(f"{site.hook}[{site.layer}] is refused without a reason")
        try:
            engine.ask([(site.hook, site.layer)])
        except weir.WeirError:
            continue
        raise Wrong(f"{site.hook}[{site.layer}] is not served, but a request for it went through")


def check_neighbours(stock: Sequence[Answer], now: Sequence[Answer], what: str, bound: float, exact: bool) -> None:
    """Everybody but the steered request has the tokens and log-probabilities of the run without Weir's keys.

    To the bit, unless the experts of a layer compute what the whole batch sends them in one product: then a neighbour's
    routing changes how a sum is blocked, in stock vLLM as well.
    """
    for i, (before, after) in enumerate(zip(stock, now)):
        if i == STEERED:
            continue
        if before.made != after.made:
            raise Wrong(f"{what}: request {i} of the batch got other tokens")
        if exact and not torch.equal(before.logprobs, after.logprobs):
            raise Wrong(f"{what}: request {i} of the batch has other log-probabilities")
        if not exact and float((before.logprobs - after.logprobs).abs().max()) > bound * 10:
            raise Wrong(f"{what}: request {i} of the batch has log-probabilities far from the others'")


def beyond(verdict: Verdict, bound: float) -> list[tuple[float, str, str]]:
    """(error, hook point, "capture" or "steer") of what is off by more than the bound.

    Where the reference's own rounding was measured, the bound is `widened` by it.
    """
    return [
        (error, hook, way)
        for hook, found in verdict.hooks.items()
        for way in ("capture", "steer")
        if (error := found[way]) is not None and not error <= widened(bound, found["rounding"].get(way, 0.0))
    ]


def conclude(verdict: Verdict, bound: float) -> None:
    """Conforms, or the worst of what does not."""
    worst = beyond(verdict, bound)
    if worst:
        error, hook, way = max(worst)
        verdict.verdict, verdict.reason = FAILS, f"{way} at {hook} is off by {error:.1e}"
    else:
        verdict.verdict = CONFORMS


__all__ = ["ENDS", "FIVE", "HOOKS", "INNER", "STREAM", "Wrong"]
