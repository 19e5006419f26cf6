"""Toy blocks with real insides: attention with heads, MLPs with a gate or without, experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.blocks import LAYERS, Block, D, Model, PostNorm, Sequential, WithParts, mapped
from vllm_weir.worker.discovery.parts.recorder import AttentionShape, Features, LinearShape, PartModules

HEADS, KV_HEADS, SIZE, EXPERTS = 4, 2, 8, 5
Q, KV, MLP = HEADS * SIZE, KV_HEADS * SIZE, 3 * D


class Heads(nn.Module):
    """The attention layer; without a cache it returns rubbish, like vLLM's."""

    heads, kv_heads = HEADS, KV_HEADS

    def forward(self, query, key, value):
        return torch.full_like(query, torch.nan)


class Merged(nn.Linear):
    """A linear layer that merges several matrices and tells their widths."""

    def __init__(self, wide, *parts):
        super().__init__(wide, sum(parts))
        self.parts = parts


class Rotary(nn.Module):
    """Turns pairs of every head, in place, like the kernels."""

    def forward(self, positions, query, key):
        angle = 1 + torch.arange(len(query))[:, None, None] * torch.linspace(0.1, 1, SIZE // 2)
        for rows in (query, key):
            heads = rows.view(len(rows), -1, SIZE)
            a, b = heads.chunk(2, -1)
            turned = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
            heads.copy_(turned.to(rows.dtype))
        return query, key


class HeadNorm(nn.Module):
    """Normalises the last dimension."""

    def __init__(self, width=SIZE):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x / x.pow(2).mean(-1, keepdim=True).sqrt() * self.weight


class Attention(WithParts):
    """Merged projections and a rotary embedding, as in Llama."""

    parts = (
        ("qkv", lambda: Merged(D, Q, KV, KV)), ("rotary", Rotary), ("core", Heads), ("o_proj", lambda: nn.Linear(Q, D)),
    )  # fmt: skip

    def project(self, x):
        return self.qkv(x).split([Q, KV, KV], -1)

    def between(self, positions, q, k):
        return self.rotary(positions, q, k)

    def forward(self, positions, hidden_states):
        q, k, v = self.project(hidden_states)
        q, k = self.between(positions, q, k)
        return self.o_proj(self.core(q, k, v))


class Unturned(Attention):
    def between(self, positions, q, k):
        return q, k


class Separate(Attention):
    """A module for each of queries, keys and values."""

    parts = (
        ("qkv", nn.Identity),
        ("q", lambda: nn.Linear(D, Q)), ("k", lambda: nn.Linear(D, KV)), ("v", lambda: nn.Linear(D, KV)),
    )  # fmt: skip

    def project(self, x):
        return self.q(x), self.k(x), self.v(x)


class NormedHeads(Attention):
    """A norm of every head, as in Qwen 3."""

    parts = (("q_norm", HeadNorm), ("k_norm", HeadNorm))

    def between(self, positions, q, k):
        q, k = (norm(x.reshape(len(x), -1, SIZE)).flatten(1) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return self.rotary(positions, q, k)


class NormedRows(Attention):
    """A norm over all heads, as in OLMo 2."""

    parts = (("q_norm", lambda: HeadNorm(Q)), ("k_norm", lambda: HeadNorm(KV)))

    def between(self, positions, q, k):
        return self.rotary(positions, self.q_norm(q), self.k_norm(k))


class Mislaid(Attention):
    """Heads of queries leave in another order than they came in, and scaled."""

    def between(self, positions, q, k):
        q = 2 * q.reshape(len(q), HEADS, SIZE).flip(1).flatten(1)
        return self.rotary(positions, q, k)


class BetweenGates(Attention):
    """Every head's query lies beside its gate, and a norm is given heads, as in Qwen 3 Next."""

    parts = (("qkv", lambda: Merged(D, 2 * Q, KV, KV)), ("q_norm", HeadNorm))

    def forward(self, positions, hidden_states):
        both, k, v = self.qkv(hidden_states).split([2 * Q, KV, KV], -1)
        q, gate = both.view(len(both), HEADS, 2 * SIZE).chunk(2, -1)
        q, gate = q.flatten(1), gate.flatten(1)
        q = self.q_norm(q.view(len(q), HEADS, SIZE)).flatten(1)
        q, k = self.rotary(positions, q, k)
        return self.o_proj(self.core(q, k, v) * gate.sigmoid())


class LeavesBias(Merged):
    """Returns its bias for its caller to add, like vLLM's with `skip_bias_add`."""

    def forward(self, x):
        return F.linear(x, self.weight), self.bias


class BiasedAttention(Attention):
    """Adds the bias of its projections itself, as in Falcon."""

    parts = (("qkv", lambda: LeavesBias(D, Q, KV, KV)),)

    def project(self, x):
        qkv, bias = self.qkv(x)
        qkv += bias
        return qkv.split([Q, KV, KV], -1)


class NormedValues(Attention):
    """Values are normalised too, as in Gemma 4."""

    parts = (("v_norm", HeadNorm),)

    def project(self, x):
        q, k, v = super().project(x)
        return q, k, self.v_norm(v.reshape(len(v), -1, SIZE)).flatten(1)


class ScaledValues(Attention):
    """Values are scaled before attention, without a module, as in MiMo V2."""

    def project(self, x):
        q, k, v = super().project(x)
        return q, k, 0.7 * v


class Interleaved(Attention):
    """The heads' queries, keys and values lie one after another."""

    def __init__(self):
        super().__init__()
        self.core.kv_heads = HEADS
        self.qkv = nn.Linear(D, 3 * Q)

    def project(self, x):
        rows = self.qkv(x).view(len(x), HEADS, 3, SIZE)
        return (rows[:, :, i].flatten(1) for i in range(3))


class Gated(Attention):
    """An output gate, made of the same input."""

    parts = (("gate", lambda: nn.Linear(D, Q)),)

    def forward(self, positions, hidden_states):
        q, k, v = self.project(hidden_states)
        gate = self.gate(hidden_states)
        q, k = self.between(positions, q, k)
        return self.o_proj(self.core(q, k, v) * gate.sigmoid())


class Deaf(Attention):
    """Its output projection is given something else than what attention returned."""

    def forward(self, positions, hidden_states):
        q, k, v = self.project(hidden_states)
        self.core(q, k, v)
        return self.o_proj(self.qkv(hidden_states)[:, :Q].tanh())


class Plain(nn.Module):
    def __init__(self, act=F.gelu):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(D, MLP), nn.Linear(MLP, D), act

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class BiasedMLP(WithParts):
    """Adds the bias of its projection itself, as in Falcon."""

    parts = (("up", lambda: LeavesBias(D, MLP)), ("act", nn.GELU), ("down", lambda: nn.Linear(MLP, D)))

    def forward(self, x):
        x, bias = self.up(x)
        x += bias
        return self.down(self.act(x))


class GatedMLP(WithParts):
    """Gate and up projection merged, as in Llama."""

    act = staticmethod(F.silu)

    parts = (("gate_up", lambda: Merged(D, MLP, MLP)), ("down", lambda: nn.Linear(MLP, D)))

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.act(gate) * up)


class GateLast(GatedMLP):
    def forward(self, x):
        up, gate = self.gate_up(x).chunk(2, -1)
        return self.down(self.act(gate) * up)


class Two(WithParts):
    """Gate and up projection apart."""

    parts = (
        ("up", lambda: nn.Linear(D, MLP)),
        ("gate", lambda: nn.Linear(D, MLP)),
        ("down", lambda: nn.Linear(MLP, D)),
    )

    def forward(self, x):
        return self.down(F.gelu(self.gate(x)) * self.up(x))


class SubNorm(GatedMLP):
    """A norm between the neurons and the down projection, as in BitNet."""

    parts = (("norm", lambda: HeadNorm(MLP)),)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.norm(F.silu(gate) * up))


class Experts(nn.Module):
    """Runs experts in one kernel."""

    def __init__(self, gate=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, D, D))
        self.gate = gate

    def forward(self, hidden_states, router_logits):
        if self.gate is not None:
            router_logits = self.gate(hidden_states)
        return torch.einsum("te,td,edf->tf", router_logits.softmax(-1), hidden_states, self.weight)


class Routed(WithParts):
    """Experts, and a router that they are given the logits of, as in Mixtral."""

    parts = (("gate", lambda: nn.Linear(D, EXPERTS)), ("experts", Experts))

    def forward(self, x):
        return self.experts(x, self.gate(x))


class RoutedInside(Routed):
    """The layer of experts calls the router itself, as in Qwen 3 MoE."""

    def __init__(self):
        super().__init__()
        self.experts.gate = self.gate

    def forward(self, x):
        return self.experts(x, x)


class WithShared(Routed):
    """A shared expert beside those that are chosen."""

    parts = (("shared", GatedMLP),)

    def forward(self, x):
        return self.shared(x) + super().forward(x)


class UnknownExperts(WithParts):
    """Experts in a module that nothing is known of, as in GPT-OSS on the Transformers backend."""

    parts = (
        ("gate", lambda: nn.Linear(D, EXPERTS)), ("weight", lambda: nn.Parameter(torch.randn(EXPERTS, D, D))),
    )  # fmt: skip

    def forward(self, x):
        return torch.einsum("te,td,edf->tf", self.gate(x).softmax(-1), x, self.weight)


class Chosen(Experts):
    """Is given the chosen experts and their weights, and never sees logits."""

    def forward(self, hidden_states, weights, ids):
        return torch.einsum("tk,td,tkdf->tf", weights, hidden_states, self.weight[ids])


class WithUnseenRouter(WithParts):
    """A shared expert runs first, and a router chooses on its own, as in Hunyuan's MoE on the Transformers backend."""

    parts = (("shared", GatedMLP), ("gate", lambda: nn.Linear(D, EXPERTS)), ("experts", Chosen))

    def forward(self, x):
        beside = self.shared(x)
        return beside + self.experts(x, *self.gate(x).softmax(-1).topk(2))


def block(attention=Attention, mlp=GatedMLP, base: type[Block] = Sequential):
    """Return a function that makes such a block."""

    def make():
        made = base()
        made.self_attn, made.mlp = attention(), mlp()
        if base is BiasedResults:
            made.self_attn.o_proj, made.mlp.down = LeavesBias(Q, D), LeavesBias(MLP, D)
        return made

    return make


class BiasedResults(Block):
    """The block adds the biases of the projections out of attention and MLP."""

    def mixed(self, positions, x):
        out, bias = super().mixed(positions, x)
        return out + bias

    def fed(self, x):
        out, bias = super().fed(x)
        return out + bias


class Normless(PostNorm):
    """Attention and MLP read the stream itself, and what they add is normalised, as in OLMo 2."""


class Backwards(Block):
    """A parallel block whose MLP runs before attention."""

    def forward(self, positions, hidden_states):
        normed = self.ln_1(hidden_states)
        mlp_out = self.mlp(normed)
        return hidden_states + self.self_attn(positions, normed) + mlp_out


class State(nn.Module):
    """Mixes tokens, and is no attention."""

    def forward(self, x):
        return torch.full_like(x, torch.nan)


class StateSpace(WithParts):
    parts = (("in_proj", lambda: nn.Linear(D, Q)), ("state", State), ("out_proj", lambda: nn.Linear(Q, D)))

    def forward(self, positions, hidden_states):
        return self.out_proj(self.state(self.in_proj(hidden_states)))


def attention_shape(module):
    return AttentionShape(module.heads, module.kv_heads, SIZE, SIZE) if isinstance(module, Heads) else None


def linear_shape(module):
    if not isinstance(module, nn.Linear):
        return None
    parts = module.parts if isinstance(module, Merged) else (module.out_features,)
    return LinearShape(Features.unsplit(module.in_features), tuple(map(Features.unsplit, parts)))


PARTS = PartModules(attention_shape, linear_shape, lambda m: EXPERTS if isinstance(m, Experts) else None)


def find(make, dtype=torch.float32, parts=PARTS, fused=False):
    """The verdicts on a toy model of such blocks."""
    torch.manual_seed(0)
    return mapped(Model([make] * LAYERS, fused), dtype, mixers=(Heads, State), parts=parts)
