"""The score kernel on CPU: what `triton_kernel` does, for all runs at a tap that are computed alike.

`vllm_weir.schema.resolved_probes` says what scores and factors are. A run is walked token by token,
so that results do not depend on how its request was cut into steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from vllm_weir.schema.instructions import ACTIVATE, SCORE
from vllm_weir.schema.resolved_probes import (
    ATTENTION,
    EMA,
    GELU,
    LINEAR,
    MAXIMUM,
    MEAN,
    MLP,
    NO_SMOOTHING,
    RELU,
    SIGMOID,
    SILU,
    SOFTMAX,
    TANH,
)
from vllm_weir.schema.taps import ALL_STAGES
from vllm_weir.worker.scoring import probe_table as fields
from vllm_weir.worker.scoring.tensors import ScoreTensors
from vllm_weir.worker.steering.programs import CELL_BIT

HIDDEN = {
    RELU: torch.relu,
    GELU: torch.nn.functional.gelu,
    SILU: torch.nn.functional.silu,
    TANH: torch.tanh,
}
ALIKE = [fields.PROBE_FIELDS.index(name) for name in ("kind", "outputs", "units", "hidden", "activation", "smoothing")]
ALIKE.append(fields.PROBE_FIELDS.index("window"))
"""Fields in which runs that are computed together agree."""


def launch(tap: int, tensors: ScoreTensors, stages: int = ALL_STAGES) -> None:
    """Compute scores and factors of the tokens of the step's runs at a tap, which has written their raw numbers.

    `stages` are bits of those of its stages whose probes score.
    """
    offsets = tensors.offsets.numpy()
    runs = tensors.runs.numpy()[offsets[tap] : offsets[tap + 1]]
    if stages != ALL_STAGES:
        runs = runs[stages >> tensors.probes.numpy()[runs[:, 0], fields.STAGE] & 1 != 0]
    if not len(runs):
        return
    keys = tensors.probes.numpy()[runs[:, 0]][:, ALIKE]
    for key in np.unique(keys, axis=0):
        _Runs(tap, tensors, runs[(keys == key).all(1)]).walk()


class _Runs:
    """Runs whose probes are computed alike. `runs`: int32 [n, 4], see RUN_FIELDS."""

    def __init__(self, tap: int, tensors: ScoreTensors, runs: np.ndarray) -> None:
        rows, self._first, self._counts, fresh = runs.astype(np.int64).T
        probes = tensors.probes.numpy()[rows].astype(np.int64)
        self._t, self._probes = tensors, probes
        kind, self._outputs, self._units, self._hidden, self._activation, self._smoothing, self._window = probes[
            0, ALIKE
        ].tolist()
        self._kind = kind
        self._raws = {LINEAR: self._outputs, MLP: self._units, ATTENTION: self._units * (1 + self._outputs)}[kind]
        size = 1 + self._outputs * (1 + self._window) + (self._units * (2 + self._outputs) if kind == ATTENTION else 0)
        self._places = probes[:, fields.STATE, None] + np.arange(size)
        new = np.flatnonzero(fresh)
        tensors.states[self._kept(new, self._places[new], 0, -1)] = 0.0
        for of_run, gates in self._gates(new):
            tensors.states[self._kept(new[of_run], gates[:, fields.GATE_STATE], 0, -1)] = 0.0
        self._states = tensors.states[self._kept(np.arange(len(runs)), self._places, 0, -1)]
        self._decay = tensors.decays[torch.from_numpy(rows)][:, None]
        self._scored = self._find_scored(tap)
        self._biases = self._at_outputs(tensors.biases)
        self._w_out: torch.Tensor | None = None
        if kind == MLP:
            d_model = tensors.vectors.shape[1]
            first = self._at_outputs(tensors.outs).long() * d_model
            self._w_out = tensors.vectors.view(-1)[first[:, :, None] + torch.arange(self._units)]

    def _kept(self, live: np.ndarray, places: np.ndarray, step: int, later: int = 0) -> torch.Tensor:
        """Return where numbers of runs stand in the copy kept after token `step`, or `later` positions on.

        `live` is int64 [n], which runs; `places`, int64 [n] or [n, m], are those in the first copy.
        """
        copies = self._t.copies
        if copies == 1:
            return torch.from_numpy(places)
        positions = self._t.positions.numpy()[self._first[live] + step].astype(np.int64)
        shift = (positions + later) % copies * self._probes[live, fields.STRIDE]
        return torch.from_numpy(places + shift.reshape(-1, *[1] * (places.ndim - 1)))

    def _at_outputs(self, table: torch.Tensor) -> torch.Tensor:
        """Return what a table has for the outputs of each run's probe, [n, outputs]."""
        places = self._probes[:, fields.STATE, None] + np.arange(self._outputs)
        return table[torch.from_numpy(places)]

    def _find_scored(self, tap: int) -> list[np.ndarray]:
        """Return which tokens of each run its probe scores: those whose program writes its raw numbers."""
        tokens = np.concatenate([np.arange(a, a + n) for a, n in zip(self._first, self._counts, strict=True)])
        cells = (self._probes[:, fields.RAWS] + 1).repeat(self._counts)
        programs = self._t.plan.numpy()[tokens, 2]
        nodes = np.where(programs >= 0, self._t.heads.numpy()[programs, tap], -1)
        scored, ints = np.zeros(len(tokens), bool), self._t.ints.numpy()
        while (nodes >= 0).any():
            at = ints[nodes]
            scored |= (nodes >= 0) & np.isin(at[:, 0], (SCORE, ACTIVATE)) & (at[:, 4] >> CELL_BIT == cells)
            nodes = np.where(nodes >= 0, at[:, 3], -1)
        return np.split(scored, np.cumsum(self._counts)[:-1])

    def walk(self) -> None:
        """Go through the tokens of all runs, the first of each, then the second, and so on."""
        for step in range(int(self._counts.max())):
            live = np.flatnonzero(self._counts > step)
            tokens = self._first[live] + step
            scored = np.array([self._scored[k][step] for k in live.tolist()])
            scores = torch.full((len(live), self._outputs), float("nan"))
            if scored.any():
                scores[torch.from_numpy(scored)] = self._score(live[scored], tokens[scored])
            self._put(live, tokens, self._probes[live, fields.SCORES], scores)
            self._decide(live, step, scored)
            self._t.states[self._kept(live, self._places[live], step)] = self._states[torch.from_numpy(live)]

    def _put(self, live: np.ndarray, tokens: np.ndarray, cells: np.ndarray, values: torch.Tensor) -> None:
        """Write values [n, m] into cells of tokens, from `cells` [n] on."""
        columns = cells[:, None] + np.arange(values.shape[1])
        self._t.cells[torch.from_numpy(tokens)[:, None], torch.from_numpy(columns)] = values

    def _score(self, live: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
        """Return the scores [n, outputs] of tokens that are scored, of the runs numbered `live`."""
        runs = torch.from_numpy(live)
        columns = self._probes[live, fields.RAWS, None] + np.arange(self._raws)
        raws = self._t.cells[torch.from_numpy(tokens)[:, None], torch.from_numpy(columns)]
        outputs = raws
        if self._kind == MLP:
            assert self._w_out is not None
            hidden = HIDDEN[self._hidden](raws)
            outputs = (hidden[:, None] * self._w_out[runs]).sum(2) + self._biases[runs]
        elif self._kind == ATTENTION:
            outputs = self._attend(runs, raws) + self._biases[runs]
        if self._activation == SIGMOID:
            outputs = outputs.sigmoid()
        elif self._activation == SOFTMAX:
            outputs = outputs.softmax(1)
        scores = outputs if self._smoothing == NO_SMOOTHING else self._smoothed(runs, outputs)
        self._states[runs, 1 : 1 + self._outputs] = scores
        self._states[runs, 0] += 1
        return scores

    def _attend(self, runs: torch.Tensor, raws: torch.Tensor) -> torch.Tensor:
        """Add tokens to the weighted means of attention probes; return the sums over heads."""
        heads, k = self._units, self._outputs
        state = self._states[runs, 1 + k * (1 + self._window) :].view(-1, heads, 2 + k)
        query, values = raws[:, :heads], raws[:, heads:].view(-1, heads, k)
        begun = (self._states[runs, 0] > 0)[:, None]
        before = torch.where(begun, state[..., 0], float("-inf"))
        largest = torch.maximum(before, query)
        kept, weight = (before - largest).exp()[..., None], (query - largest).exp()[..., None]
        new = torch.cat([torch.ones_like(weight), values], 2)
        sums = state[..., 1:] * kept + new * weight
        self._states[runs, 1 + k * (1 + self._window) :] = torch.cat([largest[..., None], sums], 2).flatten(1)
        return (sums[..., 1:] / sums[..., :1]).sum(1)

    def _smoothed(self, runs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Return the new scores that follow from outputs and the scores before."""
        k = self._outputs
        number, before = self._states[runs, 0], self._states[runs, 1 : 1 + k]
        if self._smoothing == MEAN:
            place = number.long() % self._window
            columns = 1 + k + place[:, None] * k + torch.arange(k)
            self._states[runs[:, None], columns] = outputs
            window = self._states[runs, 1 + k : 1 + k * (1 + self._window)].view(-1, self._window, k)
            return window.sum(1) / (number + 1).clamp(max=self._window)[:, None]
        if self._smoothing == MAXIMUM:
            after = torch.maximum(before, outputs)
        else:
            assert self._smoothing == EMA
            after = self._decay[runs] * outputs + (1 - self._decay[runs]) * before
        return torch.where(number[:, None] > 0, after, outputs)

    def _decide(self, live: np.ndarray, step: int, scored: np.ndarray) -> None:
        """Write the factors of the probes' gates for one token of each run."""
        tokens = self._first[live] + step
        for of_run, gates in self._gates(live):
            before = self._t.states[self._kept(live[of_run], gates[:, fields.GATE_STATE], step, -1)]
            follows = scored[of_run] & (gates[:, fields.FLAGS] & fields.CONTROLLED == 0)
            after = torch.where(torch.from_numpy(follows), self._factors(live[of_run], gates, before), before)
            self._t.states[self._kept(live[of_run], gates[:, fields.GATE_STATE], step)] = after
            delayed = torch.from_numpy(gates[:, fields.FLAGS] & fields.DELAYED != 0)
            factors = torch.where(delayed, before, after)
            self._put(live[of_run], tokens[of_run], gates[:, fields.FACTOR], factors[:, None])

    def _factors(self, runs: np.ndarray, gates: np.ndarray, before: torch.Tensor) -> torch.Tensor:
        """Return what the runs' scores say to gates, float32 [n]."""
        score = self._states[torch.from_numpy(runs), torch.from_numpy(1 + gates[:, fields.OUTPUT])]
        threshold, sharpness = self._t.bounds[torch.from_numpy(gates[:, -1])].unbind(1)
        flags = torch.from_numpy(gates[:, fields.FLAGS])
        above = flags & fields.ABOVE != 0
        fired = torch.where(above, score > threshold, score < threshold).float()
        over = torch.where(above, score - threshold, threshold - score)
        factor = torch.where(sharpness != 0, (sharpness * over).sigmoid(), fired)
        return torch.where(flags & fields.LATCH != 0, torch.maximum(before, factor), factor)

    def _gates(self, live: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the first gates of the runs' probes, then the second ones, and so on.

        Each as indices into `live`, and int64 [n, 6]: the gates' fields, and their rows.
        """
        rows, of_run = self._probes[live, fields.GATE], np.arange(len(live))
        while (has := rows >= 0).any():
            rows, of_run = rows[has], of_run[has]
            gates = np.column_stack([self._t.gates.numpy()[rows].astype(np.int64), rows])
            yield of_run, gates
            rows = gates[:, fields.NEXT_GATE]
