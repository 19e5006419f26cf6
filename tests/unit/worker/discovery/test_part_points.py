"""Hook points inside attention and MLP: toy blocks of every shape that real ones have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit import part_blocks as toys
from tests.unit.blocks import LAYERS, D, Fused, MLPOnly, Parallel
from tests.unit.part_blocks import EXPERTS, HEADS, KV, KV_HEADS, MLP, SIZE, Q, block, find
from vllm_weir.config.settings import Settings
from vllm_weir.schema.hooks import ATTENTION_HOOKS, MLP_HOOKS, PART_HOOKS, Site
from vllm_weir.schema.rows import Shard
from vllm_weir.worker.discovery.parts.recorder import Features
from vllm_weir.worker.discovery.parts.verification import head_codes
from vllm_weir.worker.discovery.site_map import chosen

DENSE = frozenset(PART_HOOKS) - {"router_logits"}
NEURONS = frozenset({"mlp_pre", "mlp_pre_linear", "mlp_post"})
ATTENTION = frozenset(ATTENTION_HOOKS)
NOTHING: Mapping[str, Any] = MappingProxyType({})
K_AND_V = {"k": ("self_attn.qkv", "after", (Q, Q + KV)), "v": ("self_attn.qkv", "after", (Q + KV, Q + 2 * KV))}
GATE, UP = ("mlp.gate_up", "after", (0, MLP)), ("mlp.gate_up", "after", (MLP, 2 * MLP))


def found(sites, layer=1):
    """The points that a block has."""
    return {hook for hook in PART_HOOKS if Site(hook, layer) in sites.anchors}


def where(sites, hook, layer=1):
    """Module and columns of a point."""
    anchor = sites.anchors[Site(hook, layer)]
    return anchor.module.removeprefix(f"layers.{layer}."), anchor.when, anchor.columns


class Case(NamedTuple):
    make: Any
    points: frozenset = DENSE
    places: Mapping[str, tuple] = NOTHING
    """Hook point -> its module, when, and columns."""
    refused: Mapping[str, str] = NOTHING
    """Hook point -> words of the reason."""
    read_only: frozenset = frozenset()
    fused: bool = False


def before(module):
    return module, "before", None


LLAMA = Case(
    block(),
    places={
        "attn_in": before("self_attn.qkv"), "q": ("self_attn.qkv", "after", (0, Q)), **K_AND_V,
        "q_rot": before("self_attn.core"), "k_rot": before("self_attn.core"), "z": before("self_attn.o_proj"),
        "mlp_in": before("mlp.gate_up"), "mlp_pre": GATE, "mlp_pre_linear": UP, "mlp_post": before("mlp.down"),
    },
)  # fmt: skip
EXPERTS_ONLY = Case(
    block(mlp=toys.Routed),
    ATTENTION | {"mlp_in", "router_logits"},
    {"router_logits": ("mlp.gate", "after", None)},
    dict.fromkeys(NEURONS, "fused kernel"),
)
ACTIVATIONS = {
    "silu": F.silu, "gelu": F.gelu, "relu": F.relu, "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "squared relu": lambda x: F.relu(x) ** 2,
}  # fmt: skip
CASES = {
    "like Llama's": LLAMA,
    "like Llama's, fused": LLAMA._replace(make=block(base=Fused), fused=True),
    **{kind.__name__: Case(block(kind)) for kind in (toys.Unturned, toys.NormedHeads, toys.NormedRows, toys.Gated)},
    "apart": Case(
        block(toys.Separate),
        places={hook: (f"self_attn.{hook}", "after", None) for hook in "qkv"} | {"attn_in": before("self_attn.q")},
    ),
    "heads in another order": Case(block(toys.Mislaid), DENSE - {"q"}, refused={"q": "one head"}),
    # Rows that no columns side by side hold are rows of their own where a module is given them.
    "interleaved": Case(
        block(toys.Interleaved),
        places={hook: before("self_attn.rotary") for hook in "qk"} | {"v": before("self_attn.core")},
    ),
    "between gates": Case(
        block(toys.BetweenGates),
        places={"q": before("self_attn.q_norm"), "k": ("self_attn.qkv", "after", (2 * Q, 2 * Q + KV))},
    ),
    # Biases that are added later are part of the value.
    "biases": Case(
        block(toys.BiasedAttention, toys.BiasedMLP), DENSE - {"mlp_pre_linear"},
        {"q": before("self_attn.rotary"), "v": before("self_attn.core"), "mlp_pre": before("mlp.act")},
    ),
    "biases left to the block": Case(block(base=toys.BiasedResults)),
    "normed values": Case(block(toys.NormedValues), places=K_AND_V),
    "scaled values": Case(block(toys.ScaledValues), places=K_AND_V),
    **{
        f"{name}, no gate": Case(
            block(mlp=lambda act=act: toys.Plain(act)), DENSE - {"mlp_pre_linear"},
            refused={"mlp_pre_linear": "no gate"},
        )
        for name, act in ACTIVATIONS.items()
    },
    **{
        f"{name}, gated": Case(
            block(mlp=type("Gated", (toys.GatedMLP,), {"act": staticmethod(act)})),
            places={"mlp_pre": GATE, "mlp_pre_linear": UP},
        )
        for name, act in ACTIVATIONS.items()
    },
    "the second half is the gate": Case(block(mlp=toys.GateLast), places={"mlp_pre": UP, "mlp_pre_linear": GATE}),
    "gate and up apart": Case(
        block(mlp=toys.Two),
        places={
            "mlp_pre": ("mlp.gate", "after", None), "mlp_pre_linear": ("mlp.up", "after", None),
            "mlp_in": before("mlp.gate"),  # it runs first
        },
    ),
    "a norm between": Case(block(mlp=toys.SubNorm)),
    "experts": EXPERTS_ONLY,
    "the router inside": EXPERTS_ONLY._replace(make=block(mlp=toys.RoutedInside)),
    "a shared expert": EXPERTS_ONLY._replace(make=block(mlp=toys.WithShared)),
    # mlp_in stands where the first of all that read it does, so that an edit reaches the router too.
    "a router that is not seen": Case(
        block(mlp=toys.WithUnseenRouter), ATTENTION | {"mlp_in"}, {"mlp_in": before("mlp.shared.gate_up")},
        {"router_logits": "no linear module returns the logits"},
    ),
    # They are refused as what they are, not as if the block had none.
    "unknown experts": Case(
        block(mlp=toys.UnknownExperts), ATTENTION,
        refused={"router_logits": "nor a layer of experts that vLLM tells about"},
    ),
    "no experts": Case(block(), refused={"router_logits": "no experts"}),
    # In a parallel block, what is added to the one tensor before attention reads it, the MLP would read too.
    "parallel": Case(block(base=Parallel), read_only=frozenset({"attn_in"}), fused=True),
    "parallel, the MLP first": Case(block(base=toys.Backwards), read_only=frozenset({"mlp_in"})),
    "the input is the stream": Case(block(base=toys.Normless), read_only=frozenset({"attn_in", "mlp_in"})),
    "state space": Case(block(toys.StateSpace), NEURONS | {"mlp_in"}, refused={"q": "state-space"}),
    "MLP alone": Case(block(base=MLPOnly), NEURONS | {"mlp_in"}, refused={"z": "no attention"}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_points(case, dtype):
    sites = find(case.make, dtype, fused=case.fused)
    assert all(found(sites, layer) == case.points for layer in range(LAYERS))
    for hook, place in case.places.items():
        assert where(sites, hook) == place
    for hook, why in case.refused.items():
        assert why in sites.refused[Site(hook, 1)]
    assert set(sites.read_only) == {Site(hook, layer) for hook in case.read_only for layer in range(LAYERS)}
    assert not sites.shards and not sites.before_quantised
    shapes = {
        **dict.fromkeys(("q", "q_rot", "z"), (HEADS, SIZE)),
        **dict.fromkeys(("k", "k_rot", "v"), (HEADS if case is CASES["interleaved"] else KV_HEADS, SIZE)),
        **dict.fromkeys(NEURONS, (MLP,)),
        "router_logits": (EXPERTS,),
    }
    assert {hook: sites.shapes.get(Site(hook, 1)) for hook in case.points} == {
        hook: shapes.get(hook) for hook in case.points
    }


def test_what_is_told_of_anchors():
    llama = find(block())
    assert [llama.anchors[Site(hook, 1)].hidden.name for hook in ("q_rot", "k_rot")] == ["query", "key"]
    assert find(block(toys.BetweenGates)).anchors[Site("q", 1)].per_head
    assert "does not arrive at o_proj" in find(block(toys.Deaf)).refused[Site("z", 1)], "it has to depend on attention"
    assert "stream" in find(block(base=toys.Normless)).read_only[Site("attn_in", 1)]


def test_the_other_points_stay_as_they_are():
    with_parts, without = find(block()), find(block(), parts=None)
    assert without.anchors and not any(site.hook in PART_HOOKS for site in (*without.anchors, *without.refused))
    assert {s: a for s, a in with_parts.anchors.items() if s.hook not in PART_HOOKS} == without.anchors


class Again(toys.GatedMLP):
    def forward(self, x):
        self.down(torch.zeros(len(x), MLP, dtype=x.dtype))
        return super().forward(x)


def test_a_module_that_runs_twice_has_no_point():
    assert "runs 2 times" in find(block(mlp=Again)).refused[Site("mlp_post", 1)]


class Half(toys.Attention):
    """Of worker 1 of 2: two of four query heads, one of two key-value heads."""

    def __init__(self):
        super().__init__()
        self.core.heads, self.core.kv_heads = HEADS // 2, KV_HEADS // 2
        self.qkv, self.o_proj = toys.Merged(D, Q // 2, KV // 2, KV // 2), nn.Linear(Q // 2, D)

    def project(self, x):
        return self.qkv(x).split([Q // 2, KV // 2, KV // 2], -1)


def found_with(linear, make=None, **more):
    """The verdicts if this is what is known of linear modules."""
    return find(make or block(), parts=replace(toys.PARTS, linear=linear, **more))


def test_rows_that_are_divided_among_workers():
    def linear(module):
        shape = toys.linear_shape(module)
        if isinstance(module, toys.Merged):
            return replace(shape, outputs=tuple(Features(2 * n, Shard(n, 2 * n)) for n in module.parts))
        n = getattr(module, "in_features", 0)
        return shape and replace(shape, inputs=Features(2 * n, Shard(n, 2 * n)))

    sites = found_with(linear, block(Half), ranks=2)
    assert found(sites) == DENSE
    for hooks, shape, shard in (
        (("q", "q_rot", "z"), (HEADS, SIZE), Shard(Q // 2, Q)),
        (("k", "k_rot", "v"), (KV_HEADS, SIZE), Shard(KV // 2, KV)),
        (("mlp_pre", "mlp_post"), (2 * MLP,), Shard(MLP, 2 * MLP)),
    ):
        for hook in hooks:
            assert (sites.shapes[Site(hook, 1)], sites.shards[Site(hook, 1)]) == (shape, shard)
    assert Site("attn_in", 1) not in sites.shards


def test_heads_that_nothing_places_are_refused():
    def linear(module):
        plain = toys.linear_shape(module)
        return plain and toys.linear_shape(nn.Linear(module.in_features, module.out_features))

    sites = found_with(linear, ranks=2)
    assert not found(sites) & {"q", "k", "v", "q_rot", "k_rot"} and "z" in found(sites)


def test_taps_before_quantised_modules_are_left_out_unless_asked_for():
    def linear(module):
        shape = toys.linear_shape(module)
        return shape and replace(shape, quantises_input=True)

    sites = found_with(linear)
    assert {site.hook for site in sites.before_quantised} == {"attn_in", "z", "mlp_in", "mlp_post"}
    by_default, named = Settings(), Settings(hooks=("mlp_in",))
    assert not set(chosen(sites, by_default).values()) & {sites.anchors[s] for s in sites.before_quantised}
    assert len(chosen(sites, named)) == LAYERS
    assert "quantised model" in sites.why_left_out(Site("mlp_in", 1), by_default)
    assert sites.why_left_out(Site("q", 1), by_default) == "" == sites.why_left_out(Site("mlp_in", 1), named)


def test_parts_that_fail_leave_the_other_points():
    def linear(module):
        raise RuntimeError("broken")

    sites = found_with(linear)
    assert Site("attn_out", 1) in sites.anchors and not found(sites)
    assert all("broken" in sites.refused[Site(hook, 1)] for hook in (*ATTENTION_HOOKS, *MLP_HOOKS))


def test_every_head_has_a_code_of_its_own():
    codes = head_codes(127, 8, 1)
    assert codes.shape == (8, 127) and not codes[1].any() and codes.any(0).all()
    assert len({tuple(column.tolist()) for column in codes.T}) == 127
    assert head_codes(300, 8, 0).any(0).all(), "more heads than codes share them"
