"""Modules that run more than once in a block, and points whose neighbours are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.blocks import LAYERS, Block, Fused, Model, Sequential, mapped, supported
from vllm_weir.schema.hooks import STREAM_HOOKS, Site

DTYPES = (torch.float32, torch.bfloat16)


class OneNorm(Block):
    """The same norm before attention and before the MLP."""

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.self_attn(positions, self.ln_1(hidden_states))
        return hidden_states + self.mlp(self.ln_1(hidden_states))


class OneFusedNorm(Fused):
    def __init__(self):
        super().__init__()
        self.ln_2 = self.ln_1


class OnePostNorm(Block):
    """The same norm after attention and after the MLP."""

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.ln_1(self.self_attn(positions, hidden_states))
        return hidden_states + self.ln_1(self.mlp(hidden_states))


class Copied(Block):
    """What its second norm is given is a copy, and what is written there never arrives."""

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.self_attn(positions, self.ln_1(hidden_states))
        return hidden_states + self.mlp(self.ln_2(hidden_states.clone()))


class Dropped(Block):
    """One addition, after a dropout that does nothing."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, positions, hidden_states):
        return hidden_states + self.drop(self.self_attn(positions, self.ln_1(hidden_states)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tap_on_a_module_that_runs_twice_would_act_twice(dtype):
    """Its rows would be those of the second call, whatever the name says."""
    sites = mapped(Model([OnePostNorm] * LAYERS), dtype)
    assert supported(sites) == {"resid_pre", "resid_mid", "resid_post"}
    for hook in ("attn_out", "mlp_out"):
        assert "layers.1.ln_1 runs 2 times in one pass" in sites.refused[Site(hook, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "fused"), [(OneNorm, False), (OneFusedNorm, True)])
def test_one_norm_for_both_parts_costs_the_point_before_it_alone(kind, fused, dtype):
    sites = mapped(Model([kind] * LAYERS, fused), dtype)
    assert supported(sites) == set(STREAM_HOOKS) - {"resid_mid"}
    assert "layers.1.ln_1 runs 2 times in one pass" in sites.refused[Site("resid_mid", 1)]


@pytest.mark.parametrize("between", [0.0, 0.5])
def test_writes_are_checked_where_resid_pre_is_refused_too(between):
    sites = mapped(Model([Copied] * LAYERS, between=between))
    assert not {"attn_out", "resid_mid", "mlp_out"} & supported(sites)
    assert "does not arrive" in sites.refused[Site("resid_mid", 1)]


def test_writes_are_checked_where_attn_out_is_refused_too():
    for kind, left in ((Sequential, {"resid_mid", "mlp_out"}), (Copied, set())):
        model = Model([kind] * LAYERS)
        model.layers[2].self_attn = model.layers[0].self_attn
        sites = mapped(model)
        assert "shared" in sites.refused[Site("attn_out", 0)]
        assert supported(sites, 0) == {"resid_pre", "resid_post"} | left


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_dropout_hands_on_is_no_second_part(dtype):
    """Half of the one and half of the other make up the same sum."""
    sites = mapped(Model([Dropped] * LAYERS).eval(), dtype)
    assert supported(sites) == {"resid_pre", "attn_out", "resid_post"}
    assert sites.anchors[Site("attn_out", 1)].scale == 1
