"""Hook points inside attention and MLP: toy blocks of every shape that real ones have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit import part_blocks as toys
from tests.unit.blocks import LAYERS, D, Fused, MLPOnly, Parallel, Sequential
from tests.unit.part_blocks import EXPERTS, HEADS, KV, KV_HEADS, MLP, SIZE, Q, block, find
from vllm_weir.config.settings import Settings
from vllm_weir.schema.hooks import ATTENTION_HOOKS, MLP_HOOKS, PART_HOOKS, Site
from vllm_weir.schema.row_shapes import Shard
from vllm_weir.worker.discovery.part_modules import Features
from vllm_weir.worker.discovery.part_verification import head_codes
from vllm_weir.worker.discovery.site_map import chosen

DENSE = {*PART_HOOKS} - {"router_logits"}
NEURONS = {"mlp_pre", "mlp_pre_linear", "mlp_post"}


def found(sites, layer=1):
    """The points that a block has."""
    return {hook for hook in PART_HOOKS if Site(hook, layer) in sites.anchors}


def where(sites, hook, layer=1):
    """Module and columns of a point."""
    anchor = sites.anchors[Site(hook, layer)]
    return anchor.module.removeprefix(f"layers.{layer}."), anchor.when, anchor.columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("base", "fused"), [(Sequential, False), (Fused, True)])
def test_a_block_like_llamas(base, fused, dtype):
    sites = find(block(base=base), dtype, fused=fused)
    for layer in range(LAYERS):
        assert found(sites, layer) == DENSE
    assert not sites.read_only and not sites.shards and not sites.before_quantised
    assert where(sites, "attn_in") == ("self_attn.qkv", "before", None)
    assert where(sites, "q") == ("self_attn.qkv", "after", (0, Q))
    assert where(sites, "k") == ("self_attn.qkv", "after", (Q, Q + KV))
    assert where(sites, "v") == ("self_attn.qkv", "after", (Q + KV, Q + 2 * KV))
    assert where(sites, "q_rot") == where(sites, "k_rot") == ("self_attn.core", "before", None)
    assert sites.anchors[Site("q_rot", 1)].hidden.name == "query"
    assert sites.anchors[Site("k_rot", 1)].hidden.name == "key"
    assert where(sites, "z") == ("self_attn.o_proj", "before", None)
    assert where(sites, "mlp_in") == ("mlp.gate_up", "before", None)
    assert where(sites, "mlp_pre") == ("mlp.gate_up", "after", (0, MLP))
    assert where(sites, "mlp_pre_linear") == ("mlp.gate_up", "after", (MLP, 2 * MLP))
    assert where(sites, "mlp_post") == ("mlp.down", "before", None)
    shapes = {hook: sites.shapes.get(Site(hook, 1)) for hook in PART_HOOKS}
    assert shapes == {
        **dict.fromkeys(("q", "q_rot", "z"), (HEADS, SIZE)),
        **dict.fromkeys(("k", "k_rot", "v"), (KV_HEADS, SIZE)),
        **dict.fromkeys(NEURONS, (MLP,)),
        **dict.fromkeys(("attn_in", "mlp_in", "router_logits")),
    }


def test_the_other_points_stay_as_they_are():
    with_parts, without = find(block()), find(block(), parts=None)
    assert without.anchors and not any(site.hook in PART_HOOKS for site in (*without.anchors, *without.refused))
    assert {s: a for s, a in with_parts.anchors.items() if s.hook not in PART_HOOKS} == without.anchors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "attention",
    [toys.Attention, toys.Unturned, toys.Separate, toys.NormedHeads, toys.NormedRows, toys.Gated],
)
def test_attention(attention, dtype):
    sites = find(block(attention), dtype)
    assert found(sites) == DENSE and not sites.read_only
    if attention is toys.Separate:
        assert [where(sites, hook)[0] for hook in "qkv"] == ["self_attn.q", "self_attn.k", "self_attn.v"]
        assert where(sites, "attn_in")[0] == "self_attn.q"


def test_heads_in_another_order_are_refused():
    sites = find(block(toys.Mislaid))
    assert found(sites) == DENSE - {"q"}
    assert "one head" in sites.refused[Site("q", 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_no_columns_side_by_side_hold(dtype):
    """They are rows of their own where a module is given them."""
    sites = find(block(toys.Interleaved), dtype)
    assert found(sites) == DENSE and not sites.read_only
    assert where(sites, "q") == where(sites, "k") == ("self_attn.rotary", "before", None)
    assert where(sites, "v") == ("self_attn.core", "before", None)
    gated = find(block(toys.BetweenGates), dtype)
    assert found(gated) == DENSE and not gated.read_only
    assert where(gated, "q") == ("self_attn.q_norm", "before", None)
    assert gated.anchors[Site("q", 1)].per_head and gated.shapes[Site("q", 1)] == (HEADS, SIZE)
    assert where(gated, "k")[0] == "self_attn.qkv"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_that_are_added_later_are_part_of_the_value(dtype):
    sites = find(block(toys.BiasedAttention, toys.BiasedMLP), dtype)
    assert found(sites) == DENSE - {"mlp_pre_linear"} and not sites.read_only
    assert where(sites, "q") == ("self_attn.rotary", "before", None)
    assert where(sites, "v") == ("self_attn.core", "before", None)
    assert where(sites, "mlp_pre") == ("mlp.act", "before", None)
    left_to_the_block = find(block(base=toys.BiasedResults), dtype)
    assert found(left_to_the_block) == DENSE


@pytest.mark.parametrize("attention", [toys.NormedValues, toys.ScaledValues])
def test_values_that_attention_is_not_given_as_they_are(attention):
    sites = find(block(attention))
    assert found(sites) == DENSE
    assert where(sites, "k") == ("self_attn.qkv", "after", (Q, Q + KV))
    assert where(sites, "v") == ("self_attn.qkv", "after", (Q + KV, Q + 2 * KV))


def test_z_has_to_depend_on_attention():
    sites = find(block(toys.Deaf))
    assert "z" not in found(sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "act", [F.silu, F.gelu, F.relu, lambda x: F.gelu(x, approximate="tanh"), lambda x: F.relu(x) ** 2]
)
def test_activations(act, dtype):
    plain = find(block(mlp=lambda: toys.Plain(act)), dtype)
    assert found(plain) == DENSE - {"mlp_pre_linear"}
    assert "no gate" in plain.refused[Site("mlp_pre_linear", 1)]
    gated_mlp = type("Gated", (toys.GatedMLP,), {"act": staticmethod(act)})
    gated = find(block(mlp=gated_mlp), dtype)
    assert where(gated, "mlp_pre")[2] == (0, MLP) and where(gated, "mlp_pre_linear")[2] == (MLP, 2 * MLP)


def test_which_half_is_the_gate():
    sites = find(block(mlp=toys.GateLast))
    assert where(sites, "mlp_pre")[2] == (MLP, 2 * MLP) and where(sites, "mlp_pre_linear")[2] == (0, MLP)
    two = find(block(mlp=toys.Two))
    assert where(two, "mlp_pre")[0] == "mlp.gate" and where(two, "mlp_pre_linear")[0] == "mlp.up"
    assert where(two, "mlp_in")[0] == "mlp.gate", "it runs first"
    assert found(find(block(mlp=toys.SubNorm))) == DENSE


@pytest.mark.parametrize("mlp", [toys.Routed, toys.RoutedInside, toys.WithShared])
def test_experts(mlp):
    sites = find(block(mlp=mlp))
    assert found(sites) == {*ATTENTION_HOOKS, "mlp_in", "router_logits"}
    assert not sites.read_only
    assert where(sites, "router_logits") == ("mlp.gate", "after", None)
    assert sites.shapes[Site("router_logits", 1)] == (EXPERTS,)
    for hook in NEURONS:
        assert "fused kernel" in sites.refused[Site(hook, 1)]


def test_experts_whose_router_is_not_seen():
    """mlp_in stands where the first of all that read it does, so that an edit reaches the router too."""
    sites = find(block(mlp=toys.WithUnseenRouter))
    assert found(sites) == {*ATTENTION_HOOKS, "mlp_in"}
    assert where(sites, "mlp_in")[:2] == (where(find(block()), "mlp_in")[0].replace("mlp.", "mlp.shared."), "before")
    assert "no linear module returns the logits" in sites.refused[Site("router_logits", 1)]


def test_experts_in_a_module_that_nothing_is_known_of():
    """They are refused as what they are, not as if the block had none."""
    sites = find(block(mlp=toys.UnknownExperts))
    assert found(sites) == {*ATTENTION_HOOKS}
    assert "nor a layer of experts that vLLM tells about" in sites.refused[Site("router_logits", 1)]
    assert "no experts" in find(block()).refused[Site("router_logits", 1)]


def test_in_a_parallel_block_the_first_reader_is_not_written():
    """What is added to the one tensor before attention reads it, the MLP would read too."""
    sites = find(block(base=Parallel), fused=True)
    assert found(sites) == DENSE
    assert set(sites.read_only) == {Site("attn_in", layer) for layer in range(LAYERS)}
    backwards = find(block(base=toys.Backwards))
    assert found(backwards) == DENSE
    assert set(backwards.read_only) == {Site("mlp_in", layer) for layer in range(LAYERS)}


def test_an_input_that_is_the_stream_is_not_written():
    sites = find(block(base=toys.Normless))
    assert found(sites) == DENSE
    assert {site.hook for site in sites.read_only} == {"attn_in", "mlp_in"}
    assert "stream" in sites.read_only[Site("attn_in", 1)]


def test_other_mixers_and_blocks_without_a_part():
    sites = find(block(toys.StateSpace))
    assert found(sites) == {"mlp_in", *NEURONS}
    assert "state-space" in sites.refused[Site("q", 1)]
    only_mlp = find(block(base=MLPOnly))
    assert "no attention" in only_mlp.refused[Site("z", 1)]


def test_a_module_that_runs_twice_has_no_point():
    class Again(toys.GatedMLP):
        def forward(self, x):
            self.down(torch.zeros(len(x), MLP, dtype=x.dtype))
            return super().forward(x)

    sites = find(block(mlp=Again))
    assert "runs 2 times" in sites.refused[Site("mlp_post", 1)]


def test_rows_that_are_divided_among_workers():
    """Worker 1 of 2: two of four query heads, one of two key-value heads, half of the neurons."""

    class Half(toys.Attention):
        def __init__(self):
            super().__init__()
            self.core.heads, self.core.kv_heads = HEADS // 2, KV_HEADS // 2
            self.qkv, self.o_proj = toys.Merged(D, Q // 2, KV // 2, KV // 2), nn.Linear(Q // 2, D)

        def project(self, x):
            return self.qkv(x).split([Q // 2, KV // 2, KV // 2], -1)

    def linear(module):
        shape = toys.linear_shape(module)
        if isinstance(module, toys.Merged):
            return replace(shape, outputs=tuple(Features(2 * n, Shard(n, 2 * n)) for n in module.parts))
        return shape and replace(
            shape, inputs=Features(2 * module.in_features, Shard(module.in_features, 2 * module.in_features))
        )

    sites = find(block(Half), parts=replace(toys.PARTS, linear=linear, ranks=2))
    assert found(sites) == DENSE
    assert sites.shapes[Site("q", 1)] == sites.shapes[Site("q_rot", 1)] == sites.shapes[Site("z", 1)] == (HEADS, SIZE)
    assert sites.shapes[Site("k", 1)] == sites.shapes[Site("v", 1)] == (KV_HEADS, SIZE)
    assert sites.shards[Site("q", 1)] == sites.shards[Site("q_rot", 1)] == Shard(Q // 2, Q)
    assert sites.shards[Site("k_rot", 1)] == sites.shards[Site("v", 1)] == Shard(KV // 2, KV)
    assert sites.shards[Site("mlp_post", 1)] == sites.shards[Site("mlp_pre", 1)] == Shard(MLP, 2 * MLP)
    assert Site("attn_in", 1) not in sites.shards


def test_heads_that_nothing_places_are_refused():
    def linear(module):
        return (
            toys.linear_shape(nn.Linear(module.in_features, module.out_features)) if toys.linear_shape(module) else None
        )

    sites = find(block(), parts=replace(toys.PARTS, linear=linear, ranks=2))
    assert not found(sites) & {"q", "k", "v", "q_rot", "k_rot"} and "z" in found(sites)


def test_taps_before_quantised_modules_are_left_out_unless_asked_for():
    def linear(module):
        shape = toys.linear_shape(module)
        return shape and replace(shape, quantises_input=True)

    sites = find(block(), parts=replace(toys.PARTS, linear=linear))
    quantised = {"attn_in", "z", "mlp_in", "mlp_post"}
    assert {site.hook for site in sites.before_quantised} == quantised
    by_default, named = Settings(), Settings(hooks=("mlp_in",))
    assert not set(chosen(sites, by_default).values()) & {sites.anchors[s] for s in sites.before_quantised}
    assert len(chosen(sites, named)) == LAYERS
    assert "quantised model" in sites.why_left_out(Site("mlp_in", 1), by_default)
    assert sites.why_left_out(Site("q", 1), by_default) == "" == sites.why_left_out(Site("mlp_in", 1), named)


def test_every_head_has_a_code_of_its_own():
    codes = head_codes(127, 8, 1)
    assert codes.shape == (8, 127) and not codes[1].any() and codes.any(0).all()
    assert len({tuple(column.tolist()) for column in codes.T}) == 127
    assert head_codes(300, 8, 0).any(0).all(), "more heads than codes share them"


def test_parts_that_fail_leave_the_other_points():
    def linear(module):
        raise RuntimeError("broken")

    sites = find(block(), parts=replace(toys.PARTS, linear=linear))
    assert Site("attn_out", 1) in sites.anchors and not found(sites)
    assert all("broken" in sites.refused[Site(hook, 1)] for hook in (*ATTENTION_HOOKS, *MLP_HOOKS))
