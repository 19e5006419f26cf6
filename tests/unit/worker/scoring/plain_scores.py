"""Probes and gates as `vllm_weir.schema.resolved_probes` words them, one token after the other, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from vllm_weir.schema import resolved_probes as rp
from vllm_weir.schema.instructions import AFFINE, BLEND, CONST, NORM


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def hidden_units(kind, x):
    if kind == rp.RELU:
        return np.maximum(x, 0)
    if kind == rp.GELU:
        return x * 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x]))
    return x * sigmoid(x) if kind == rp.SILU else np.tanh(x)


@dataclass
class PlainProbe:
    """A probe, and all that it has seen of a request."""

    probe: object
    vectors: dict
    raws: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    scores: dict = field(default_factory=dict)

    def read(self, position, row):
        probe = self.probe
        part = row[probe.start : probe.stop] if probe.stop else row
        weights = np.array([self.vectors[digest] for digest in probe.rows], np.float64)
        raw = weights @ part + np.array(probe.offsets)
        self.raws.append(raw if probe.threshold is None else np.where(raw > probe.threshold, raw, 0.0))
        outputs = self._outputs()
        if probe.activation == rp.SIGMOID:
            outputs = sigmoid(outputs)
        if probe.activation == rp.SOFTMAX:
            outputs = np.exp(outputs - outputs.max())
            outputs /= outputs.sum()
        self.outputs.append(outputs)
        self.scores[position] = self._smoothed()

    def _outputs(self):
        probe, raw = self.probe, self.raws[-1]
        if probe.kind == rp.LINEAR:
            return raw
        if probe.kind == rp.MLP:
            w_out = np.array([self.vectors[digest] for digest in probe.out_rows], np.float64)
            return w_out @ hidden_units(probe.hidden, raw) + np.array(probe.out_offsets)
        assert probe.kind == rp.ATTENTION
        total = np.array(probe.out_offsets, np.float64)
        seen = np.array(self.raws)
        for head in range(probe.heads):
            weights = np.exp(seen[:, head] - seen[:, head].max())
            first = probe.heads + head * probe.outputs
            total = total + weights @ seen[:, first : first + probe.outputs] / weights.sum()
        return total

    def _smoothed(self):
        probe = self.probe
        if probe.smoothing == rp.MAXIMUM:
            return np.max(self.outputs, 0)
        if probe.smoothing == rp.MEAN:
            return np.mean(self.outputs[-int(probe.parameter) :], 0)
        if probe.smoothing == rp.EMA and len(self.outputs) > 1:
            before = self.scores[max(self.scores)]
            return probe.parameter * self.outputs[-1] + (1 - probe.parameter) * before
        return self.outputs[-1]


def factors_of(gate, probe, until):
    """The factor that a gate would give after each position up to `until`, by the scores so far."""
    factor, found = 0.0, []
    for position in range(until + 1):
        if position in probe.scores:
            score = probe.scores[position][gate.output]
            over = score - gate.threshold if gate.above else gate.threshold - score
            now = sigmoid(gate.sharpness * over) if gate.sharpness else float(over > 0)
            factor = max(factor, now) if gate.latch else now
        found.append(factor)
    return found


def added(instruction, h, vectors):
    u = np.asarray(vectors[instruction.u], np.float64)
    if instruction.kind == CONST:
        return instruction.a * u
    if instruction.kind == NORM:
        return instruction.a * np.linalg.norm(h) * u
    if instruction.kind == BLEND:
        return instruction.a * (u - h)
    assert instruction.kind == AFFINE
    return (instruction.a * (np.asarray(vectors[instruction.w], np.float64) @ h) + instruction.b) * u


class PlainModel:
    """Blocks that work on each row alone, steered and probed as one request asks."""

    def __init__(self, blocks, vectors, moves, probes, gates, prompt_len, token_ids):
        self.blocks, self.vectors, self.moves, self.gates = blocks, vectors, moves, gates
        self.prompt_len, self.token_ids = prompt_len, token_ids
        self.probes = [PlainProbe(probe, vectors) for probe in probes]
        self.factors = [{} for _ in gates]

    def selects(self, positions, position):
        at = np.array([position])
        return bool(positions.mask(at, self.prompt_len, np.array([self.token_ids[position]]))[0])

    def factor(self, g, position):
        gate = self.gates[g]
        until = position - gate.delay
        return factors_of(gate, self.probes[gate.probe], until)[-1] if until >= 0 else 0.0

    def _read(self, site, before, position, h):
        for probe in self.probes:
            is_here = probe.probe.site == site and probe.probe.before == before
            if is_here and self.selects(probe.probe.positions, position):
                probe.read(position, h)

    def run(self, rows, factor_cells):
        """Rows [n, d] that leave the model; `factor_cells`: cell of each gate's factor."""
        out = []
        for position, h in enumerate(np.asarray(rows, np.float64)):
            for layer, block in enumerate(self.blocks):
                h = block(h)
                for hook, there in (("resid_post", layer), ("resid_pre", layer + 1)):
                    self._read((hook, there), True, position, h)
                    for move in self.moves:
                        if move.hook == hook and there in move.layers and self.selects(move.positions, position):
                            delta = 0
                            for one in move.instructions:
                                factor = self.factor(factor_cells.index(one.cell - 1), position) if one.cell else 1.0
                                delta = delta + factor * added(one, h, self.vectors)
                            h = h + delta
                    self._read((hook, there), False, position, h)
            for g in range(len(self.gates)):
                self.factors[g][position] = self.factor(g, position)
            out.append(h)
        return np.array(out)
