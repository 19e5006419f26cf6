"""The reference for probes and gates: rows of transformers put through the rules, one position after another.

`ProbeCase` and `GateCase` hold what a test asks for, `public()` turns them into what users write. The arithmetic here
is float64 on float32 rows, written from the rules alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

import vllm_weir as weir
from tests.conformance.inside import Inside
from tests.support.check import expected_positions
from tests.support.oracle import Site
from tests.support.steered import SteeredOracle, _apply, _apply_to_part, of_layer

KINDS = {"linear": "Probe", "mlp": "MLPProbe", "attention": "AttentionProbe"}
HIDDEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": torch.tanh,
}
Scores = tuple[list[int], torch.Tensor]
"""The scored positions, ascending, and the scores there, float64 [positions, k]."""


@dataclass(frozen=True)
class ProbeCase:
    """A probe written out; `tensors` are named as the arguments of its class."""

    name: str
    hook: str
    layer: int
    kind: str
    tensors: Mapping[str, torch.Tensor]
    activation: str = "none"
    smooth: tuple[Any, ...] | None = None
    positions: Any = "all"
    head: int | None = None
    hidden: str = "relu"
    before: bool = False
    """Whether it reads the row before the interventions at its hook point, as gates by a feature do."""

    @property
    def site(self) -> Site:
        return self.hook, self.layer

    def public(self) -> Any:
        """The probe as a user writes it."""
        options: dict[str, Any] = {"positions": self.positions}
        options |= {"head": self.head} if self.head is not None else {}
        options |= {"hidden": self.hidden} if self.kind == "mlp" else {}
        options |= {"activation": self.activation, "smooth": self.smooth}
        cls = getattr(weir, KINDS[self.kind])
        return cls(self.name, **self.tensors, hook=self.hook, layer=self.layer, **options)

    def scores(self, rows: torch.Tensor, prompt_len: int, ids: Sequence[int]) -> Scores:
        """The scores of `rows` [n, ...], those of the positions from 0 on; `ids` are the tokens of a finished request.

        Positions that have no row in `rows` have no score.
        """
        at = expected_positions(self.positions, prompt_len, len(ids) - prompt_len + 1, ids)
        at = [p for p in at if p < len(rows)]
        rows = rows if self.head is None else rows[:, self.head]
        outputs = self._outputs(rows[at].flatten(1).double())
        return at, _smoothed([self._activated(one) for one in outputs], self.smooth)

    def _outputs(self, h: torch.Tensor) -> list[torch.Tensor]:
        w = {name: torch.as_tensor(tensor).double() for name, tensor in self.tensors.items()}
        if self.kind == "linear":
            weight = torch.atleast_2d(w["weight"])
            return [weight.flatten(1) @ row + w["bias"] for row in h]
        if self.kind == "mlp":
            f = HIDDEN[self.hidden]
            return [w["w_out"] @ f(w["w_in"] @ row + w["b_in"]) + w["b_out"] for row in h]
        value = w["value"] if w["value"].ndim == 3 else w["value"][:, None]
        found = []
        for t in range(len(h)):
            s = w["bias"].clone()
            for q, v in zip(w["query"], value, strict=True):
                weights = torch.softmax(h[: t + 1] @ q, 0)
                s = s + (weights[:, None] * (h[: t + 1] @ v.T)).sum(0)
            found.append(s)
        return found

    def _activated(self, s: torch.Tensor) -> torch.Tensor:
        s = torch.atleast_1d(s)
        return {"none": lambda x: x, "sigmoid": torch.sigmoid, "softmax": lambda x: torch.softmax(x, 0)}[
            self.activation
        ](s)


def _smoothed(scores: list[torch.Tensor], smooth: tuple[Any, ...] | None) -> torch.Tensor:
    kind, *parameters = smooth or ("none",)
    smoothed: list[torch.Tensor] = []
    for t, s in enumerate(scores):
        if kind == "ema":
            s = s if t == 0 else parameters[0] * s + (1 - parameters[0]) * smoothed[-1]
        elif kind == "max":
            s = torch.stack(scores[: t + 1]).max(0).values
        elif kind == "mean":
            last = scores[max(0, t + 1 - parameters[0]) : t + 1]
            s = torch.stack(last).sum(0) / len(last)
        smoothed.append(s)
    return torch.stack(smoothed) if smoothed else torch.zeros(0, 1, dtype=torch.float64)


@dataclass(frozen=True)
class GateCase:
    """A gate written out."""

    probe: str
    above: float | None = None
    below: float | None = None
    latch: bool = False
    delay: int = 0
    sharpness: float | None = None
    output: int = 0

    def public(self) -> Any:
        """The gate as a user writes it."""
        bound = {"above": self.above} if self.above is not None else {"below": self.below}
        more = {"latch": True} if self.latch else {}
        more |= {"delay": self.delay} if self.delay else {}
        more |= {"sharpness": self.sharpness} if self.sharpness is not None else {}
        return weir.When(self.probe, **bound, **more, output=self.output)

    @property
    def threshold(self) -> float:
        return self.above if self.above is not None else self.below  # type: ignore[return-value]

    def factors(self, scores: Scores, length: int) -> list[float]:
        """The factor at each position of a sequence."""
        by_position = dict(zip(scores[0], scores[1][:, self.output].tolist(), strict=True))
        found, last, was_open = [], None, False
        known = []  # the last score there is, at each position
        for t in range(length):
            last = by_position.get(t, last)
            known.append(last)
        for t in range(length):
            y = known[t - self.delay] if t >= self.delay else None
            fires = y is not None and (y > self.threshold if self.above is not None else y < self.threshold)
            was_open = was_open or fires
            if y is None:
                found.append(0.0)
            elif self.sharpness is not None:
                sign = 1 if self.above is not None else -1
                found.append(1 / (1 + math.exp(-sign * self.sharpness * (y - self.threshold))))
            else:
                found.append(float(was_open if self.latch else fires))
        return found


@dataclass(frozen=True)
class Act:
    """An intervention that a gate may decide on.

    `make` takes `when=` and returns what a user writes; `item` is what the reference applies if that is something else
    than what `make` returns without a gate.
    """

    make: Callable[..., Any]
    gate: GateCase | None = None
    item: Any = None

    @cached_property
    def plain(self) -> Any:
        """Without its gate."""
        return self.item if self.item is not None else self.make()

    def public(self) -> Any:
        """The intervention as a user writes it."""
        return self.make() if self.gate is None else self.make(when=self.gate.public())


class Traced(NamedTuple):
    """A pass of the reference.

    Attributes:
        rows: after the interventions, by site.
        logits: [n, vocab].
        scores: by the probes' names.
        factors: of each act, at each position.
    """

    rows: dict[Site, torch.Tensor]
    logits: torch.Tensor
    scores: dict[str, Scores]
    factors: list[list[float]]


@dataclass
class _Pass:
    """What hooks share while a sequence goes through the model."""

    ids: Sequence[int]
    prompt_len: int
    probes: Mapping[str, ProbeCase]
    acts: Sequence[Act]
    num_layers: int
    before: dict[str, Scores]
    """Scores of the pass before this one, for gates whose probe is met after the intervention."""
    rows: dict[Site, torch.Tensor] = field(default_factory=dict)
    scores: dict[str, Scores] = field(default_factory=dict)
    used: list[tuple[Act, list[float]]] = field(default_factory=list)
    """The factors that each act had when it acted."""

    def through(self, hook: str, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, ...] of a site after the interventions there, which are then scored."""
        self._score((hook, layer), True, rows)
        for act in self.acts:
            item = act.plain
            layers = range(self.num_layers) if item.layers == "all" else item.layers
            if item.hook == hook and layer in layers:
                rows = self._changed(act, of_layer(item, layer, layers), rows)
        self.rows[hook, layer] = rows.detach().clone()
        self._score((hook, layer), False, rows)
        return rows

    def _score(self, site: Site, before: bool, rows: torch.Tensor) -> None:
        for probe in self.probes.values():
            if (probe.site, probe.before) == (site, before):
                self.scores[probe.name] = probe.scores(rows, self.prompt_len, self.ids)

    def factors(self, act: Act) -> list[float]:
        """The factor of an act at each position, by the scores that there are by now."""
        if act.gate is None:
            return [1.0] * len(self.ids)
        scores = self.scores.get(act.gate.probe, self.before.get(act.gate.probe))
        return [0.0] * len(self.ids) if scores is None else act.gate.factors(scores, len(self.ids))

    def _changed(self, act: Act, item: Any, rows: torch.Tensor) -> torch.Tensor:
        # As many rows as tokens: everything given here has gone through the model.
        generated = len(self.ids) - self.prompt_len + 1
        at = expected_positions(item.positions.to_json(), self.prompt_len, generated, self.ids)
        factors = self.factors(act)
        self.used.append((act, factors))
        after = (_apply if rows.ndim == 2 and item.neurons is None else _apply_to_part)(item, rows[at])
        rows = rows.clone()
        for one, position in zip(after, at, strict=True):
            if factors[position] == 1.0:
                rows[position] = one
            elif factors[position]:
                rows[position] += factors[position] * (one - rows[position])
        return rows


class GatedOracle(SteeredOracle):
    """An Oracle under probes and gated interventions."""

    def gated(self, ids: Sequence[int], prompt_len: int, probes: Sequence[ProbeCase], acts: Sequence[Act]) -> Traced:
        """Run `ids`, all of which go through the model.

        A gate whose probe is met after the intervention takes its scores from a pass before; passes are repeated until
        they say the same, and each gets at least one more position right.
        """
        by_name = {probe.name: probe for probe in probes}
        before: dict[str, Scores] = {}
        inside = self.inside  # found by a pass of its own, which no hook of this one may see
        for _ in range(len(ids) + 1):
            now = _Pass(list(ids), prompt_len, by_name, acts, self.num_layers, before)
            with torch.no_grad(), self._hooked(inside, now):
                logits = self._forward(now.ids)
            if all(now.factors(act) == used for act, used in now.used):
                return Traced(now.rows, logits, now.scores, [now.factors(act) for act in acts])
            before = now.scores
        raise AssertionError("a gate's probe is met after the intervention, and it does not wait a token")

    @contextlib.contextmanager
    def _hooked(self, inside: Inside, now: _Pass) -> Iterator[None]:
        def out(hook: str, layer: int) -> Any:
            def after(_module: Any, _args: Any, output: Any) -> Any:
                if isinstance(output, tuple):
                    return (now.through(hook, layer, output[0][0])[None], *output[1:])
                return now.through(hook, layer, output[0])[None]

            return after

        def into(hook: str, layer: int, read_only: bool = False) -> Any:
            def before(_module: Any, args: Any, kwargs: Any) -> Any:
                given = args[0] if args else kwargs["hidden_states"]
                given = now.through(hook, layer, given[0])[None]
                if read_only:
                    return None
                return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})

            return before

        with contextlib.ExitStack() as stack:
            for layer, block in enumerate(self.blocks):
                stack.callback(block.register_forward_pre_hook(into("resid_pre", layer), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(out("resid_post", layer)).remove)
                # The names of Llama's modules; other families are served between and inside blocks' parts.
                parts = dict(block.named_children())
                if "post_attention_layernorm" in parts and "pre_feedforward_layernorm" not in parts:
                    stack.callback(parts["self_attn"].register_forward_hook(out("attn_out", layer)).remove)
                    stack.callback(parts["mlp"].register_forward_hook(out("mlp_out", layer)).remove)
                    norm = parts["post_attention_layernorm"]
                    hook = into("resid_mid", layer, read_only=True)
                    stack.callback(norm.register_forward_pre_hook(hook, with_kwargs=True).remove)
            stack.enter_context(inside.watched({}, now.through))
            yield


ORDER = (
    "resid_pre", "attn_in", "q", "k", "v", "q_rot", "k_rot", "z", "attn_out", "resid_mid", "mlp_in", "router_logits",
    "mlp_pre", "mlp_pre_linear", "mlp_post", "mlp_out",
)  # fmt: skip
"""Hook points of a block in the order in which a token meets them, up to the next block's first."""


def place(hook: str, layer: int) -> tuple[int, int]:
    """A key that orders taps; a block's end is the beginning of the next."""
    if hook in ("embed", "final_norm"):
        return (-1, 0) if hook == "embed" else (1 << 30, 0)
    return (layer + 1, 0) if hook == "resid_post" else (layer, ORDER.index(hook))


def comes_first(probe: ProbeCase, hook: str, layers: Sequence[int]) -> bool:
    """Whether a probe is met before interventions at a hook point of some blocks."""
    return all(place(*probe.site) < place(hook, layer) for layer in layers)
