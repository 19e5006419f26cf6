"""Sync controllers of the engine tests, and what they do written out for the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import vllm_weir as weir
from tests.support.probe_reference import Scores
from vllm_weir.controllers import ScoredStep, SyncController, WorkerInfo


class Leaky(SyncController):
    """Follows the tanh of a probe's score with a delay: ``s = keep * s + (1 - keep) * tanh(score)``."""

    def __init__(self, probe: str = "p", keep: float = 0.6) -> None:
        self.probes, self.keep = [probe], keep

    def open(self, worker: WorkerInfo) -> None:
        self.state = torch.zeros(worker.slots, device=worker.device)

    def step(self, step: ScoredStep) -> torch.Tensor:
        before = torch.where(step.first, 0.0, self.state[step.slots])
        score = step.scores[self.probes[0]][:, 0].nan_to_num(0.0)
        self.state[step.slots] = after = self.keep * before + (1 - self.keep) * score.tanh()
        return after


class Both(SyncController):
    """The strength that was, turned round, and half the difference of two probes; `calls` keeps what it was given."""

    probes = ("p", "q")
    calls: ClassVar[list[ScoredStep]] = []

    def __init__(self) -> None:
        pass

    def step(self, step: ScoredStep) -> torch.Tensor:
        self.calls.append(step)
        difference = step.scores["p"][:, 0] - step.scores["q"][:, -1]
        return (0.5 * difference.tanh() - 0.5 * step.strengths).nan_to_num(0.0)


class Odd(SyncController):
    """Answers or raises what a test says."""

    probes = ("p",)
    answer: ClassVar[Any] = 1.0

    def __init__(self) -> None:
        pass

    def step(self, step: ScoredStep) -> torch.Tensor:
        if isinstance(self.answer, type):
            raise self.answer("on purpose")  # made here: what a test keeps would keep its traceback
        if isinstance(self.answer, float):
            return torch.full_like(step.strengths, self.answer)
        return self.answer


SETTINGS = {
    name: {f"{__name__}:{options.pop('of')}": options}
    for name, options in {"leaky": {"of": "Leaky"}, "both": {"of": "Both"}, "odd": {"of": "Odd"}}.items()
}


@dataclass(frozen=True)
class LeakyCase:
    """`Leaky` for the reference; takes the place of a `GateCase`."""

    probe: str
    prompt_len: int
    keep: float = 0.6
    sharpness: float = 1.0
    """No score is near a threshold, for there is none."""

    def public(self) -> Any:
        return weir.When("controller:leaky")

    def factors(self, scores: Scores, length: int) -> list[float]:
        """The factor at each position; a token's follows from the scores up to the one before."""
        by_position = dict(zip(scores[0], scores[1][:, 0].tolist(), strict=True))
        found, state = [0.0] * length, 0.0
        last = 0.0
        for t in range(length - 1):
            last = by_position.get(t, last)
            if t >= self.prompt_len - 1:
                state = self.keep * state + (1 - self.keep) * math.tanh(last)
                found[t + 1] = state
        return found
