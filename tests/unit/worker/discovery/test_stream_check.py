"""What the blocks hand on: which of several tensors is the stream, and memory that nobody has written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit import blocks as toys
from tests.unit.blocks import LAYERS, TOKENS, D, mapped, supported
from vllm_weir.schema.hooks import STREAM_HOOKS, Site
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey, value_at
from vllm_weir.worker.discovery.block_stack import ModelDescription, find_tree
from vllm_weir.worker.discovery.recorder import Recorder

DTYPES = (torch.float32, torch.bfloat16)
SLOW_DTYPES = (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough))
EVERY, EMBED, FINAL_NORM = set(STREAM_HOOKS), Site("embed", 0), Site("final_norm", 0)
MEMORY = {
    "nothing": lambda normed, residual: torch.zeros_like(normed),
    "rubbish": lambda normed, residual: torch.randn_like(normed),
    "not a number": lambda normed, residual: torch.full_like(normed, torch.nan),
    "what was normed": lambda normed, residual: normed.clone(),
    "the stream": lambda normed, residual: residual.clone(),
}


def worst_error(model, sites):
    """Of what the supported points of a block hold in a pass in which the mixers write: max |d|."""
    tree = find_tree(
        model, D, LAYERS, ModelDescription(), lambda m: isinstance(m, toys.Core),
        lambda m: m is getattr(model, "embed_tokens", None), lambda: None,
    )  # fmt: skip
    with torch.inference_mode(), Recorder(tree).recording() as trace:
        model(torch.arange(TOKENS))
    errors = [
        float((value_at(trace.blocks[site.layer], anchor) - model.layers[site.layer].true[site.hook]).abs().max())
        for site, anchor in sites.anchors.items()
        if site.hook in STREAM_HOOKS
    ]
    return max(errors, default=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("holds", MEMORY)
@pytest.mark.parametrize("mixer", [toys.Scan, toys.ScanInto])
def test_a_mixer_that_writes_nothing_in_the_probe_is_followed(mixer, holds, dtype, monkeypatch):
    """Where no name tells what it would write into: what is supported all the same is right."""
    kind = type("Block", (toys.Mamba1,), {"kind": mixer, "memory": staticmethod(MEMORY[holds])})
    model = toys.Model([kind] * LAYERS, True)
    sites = mapped(model, dtype)
    for layer in range(LAYERS) if mixer is toys.Scan else ():
        assert supported(sites, layer) == {"resid_pre", "attn_out", "resid_post"}
        assert sites.anchors[Site("attn_out", layer)].module.endswith(".mixer")
    assert mixer is toys.ScanInto or {EMBED, FINAL_NORM} <= set(sites.anchors)
    for site in sites.anchors:
        assert site.hook not in ("resid_pre", "resid_post") or sites.anchors[site].residual or site == ("resid_pre", 0)
    monkeypatch.setattr(toys.Scan, "real", True)
    assert worst_error(model, sites) < (1e-6 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("dtype", SLOW_DTYPES)
def test_the_stream_of_a_block_with_two_attentions(dtype):
    """Two tensors whose sum is all that it goes by, though nothing within it is a point."""
    sites = mapped(toys.Model([toys.TwoAttentions] * LAYERS, True), dtype)
    assert supported(sites) == {"resid_pre", "resid_post"}
    assert sites.anchors[Site("resid_post", 1)].residual is not None
    assert "mixes tokens in 2 places (self_attn.core, others.0.core)" in sites.refused[Site("attn_out", 1)]
    assert {EMBED, FINAL_NORM} <= set(sites.anchors)


class Differs(toys.Model):
    def leave(self, hidden, residual=None):
        return self.norm(hidden - residual)


@pytest.mark.parametrize("dtype", SLOW_DTYPES)
def test_two_tensors_of_which_neither_is_the_stream(dtype):
    sites = mapped(Differs([toys.Apart] * LAYERS, True), dtype)
    assert not supported(sites)
    for site in (Site("resid_post", 1), EMBED):  # not that there is no embedding
        assert "could not be shown that the stream is" in sites.refused[site]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "layers"), [(toys.Parallel, 3), (toys.Weighted, 3), (toys.Halfway, 1), (toys.Halfway, 2)]
)
def test_a_tensor_that_nobody_uses_is_not_part_of_the_stream(kind, layers, dtype):
    """Of one block it is told by what the model returns: with nothing to be handed on to, both tensors together look
    like a stream, and the block's own result like an addition to it."""
    sites = mapped(toys.Model([kind] * layers, True), dtype)
    for layer in range(layers):
        assert (
            supported(sites, layer) == EVERY
            if kind is toys.Halfway
            else supported(sites) >= {"resid_pre", "resid_post"}
        )
    assert sites.anchors[Site("resid_post", layers - 1)].residual is None
    assert kind is not toys.Halfway or {EMBED, FINAL_NORM} <= set(sites.anchors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_one_block_a_tensor_that_is_part_of_the_stream_is_not_overlooked(dtype):
    sites = mapped(toys.Model([toys.Renamed], True), dtype)
    assert not supported(sites, 0)
    assert "what the model returns depends on more" in sites.refused[Site("resid_post", 0)]


class InPlace(toys.Model):
    """Its blocks write into what they are given, into both tensors if it is fused."""

    def through(self, hidden, residual=None):
        more = [torch.zeros_like(hidden)] if self.fused else []
        for layer in self.layers:
            returned = layer(None, hidden, *more)
            hidden = hidden if returned is None else returned
        return hidden, *more


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", [toys.WrittenInto, toys.ReturnsNothing])
def test_what_blocks_write_into_and_do_not_return_is_handed_on_too(kind, layers, dtype):
    """The first of the two tensors alone is what the last MLP added, and no stream."""
    sites = mapped(InPlace([kind] * layers, kind is toys.WrittenInto), dtype)
    assert all(supported(sites, layer) == EVERY for layer in range(layers)), sites.refused
    post = sites.anchors[Site("resid_post", layers - 1)]
    key, name = (post.residual, "residual") if kind is toys.WrittenInto else (post.hidden, "hidden_states")
    assert (key.kind, key.name) == ("arg", name)


class Stage(toys.Model):
    """A pipeline stage that neither begins nor ends the model's stream."""

    given_both = False

    def forward(self, ids):
        hidden = self.embed_tokens(ids)
        return self.through(hidden, hidden.flip(0) if self.given_both else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("kind", "left"),
    [(toys.Fused, EVERY), (toys.Parallel, EVERY - {"resid_mid"}), (toys.Halfway, EVERY), (toys.Renamed, set())],
)
def test_the_only_block_of_a_pipeline_stage(kind, left, place, dtype):
    """Nothing that follows it shows what is used of the tensors that it hands on."""
    model = Stage([kind] * LAYERS, True)
    model.given_both = place and kind in (toys.Fused, toys.Renamed)
    for layer in {0, 1, 2} - {place}:
        model.layers[layer] = toys.PPMissingLayer()
    sites = mapped(model, dtype)
    assert supported(sites, place) == (left - {"resid_pre"} if place else left), sites.refused
    if kind in (toys.Halfway, toys.Parallel):
        assert sites.anchors[Site("resid_post", place)].residual is None
    if kind is toys.Renamed:
        assert "nothing in its pipeline stage tells" in sites.refused[Site("resid_post", place)]


class Several(toys.Sequential):
    def forward(self, positions, hidden_states):
        return torch.stack([super(Several, self).forward(positions, stream) for stream in hidden_states])


@pytest.mark.parametrize("streams", [2, TOKENS])
def test_a_trunk_of_several_streams_says_so(streams):
    """Also where there are as many of them as tokens in the probe."""

    class Trunk(toys.Model):
        def enter(self, ids):
            return torch.stack([(i + 1) * self.embed_tokens(ids) for i in range(streams)])

        def leave(self, hidden, residual=None):
            return self.norm(hidden[0])

    sites = mapped(Trunk([Several] * LAYERS))
    assert not sites.anchors
    assert f"several streams at once ({streams}, {TOKENS}, {D})" in sites.refused[EMBED]


class Entered(torch.nn.Module):
    """A model that is given embeddings, inside one that is what the runner calls."""

    def __init__(self, inner):
        super().__init__()
        self.model = inner

    def forward(self, ids=None, inputs_embeds=None):
        return self.model(None, inputs_embeds)


def given(model, dtype=torch.float32, width=D, **more):
    """The verdicts on a model that is given embeddings, in a buffer of zeros that blocks write into."""
    buffer = torch.zeros(TOKENS, width, dtype=dtype)

    def is_embedding(module) -> bool:
        return isinstance(module, torch.nn.Embedding) and module.num_embeddings == 11

    sites = mapped(model, dtype, is_embedding=is_embedding, run=lambda: model(inputs_embeds=buffer), **more)
    assert not buffer.any()
    return sites


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [toys.Fused, toys.Sandwich])
def test_embeddings_given_in_a_buffer(kind, dtype):
    sites = given(toys.GivenEmbeddings([kind] * LAYERS, True), dtype)
    assert all(supported(sites, layer) == EVERY for layer in range(LAYERS)) and not sites.refused
    assert sites.anchors[EMBED] == Anchor("", "before", TensorKey("arg", 1, "inputs_embeds"))
    assert str(sites.anchors[EMBED]) == "inputs_embeds of the model, before the call"


class Places(toys.GivenEmbeddings):
    """Scaled, and given positions."""

    def enter(self, inputs_embeds):
        return 3.0 * inputs_embeds + self.wpe(torch.arange(TOKENS))


class Narrow(toys.GivenEmbeddings):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.widen = torch.nn.Linear(D // 2, D)

    def enter(self, inputs_embeds):
        return self.widen(inputs_embeds) + self.wpe(torch.arange(TOKENS))


class Normed(toys.GivenEmbeddings):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.embed_norm = toys.Norm()

    def enter(self, inputs_embeds):
        return self.embed_norm(inputs_embeds)


class SameTable(toys.GivenEmbeddings):
    """Positions are looked up inside, in a table of the same kind as the tokens'."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.places = torch.nn.Embedding(11, D)

    def enter(self, inputs_embeds):
        return inputs_embeds + self.places(torch.arange(TOKENS))


@pytest.mark.parametrize(
    ("kind", "module", "scale"),
    [(Places, "", 3.0), (Narrow, "widen", 1.0), (Normed, "embed_norm", 1.0), (SameTable, "", 1.0)],
)
def test_what_is_done_to_given_embeddings_inside_is_measured(kind, module, scale):
    """As where the tokens are looked up inside."""
    sites = given(kind([toys.Sequential] * LAYERS, positions=True), width=D // 2 if kind is Narrow else D)
    anchor = sites.anchors[EMBED]
    assert anchor.module == module and anchor.scale == pytest.approx(scale, rel=1e-6) and not sites.refused
    assert module or anchor.hidden.name == "inputs_embeds"


def test_what_is_compiled_whole_is_not_where_embeddings_are_tapped():
    model = Entered(toys.GivenEmbeddings([toys.Fused] * LAYERS, True))
    for compiled_whole, path in ((lambda m: False, ""), (lambda m: m is model, "model")):
        anchor = given(model, compiled_whole=compiled_whole).anchors[EMBED]
        assert (anchor.module, anchor.when, anchor.hidden.name) == (path, "before", "inputs_embeds")


class Inner(toys.GivenEmbeddings):
    def forward(self, ids=None, inputs_embeds=None, features=()):
        hidden, residual = inputs_embeds, None
        for layer, feature in zip(self.layers, [*features, None, None]):
            hidden, residual = layer(None, hidden, residual)
            hidden = hidden if feature is None else hidden + feature
        return self.leave(hidden, residual)


class WithFeatures(Entered):
    def __init__(self, inner):
        super().__init__(inner)
        self.features = [torch.zeros(TOKENS, D)]

    def forward(self, ids=None, inputs_embeds=None):
        return self.model(None, inputs_embeds, features=self.features)


@pytest.mark.parametrize("told", [False, True])
def test_what_is_added_between_blocks_only_with_images(told):
    """Zeros in the passes over dummy tokens: the stream after the addition is refused where discovery is told of it."""
    model = WithFeatures(Inner([toys.Fused] * LAYERS, True))
    sites = given(model, beside_stream=lambda kwargs: kwargs["features"] if told else ())
    refused = {site: why for site, why in sites.refused.items() if "changes the stream" in why}
    assert set(refused) == ({Site("resid_pre", 1)} if told else set())
    assert supported(sites, 0) == supported(sites, 2) == EVERY
    assert EMBED in sites.anchors and sites.embeddings_given and not model.features[0].any()


def test_embeddings_that_are_not_the_tables_are_refused():
    """What a model's look-up adds to its table (an embedding of n-grams, say) is no part of the token embedding."""
    model = toys.GivenEmbeddings([toys.Fused] * LAYERS, True)
    ids = torch.arange(TOKENS)
    looks: dict[str, Any] = {
        "": lambda: 2.5 * model.embed_tokens(ids),
        "no multiple": lambda: model.embed_tokens(ids) + model.embed_tokens(ids.flip(0)),
    }
    for why, look_up in looks.items():
        sites = given(model, look_up=look_up)
        assert why in sites.refused.get(EMBED, "") and (why != "") == (EMBED in sites.refused)


class Warming(toys.Core):
    """Calls a part of its in the first pass only, to have its kernels tuned, like Qwen3-Next's mixers."""

    def __init__(self):
        super().__init__()
        self.kernel, self.cold = torch.nn.Linear(D, D), True

    def forward(self, *args, **kwargs):
        if self.cold:
            self.kernel(torch.ones(3, D, dtype=self.kernel.weight.dtype))
            self.cold = False
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_that_the_first_pass_warms_up(dtype):
    model = toys.Model([toys.Fused] * LAYERS, True)
    for layer in model.layers:
        layer.self_attn.core = Warming()
    assert not mapped(model, dtype).refused
    assert all(not layer.self_attn.core.cold for layer in model.layers)
