"""Controllers that keep the score of a probe near a target: from answer to answer, and from token to token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import vllm_weir as weir
from vllm_weir.controllers import AsyncController, Finished, ScoredStep, SyncController, WorkerInfo
from vllm_weir.results.scores import Scores


class Thermostat(AsyncController):
    """Steers every request along the probe's direction, by how far the answers before it were off.

    Args:
        probe: file of a linear probe (`Probe.save`); it scores what every request generates.
        layer: block at which requests are steered.
        target: the mean score that answers should have.
        gain: how much an answer that is off by 1 changes the strength.
    """

    def __init__(self, probe: str, layer: int, target: float = 0.0, gain: float = 0.1) -> None:
        loaded = weir.load_probe(probe)
        self.probes = [weir.Probe(loaded.name, loaded.weight, loaded.bias, loaded.hook, loaded.layer,
                                  positions="generated")]  # fmt: skip
        self.name, self.layer, self.target, self.gain = loaded.name, layer, target, gain
        weight = torch.as_tensor(loaded.weight.array).reshape(-1)
        self.direction = weight / weight.norm() ** 2  # adding it raises the score by 1
        self.strength = 0.0

    def score(self, request: Finished, scores: Scores) -> None:
        if len(scores[self.name]):
            self.strength += self.gain * (self.target - float(scores[self.name].mean()))

    def finish(self, request: Finished) -> Sequence[str]:
        self.actions.set_global(weir.Add(self.direction, self.layer, self.strength))
        return ()


class Steady(SyncController):
    """Decides on interventions by an average of the probe's last scores: the lower it is, the stronger.

    Args:
        probe: name of the probe, which requests bring along or which is registered.
        target: the score at which interventions are left out.
        width: how far below (above) the target they act with strength 1 (-1).
        keep: weight of what was before in the average.
    """

    def __init__(self, probe: str = "mood", target: float = 0.0, width: float = 1.0, keep: float = 0.8) -> None:
        if not 0 <= keep < 1 or width <= 0:
            raise weir.WeirError("0 <= keep < 1, and width is above 0", "keep")
        self.probes, self.target, self.width, self.keep = [probe], target, width, keep

    def open(self, worker: WorkerInfo) -> None:
        self.mean = torch.zeros(worker.slots, device=worker.device)

    def step(self, step: ScoredStep) -> torch.Tensor:
        score = step.scores[self.probes[0]][:, 0]
        mean = torch.where(step.first, score, self.keep * self.mean[step.slots] + (1 - self.keep) * score)
        self.mean[step.slots] = mean
        return ((self.target - mean) / self.width).clamp(-1, 1)
