"""Toy blocks that hand on two tensors, and some that take what nobody has written to."""

from __future__ import annotations

import torch
from torch import nn

from tests.unit.blocks import MLP, Attention, Block, Core, D, Fused, Parallel


class Scan(Core):
    """A token mixer that writes its result into an argument, and without a cache writes nothing, like Mamba-1's."""

    real = False

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(D, D)

    def forward(self, hidden_states, output):
        if self.real:
            output.copy_(self.project(hidden_states.cumsum(0)))


class ScanInto(Scan):
    """The same with an argument of a name that says nothing."""

    def forward(self, hidden_states, there):
        super().forward(hidden_states, there)


class Mamba1(Block):
    """What its mixer leaves alone holds whatever the memory held: `memory(normed, residual)` stands in for that."""

    kind = Scan
    memory = staticmethod(lambda normed, residual: torch.zeros_like(normed))

    def __init__(self):
        super().__init__()
        self.mixer = self.kind()
        self.true = {}

    def forward(self, positions, hidden_states, residual):
        pre = hidden_states.clone() if residual is None else hidden_states + residual
        if residual is None:
            residual, hidden_states = hidden_states, self.ln_1(hidden_states)
        else:
            hidden_states, residual = self.ln_1(hidden_states, residual)
        output = self.memory(hidden_states, residual)
        self.mixer(hidden_states, output)
        self.true = {"resid_pre": pre, "attn_out": output.clone(), "resid_post": output + residual}
        return output, residual


class TwoAttentions(Block):
    """Attention, MLP, and both once more, beside a third part, like LongCat's."""

    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList([Attention(), MLP(), MLP()])

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual, hidden_states = hidden_states, self.ln_1(hidden_states)
        else:
            hidden_states, residual = self.ln_1(hidden_states, residual)
        hidden_states, residual = self.ln_2(self.self_attn(positions, hidden_states), residual)
        beside = self.others[2](hidden_states.clone())
        hidden_states, residual = self.ln_3(self.mlp(hidden_states), residual)
        hidden_states, residual = self.ln_4(self.others[0](positions, hidden_states), residual)
        return self.others[1](hidden_states) + beside, residual


class Apart(TwoAttentions):
    """Hands on two tensors that it does not add up, but uses one of them on its own."""

    def forward(self, positions, hidden_states, residual):
        residual = hidden_states if residual is None else residual
        out, _ = super().forward(positions, hidden_states.clone(), residual.clone())
        return out, 0.5 * residual + hidden_states


class Halfway(Parallel):
    """Hands on the stream before its MLP as a second tensor that nobody uses, like Exaone 4's."""

    def forward(self, positions, hidden_states, residual):
        residual = hidden_states + self.self_attn(positions, self.ln_1(hidden_states))
        return residual + self.mlp(self.ln_2(residual)), residual


class Renamed(Fused):
    """Calls the second of the two tensors whose sum is its stream something else."""

    def forward(self, positions, hidden_states, rest):
        return super().forward(positions, hidden_states, rest)


class WrittenInto(Block):
    """Adds to the second of its tensors in place, and returns the first alone."""

    def forward(self, positions, hidden_states, residual):
        hidden_states, _ = self.ln_1(hidden_states, residual)
        hidden_states, _ = self.ln_2(self.self_attn(positions, hidden_states), residual)
        return self.mlp(hidden_states)


class ReturnsNothing(Block):
    """Adds to its stream in place."""

    def forward(self, positions, hidden_states):
        hidden_states += self.self_attn(positions, self.ln_1(hidden_states))
        hidden_states += self.mlp(self.ln_2(hidden_states))
