"""Hook points found by structure: toy blocks of every shape that real ones have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.blocks import (
    LAYERS,
    Biased,
    Block,
    Chained,
    D,
    Deep,
    Feeding,
    Fused,
    Gain,
    Joint,
    MixerOnly,
    MLPOnly,
    Model,
    Norm,
    OutputArgument,
    Parallel,
    PostNorm,
    SameRoom,
    Sandwich,
    Scaled,
    Sequential,
    Shared,
    TwoMixers,
    Weighted,
    mapped,
    supported,
)
from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import STREAM_HOOKS, Site
from vllm_weir.schema.taps import tap_of
from vllm_weir.worker.discovery.descriptions import ModelDescription
from vllm_weir.worker.discovery.site_map import SiteMap, chosen

INSIDE = ("attn_out", "resid_mid", "mlp_out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        (Sequential, False),
        (Fused, True),
        (Sandwich, True),
        (PostNorm, False),
        (Scaled, False),
        (OutputArgument, False),
        (SameRoom, False),
        (Deep, False),
        (Shared, False),
        (TwoMixers, False),
        (Biased, False),
        (Gain, False),
    ],
)
def test_sequential_blocks_have_all_five(kind, fused, dtype):
    sites = mapped(Model([kind] * LAYERS, fused), dtype)
    assert not sites.refused
    assert len(sites.anchors) == 5 * LAYERS + 2
    assert sites.anchors[Site("final_norm", 0)].module == "norm"
    assert sites.anchors[Site("embed", 0)].module == "embed_tokens"


def test_where_they_are():
    sites = mapped(Model([Sandwich] * LAYERS, True))
    where = {h: sites.anchors[Site(h, 1)] for h in STREAM_HOOKS}
    assert where["attn_out"].module == "layers.1.ln_3" and where["attn_out"].when == "after"
    assert where["resid_mid"].module == "layers.1.ln_2" and where["resid_mid"].residual is not None
    assert where["mlp_out"].module == "layers.1.ln_4"
    assert where["resid_post"].residual is not None and where["resid_post"].module == "layers.1"
    scaled = mapped(Model([Scaled] * LAYERS))
    assert scaled.anchors[Site("attn_out", 0)].scale == pytest.approx(0.22, rel=1e-6)
    assert scaled.anchors[Site("mlp_out", 0)].scale == pytest.approx(0.37, rel=1e-6)


def test_a_parallel_block_has_no_resid_mid():
    sites = mapped(Model([Parallel] * LAYERS, True))
    assert supported(sites) == {"resid_pre", "attn_out", "mlp_out", "resid_post"}
    assert "parallel" in sites.refused[Site("resid_mid", 1)]
    assert sites.anchors[Site("resid_post", 1)].residual is None, "the second tensor is not part of the stream"


def test_blocks_of_two_kinds_with_arguments_in_another_order():
    class Other(Sequential):
        def forward(self, hidden_states, positions):
            return super().forward(positions, hidden_states)

    class Mixed(Model):
        def forward(self, ids):
            hidden = self.embed_tokens(ids)
            for layer in self.layers:
                if isinstance(layer, Other):
                    hidden = layer(hidden, positions=None)
                else:
                    hidden = layer(None, hidden_states=hidden)
            return self.norm(hidden)

    assert not mapped(Mixed([Sequential, Other, Sequential])).refused


def test_blocks_with_one_addition():
    sites = mapped(Model([Sequential, MixerOnly, MLPOnly]))
    assert supported(sites, 0) == set(STREAM_HOOKS)
    assert supported(sites, 1) == {"resid_pre", "attn_out", "resid_post"}
    assert supported(sites, 2) == {"resid_pre", "mlp_out", "resid_post"}
    assert "no MLP" in sites.refused[Site("mlp_out", 1)] and "no attention" in sites.refused[Site("attn_out", 2)]


def test_what_cannot_be_told_apart_is_refused():
    sites = mapped(Model([Joint] * LAYERS))
    assert supported(sites) == {"resid_pre", "resid_post"}
    assert "told apart" in sites.refused[Site("attn_out", 1)]


def test_what_goes_into_a_mixer_adds_nothing_of_its_own():
    sites = mapped(Model([Feeding] * LAYERS))
    assert supported(sites) == {"resid_pre", "attn_out", "resid_post"}
    assert sites.anchors[Site("attn_out", 1)].module.startswith("layers.1.decoder.mixer")
    chained = mapped(Model([Chained] * LAYERS))
    assert supported(chained) == {"resid_pre", "resid_post"}
    assert "told apart" in chained.refused[Site("attn_out", 1)]


def test_a_pair_whose_sum_is_not_shown_to_be_the_stream_is_refused():
    sites = mapped(Model([Weighted] * LAYERS, True))
    assert not supported(sites) & set(INSIDE)
    assert all(a.residual is None or a.module == "norm" for a in sites.anchors.values())


def test_a_block_that_runs_twice_has_no_points():
    sites = mapped(Model([Sequential] * LAYERS, times=2))
    assert not sites.anchors and "runs 2 times" in sites.refused[Site("resid_post", 0)]


def test_what_is_added_between_blocks_parts_resid_pre_from_resid_post():
    sites = mapped(Model([Sequential] * LAYERS, between=0.5))
    assert "between block 0 and block 1" in sites.refused[Site("resid_pre", 1)]
    assert supported(sites) == {"attn_out", "resid_mid", "mlp_out", "resid_post"}


@pytest.mark.parametrize("scale", [1.0, 0.3, 12.0])
def test_embeddings(scale):
    """A multiplier belongs to the embedding, with positions and without; positions do not."""
    plain = mapped(Model([Sequential] * LAYERS, scale=scale))
    assert plain.anchors[Site("embed", 0)].module == "embed_tokens"
    assert plain.anchors[Site("embed", 0)].scale == pytest.approx(scale, rel=1e-6)
    added = mapped(Model([Sequential] * LAYERS, positions=True, scale=scale))
    assert added.anchors[Site("embed", 0)].scale == pytest.approx(scale, rel=1e-6)


def test_shared_parts_are_refused():
    model = Model([Sequential] * LAYERS)
    model.layers[2].self_attn = model.layers[0].self_attn
    sites = mapped(model)
    assert "shared" in sites.refused[Site("attn_out", 0)] and Site("attn_out", 2) in sites.refused
    assert supported(sites, 1) == set(STREAM_HOOKS)


def test_streams_of_another_shape_are_refused():
    class Hyper(Block):
        def forward(self, positions, hidden_states):
            return hidden_states + self.self_attn(positions, hidden_states[:, :D]).repeat(1, 2)

    class Streams(Model):
        def forward(self, ids):
            hidden = self.embed_tokens(ids).repeat(1, 2)
            for layer in self.layers:
                hidden = layer(None, hidden)
            return self.norm(hidden[:, :D])

    sites = mapped(Streams([Hyper] * LAYERS))
    assert not supported(sites) and "do not hand on one stream" in sites.refused[Site("resid_post", 0)]


def test_a_description_is_verified_too():
    good = {"points": {"attn_out": "self_attn:out", "resid_mid": "ln_2:in:x", "mlp_out": "mlp:out"}}
    assert not mapped(Model([Sequential] * LAYERS), description=ModelDescription.parse(good, "d")).refused
    by_place = {"points": good["points"] | {"resid_mid": "ln_2:in:0+1"}}
    assert not mapped(Model([Fused] * LAYERS, True), description=ModelDescription.parse(by_place, "d")).refused
    parallel = {"points": {"attn_out": "self_attn:out", "mlp_out": "mlp:out"}}
    sites = mapped(Model([Parallel] * LAYERS, True), description=ModelDescription.parse(parallel, "d"))
    assert supported(sites) == {"resid_pre", "attn_out", "mlp_out", "resid_post"}


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({"attn_out": "ln_1:out"}, {"mlp_out"}),
        ({"resid_mid": "ln_1:in:x"}, set()),
        ({"resid_mid": "ln_2:in:y"}, {"attn_out", "mlp_out"}),
        ({"mlp_out": "ln_2:out"}, {"attn_out"}),
        ({"mlp_out": "nothing:out"}, {"attn_out", "resid_mid"}),
        ({"attn_out": "self_attn:out:1"}, set()),
    ],
)
def test_what_is_described_wrongly_is_refused(changed, left):
    good = {"attn_out": "self_attn:out", "resid_mid": "ln_2:in:x", "mlp_out": "mlp:out"}
    sites = mapped(Model([Sequential] * LAYERS), description=ModelDescription.parse({"points": good | changed}, "d"))
    found = supported(sites)
    for hook in changed:
        assert hook not in found and sites.refused[Site(hook, 1)]
    assert found & set(INSIDE) <= left and found >= {"resid_pre", "resid_post"}


@pytest.mark.parametrize(
    "bad",
    [[], {"x": 1}, {"stack": 3}, {"points": {"embed": "a:out"}}, {"points": {"attn_out": "a"}},
     {"points": {"attn_out": "a:out:x"}}, {"points": {"mlp_out": "a:in:b+c+d"}}, {"points": {"mlp_out": 3}}],
)  # fmt: skip
def test_bad_descriptions_are_refused(bad):
    with pytest.raises(WeirError) as e:
        ModelDescription.parse(bad, "settings.describe")
    assert e.value.field.startswith("settings.describe")


def gained(gain, dtype):
    """The verdicts on blocks that end with this gain: every point is served."""
    model = Model([Gain] * LAYERS)
    for block in model.layers:
        block.gain = gain
    sites = mapped(model, dtype)
    assert not sites.refused
    return sites


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gain", [0.02, 0.95, 0.978, 0.981, 0.985, 0.99, 0.998, 1.0, 1.01, 1.02, 1.03, 4.0])
def test_a_gain_of_nearly_one_is_told_from_a_factor_of_what_the_mlp_adds(gain, dtype):
    """In few bits ``c * (mid + o)`` looks much like ``mid + c * o``: every point is there, none of them scaled."""
    sites = gained(gain, dtype)
    for layer in range(LAYERS):
        for hook, module in (("attn_out", "self_attn"), ("mlp_out", "mlp")):
            anchor = sites.anchors[Site(hook, layer)]
            assert (anchor.module, anchor.scale, anchor.added_term) == (f"layers.{layer}.{module}", 1.0, None)


@pytest.mark.parametrize(("dtype", "gain"), [(torch.float32, -9.4e-4), (torch.float32, 1e-5), (torch.bfloat16, 3e-4)])
def test_a_gain_as_small_as_dummy_weights_are(dtype, gain):
    """Gemma 4's blocks end with a number that is a weight: `load_format="dummy"` makes it up like all others."""
    sites = gained(gain, dtype)
    assert {sites.anchors[Site("mlp_out", layer)].module for layer in range(LAYERS)} == {
        f"layers.{layer}.mlp" for layer in range(LAYERS)
    }


def test_no_stack_or_two():
    with pytest.raises(WeirError, match=r"no list of blocks with attention; name the list .*describe="):
        mapped(nn.Sequential(Norm()))
    with pytest.raises(WeirError, match="no list of blocks called 'nowhere', as its description says"):
        mapped(Model([Sequential] * LAYERS), description=ModelDescription("nowhere"))
    both = Model([Sequential] * LAYERS)
    both.others = nn.ModuleList(Sequential() for _ in range(LAYERS))
    with pytest.raises(WeirError) as caught:
        mapped(both)
    assert caught.value.message == (
        f"Model has 2 lists of blocks with attention (layers: {LAYERS} blocks, run 1 times in one pass; "
        f"others: {LAYERS} blocks, run 0 times in one pass). Layers are counted in one list: name it, say "
        "describe={'stack': 'layers'}"
    )
    assert not mapped(both, description=ModelDescription("layers")).refused


def test_two_stacks_that_run_again_and_again_are_told_so():
    """To name one of them would not help: what is said of a model with one such stack is said at once."""
    both = Model([Sequential] * LAYERS, times=2)
    both.others = nn.ModuleList(Sequential() for _ in range(LAYERS))
    with pytest.raises(WeirError, match=r"layers: 3 blocks, run 2 times .*: Weir cannot serve this model") as caught:
        mapped(both)
    assert "describe" not in caught.value.message
    assert not any(m._forward_pre_hooks for m in both.modules())
    sites = mapped(both, description=ModelDescription("layers"))
    assert not sites.anchors and all("runs 2 times in one pass" in why for why in sites.refused.values())


def test_a_stage_of_a_pipeline():
    """Its first block's resid_pre belongs to the stage before, the following stage's to it."""

    class PPMissingLayer(nn.Identity):
        def forward(self, positions, hidden):
            return hidden

    model = Model([Sequential] * LAYERS)
    model.layers[2] = PPMissingLayer()
    first = mapped(model)
    assert Site("resid_pre", 2) in first.anchors and Site("resid_post", 2) not in first.anchors
    model = Model([Sequential] * LAYERS)
    model.layers[0] = model.layers[1] = PPMissingLayer()
    second = mapped(model)
    assert Site("resid_pre", 2) not in {**second.anchors, **second.refused}
    assert supported(second, 2) == {"attn_out", "resid_mid", "mlp_out", "resid_post"}
    assert not set(chosen(first, Settings())) & set(chosen(second, Settings()))


def test_what_the_settings_choose():
    sites = mapped(Model([Parallel] * LAYERS, True))
    every = chosen(sites, Settings())
    assert len(every) == 2 + 1 + 3 * LAYERS
    assert list(chosen(sites, Settings(hooks=("resid_post",), layers=[1]))) == [tap_of(Site("resid_post", 1))]
    assert list(chosen(sites, Settings(hooks=("resid_post",), layers=[0]))) == [2, tap_of(Site("resid_post", 0))]
    assert list(chosen(sites, Settings(hooks=("mlp_out", "embed"), layers=[0]))) == [0, tap_of(Site("mlp_out", 0))]
    with pytest.raises(WeirError, match="parallel"):
        chosen(sites, Settings(hooks=("resid_mid",), refused="start"))
    # Unless hook points are named, all that the model has are meant: what it lacks was not asked for.
    assert chosen(sites, Settings(refused="start")) == every
    none = SiteMap(LAYERS)
    none.refuse(STREAM_HOOKS, range(LAYERS), "its blocks hand on two streams")
    assert chosen(none, Settings()) == {}
    with pytest.raises(WeirError, match=r"every site is refused.*two streams"):
        chosen(none, Settings(refused="start"))
    with pytest.raises(WeirError, match="block 3 does not exist"):
        chosen(sites, Settings(layers=[3]))
