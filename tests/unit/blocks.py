"""Toy blocks of every shape that real ones have, and a model around them, for the probe to find its way in."""

from __future__ import annotations

import torch
from torch import nn

from vllm_weir.schema.hooks import STREAM_HOOKS, Site
from vllm_weir.worker.discovery.block_stack import find_tree
from vllm_weir.worker.discovery.descriptions import ModelDescription
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.discovery.sites import map_sites

D, TOKENS, LAYERS = 16, 6, 3


class Core(nn.Module):
    """Mixes tokens; without a cache it returns rubbish, like vLLM's."""

    def forward(self, q):
        return torch.full_like(q, torch.nan)


class Attention(nn.Module):
    def __init__(self, wide: int = 2 * D):
        super().__init__()
        self.qkv, self.core, self.o_proj = nn.Linear(D, wide), Core(), nn.Linear(wide, D)

    def forward(self, positions, hidden_states):
        return self.o_proj(self.core(self.qkv(hidden_states)))


class IntoArgument(nn.Module):
    """Writes its result into an argument, as vLLM's linear attention does."""

    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, hidden_states, output):
        output.copy_(self.inner(None, hidden_states))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(D, 3 * D), nn.ReLU(), nn.Linear(3 * D, D)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Norm(nn.Module):
    """Plain, or fused with the addition before it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x, residual=None):
        if residual is not None:
            residual.add_(x)  # in place, like the kernels
            normed = residual / residual.pow(2).mean(-1, keepdim=True).sqrt() * self.weight
            x.copy_(normed)
            return x, residual
        return x / x.pow(2).mean(-1, keepdim=True).sqrt() * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.ln_3, self.ln_4 = Norm(), Norm(), Norm(), Norm()
        self.self_attn, self.mlp = Attention(), MLP()


class Sequential(Block):
    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.self_attn(positions, self.ln_1(hidden_states))
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class Fused(Block):
    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.ln_1(hidden_states)
        else:
            hidden_states, residual = self.ln_1(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.ln_2(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Sandwich(Block):
    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.ln_1(hidden_states)
        else:
            hidden_states, residual = self.ln_1(hidden_states, residual)
        hidden_states = self.ln_3(self.self_attn(positions, hidden_states))
        hidden_states, residual = self.ln_2(hidden_states, residual)
        return self.ln_4(self.mlp(hidden_states)), residual


class PostNorm(Block):
    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.ln_1(self.self_attn(positions, hidden_states))
        return hidden_states + self.ln_2(self.mlp(hidden_states))


class Scaled(Block):
    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + 0.22 * self.self_attn(positions, self.ln_1(hidden_states))
        return hidden_states + 0.37 * self.mlp(self.ln_2(hidden_states))


class Parallel(Block):
    def forward(self, positions, hidden_states, residual):
        """Hands on its input as a second tensor that nobody uses, like Cohere."""
        normed = self.ln_1(hidden_states)
        return hidden_states + self.self_attn(positions, normed) + self.mlp(normed), hidden_states


class OutputArgument(Block):
    def __init__(self):
        super().__init__()
        self.self_attn = IntoArgument()

    def room(self, like):
        return torch.empty_like(like)

    def forward(self, positions, hidden_states):
        out = self.room(hidden_states)
        self.self_attn(hidden_states=self.ln_1(hidden_states), output=out)
        hidden_states = hidden_states + out
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class SameRoom(OutputArgument):
    """The memory that it gives its mixer still holds the mixer's last result."""

    def room(self, like):
        if "kept" not in self.__dict__:
            self.__dict__["kept"] = torch.zeros_like(like)
        return self.__dict__["kept"]


class Deep(Block):
    """Its parts add to the stream themselves."""

    class Adds(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x, stream):
            return stream + (self.part(x) if isinstance(self.part, MLP) else self.part(None, x))

    def __init__(self):
        super().__init__()
        self.first, self.second = Deep.Adds(self.self_attn), Deep.Adds(self.mlp)

    def forward(self, positions, hidden_states):
        hidden_states = self.first(self.ln_1(hidden_states), hidden_states)
        return self.second(self.ln_2(hidden_states), hidden_states)


class Shared(Block):
    """What two modules give is added up before it is scaled and added to the stream."""

    def __init__(self):
        super().__init__()
        self.shared = MLP()

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + 0.8 * self.self_attn(positions, self.ln_1(hidden_states))
        normed = self.ln_2(hidden_states)
        return hidden_states + 0.8 * (self.mlp(normed) + self.shared(normed))


class TwoMixers(Block):
    """Two parts that mix tokens, each with a multiplier."""

    def __init__(self):
        super().__init__()
        self.mixer = Attention()

    def forward(self, positions, hidden_states):
        normed = self.ln_1(hidden_states)
        one, other = self.self_attn(positions, normed), self.mixer(positions, normed)
        hidden_states = hidden_states + (0.7 * one + 1.3 * other)
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class TooLate(TwoMixers):
    """The first part is used before the second has run: together they can be read, and not written."""

    def forward(self, positions, hidden_states):
        normed = self.ln_1(hidden_states)
        one = 0.7 * self.self_attn(positions, normed)
        hidden_states = hidden_states + (one + 1.3 * self.mixer(positions, normed))
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class WithBias(nn.Module):
    """Hands its bias over for others to add, like vLLM's linear layers with `skip_bias_add`."""

    def __init__(self, part):
        super().__init__()
        self.part, self.bias = part, nn.Parameter(0.01 * torch.rand(D))

    def forward(self, *args):
        return self.part(*args), self.bias


class Biased(Block):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = WithBias(self.self_attn), WithBias(self.mlp)

    def forward(self, positions, hidden_states):
        out, bias = self.self_attn(positions, self.ln_1(hidden_states))
        out += bias
        hidden_states = hidden_states + out
        out, bias = self.mlp(self.ln_2(hidden_states))
        out += bias
        return hidden_states + out


class BiasedParallel(Biased):
    def forward(self, positions, hidden_states):
        normed = self.ln_1(hidden_states)
        one, one_bias = self.self_attn(positions, normed)
        other, other_bias = self.mlp(normed)
        other += one
        other += one_bias
        other += other_bias
        return hidden_states + other


class Gain(Block):
    """Scales the stream before it hands it on."""

    gain = 0.6

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.self_attn(positions, self.ln_1(hidden_states))
        return self.gain * (hidden_states + self.mlp(self.ln_2(hidden_states)))


class More(Block):
    """Adds something else after what the MLP adds."""

    scale = 0.6

    def __init__(self):
        super().__init__()
        self.gate, self.project = nn.Linear(D, 4), nn.Linear(4, D)

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.self_attn(positions, self.ln_1(hidden_states))
        hidden_states = hidden_states + self.mlp(self.ln_2(hidden_states))
        return self.scale * (hidden_states + self.project(self.gate(hidden_states)))


class MoreUnscaled(More):
    scale = 1.0


class MixerOnly(Block):
    def forward(self, positions, hidden_states):
        return hidden_states + self.self_attn(positions, self.ln_1(hidden_states))


class MLPOnly(Block):
    def forward(self, positions, hidden_states):
        return hidden_states + self.mlp(self.ln_1(hidden_states))


class Joint(Block):
    """What attention and MLP add comes out of one linear layer."""

    def __init__(self):
        super().__init__()
        self.join = nn.Linear(2 * D, D)

    def forward(self, positions, hidden_states):
        normed = self.ln_1(hidden_states)
        both = torch.cat([self.self_attn(positions, normed), self.mlp(normed)], -1)
        return hidden_states + self.join(both)


class Feeding(Block):
    """Attention and a linear layer after it go into a second mixer, whose result alone is added, like Zamba2's."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mixer = Norm(), Attention()

        def forward(self, positions, hidden_states, more):
            return hidden_states + self.mixer(positions, self.norm(hidden_states + more))

    def __init__(self):
        super().__init__()
        self.linear, self.decoder = nn.Linear(D, D), Feeding.Decoder()

    def forward(self, positions, hidden_states):
        more = self.linear(self.self_attn(positions, self.ln_1(hidden_states)))
        return self.decoder(positions, hidden_states, more)


class Chained(Block):
    """The MLP works on what attention makes, and its result alone is added."""

    def forward(self, positions, hidden_states):
        return hidden_states + self.mlp(self.self_attn(positions, self.ln_1(hidden_states)))


class Weighted(Block):
    """The stream itself is scaled, so nothing is simply added to it."""

    def forward(self, positions, hidden_states, residual):
        residual = hidden_states
        hidden_states = 3 * residual + self.self_attn(positions, self.ln_1(hidden_states))
        return 2 * hidden_states + self.mlp(self.ln_2(hidden_states)), residual


class Model(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, kinds, fused=False, times=1, between=0.0, scale=1.0, positions=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(11, D)
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.norm = Norm()
        self.wpe = nn.Embedding(TOKENS, D) if positions else None
        self.fused, self.times, self.between, self.scale = fused, times, between, scale

    def forward(self, ids):
        positions = torch.arange(len(ids))
        hidden, residual = self.embed_tokens(ids) * self.scale, None
        if self.wpe is not None:
            hidden = hidden + self.wpe(positions)
        for layer in [*self.layers] * self.times:
            if self.fused:
                hidden, residual = layer(positions, hidden, residual)
            else:
                hidden = layer(positions, hidden)
            hidden = hidden + self.between if self.between else hidden
        if self.fused:
            return self.norm(hidden, residual)[0] if not isinstance(layer, (Parallel, Weighted)) else self.norm(hidden)
        return self.norm(hidden)


def mapped(model, dtype=torch.float32, description=None, mixers=Core, parts=None) -> SiteMap:
    """The verdicts on a toy model; `parts` recognises the modules inside attention and MLP."""
    torch.manual_seed(0)
    model = model.to(dtype)
    description = description or ModelDescription()

    def run() -> None:
        model(torch.zeros(TOKENS, dtype=torch.long))

    with torch.inference_mode():
        tree = find_tree(
            model, D, LAYERS, description, lambda m: isinstance(m, mixers),
            lambda m: m is getattr(model, "embed_tokens", None), run,
        )  # fmt: skip
        return map_sites(tree, run, dtype, description, parts)


def supported(sites, layer=1):
    """The hook points that a block has."""
    return {h for h in STREAM_HOOKS if Site(h, layer) in sites.anchors}
