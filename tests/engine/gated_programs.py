"""Random programs: a request with probes, gates of every form, and interventions that they decide on.

Everything of a program follows from its number, so a failure is repeated by the number alone.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch

import vllm_weir as weir
from tests.engine.common import tokens
from tests.engine.probe_cases import (
    ACTIVATIONS,
    HEADS,
    LAYERS,
    POSITIONS,
    SITES,
    SMOOTHINGS,
    WIDTHS,
    D,
    random_probe,
)
from tests.support.probe_reference import Act, GateCase, GatedOracle, ProbeCase, comes_first

ACTED: list[tuple[str, Any]] = [
    ("resid_post", [2]), ("resid_post", [3]), ("resid_pre", [2, 3]), ("z", [2]), ("mlp_post", [3]), ("attn_out", [3]),
    ("mlp_out", [1]), ("resid_post", [1, 3]), ("resid_pre", [1]), ("resid_post", "all"),
]  # fmt: skip
FORMS = ("add", "norm_match", "keep_norm", "ablate", "clamp", "bounded", "replace", "low_rank", "head")


@dataclass(frozen=True)
class Program:
    """A request of `prompt` tokens that generates `max_tokens`."""

    number: int
    prompt: list[int]
    max_tokens: int
    probes: list[ProbeCase]
    acts: list[Act]


def intervention(form: str, hook: str, layers: Any, positions: Any, seed: int) -> Any:
    """A partial that makes an intervention of some form; strengths are of the size of the rows."""
    generator = torch.Generator().manual_seed(seed)
    width = WIDTHS.get(hook, D)

    def v(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    at = {"hook": hook, "layers": layers, "positions": positions}
    if form == "head":
        head = seed % HEADS["z"]
        return functools.partial(weir.Add, v(WIDTHS["z"] // HEADS["z"]), scale=2.0, **at | {"hook": "z"}, heads=[head])
    makers = {
        "add": functools.partial(weir.Add, v(width), scale=1.5),
        "norm_match": functools.partial(weir.Add, v(width), scale=0.7, norm_match=True),
        "keep_norm": functools.partial(weir.Add, v(width), scale=2.0, keep_norm=True),
        "ablate": functools.partial(weir.Ablate, v(2, width)),
        "clamp": functools.partial(weir.Clamp, v(width), value=5.0, strength=0.8),
        "bounded": functools.partial(weir.Clamp, v(width), min=0.5, max=2.0),
        "replace": functools.partial(weir.Replace, v(width), alpha=0.6),
        "low_rank": functools.partial(weir.LowRank, v(2, width) / width**0.5, v(2, width) / width**0.5, 3 * v(2)),
    }
    return functools.partial(makers[form], **at)


def make_program(number: int, oracle: GatedOracle) -> Program:
    """The program of a number: one to three probes, one to four interventions, most of them gated."""
    chance = random.Random(number)
    prompt = tokens(chance.randrange(6, 60), number)
    max_tokens = chance.randrange(3, 8)
    kinds = ("linear", "linear", "mlp", "attention")
    probes = [
        random_probe(
            f"p{k}",
            chance.choice(kinds),
            chance.choice(SITES),
            1000 * number + k,
            chance.choice((1, 1, 3)),
            activation=chance.choice(ACTIVATIONS),
            smooth=chance.choice(SMOOTHINGS),
            positions=chance.choice(["all", "all", *POSITIONS]),
            hidden=chance.choice(("relu", "gelu", "silu", "tanh")),
        )
        for k in range(chance.randrange(1, 4))
    ]
    # Thresholds lie among the scores that there are without interventions, so that gates open and close.
    plain = oracle.gated(prompt, len(prompt), probes, []).scores
    acts = []
    for k in range(chance.randrange(1, 5)):
        form, (hook, layers) = chance.choice(FORMS), chance.choice(ACTED)
        hook, layers = ("z", [2]) if form == "head" else (hook, layers)
        positions = chance.choice(["all", "all", "prompt", "generated", "sampled", "3:40:2"])
        gate = None
        if chance.random() < 0.85:
            probe = chance.choice(probes)
            gate = _gate(chance, probe, plain[probe.name][1])
            if not comes_first(probe, hook, range(LAYERS) if layers == "all" else layers):
                # The token before decides, which of a prompt's tokens is in the same pass.
                gate, positions = _gate(chance, probe, plain[probe.name][1], delay=1), "generated"
        acts.append(Act(intervention(form, hook, layers, positions, 77 * number + k), gate))
    return Program(number, prompt, max_tokens, probes, acts)


def _gate(chance: random.Random, probe: ProbeCase, scores: torch.Tensor, delay: int | None = None) -> GateCase:
    output = chance.randrange(scores.shape[1]) if len(scores) else 0
    seen = sorted(scores[:, output].tolist()) or [0.0]
    k = chance.randrange(len(seen))
    threshold = round((seen[k] + seen[max(0, k - 1)]) / 2 + chance.uniform(-0.02, 0.02), 3)
    side = {chance.choice(("above", "below")): threshold}
    how = chance.choice(("switch", "switch", "latch", "sigmoid"))
    return GateCase(
        probe.name,
        **side,
        latch=how == "latch",
        delay=chance.choice((0, 0, 1)) if delay is None else delay,
        sharpness=round(chance.uniform(0.5, 8), 2) if how == "sigmoid" else None,
        output=output,
    )
