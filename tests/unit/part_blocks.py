"""Toy blocks with real insides: attention with heads, MLPs with a gate or without, experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.blocks import LAYERS, Block, D, Model, Sequential, mapped
from vllm_weir.worker.discovery.part_modules import AttentionShape, Features, LinearShape, PartModules

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


class Attention(nn.Module):
    """Merged projections and a rotary embedding, as in Llama."""

    def __init__(self):
        super().__init__()
        self.qkv, self.rotary = Merged(D, Q, KV, KV), Rotary()
        self.core, self.o_proj = Heads(), nn.Linear(Q, D)

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

    def __init__(self):
        super().__init__()
        del self.qkv
        self.q, self.k, self.v = nn.Linear(D, Q), nn.Linear(D, KV), nn.Linear(D, KV)

    def project(self, x):
        return self.q(x), self.k(x), self.v(x)


class NormedHeads(Attention):
    """A norm of every head, as in Qwen 3."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = HeadNorm(), HeadNorm()

    def between(self, positions, q, k):
        q, k = (norm(x.reshape(len(x), -1, SIZE)).flatten(1) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return self.rotary(positions, q, k)


class NormedRows(Attention):
    """A norm over all heads, as in OLMo 2."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = HeadNorm(Q), HeadNorm(KV)

    def between(self, positions, q, k):
        return self.rotary(positions, self.q_norm(q), self.k_norm(k))


class Mislaid(Attention):
    """Heads of queries leave in another order than they came in, and scaled."""

    def between(self, positions, q, k):
        q = 2 * q.reshape(len(q), HEADS, SIZE).flip(1).flatten(1)
        return self.rotary(positions, q, k)


class BetweenGates(Attention):
    """Every head's query lies beside its gate, and a norm is given heads, as in Qwen 3 Next."""

    def __init__(self):
        super().__init__()
        self.qkv, self.q_norm = Merged(D, 2 * Q, KV, KV), HeadNorm()

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

    def __init__(self):
        super().__init__()
        self.qkv = LeavesBias(D, Q, KV, KV)

    def project(self, x):
        qkv, bias = self.qkv(x)
        qkv += bias
        return qkv.split([Q, KV, KV], -1)


class NormedValues(Attention):
    """Values are normalised too, as in Gemma 4."""

    def __init__(self):
        super().__init__()
        self.v_norm = HeadNorm()

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

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, Q)

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


class BiasedMLP(nn.Module):
    """Adds the bias of its projection itself, as in Falcon."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = LeavesBias(D, MLP), nn.GELU(), nn.Linear(MLP, D)

    def forward(self, x):
        x, bias = self.up(x)
        x += bias
        return self.down(self.act(x))


class GatedMLP(nn.Module):
    """Gate and up projection merged, as in Llama."""

    act = staticmethod(F.silu)

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = Merged(D, MLP, MLP), nn.Linear(MLP, D)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.act(gate) * up)


class GateLast(GatedMLP):
    def forward(self, x):
        up, gate = self.gate_up(x).chunk(2, -1)
        return self.down(self.act(gate) * up)


class Two(nn.Module):
    """Gate and up projection apart."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(D, MLP), nn.Linear(D, MLP), nn.Linear(MLP, D)

    def forward(self, x):
        return self.down(F.gelu(self.gate(x)) * self.up(x))


class SubNorm(GatedMLP):
    """A norm between the neurons and the down projection, as in BitNet."""

    def __init__(self):
        super().__init__()
        self.norm = HeadNorm(MLP)

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


class Routed(nn.Module):
    """Experts, and a router that they are given the logits of, as in Mixtral."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, EXPERTS), Experts()

    def forward(self, x):
        return self.experts(x, self.gate(x))


class RoutedInside(nn.Module):
    """The layer of experts calls the router itself, as in Qwen 3 MoE."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS)
        self.experts = Experts(self.gate)

    def forward(self, x):
        return self.experts(x, x)


class WithShared(Routed):
    """A shared expert beside those that are chosen."""

    def __init__(self):
        super().__init__()
        self.shared = GatedMLP()

    def forward(self, x):
        return self.shared(x) + super().forward(x)


class UnknownExperts(nn.Module):
    """Experts in a module that nothing is known of, as in GPT-OSS on the Transformers backend."""

    def __init__(self):
        super().__init__()
        self.gate, self.weight = nn.Linear(D, EXPERTS), nn.Parameter(torch.randn(EXPERTS, D, D))

    def forward(self, x):
        return torch.einsum("te,td,edf->tf", self.gate(x).softmax(-1), x, self.weight)


class Chosen(Experts):
    """Is given the chosen experts and their weights, and never sees logits."""

    def forward(self, hidden_states, weights, ids):
        return torch.einsum("tk,td,tkdf->tf", weights, hidden_states, self.weight[ids])


class WithUnseenRouter(nn.Module):
    """A shared expert runs first, and a router chooses on its own, as in Hunyuan's MoE on the Transformers backend."""

    def __init__(self):
        super().__init__()
        self.shared, self.gate, self.experts = GatedMLP(), nn.Linear(D, EXPERTS), Chosen()

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

    def forward(self, positions, hidden_states):
        out, bias = self.self_attn(positions, self.ln_1(hidden_states))
        hidden_states = hidden_states + (out + bias)
        out, bias = self.mlp(self.ln_2(hidden_states))
        return hidden_states + (out + bias)


class Normless(Block):
    """Attention and MLP read the stream itself, and what they add is normalised, as in OLMo 2."""

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.ln_1(self.self_attn(positions, hidden_states))
        return hidden_states + self.ln_2(self.mlp(hidden_states))


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


class StateSpace(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.state, self.out_proj = nn.Linear(D, Q), State(), nn.Linear(Q, D)

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
