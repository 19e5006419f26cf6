"""What the blocks hand on: which of several tensors is the stream, and memory that nobody has written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.blocks import (
    LAYERS,
    TOKENS,
    Core,
    D,
    Fused,
    Model,
    Norm,
    Parallel,
    Sandwich,
    Sequential,
    Weighted,
    mapped,
    supported,
)
from tests.unit.more_blocks import (
    Apart,
    Halfway,
    Mamba1,
    Renamed,
    ReturnsNothing,
    Scan,
    ScanInto,
    TwoAttentions,
    WrittenInto,
)
from vllm_weir.schema.hooks import STREAM_HOOKS, Site
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.discovery.block_stack import find_tree
from vllm_weir.worker.discovery.descriptions import ModelDescription
from vllm_weir.worker.discovery.recorder import Recorder
from vllm_weir.worker.discovery.sites import map_sites
from vllm_weir.worker.discovery.trace import value_at

DTYPES = (torch.float32, torch.bfloat16)
MEMORY = {
    "nothing": lambda normed, residual: torch.zeros_like(normed),
    "rubbish": lambda normed, residual: torch.randn_like(normed),
    "not a number": lambda normed, residual: torch.full_like(normed, torch.nan),
    "what was normed": lambda normed, residual: normed.clone(),
    "the stream": lambda normed, residual: residual.clone(),
}


def kind_of(mixer, holds):
    return type("Block", (Mamba1,), {"kind": mixer, "memory": staticmethod(MEMORY[holds])})


def worst_error(model, sites):
    """Of what the supported points of a block hold in a pass in which the mixers write: max |d|."""
    tree = find_tree(
        model, D, LAYERS, ModelDescription(), lambda m: isinstance(m, Core),
        lambda m: m is getattr(model, "embed_tokens", None), lambda: None,
    )  # fmt: skip
    with torch.inference_mode(), Recorder(tree).recording() as trace:
        model(torch.arange(TOKENS))
    return max(
        float((value_at(trace.blocks[site.layer], anchor) - model.layers[site.layer].true[site.hook]).abs().max())
        for site, anchor in sites.anchors.items()
        if site.hook in STREAM_HOOKS
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("holds", MEMORY)
def test_a_mixer_that_writes_nothing_in_the_probe_is_followed(holds, dtype, monkeypatch):
    model = Model([kind_of(Scan, holds)] * LAYERS, True)
    sites = mapped(model, dtype)
    for layer in range(LAYERS):
        assert supported(sites, layer) == {"resid_pre", "attn_out", "resid_post"}
        assert sites.anchors[Site("attn_out", layer)].module.endswith(".mixer")
    assert Site("embed", 0) in sites.anchors and Site("final_norm", 0) in sites.anchors
    monkeypatch.setattr(Scan, "real", True)
    assert worst_error(model, sites) < (1e-6 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("holds", MEMORY)
def test_memory_that_nobody_wrote_to_proves_nothing(holds, monkeypatch):
    """Where no name tells what the mixer would write into: what is supported all the same is right."""
    model = Model([kind_of(ScanInto, holds)] * LAYERS, True)
    sites = mapped(model)
    monkeypatch.setattr(Scan, "real", True)
    if any(site.hook in STREAM_HOOKS for site in sites.anchors):
        assert worst_error(model, sites) < 1e-6
    for site in sites.anchors:
        assert site.hook not in ("resid_pre", "resid_post") or sites.anchors[site].residual or site == ("resid_pre", 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stream_of_a_block_with_two_attentions(dtype):
    """Two tensors whose sum is all that it goes by, though nothing within it is a point."""
    sites = mapped(Model([TwoAttentions] * LAYERS, True), dtype)
    assert supported(sites) == {"resid_pre", "resid_post"}
    assert sites.anchors[Site("resid_post", 1)].residual is not None
    assert "mixes tokens in 2 places (self_attn.core, others.0.core)" in sites.refused[Site("attn_out", 1)]
    assert {Site("embed", 0), Site("final_norm", 0)} <= set(sites.anchors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_tensors_of_which_neither_is_the_stream(dtype):
    class Sums(Model):
        def forward(self, ids):
            hidden, residual = self.embed_tokens(ids), None
            for layer in self.layers:
                hidden, residual = layer(None, hidden, residual)
            return self.norm(hidden - residual)

    sites = mapped(Sums([Apart] * LAYERS, True), dtype)
    assert not supported(sites)
    assert "could not be shown that the stream is" in sites.refused[Site("resid_post", 1)]
    assert "could not be shown that the stream is" in sites.refused[Site("embed", 0)], "not that there is no embedding"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Parallel, Weighted])
def test_a_tensor_that_nobody_uses_is_not_part_of_the_stream(kind, dtype):
    sites = mapped(Model([kind] * LAYERS, True), dtype)
    assert {"resid_pre", "resid_post"} <= supported(sites)
    assert sites.anchors[Site("resid_post", 1)].residual is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", [1, 2])
def test_of_one_block_the_tensor_that_nobody_uses_is_told_by_what_the_model_returns(layers, dtype):
    """With nothing to be handed on to, both tensors together look like a stream, and the block's own result like an
    addition to it."""
    sites = mapped(Model([Halfway] * layers, True), dtype)
    assert all(supported(sites, layer) == set(STREAM_HOOKS) for layer in range(layers))
    assert sites.anchors[Site("resid_post", layers - 1)].residual is None
    assert {Site("embed", 0), Site("final_norm", 0)} <= set(sites.anchors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_one_block_a_tensor_that_is_part_of_the_stream_is_not_overlooked(dtype):
    sites = mapped(Model([Renamed], True), dtype)
    assert not supported(sites, 0)
    assert "what the model returns depends on more" in sites.refused[Site("resid_post", 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", [WrittenInto, ReturnsNothing])
def test_what_blocks_write_into_and_do_not_return_is_handed_on_too(kind, layers, dtype):
    """The first of the two tensors alone is what the last MLP added, and no stream."""

    class InPlace(Model):
        def forward(self, ids):
            hidden = self.embed_tokens(ids)
            more = [torch.zeros_like(hidden)] if kind is WrittenInto else []
            for layer in self.layers:
                returned = layer(None, hidden, *more)
                hidden = hidden if returned is None else returned
            return self.norm(hidden, *more)[0] if more else self.norm(hidden)

    sites = mapped(InPlace([kind] * layers), dtype)
    assert all(supported(sites, layer) == set(STREAM_HOOKS) for layer in range(layers)), sites.refused
    post = sites.anchors[Site("resid_post", layers - 1)]
    keys = [post.residual] if kind is WrittenInto else [post.hidden]
    assert [(key.kind, key.name) for key in keys] == [("arg", "residual" if kind is WrittenInto else "hidden_states")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("kind", "left"),
    [
        (Fused, set(STREAM_HOOKS)),
        (Parallel, set(STREAM_HOOKS) - {"resid_mid"}),
        (Halfway, set(STREAM_HOOKS)),
        (Renamed, set()),
    ],
)
def test_the_only_block_of_a_pipeline_stage(kind, left, place, dtype):
    """Nothing that follows it shows what is used of the tensors that it hands on."""

    class PPMissingLayer(torch.nn.Identity):
        def forward(self, positions, hidden, residual):
            return hidden, residual

    class Stage(Model):
        def forward(self, ids):
            hidden = self.embed_tokens(ids)
            residual = hidden.flip(0) if place and kind in (Fused, Renamed) else None
            for layer in self.layers:
                hidden, residual = layer(None, hidden, residual)
            return hidden, residual

    model = Stage([kind] * LAYERS, True)
    for layer in {0, 1, 2} - {place}:
        model.layers[layer] = PPMissingLayer()
    sites = mapped(model, dtype)
    assert supported(sites, place) == (left - {"resid_pre"} if place else left), sites.refused
    if kind in (Halfway, Parallel):
        assert sites.anchors[Site("resid_post", place)].residual is None
    if kind is Renamed:
        assert "nothing in its pipeline stage tells" in sites.refused[Site("resid_post", place)]


@pytest.mark.parametrize("streams", [2, TOKENS])
def test_a_trunk_of_several_streams_says_so(streams):
    """Also where there are as many of them as tokens in the probe."""

    class Several(Sequential):
        def forward(self, positions, hidden_states):
            return torch.stack([super(Several, self).forward(positions, stream) for stream in hidden_states])

    class Trunk(Model):
        def forward(self, ids):
            hidden = torch.stack([(i + 1) * self.embed_tokens(ids) for i in range(streams)])
            for layer in self.layers:
                hidden = layer(None, hidden)
            return self.norm(hidden[0])

    sites = mapped(Trunk([Several] * LAYERS))
    assert not sites.anchors
    assert f"several streams at once ({streams}, {TOKENS}, {D})" in sites.refused[Site("embed", 0)]


class GivenEmbeddings(Model):
    """Is given embeddings instead of tokens, like models under `enable_prompt_embeds`."""

    def forward(self, ids=None, inputs_embeds=None):
        hidden, residual = inputs_embeds, None
        for layer in self.layers:
            hidden, residual = layer(None, hidden, residual)
        return self.norm(hidden, residual)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Fused, Sandwich])
def test_embeddings_given_in_a_buffer_of_zeros_that_blocks_write_into(kind, dtype):
    torch.manual_seed(0)
    model, buffer = GivenEmbeddings([kind] * LAYERS, True).to(dtype), torch.zeros(TOKENS, D, dtype=dtype)

    def run() -> None:
        model(inputs_embeds=buffer)

    def is_embedding(module) -> bool:
        return module is model.embed_tokens

    tree = find_tree(model, D, LAYERS, ModelDescription(), lambda m: isinstance(m, Core), is_embedding, run)
    with torch.inference_mode():
        sites = map_sites(tree, run, dtype, ModelDescription())
    assert all(supported(sites, layer) == set(STREAM_HOOKS) for layer in range(LAYERS))
    assert sites.anchors[Site("embed", 0)] == Anchor("", "before", TensorKey("arg", 1, "inputs_embeds"))
    assert str(sites.anchors[Site("embed", 0)]) == "inputs_embeds of the model, before the call"
    assert not sites.refused and not buffer.any()


class Entered(torch.nn.Module):
    """A model that is given embeddings, inside one that is what the runner calls."""

    def __init__(self, inner):
        super().__init__()
        self.model = inner

    def forward(self, ids=None, inputs_embeds=None):
        return self.model(None, inputs_embeds)


def given(model, look_up=None, compiled_whole=lambda module: False, width=D, beside_stream=lambda kwargs: ()):
    """The verdicts on a model that is given embeddings."""
    torch.manual_seed(0)
    buffer = torch.zeros(TOKENS, width)

    def run() -> None:
        model(inputs_embeds=buffer)

    def is_embedding(module) -> bool:
        return isinstance(module, torch.nn.Embedding) and module.num_embeddings == 11

    tree = find_tree(
        model,
        D,
        LAYERS,
        ModelDescription(),
        lambda m: isinstance(m, Core),
        is_embedding,
        run,
        compiled_whole=compiled_whole,
        look_up=look_up,
        beside_stream=beside_stream,
    )
    with torch.inference_mode():
        return map_sites(tree, run, torch.float32, ModelDescription())


def test_embeddings_that_are_scaled_and_given_positions_and_widened():
    """What is done to them inside is measured, as where the tokens are looked up inside."""

    class Scaled(GivenEmbeddings):
        def forward(self, ids=None, inputs_embeds=None):
            hidden = self.enter(inputs_embeds)
            for layer in self.layers:
                hidden = layer(None, hidden)
            return self.norm(hidden)

    class Positions(Scaled):
        def enter(self, hidden):
            return 3.0 * hidden + self.wpe(torch.arange(TOKENS))

    class Narrow(Scaled):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.widen = torch.nn.Linear(D // 2, D)

        def enter(self, hidden):
            return self.widen(hidden) + self.wpe(torch.arange(TOKENS))

    class Normed(Scaled):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.embed_norm = Norm()

        def enter(self, hidden):
            return self.embed_norm(hidden)

    anchor = given(Positions([Sequential] * LAYERS, positions=True)).anchors[Site("embed", 0)]
    assert (anchor.module, anchor.hidden.name) == ("", "inputs_embeds") and anchor.scale == pytest.approx(3, rel=1e-6)
    widened = given(Narrow([Sequential] * LAYERS, positions=True), width=D // 2)
    assert widened.anchors[Site("embed", 0)].module == "widen" and not widened.refused
    assert given(Normed([Sequential] * LAYERS)).anchors[Site("embed", 0)].module == "embed_norm"


def test_what_is_compiled_whole_is_not_where_embeddings_are_tapped():
    model = Entered(GivenEmbeddings([Fused] * LAYERS, True))
    for compiled_whole, path in ((lambda m: False, ""), (lambda m: m is model, "model")):
        anchor = given(model, compiled_whole=compiled_whole).anchors[Site("embed", 0)]
        assert (anchor.module, anchor.when, anchor.hidden.name) == (path, "before", "inputs_embeds")


@pytest.mark.parametrize("told", [False, True])
def test_what_is_added_between_blocks_only_with_images(told):
    """Zeros in the passes over dummy tokens: the stream after the addition is refused where discovery is told of it."""

    class Inner(GivenEmbeddings):
        def forward(self, ids=None, inputs_embeds=None, features=()):
            hidden, residual = inputs_embeds, None
            for layer, feature in zip(self.layers, [*features, None, None]):
                hidden, residual = layer(None, hidden, residual)
                hidden = hidden if feature is None else hidden + feature
            return self.norm(hidden, residual)[0]

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.features = Inner([Fused] * LAYERS, True), [torch.zeros(TOKENS, D)]

        def forward(self, ids=None, inputs_embeds=None):
            return self.model(None, inputs_embeds, features=self.features)

    model = Outer()
    sites = given(model, beside_stream=(lambda kwargs: kwargs["features"]) if told else lambda kwargs: ())
    refused = {site: why for site, why in sites.refused.items() if "changes the stream" in why}
    assert set(refused) == ({Site("resid_pre", 1)} if told else set())
    assert supported(sites, 0) == set(STREAM_HOOKS) and supported(sites, 2) == set(STREAM_HOOKS)
    assert Site("embed", 0) in sites.anchors and sites.embeddings_given and not model.features[0].any()


def test_positions_that_are_looked_up_inside_are_not_taken_for_tokens():
    """By a table of the same kind as the tokens'."""

    class Positions(GivenEmbeddings):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.places = torch.nn.Embedding(11, D)

        def forward(self, ids=None, inputs_embeds=None):
            return super().forward(inputs_embeds=inputs_embeds + self.places(torch.arange(TOKENS)))

    assert given(Positions([Fused] * LAYERS, True)).anchors[Site("embed", 0)].hidden.name == "inputs_embeds"


def test_embeddings_that_are_not_the_tables_are_refused():
    """What a model's look-up adds to its table (an embedding of n-grams, say) is no part of the token embedding."""
    model = GivenEmbeddings([Fused] * LAYERS, True)
    ids = torch.arange(TOKENS)
    looks: dict[str, Any] = {
        "": lambda: 2.5 * model.embed_tokens(ids),
        "no multiple": lambda: model.embed_tokens(ids) + model.embed_tokens(ids.flip(0)),
    }
    for why, look_up in looks.items():
        sites = given(model, look_up)
        assert why in sites.refused.get(Site("embed", 0), "") and (why != "") == (Site("embed", 0) in sites.refused)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_that_the_first_pass_warms_up(dtype):
    """Qwen3-Next's mixers call a part of theirs in the first pass only, to have its kernels tuned."""

    class Warming(Core):
        def __init__(self):
            super().__init__()
            self.kernel, self.cold = torch.nn.Linear(D, D), True

        def forward(self, *args, **kwargs):
            if self.cold:
                self.kernel(torch.ones(3, D, dtype=self.kernel.weight.dtype))
                self.cold = False
            return super().forward(*args, **kwargs)

    model = Model([Fused] * LAYERS, True)
    for layer in model.layers:
        layer.self_attn.core = Warming()
    sites = mapped(model, dtype)
    assert not sites.refused
    assert all(not layer.self_attn.core.cold for layer in model.layers)
