"""Points made of two tensors, and the two outside the blocks where models do more than add and norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.blocks import (
    LAYERS,
    MLP,
    Attention,
    Biased,
    BiasedParallel,
    D,
    Fused,
    Model,
    More,
    MoreUnscaled,
    Norm,
    Sequential,
    Shared,
    TooLate,
    TwoMixers,
    mapped,
    supported,
)
from vllm_weir.schema.hooks import STREAM_HOOKS, Site
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_points_made_of_two_tensors(dtype):
    shared = mapped(Model([Shared] * LAYERS), dtype).anchors[Site("mlp_out", 1)]
    assert (shared.module, shared.added_term.module) == ("layers.1.shared", "layers.1.mlp")
    assert shared.scale == shared.added_term.scale == pytest.approx(0.8, rel=3e-3)
    mixers = mapped(Model([TwoMixers] * LAYERS), dtype).anchors[Site("attn_out", 1)]
    assert (mixers.module, mixers.added_term.module) == ("layers.1.mixer", "layers.1.self_attn")
    assert (mixers.scale, mixers.added_term.scale) == pytest.approx((1.3, 0.7), rel=3e-3)
    assert "x output of layers.1.mixer, after the call, + 0." in str(mixers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_that_is_handed_over_belongs_to_the_point(dtype):
    """However small it is next to the noise of the probe, and to bfloat16."""
    sites = mapped(Model([BiasedParallel] * LAYERS), dtype)
    assert supported(sites) == {"resid_pre", "attn_out", "mlp_out", "resid_post"}
    for found in (sites, mapped(Model([Biased] * LAYERS), dtype)):
        assert all(found.anchors[Site(h, 1)].offset == TensorKey("out", 1) for h in ("attn_out", "mlp_out"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_mlp_in_one_part_of_a_block(dtype):
    """Their sum, which is all that the block adds, is no `attn_out`."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.feed_forward = Attention(), MLP()

        def forward(self, x):
            return self.attention(None, x) + self.feed_forward(x)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.both = Norm(), Both()

        def forward(self, positions, hidden_states):
            return hidden_states + self.both(self.norm(hidden_states))

    sites = mapped(Model([Wrapped] * LAYERS), dtype)
    assert supported(sites) == {"resid_pre", "attn_out", "mlp_out", "resid_post"}
    assert sites.anchors[Site("attn_out", 1)].module.startswith("layers.1.both.attention")
    assert sites.anchors[Site("mlp_out", 1)].module.startswith("layers.1.both.feed_forward")


@pytest.mark.parametrize("kind", [More, MoreUnscaled])
def test_what_is_added_after_the_mlp(kind):
    sites = mapped(Model([kind] * LAYERS))
    assert supported(sites) == {"resid_pre", "attn_out", "resid_mid", "resid_post"}
    assert "after what the MLP adds" in sites.refused[Site("mlp_out", 1)]


def test_what_is_used_too_early_is_refused():
    sites = mapped(Model([TooLate] * LAYERS))
    assert not {"attn_out", "resid_mid"} & supported(sites)
    assert "does not arrive" in sites.refused[Site("attn_out", 1)]


def test_what_comes_after_the_final_norm():
    """A factor, a projection to another width, a class that calls its forward past the hooks."""

    class Divides(Model):
        def forward(self, ids):
            return super().forward(ids) / 1.75

    class Projects(Model):
        def __init__(self, *args):
            super().__init__(*args)
            self.head = nn.Linear(D, D // 2)

        def forward(self, ids):
            return self.head(super().forward(ids))

    class CallsItself(Model):
        def __call__(self, ids):
            return self.forward(ids)

    class Doubles(Projects):
        def forward(self, ids):
            return self.head(2 * Model.forward(self, ids))

    for kind in (Divides, Projects, CallsItself):
        assert mapped(kind([Sequential] * LAYERS)).anchors[Site("final_norm", 0)] == Anchor(
            "norm", "after", TensorKey("out", -1)
        )
    assert "changes what norm returns" in mapped(Doubles([Sequential] * LAYERS)).refused[Site("final_norm", 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_before_the_final_norm_or_instead_of_it(dtype):
    """A dropout, a part that looks at the stream as well, a projection of the stream's own width."""

    class Square(Model):
        def __init__(self, *args):
            super().__init__(*args)
            self.drop, self.linear = nn.Dropout(0.0), nn.Linear(D, D)

        def forward(self, ids):
            hidden = self.embed_tokens(ids)
            for layer in self.layers:
                hidden = layer(None, hidden)
            return self.end(hidden)

    class Drops(Square):
        def end(self, hidden):
            return self.norm(self.drop(hidden))

    class Looks(Square):
        def end(self, hidden):
            self.linear(hidden)
            return self.norm(hidden)

    class Projects(Square):
        def end(self, hidden):
            return self.linear(hidden)

    class ProjectsFirst(Square):
        def end(self, hidden):
            return self.norm(self.linear(hidden))

    for kind in (Drops, Looks):
        sites = mapped(kind([Sequential] * LAYERS).eval(), dtype)
        assert sites.anchors[Site("final_norm", 0)] == Anchor("norm", "after", TensorKey("out", -1))
    for kind in (Projects, ProjectsFirst):
        sites = mapped(kind([Sequential] * LAYERS).eval(), dtype)
        assert "linear, which is given what leaves the last block, is no norm" in sites.refused[Site("final_norm", 0)]


def test_what_runs_again_elsewhere_is_no_point():
    """A tap on a norm that is called before the blocks as well would add there too, like NanoChat's."""

    class NormsFirst(Model):
        def forward(self, ids):
            hidden = self.norm(self.embed_tokens(ids))
            for layer in self.layers:
                hidden = layer(None, hidden)
            return self.norm(hidden)

    class LooksUpTwice(Model):
        def forward(self, ids):
            return super().forward(ids) + self.embed_tokens(ids)

    sites = mapped(NormsFirst([Sequential] * LAYERS))
    assert "norm runs 2 times in one pass" in sites.refused[Site("final_norm", 0)]
    assert Site("embed", 0) in sites.anchors and supported(sites) == set(STREAM_HOOKS)
    sites = mapped(LooksUpTwice([Sequential] * LAYERS))
    assert "embed_tokens runs 2 times in one pass" in sites.refused[Site("embed", 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_the_embeddings_own_belongs_to_it(dtype):
    """Bloom's: what it returns enters block 0, as TransformerLens's hook_embed has it."""

    class Normed(Model):
        def __init__(self, *args):
            super().__init__(*args)
            self.embed_norm = Norm()

        def forward(self, ids):
            hidden = self.embed_norm(self.embed_tokens(ids))
            for layer in self.layers:
                hidden = layer(None, hidden)
            return self.norm(hidden)

    sites = mapped(Normed([Sequential] * LAYERS), dtype)
    assert sites.anchors[Site("embed", 0)] == Anchor("embed_norm", "after", TensorKey("out", -1)) and not sites.refused


def test_a_final_norm_outside_the_pass_is_refused():
    class Sums(Model):
        def forward(self, ids):
            hidden, residual = self.embed_tokens(ids), None
            for layer in self.layers:
                hidden, residual = layer(None, hidden, residual)
            return hidden + residual

    model = Sums([Fused] * LAYERS, True)
    assert "returns the stream as it leaves" in mapped(model).refused[Site("final_norm", 0)]


def test_an_embedding_that_is_widened():
    class Narrow(Model):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.embed_tokens = nn.Embedding(11, D // 2)
            self.widen = nn.Linear(D // 2, D)

        def forward(self, ids):
            positions = torch.arange(len(ids))
            hidden = self.widen(self.embed_tokens(ids)) + self.wpe(positions)
            for layer in self.layers:
                hidden = layer(positions, hidden)
            return self.norm(hidden)

    model = Narrow([Sequential] * LAYERS, positions=True)
    sites = mapped(model)
    assert sites.anchors[Site("embed", 0)].module == "widen" and not sites.refused


def test_an_embedding_that_does_not_reach_the_stream_is_refused():
    class Elsewhere(Model):
        def forward(self, ids):
            self.embed_tokens(ids)
            hidden = self.wpe(torch.arange(len(ids)))
            for layer in self.layers:
                hidden = layer(None, hidden)
            return self.norm(hidden)

    sites = mapped(Elsewhere([Sequential] * LAYERS, positions=True))
    assert "does not arrive" in sites.refused[Site("embed", 0)]
