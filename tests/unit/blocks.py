"""Toy blocks of every shape that real ones have, and a model around them, for the probe to find its way in."""

from __future__ import annotations

import torch
from torch import nn

from vllm_weir.schema.hooks import STREAM_HOOKS, Site
from vllm_weir.worker.discovery.block_stack import ModelDescription, find_tree
from vllm_weir.worker.discovery.sites import map_sites

D, TOKENS, LAYERS = 16, 6, 3


class WithParts(nn.Module):
    """Makes the modules named in `parts` of its classes, base classes' first."""

    parts: tuple = ()

    def __init__(self):
        super().__init__()
        for kind in reversed(type(self).__mro__):
            for name, make in vars(kind).get("parts", ()):
                setattr(self, name, make())


class Core(nn.Module):
    """Mixes tokens; without a cache it returns rubbish, like vLLM's."""

    def forward(self, q):
        return torch.full_like(q, torch.nan)


class Attention(WithParts):
    parts = (("qkv", lambda: nn.Linear(D, 2 * D)), ("core", Core), ("o_proj", lambda: nn.Linear(2 * D, D)))

    def forward(self, positions, hidden_states):
        return self.o_proj(self.core(self.qkv(hidden_states)))


class IntoArgument(WithParts):
    """Writes its result into an argument, as vLLM's linear attention does."""

    parts = (("inner", Attention),)

    def forward(self, hidden_states, output):
        output.copy_(self.inner(None, hidden_states))


class MLP(WithParts):
    parts = (("up", lambda: nn.Linear(D, 3 * D)), ("act", nn.ReLU), ("down", lambda: nn.Linear(3 * D, D)))

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Norm(WithParts):
    """Plain, or fused with the addition before it."""

    parts = (("weight", lambda: nn.Parameter(torch.rand(D) + 0.5)),)

    def forward(self, x, residual=None):
        if residual is None:
            return x / x.pow(2).mean(-1, keepdim=True).sqrt() * self.weight
        residual.add_(x)  # in place, like the kernels
        x.copy_(residual / residual.pow(2).mean(-1, keepdim=True).sqrt() * self.weight)
        return x, residual


class Block(WithParts):
    """Adds what attention makes, and then what the MLP does."""

    parts = (*((f"ln_{k}", Norm) for k in range(1, 5)), ("self_attn", Attention), ("mlp", MLP))

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.mixed(positions, hidden_states)
        return hidden_states + self.fed(hidden_states)

    def mixed(self, positions, x):
        return self.self_attn(positions, self.ln_1(x))

    def fed(self, x):
        return self.mlp(self.ln_2(x))

    def first_norm(self, hidden_states, residual):
        """The norm before attention, with the addition that the block before has left to this one."""
        return (self.ln_1(hidden_states), hidden_states) if residual is None else self.ln_1(hidden_states, residual)


class Sequential(Block):
    pass


class Fused(Block):
    """Hands on two tensors whose sum is the stream."""

    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = self.first_norm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.ln_2(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Sandwich(Block):
    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = self.first_norm(hidden_states, residual)
        hidden_states = self.ln_3(self.self_attn(positions, hidden_states))
        hidden_states, residual = self.ln_2(hidden_states, residual)
        return self.ln_4(self.mlp(hidden_states)), residual


class PostNorm(Block):
    def mixed(self, positions, x):
        return self.ln_1(self.self_attn(positions, x))

    def fed(self, x):
        return self.ln_2(self.mlp(x))


class Scaled(Block):
    def mixed(self, positions, x):
        return 0.22 * super().mixed(positions, x)

    def fed(self, x):
        return 0.37 * super().fed(x)


class Parallel(Block):
    def forward(self, positions, hidden_states, residual):
        """Hands on its input as a second tensor that nobody uses, like Cohere."""
        normed = self.ln_1(hidden_states)
        return hidden_states + self.self_attn(positions, normed) + self.mlp(normed), hidden_states


class OutputArgument(Block):
    parts = (("self_attn", IntoArgument),)

    def room(self, like):
        return torch.empty_like(like)

    def mixed(self, positions, x):
        out = self.room(x)
        self.self_attn(hidden_states=self.ln_1(x), output=out)
        return out


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

    parts = (("shared", MLP),)

    def mixed(self, positions, x):
        return 0.8 * super().mixed(positions, x)

    def fed(self, x):
        normed = self.ln_2(x)
        return 0.8 * (self.mlp(normed) + self.shared(normed))


class TwoMixers(Block):
    """Two parts that mix tokens, each with a multiplier."""

    parts = (("mixer", Attention),)

    def mixed(self, positions, x):
        normed = self.ln_1(x)
        one, other = self.self_attn(positions, normed), self.mixer(positions, normed)
        return 0.7 * one + 1.3 * other


class TooLate(TwoMixers):
    """The first part is used before the second has run: together they can be read, and not written."""

    def mixed(self, positions, x):
        normed = self.ln_1(x)
        one = 0.7 * self.self_attn(positions, normed)
        return one + 1.3 * self.mixer(positions, normed)


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

    def mixed(self, positions, x):
        out, bias = super().mixed(positions, x)
        out += bias
        return out

    def fed(self, x):
        out, bias = super().fed(x)
        out += bias
        return out


class BiasedParallel(Biased):
    def forward(self, positions, hidden_states):
        normed = self.ln_1(hidden_states)
        one, one_bias = self.self_attn(positions, normed)
        other, other_bias = self.mlp(normed)
        for more in (one, one_bias, other_bias):
            other += more
        return hidden_states + other


class Gain(Block):
    """Scales the stream before it hands it on."""

    gain = 0.6

    def forward(self, positions, hidden_states):
        return self.gain * super().forward(positions, hidden_states)


class More(Block):
    """Adds something else after what the MLP adds."""

    scale = 0.6

    parts = (("gate", lambda: nn.Linear(D, 4)), ("project", lambda: nn.Linear(4, D)))

    def forward(self, positions, hidden_states):
        hidden_states = super().forward(positions, hidden_states)
        return self.scale * (hidden_states + self.project(self.gate(hidden_states)))


class MoreUnscaled(More):
    scale = 1.0


class MixerOnly(Block):
    def forward(self, positions, hidden_states):
        return hidden_states + self.mixed(positions, hidden_states)


class MLPOnly(Block):
    def forward(self, positions, hidden_states):
        return hidden_states + self.mlp(self.ln_1(hidden_states))


class Joint(Block):
    """What attention and MLP add comes out of one linear layer."""

    parts = (("join", lambda: nn.Linear(2 * D, D)),)

    def forward(self, positions, hidden_states):
        normed = self.ln_1(hidden_states)
        both = torch.cat([self.self_attn(positions, normed), self.mlp(normed)], -1)
        return hidden_states + self.join(both)


class Feeding(Block):
    """Attention and a linear layer after it go into a second mixer, whose result alone is added, like Zamba2's."""

    class Decoder(WithParts):
        parts = (("norm", Norm), ("mixer", Attention))

        def forward(self, positions, hidden_states, more):
            return hidden_states + self.mixer(positions, self.norm(hidden_states + more))

    parts = (("linear", lambda: nn.Linear(D, D)), ("decoder", Decoder))

    def forward(self, positions, hidden_states):
        more = self.linear(self.mixed(positions, hidden_states))
        return self.decoder(positions, hidden_states, more)


class Chained(Block):
    """The MLP works on what attention makes, and its result alone is added."""

    def forward(self, positions, hidden_states):
        return hidden_states + self.mlp(self.mixed(positions, hidden_states))


class Weighted(Block):
    """The stream itself is scaled, so nothing is simply added to it."""

    def forward(self, positions, hidden_states, residual):
        residual = hidden_states
        hidden_states = 3 * residual + self.mixed(positions, hidden_states)
        return 2 * hidden_states + self.fed(hidden_states), residual


class Scan(WithParts, Core):
    """A token mixer that writes its result into an argument, and without a cache writes nothing, like Mamba-1's."""

    real = False

    parts = (("project", lambda: nn.Linear(D, D)),)

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
        hidden_states, residual = self.first_norm(hidden_states, residual)
        output = self.memory(hidden_states, residual)
        self.mixer(hidden_states, output)
        self.true = {"resid_pre": pre, "attn_out": output.clone(), "resid_post": output + residual}
        return output, residual


class TwoAttentions(Block):
    """Attention, MLP, and both once more, beside a third part, like LongCat's."""

    parts = (("others", lambda: nn.ModuleList([Attention(), MLP(), MLP()])),)

    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = self.first_norm(hidden_states, residual)
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
        residual = hidden_states + self.mixed(positions, hidden_states)
        return residual + self.fed(residual), residual


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
        hidden_states += self.mixed(positions, hidden_states)
        hidden_states += self.fed(hidden_states)


class PPMissingLayer(nn.Identity):
    """Stands where vLLM has a block on another pipeline stage."""

    def forward(self, positions, *stream):
        return stream if len(stream) > 1 else stream[0]


class Model(nn.Module):
    """Embedding, blocks, final norm; others override how it begins and ends."""

    def __init__(self, kinds, fused=False, times=1, between=0.0, scale=1.0, positions=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(11, D)
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.norm = Norm()
        self.wpe = nn.Embedding(TOKENS, D) if positions else None
        self.fused, self.times, self.between, self.scale = fused, times, between, scale

    def forward(self, ids):
        return self.leave(*self.through(self.enter(ids)))

    def enter(self, ids):
        hidden = self.embed_tokens(ids) * self.scale
        return hidden if self.wpe is None else hidden + self.wpe(torch.arange(len(ids)))

    def through(self, hidden, residual=None):
        """The two tensors that leave the last block; the second is None unless the blocks are fused."""
        positions = torch.arange(len(hidden))
        for layer in [*self.layers] * self.times:
            if self.fused:
                hidden, residual = layer(positions, hidden, residual)
            else:
                hidden = layer(positions, hidden)
            hidden = hidden + self.between if self.between else hidden
        return hidden, residual

    def leave(self, hidden, residual=None):
        if residual is None or isinstance(self.layers[-1], (Parallel, Weighted)):
            return self.norm(hidden)
        return self.norm(hidden, residual)[0]


class GivenEmbeddings(Model):
    """Is given embeddings instead of tokens, like models under `enable_prompt_embeds`."""

    def forward(self, ids=None, inputs_embeds=None):
        return self.leave(*self.through(self.enter(inputs_embeds)))

    def enter(self, inputs_embeds):
        return inputs_embeds


def mapped(model, dtype=torch.float32, description=None, mixers=Core, parts=None, is_embedding=None, run=None, **more):
    """The verdicts on a toy model; `parts` recognises the modules inside attention and MLP."""
    torch.manual_seed(0)
    model = model.to(dtype)
    description = description or ModelDescription()
    is_embedding = is_embedding or (lambda m: m is getattr(model, "embed_tokens", None))
    run = run or (lambda: model(torch.zeros(TOKENS, dtype=torch.long)))
    with torch.inference_mode():
        tree = find_tree(model, D, LAYERS, description, lambda m: isinstance(m, mixers), is_embedding, run, **more)
        return map_sites(tree, run, dtype, description, parts)


def supported(sites, layer=1):
    """The hook points that a block has."""
    return {h for h in STREAM_HOOKS if Site(h, layer) in sites.anchors}
