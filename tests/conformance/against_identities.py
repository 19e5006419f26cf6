"""Every served site against what the words mean, where no reference has the model.

Captured rows have to obey the identities that define the hook points. Additions have to move what lies downstream and
nothing upstream, the same from two names of one place, through attention where attention follows and not where only
the MLP does, and in proportion where they are small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tests.conformance.checks import (
    HOOKS,
    INNER,
    SOME,
    Wrong,
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
from tests.conformance.engine import LENGTHS, STEERED, Answer, Engine
from tests.conformance.inside_identities import inside_errors
from tests.conformance.oracle import FIVE
from tests.conformance.verdict import Verdict
from tests.conformance.zoo.entry import COARSE, EXACT
from tests.support.measure import rel_err

Site = tuple[str, int]
Rows = dict[Site, torch.Tensor]

SMALL = (2e-4, 2e-5)
"""Of a row's length: small enough for the first order, large enough for fp32 to see it to a few percent. Where the
first takes an early token across the border between two experts, all the tokens after it jump; the second rarely does.
"""
DERIVED = ("attn_scores", "pattern", "expert_ids", "expert_weights")
SAME_PLACE = (("attn_out", "resid_mid", 0), ("mlp_out", "resid_post", 0), ("resid_post", "resid_pre", 1))
"""Adding at the first is adding at the second, so many blocks later."""


def check_identities(
    engine: Engine, sites: Iterable[Any], stock: Sequence[Answer], bound: float, verdict: Verdict
) -> None:
    """Fill in the verdict."""
    import vllm_weir as weir

    sites = list(sites)
    verdict.hooks = summary(sites)
    good = served(sites)
    check_refusals(engine, sites)
    captured, gains = engine.ask(good), engine.gains
    check_neighbours(stock, captured, "captured", bound, exact=verdict.steady)
    for answer in captured:
        if not torch.isfinite(answer.logprobs).all():
            raise Wrong("the model's own log-probabilities are not finite")
        for hook, error in identity_errors(answer.rows, None, gains).items():
            verdict.hooks[hook]["capture"] = max(verdict.hooks[hook]["capture"] or 0.0, error)
    for hook, error in inside_errors(engine, captured).items():
        verdict.hooks[hook]["capture"] = max(verdict.hooks[hook]["capture"] or 0.0, error)
    unchecked = [hook for hook, found in verdict.hooks.items() if found["layers"] and found["capture"] is None]
    for hook in unchecked:
        if hook in INNER:
            continue  # the worker has verified it with the model's own modules, or it would not be served
        if hook in FIVE:
            raise Wrong(f"{hook} takes part in no identity: nothing tells whether it is right")
        verdict.hooks[hook]["capture"] = _end_error(hook, captured)

    checks = _Steering(engine, good, stock, captured[STEERED], verdict, gains)
    for seed, (hook, found) in enumerate(verdict.hooks.items()):
        site = middle(good, hook)
        if site is None or not steerable(hook):
            continue
        try:
            found["steer"] = checks.error(site, seed)
        except weir.WeirError as e:
            if "can be read and not changed" not in e.message:
                raise
            found["refused"] = f"read only: {e.message}"
    conclude(verdict, bound)


def identity_errors(
    rows: Rows, added: tuple[Site, torch.Tensor] | None = None, gains: Mapping[int, float] = MappingProxyType({})
) -> dict[str, float]:
    """The largest error of the identities that each hook point takes part in.

    Args:
        added: a site and what was added there, which the identity that defines its value knows nothing of.
        gains: block -> what it multiplies its sum with before it leaves.
    """

    def made(site: Site) -> torch.Tensor:
        return rows[site] - added[1] if added and added[0] == site else rows[site]

    worst: dict[str, float] = {}
    for layer in sorted({layer for hook, layer in rows if hook in FIVE}):
        here = {hook: rows[hook, layer] for hook in FIVE if (hook, layer) in rows}
        sums: list[tuple[str, ...]] = []
        if "resid_mid" in here:
            sums += [("resid_mid", "resid_pre", "attn_out"), ("resid_post", "resid_mid", "mlp_out")]
        else:
            sums.append(("resid_post", "resid_pre", *(h for h in ("attn_out", "mlp_out") if h in here)))
        for total, *terms in sums:
            if len(terms) > 1 and {total, *terms} <= set(here):
                gain = gains.get(layer, 1.0) if total == "resid_post" else 1.0
                error = rel_err(gain * sum(here[t] for t in terms), made((total, layer)))
                for hook in (total, *terms):
                    worst[hook] = max(worst.get(hook, 0.0), error)
                for hook in terms:
                    if float(here[hook].abs().max()) < 1e-3 * float(here[total].abs().max()):
                        raise Wrong(f"{hook}[{layer}] adds next to nothing: the identity would not miss it")
        if {("resid_post", layer), ("resid_pre", layer + 1)} <= set(rows):
            error = rel_err(made(("resid_pre", layer + 1)), rows["resid_post", layer])
            for hook in ("resid_pre", "resid_post"):
                worst[hook] = max(worst.get(hook, 0.0), error)
    return worst


def _end_error(hook: str, captured: Sequence[Answer]) -> float:
    """`embed` is a function of the token alone; `final_norm` has the rows of one model, whatever the batch."""
    if hook == "final_norm":
        return 0.0  # adding at it is checked against the logits
    first: dict[int, torch.Tensor] = {}
    worst = 0.0
    seen_again = 0
    for answer in captured:
        if not answer.rows:
            continue
        for token, row in zip(answer.ids, answer.rows[hook, 0]):
            if token in first:
                seen_again += 1
                worst = max(worst, rel_err(row, first[token]))
            first[token] = row
    if not seen_again:
        raise Wrong("no token comes twice: nothing tells whether embed depends on it alone")
    return worst


class _Steering:
    def __init__(
        self, engine: Engine, good: Sequence[Site], stock: Sequence[Answer], plain: Answer, verdict: Verdict,
        gains: Mapping[int, float],
    ) -> None:  # fmt: skip
        self.gains = gains
        self.engine, self.good, self.stock, self.plain, self.bound = engine, good, stock, plain, verdict.bound
        self.exact = verdict.steady and verdict.bound <= EXACT
        # Rounding to so few bits hides what little does, and a router may send a token elsewhere for it.
        self.coarse = verdict.bound >= COARSE

    def error(self, site: Site, seed: int) -> float:
        """The largest error of the exact checks at a site; raises Wrong at what has no measure."""
        hook, layer = site
        vector = vector_for(self.plain.rows[site], seed)
        whole = self._added(site, vector, positions_for(hook))
        added = vector.expand(self._length, *vector.shape).clone()
        if positions_for(hook) == SOME:
            added[1::2] = 0
        errors = [rel_err(self._prompt(whole, site) - self._prompt(self.plain, site), added)]
        errors += identity_errors(whole.rows, (site, vector), self.gains).values()
        for at in self.good:
            moved = not torch.equal(self._prompt(whole, at), self._prompt(self.plain, at))
            if moved and _before(at, site):
                raise Wrong(f"adding at {hook}[{layer}] moved {at[0]}[{at[1]}], which comes before it")
        if hook == "final_norm":
            self._head_is_linear(site, vector)
        elif torch.equal(whole.logprobs, self.plain.logprobs):
            raise Wrong(f"adding at {hook}[{layer}] moved nothing")
        else:
            if not self.coarse:
                self._small_ones_are_linear(site, vector)
            self._mixing(site, vector)
        for first, second, later in SAME_PLACE:
            twin = (second, layer + later)
            if hook == first and twin in self.good and self._same_place(site, twin):
                errors.append(self._apart(whole, self._added(twin, vector), twin))
        return max(errors)

    def _same_place(self, site: Site, twin: Site) -> bool:
        if site[0] == "mlp_out" and self.gains.get(site[1], 1.0) != 1:
            return False  # what is added before the gain is multiplied with it
        return site[0] != "attn_out" or ("resid_mid", site[1]) in self.good

    def _added(self, site: Site, vector: torch.Tensor, positions: Any = "all") -> Answer:
        import vllm_weir as weir

        hook, layer = site
        add = weir.Add(vector, layers=layer, hook=hook, positions=positions)
        answers = self.engine.ask(self.good, [add])
        check_neighbours(self.stock, answers, f"{hook}[{layer}] steered", self.bound, exact=self.exact)
        return answers[STEERED]

    @property
    def _length(self) -> int:
        return LENGTHS[STEERED]

    def _prompt(self, answer: Answer, site: Site) -> torch.Tensor:
        """Rows of the prompt: those after it depend on which tokens were sampled."""
        return answer.rows[site][: self._length]

    def _apart(self, a: Answer, b: Answer, after: Site) -> float:
        later = [after] if self.coarse else [at for at in self.good if not _before(at, after)]
        errors = [rel_err(self._prompt(a, at), self._prompt(b, at)) for at in later]
        return max(errors, default=0.0)

    def _small_ones_are_linear(self, site: Site, vector: torch.Tensor) -> None:
        at = None
        for small in SMALL:
            at = self._not_in_proportion(site, vector, small)
            if at is None:
                return
        assert at is not None
        raise Wrong(f"twice as little at {site[0]}[{site[1]}] is not twice the change at {at[0]}[{at[1]}]")

    def _not_in_proportion(self, site: Site, vector: torch.Tensor, small: float) -> Site | None:
        """Where twice as little is not twice the change; None if nowhere."""
        once, twice = (self._added(site, k * small * vector, positions_for(site[0])) for k in (1, 2))
        for at in self.good:
            # Further on, routers have sent tokens elsewhere, or fp32 sees too little of what is left.
            if _before(at, site) or at[1] > site[1] + 1 or at[0] in ("final_norm", *DERIVED):
                continue
            plain = self._prompt(self.plain, at).flatten(1)
            one, two = (self._prompt(answer, at).flatten(1) - plain for answer in (once, twice))
            seen = one.abs().amax(1) > 0.1 * small * plain.abs().amax(1)
            if not seen.any():
                continue
            # A router may send a token elsewhere, and all after it feel that: most rows have to be in proportion.
            apart = ((2 * one - two).abs().amax(1) / two.abs().amax(1))[seen]
            if float(apart.quantile(0.6)) > 0.1:
                return at
        return None

    def _mixing(self, site: Site, vector: torch.Tensor) -> None:
        """What is added at position 0 before a token mixer reaches other positions in that block; after it, not."""
        hook, layer = site
        one = self._added(site, vector, positions=[0])

        def later(name: str) -> bool | None:
            at = (name, layer)
            if at not in self.good:
                return None
            change = self._prompt(one, at)[1:] - self._prompt(self.plain, at)[1:]
            return float(change.abs().max()) > 1e-4 * float(self._prompt(self.plain, at).abs().max())

        if hook == "resid_pre" and later("attn_out") is False:
            raise Wrong(f"adding at resid_pre[{layer}] is not seen by the token mixer of block {layer}")
        if hook in ("attn_out", "resid_mid", "mlp_out") and later("resid_post"):
            raise Wrong(f"adding at {hook}[{layer}] reaches other positions within block {layer}")
        if hook == "resid_mid" and ("mlp_out", layer) in self.good:
            at = ("mlp_out", layer)
            if torch.equal(self._prompt(one, at)[:1], self._prompt(self.plain, at)[:1]):
                raise Wrong(f"adding at resid_mid[{layer}] is not seen by the MLP of block {layer}")

    def _head_is_linear(self, site: Site, vector: torch.Tensor) -> None:
        def centred(answer: Answer) -> torch.Tensor:
            first = answer.logprobs[0].double()  # the step that has no sampled token before it
            return first - first.mean()

        plain = centred(self.plain)
        step = 1.0 if self.coarse else 0.1
        one, two = (centred(self._added(site, k * step * vector)) - plain for k in (1, 2))
        if float(one.abs().max()) < 1e-3:
            raise Wrong("adding at final_norm does not move the logits")
        if rel_err(2 * one, two) > 0.05:
            raise Wrong("the logits are not linear in final_norm")


def _before(at: Site, site: Site) -> bool:
    """Whether a site comes before another on the way of a token."""

    def place(s: Site) -> tuple[int, int]:
        if s[0] in FIVE or s[0] in INNER:
            return s[1], HOOKS.index(s[0])
        return (-1, 0) if s[0] == "embed" else (1 << 30, 0)

    return place(at) < place(site)
