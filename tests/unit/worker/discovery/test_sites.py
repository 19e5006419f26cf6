"""Hook points found by structure: toy blocks of every shape that real ones have."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.unit import blocks as toys
from tests.unit.blocks import LAYERS, Block, D, Model, Norm, Sequential, mapped, supported
from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import STREAM_HOOKS, Site
from vllm_weir.schema.taps import tap_of
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.discovery.block_stack import ModelDescription
from vllm_weir.worker.discovery.site_map import SiteMap, chosen

DTYPES = (torch.float32, torch.bfloat16)
EVERY = frozenset(STREAM_HOOKS)
ENDS = frozenset({"resid_pre", "resid_post"})


class OneNorm(Block):
    """The same norm before attention and before the MLP."""

    def fed(self, x):
        return self.mlp(self.ln_1(x))


class OneFusedNorm(toys.Fused):
    def __init__(self):
        super().__init__()
        self.ln_2 = self.ln_1


class OnePostNorm(Block):
    """The same norm after attention and after the MLP."""

    def mixed(self, positions, x):
        return self.ln_1(self.self_attn(positions, x))

    def fed(self, x):
        return self.ln_1(self.mlp(x))


class Copied(Block):
    """What its second norm is given is a copy, and what is written there never arrives."""

    def fed(self, x):
        return super().fed(x.clone())


class Dropped(toys.MixerOnly):
    """One addition, after a dropout that does nothing: half of the one and half of the other make up the same sum."""

    parts = (("drop", lambda: nn.Dropout(0.0)),)

    def mixed(self, positions, x):
        return self.drop(super().mixed(positions, x))


class Both(toys.WithParts):
    """Attention and MLP in one part: their sum, which is all that the block adds, is no `attn_out`."""

    parts = (("attention", toys.Attention), ("feed_forward", toys.MLP))

    def forward(self, x):
        return self.attention(None, x) + self.feed_forward(x)


class Wrapped(toys.WithParts):
    parts = (("norm", Norm), ("both", Both))

    def forward(self, positions, hidden_states):
        return hidden_states + self.both(self.norm(hidden_states))


class Hyper(Block):
    """Works on streams of another shape."""

    def forward(self, positions, hidden_states):
        return hidden_states + self.self_attn(positions, hidden_states[:, :D]).repeat(1, 2)


class HyperModel(Model):
    def enter(self, ids):
        return super().enter(ids).repeat(1, 2)

    def leave(self, hidden, residual=None):
        return self.norm(hidden[:, :D])


class OtherOrder(Sequential):
    def forward(self, hidden_states, positions):
        return super().forward(positions, hidden_states)


class Mixed(Model):
    """Blocks of two kinds whose arguments come in another order."""

    def through(self, hidden, residual=None):
        for layer in self.layers:
            if isinstance(layer, OtherOrder):
                hidden = layer(hidden, positions=None)
            else:
                hidden = layer(None, hidden_states=hidden)
        return hidden, None


def of(kind, fused=False, model=Model, **options):
    """A function that makes a model of such blocks."""
    return lambda: model([kind] * LAYERS, fused, **options).eval()


def sharing(kind):
    """A function that makes a model whose first and last block have one attention layer."""

    def make():
        model = of(kind)()
        model.layers[2].self_attn = model.layers[0].self_attn
        return model

    return make


class Case(NamedTuple):
    make: Any
    points: frozenset = EVERY
    refused: Mapping[str, str] = MappingProxyType({})
    """Hook point -> words of the reason."""
    modules: Mapping[str, str] = MappingProxyType({})
    """Hook point -> its module in the block, or a beginning of it."""
    layer: int = 1


THREE = (Sequential, toys.MixerOnly, toys.MLPOnly)
NO_MID = EVERY - {"resid_mid"}
BLOCKS = {
    **{
        kind.__name__: Case(of(kind, kind in (toys.Fused, toys.Sandwich)))
        for kind in (
            toys.Sequential, toys.Fused, toys.Sandwich, toys.PostNorm, toys.Scaled, toys.OutputArgument, toys.SameRoom,
            toys.Deep, toys.Shared, toys.TwoMixers, toys.Biased, toys.Gain,
        )
    },
    "arguments in another order": Case(lambda: Mixed([Sequential, OtherOrder, Sequential])),
    "parallel": Case(of(toys.Parallel, True), NO_MID, {"resid_mid": "parallel"}),
    "parallel with biases": Case(of(toys.BiasedParallel), NO_MID, {"resid_mid": "parallel"}),
    "attention alone": Case(lambda: Model(THREE), ENDS | {"attn_out"}, {"mlp_out": "no MLP"}),
    "MLP alone": Case(lambda: Model(THREE), ENDS | {"mlp_out"}, {"attn_out": "no attention"}, layer=2),
    "joint": Case(of(toys.Joint), ENDS, {"attn_out": "told apart"}),
    "feeding": Case(of(toys.Feeding), ENDS | {"attn_out"}, {}, {"attn_out": "decoder.mixer"}),
    "chained": Case(of(toys.Chained), ENDS, {"attn_out": "told apart"}),
    "one part for both": Case(
        of(Wrapped), NO_MID, {}, {"attn_out": "both.attention", "mlp_out": "both.feed_forward"}
    ),
    "more after the MLP": Case(of(toys.More), EVERY - {"mlp_out"}, {"mlp_out": "after what the MLP adds"}),
    "more, unscaled": Case(of(toys.MoreUnscaled), EVERY - {"mlp_out"}, {"mlp_out": "after what the MLP adds"}),
    "used too early": Case(of(toys.TooLate), ENDS | {"mlp_out"}, {"attn_out": "does not arrive"}),
    "added between blocks": Case(
        of(Sequential, between=0.5), EVERY - {"resid_pre"}, {"resid_pre": "between block 0 and block 1"}
    ),
    "another shape": Case(of(Hyper, model=HyperModel), frozenset(), {"resid_post": "do not hand on one stream"}),
    "runs twice": Case(of(Sequential, times=2), frozenset(), {"resid_post": "runs 2 times", "embed": "runs 2 times"}),
    # A tap on a module that runs twice would act twice, and its rows would be those of the second call.
    "one norm before both": Case(of(OneNorm), NO_MID, {"resid_mid": "layers.1.ln_1 runs 2 times in one pass"}),
    "one fused norm": Case(of(OneFusedNorm, True), NO_MID, {"resid_mid": "layers.1.ln_1 runs 2 times in one pass"}),
    "one norm after both": Case(
        of(OnePostNorm), ENDS | {"resid_mid"}, dict.fromkeys(("attn_out", "mlp_out"), "layers.1.ln_1 runs 2 times")
    ),
    "a dropout is no second part": Case(of(Dropped), ENDS | {"attn_out"}),
    # Writes are checked where a point before them is refused, too.
    "a copy": Case(of(Copied), ENDS, {"resid_mid": "does not arrive"}),
    "a copy, resid_pre refused": Case(of(Copied, between=0.5), ENDS - {"resid_pre"}, {"resid_mid": "does not arrive"}),
    "attention shared": Case(sharing(Sequential), EVERY - {"attn_out"}, {"attn_out": "shared"}, layer=0),
    "attention shared, last": Case(sharing(Sequential), EVERY - {"attn_out"}, {"attn_out": "shared"}, layer=2),
    "attention shared, between": Case(sharing(Sequential)),
    "attention shared, a copy": Case(sharing(Copied), ENDS, {"attn_out": "shared"}, layer=0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", BLOCKS.values(), ids=BLOCKS)
def test_points_of_a_block(case, dtype):
    sites = mapped(case.make(), dtype)
    assert supported(sites, case.layer) == case.points
    for hook, why in case.refused.items():
        assert why in sites.refused[Site(hook, 0 if hook == "embed" else case.layer)]
    for hook, module in case.modules.items():
        assert sites.anchors[Site(hook, case.layer)].module.startswith(f"layers.{case.layer}.{module}")
    if "resid_pre" in case.points:
        assert {sites.anchors[Site(hook, 0)].module for hook in ("embed", "final_norm")} == {"embed_tokens", "norm"}
    if case.points == EVERY and case.make is not BLOCKS["attention shared, between"].make:
        assert not sites.refused and len(sites.anchors) == 5 * LAYERS + 2


def test_a_pair_whose_sum_is_not_shown_to_be_the_stream_is_refused():
    sites = mapped(of(toys.Weighted, True)())
    assert supported(sites) == ENDS
    assert all(a.residual is None or a.module == "norm" for a in sites.anchors.values())


def test_where_they_are():
    sites = mapped(of(toys.Sandwich, True)())
    where = {h: sites.anchors[Site(h, 1)] for h in STREAM_HOOKS}
    assert where["attn_out"].module == "layers.1.ln_3" and where["attn_out"].when == "after"
    assert where["resid_mid"].module == "layers.1.ln_2" and where["resid_mid"].residual is not None
    assert where["mlp_out"].module == "layers.1.ln_4"
    assert where["resid_post"].residual is not None and where["resid_post"].module == "layers.1"
    scaled = mapped(of(toys.Scaled)())
    assert scaled.anchors[Site("attn_out", 0)].scale == pytest.approx(0.22, rel=1e-6)
    assert scaled.anchors[Site("mlp_out", 0)].scale == pytest.approx(0.37, rel=1e-6)
    assert mapped(of(Dropped)()).anchors[Site("attn_out", 1)].scale == 1
    parallel = mapped(of(toys.Parallel, True)())
    assert parallel.anchors[Site("resid_post", 1)].residual is None, "the second tensor is not part of the stream"


@pytest.mark.parametrize("dtype", DTYPES)
def test_points_made_of_two_tensors(dtype):
    shared = mapped(of(toys.Shared)(), dtype).anchors[Site("mlp_out", 1)]
    assert (shared.module, shared.added_term.module) == ("layers.1.shared", "layers.1.mlp")
    assert shared.scale == shared.added_term.scale == pytest.approx(0.8, rel=3e-3)
    mixers = mapped(of(toys.TwoMixers)(), dtype).anchors[Site("attn_out", 1)]
    assert (mixers.module, mixers.added_term.module) == ("layers.1.mixer", "layers.1.self_attn")
    assert (mixers.scale, mixers.added_term.scale) == pytest.approx((1.3, 0.7), rel=3e-3)
    assert "x output of layers.1.mixer, after the call, + 0." in str(mixers)
    # A bias that is handed over belongs to the point, however small it is next to the noise of the probe.
    for kind in (toys.BiasedParallel, toys.Biased):
        found = mapped(of(kind)(), dtype)
        assert all(found.anchors[Site(h, 1)].offset == TensorKey("out", 1) for h in ("attn_out", "mlp_out"))


class More(Model):
    """With parts for others to use in `enter` and `leave`."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.drop, self.own_norm = nn.Dropout(0.0), Norm()
        self.square, self.head = nn.Linear(D, D), nn.Linear(D, D // 2)


class Divides(Model):
    def leave(self, hidden, residual=None):
        return super().leave(hidden) / 1.75


class Projects(More):
    def leave(self, hidden, residual=None):
        return self.head(self.norm(hidden))


class CallsItself(Model):
    """A class that calls its forward past the hooks."""

    def __call__(self, ids):
        return self.forward(ids)


class Doubles(More):
    def leave(self, hidden, residual=None):
        return self.head(2 * self.norm(hidden))


class Squares(More):
    def leave(self, hidden, residual=None):
        return self.head(self.norm(hidden) ** 2)


class Drops(More):
    def leave(self, hidden, residual=None):
        return self.norm(self.drop(hidden))


class Looks(More):
    def leave(self, hidden, residual=None):
        self.square(hidden)
        return self.norm(hidden)


class ProjectsAlone(More):
    def leave(self, hidden, residual=None):
        return self.square(hidden)


class ProjectsFirst(More):
    def leave(self, hidden, residual=None):
        return self.norm(self.square(hidden))


class NormsFirst(Model):
    """A tap on a norm that is called before the blocks as well would add there too, like NanoChat's."""

    def enter(self, ids):
        return self.norm(super().enter(ids))


class LooksUpTwice(Model):
    def forward(self, ids):
        return super().forward(ids) + self.embed_tokens(ids)


class Sums(Model):
    """Its norm is outside the pass."""

    def leave(self, hidden, residual=None):
        return hidden + residual


class NormsEmbeddings(More):
    """What its norm returns enters block 0, like Bloom's, and as TransformerLens's hook_embed has it."""

    def enter(self, ids):
        return self.own_norm(super().enter(ids))


class Narrow(Model):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.embed_tokens, self.widen = nn.Embedding(11, D // 2), nn.Linear(D // 2, D)

    def enter(self, ids):
        return self.widen(self.embed_tokens(ids)) + self.wpe(torch.arange(len(ids)))


class Elsewhere(Model):
    def enter(self, ids):
        self.embed_tokens(ids)
        return self.wpe(torch.arange(len(ids)))


NO_NORM = "square, which is given what leaves the last block, is no norm"
BOUNDARIES: list[tuple[Any, str, str, str]] = [
    # model, hook point, its module, or why it is refused
    *((kind, "final_norm", "norm", "") for kind in (Divides, Projects, CallsItself, Doubles, Drops, Looks)),
    (Squares, "final_norm", "", "changes what norm returns"),
    (ProjectsAlone, "final_norm", "", NO_NORM),
    (ProjectsFirst, "final_norm", "", NO_NORM),
    (NormsFirst, "final_norm", "", "norm runs 2 times in one pass"),
    (NormsFirst, "embed", "embed_tokens", ""),
    (LooksUpTwice, "embed", "", "embed_tokens runs 2 times in one pass"),
    (Sums, "final_norm", "", "returns the stream as it leaves"),
    (NormsEmbeddings, "embed", "own_norm", ""),
    (Narrow, "embed", "widen", ""),
    (Elsewhere, "embed", "", "does not arrive"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "hook", "module", "why"), BOUNDARIES)
def test_points_outside_the_blocks(kind, hook, module, why, dtype):
    block = toys.Fused if kind is Sums else Sequential
    sites = mapped(of(block, kind is Sums, kind, positions=kind in (Narrow, Elsewhere))(), dtype)
    if module:
        assert sites.anchors[Site(hook, 0)] == Anchor(module, "after", TensorKey("out", -1))
        assert not sites.refused or kind is NormsFirst
    else:
        assert why in sites.refused[Site(hook, 0)]
    assert supported(sites) == EVERY


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3, 12.0])
def test_a_multiplier_belongs_to_the_embedding_and_positions_do_not(scale, positions):
    anchor = mapped(of(Sequential, positions=positions, scale=scale)()).anchors[Site("embed", 0)]
    assert anchor.module == "embed_tokens" and anchor.scale == pytest.approx(scale, rel=1e-6)


GOOD = {"attn_out": "self_attn:out", "resid_mid": "ln_2:in:x", "mlp_out": "mlp:out"}


def described(points, kind=Sequential, fused=False):
    return mapped(of(kind, fused)(), description=ModelDescription.parse({"points": points}, "d"))


def test_a_description_is_verified_too():
    assert not described(GOOD).refused
    assert not described(GOOD | {"resid_mid": "ln_2:in:0+1"}, toys.Fused, True).refused
    parallel = {hook: GOOD[hook] for hook in ("attn_out", "mlp_out")}
    assert supported(described(parallel, toys.Parallel, True)) == NO_MID


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
    sites = described(GOOD | changed)
    found = supported(sites)
    assert not found & changed.keys() and all(sites.refused[Site(hook, 1)] for hook in changed)
    assert found - ENDS <= left and found >= ENDS


@pytest.mark.parametrize(
    "bad",
    [[], {"x": 1}, {"stack": 3}, {"points": {"embed": "a:out"}}, {"points": {"attn_out": "a"}},
     {"points": {"attn_out": "a:out:x"}}, {"points": {"mlp_out": "a:in:b+c+d"}}, {"points": {"mlp_out": 3}}],
)  # fmt: skip
def test_bad_descriptions_are_refused(bad):
    with pytest.raises(WeirError) as e:
        ModelDescription.parse(bad, "settings.describe")
    assert e.value.field.startswith("settings.describe")


TINY = [(torch.float32, -9.4e-4), (torch.float32, 1e-5), (torch.bfloat16, 3e-4)]
"""Gemma 4's blocks end with a number that is a weight: `load_format="dummy"` makes it up like all others."""
GAINS = (0.02, 0.95, 0.978, 0.981, 0.985, 0.99, 0.998, 1.0, 1.01, 1.02, 1.03, 4.0)


@pytest.mark.parametrize(
    ("dtype", "gain"), [*((t, g) for t in (*DTYPES, torch.float16) for g in GAINS), *TINY]
)  # fmt: skip
def test_a_gain_is_told_from_a_factor_of_what_the_mlp_adds(gain, dtype):
    """In few bits ``c * (mid + o)`` looks much like ``mid + c * o``: every point is there, none of them scaled."""
    sites = mapped(of(type("Gain", (toys.Gain,), {"gain": gain}))(), dtype)
    assert not sites.refused
    for layer in range(LAYERS):
        for hook, module in (("attn_out", "self_attn"), ("mlp_out", "mlp")):
            anchor = sites.anchors[Site(hook, layer)]
            assert anchor.module == f"layers.{layer}.{module}"
            assert (dtype, gain) in TINY or (anchor.scale, anchor.added_term) == (1.0, None)


def test_no_stack_or_two():
    with pytest.raises(WeirError, match=r"no list of blocks with attention; name the list .*describe="):
        mapped(nn.Sequential(Norm()))
    with pytest.raises(WeirError, match="no list of blocks called 'nowhere', as its description says"):
        mapped(of(Sequential)(), description=ModelDescription("nowhere"))
    both = of(Sequential)()
    both.others = nn.ModuleList(Sequential() for _ in range(LAYERS))
    with pytest.raises(WeirError) as caught:
        mapped(both)
    assert caught.value.message == (
        f"Model has 2 lists of blocks with attention (layers: {LAYERS} blocks, run 1 times in one pass; "
        f"others: {LAYERS} blocks, run 0 times in one pass). Layers are counted in one list: name it, say "
        "describe={'stack': 'layers'}"
    )
    assert not mapped(both, description=ModelDescription("layers")).refused
    # To name one of two that run again and again would not help: that is said at once.
    both.times = 2
    with pytest.raises(WeirError, match=r"layers: 3 blocks, run 2 times .*: Weir cannot serve this model") as caught:
        mapped(both)
    assert "describe" not in caught.value.message
    assert not any(m._forward_pre_hooks for m in both.modules())
    sites = mapped(both, description=ModelDescription("layers"))
    assert not sites.anchors and all("runs 2 times in one pass" in why for why in sites.refused.values())


def test_a_stage_of_a_pipeline():
    """Its first block's resid_pre belongs to the stage before, the following stage's to it."""
    model, other = of(Sequential)(), of(Sequential)()
    model.layers[2] = other.layers[0] = other.layers[1] = toys.PPMissingLayer()
    first, second = mapped(model), mapped(other)
    assert Site("resid_pre", 2) in first.anchors and Site("resid_post", 2) not in first.anchors
    assert Site("resid_pre", 2) not in {**second.anchors, **second.refused}
    assert supported(second, 2) == EVERY - {"resid_pre"}
    assert not set(chosen(first, Settings())) & set(chosen(second, Settings()))


def test_what_the_settings_choose():
    sites = mapped(of(toys.Parallel, True)())
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
