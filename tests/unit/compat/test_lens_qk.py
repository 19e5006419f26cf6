"""vllm-lens's ``output_qk``: what it becomes, its patterns, and its tensors in base64 or to be fetched."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
import zstandard

import vllm_weir as weir
from tests.support.other_systems import LENS_ANSWERS
from tests.unit.refusals import refused
from vllm_weir.compat.http import activations_field
from vllm_weir.compat.vllm_lens.request import in_lens_words, read, to_weir
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.postprocesses import stack
from vllm_weir.frontend.derived.formulas import attention_pattern
from vllm_weir.frontend.derived.sources import derived_verdicts
from vllm_weir.results.activations import Activations
from vllm_weir.results.site_slices import Stacked
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.model_facts import AttentionFacts, ModelFacts
from vllm_weir.server.limits import ServerLimits

HEADS, KV_HEADS, SIZE, N, LAYERS = 4, 2, 8, 9, 4
PLAIN = AttentionFacts(HEADS, SIZE, scale=0.3, name="model.layers.0.attn")
KINDS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=3),
    "sinks": replace(PLAIN, sinks=(0.5, -1.0, 2.0, 0.0)),
    "alibi": replace(PLAIN, alibi=(0.5, 0.25, 0.1, 0.0)),
    "soft cap": replace(PLAIN, soft_cap=2.0),
    "all": replace(PLAIN, window=4, sinks=(0.5, -1.0, 2.0, 0.0), alibi=(0.5, 0.25, 0.1, 0.0), soft_cap=2.0),
}


def capabilities(facts=None, refused=(), heads=None):
    """An engine whose blocks have attention, but for those without facts."""
    facts = facts or {n: replace(PLAIN, keys_layer=n) for n in range(LAYERS)}
    sites = {Site("resid_post", n): "" for n in range(LAYERS)}
    sites |= {Site(hook, n): "" for hook in ("q_rot", "k_rot") for n in facts} | dict(refused)
    shapes = {Site("q_rot", n): (HEADS, SIZE) for n in facts} | {Site("k_rot", n): (KV_HEADS, SIZE) for n in facts}
    model = ModelFacts(facts)
    sites |= derived_verdicts(sites, model)
    return EngineCapabilities(sites, LAYERS, 64, "float32", 1024, shapes | (heads or {}), facts=model)


class Made(NamedTuple):
    entries: Stacked
    captures: tuple


def stacks(value, engine=None, has_media=False, **more):
    with in_lens_words():
        return Made(*stack(read({"output_qk": value} | more), engine or capabilities(), has_media))


def test_what_is_captured_for_it():
    made = stacks("[1, 3]", output_residual_stream=[0, 2])
    assert [(one.hook, one.layers, one.positions.kind) for one in made.captures] == [
        ("q_rot", (1, 3), "all"),
        ("k_rot", (1, 3), "all"),
    ]
    assert (made.entries.stream, made.entries.queries, made.entries.keys) == ((0, 2), (1, 3), (1, 3))
    admitted = admit(to_weir({"output_qk": [2], "output_residual_stream": [0]}), capabilities())
    assert set(admitted.spec.sites) == {Site("resid_post", 0), Site("q_rot", 2), Site("k_rot", 2)}
    assert admitted.parts[0].stacked.names == ("residual_stream", "attn_q", "attn_k", "qk_layers", "qk_meta")
    for nothing in (False, [], "false", None):
        assert stacks(nothing) == ((Stacked()), ())


def test_the_facts_of_each_block():
    engine = capabilities({n: replace(KINDS["all"], keys_layer=n) for n in range(LAYERS)})
    (meta,) = stacks([2], engine).entries.facts
    assert meta == {
        "layer_name": "model.layers.0.attn",
        "scale": 0.3,
        "logits_soft_cap": 2.0,
        "sliding_window": [3, 0],
        "alibi_slopes": [0.5, 0.25, 0.1, 0.0],
        "sinks": [0.5, -1.0, 2.0, 0.0],
        "use_alibi_sqrt": False,
        "num_heads_local": HEADS,
        "num_kv_heads_local": KV_HEADS,
        "head_size": SIZE,
        "num_kv_heads_total": KV_HEADS,
    }
    (plain,) = stacks([2]).entries.facts
    assert plain.keys() == LENS_ANSWERS["qk_meta"]
    assert (plain["sliding_window"], plain["alibi_slopes"], plain["sinks"]) == ([-1, -1], None, None)


def test_a_block_that_attends_to_the_keys_of_another_has_those():
    engine = capabilities({n: replace(PLAIN, keys_layer=min(n, 1)) for n in range(LAYERS)})
    made = stacks(True, engine)
    assert (made.entries.queries, made.entries.keys) == ((0, 1, 2, 3), (0, 1, 1, 1))
    assert [one.layers for one in made.captures] == [(0, 1, 2, 3), (0, 1)]


def test_all_blocks_are_those_with_heads():
    """Others are named, and refused: nothing is left out of a list."""
    attention = {1: replace(PLAIN, keys_layer=1), 2: AttentionFacts(refused="its Mamba has no queries and keys")}
    engine = capabilities(attention)
    assert stacks(True, engine).entries.queries == (1,)
    with refused("output_qk.layers", "block 2 is refused: its Mamba"):
        stacks([1, 2], engine)
    with refused("output_qk.layers", "block 0 is refused: the block has no attention"):
        stacks([0], engine)
    latent = {n: AttentionFacts(refused="its MLA has no queries and keys") for n in range(LAYERS)}
    with refused("output_qk.layers", "block 0 is refused: its MLA"):
        stacks(True, capabilities(latent))
    with refused("output_qk.layers", "block 0 is refused: .*k_rot"):
        stacks(True, capabilities(refused={Site("k_rot", 0): "it is fused"}))


@pytest.mark.parametrize(
    ("engine", "media", "why"),
    [
        (capabilities({n: replace(PLAIN, keys_layer=n, chunk=8) for n in range(LAYERS)}), False, "chunks of 8"),
        (capabilities({n: replace(PLAIN, keys_layer=n, media=True) for n in range(LAYERS)}), True, "see each other"),
        (capabilities(heads={Site("q_rot", 2): (HEADS, 2 * SIZE)}), False, "blocks 0 and 2"),
        (capabilities(heads={Site("k_rot", 3): (1, SIZE)}), False, "blocks 0 and 3"),
    ],
)
def test_what_its_answer_could_not_say(engine, media, why):
    with refused("output_qk.layers", why):
        stacks(True, engine, media)


@pytest.mark.parametrize("value", ["binary", "base64", None])
def test_a_transport_has_no_effect_in_process(value):
    assert read({"activations_transport": value}).capture == ()
    with refused("activations_transport", "'binary' or 'base64', got 'zip'"):
        read({"activations_transport": "zip"})


def attended(facts, layers=(1, 3)):
    """Activations of random queries and keys at all of `N` positions, as a request gets them."""
    made = torch.Generator().manual_seed(7)
    rows = {Site("q_rot", n): torch.randn(N, HEADS, SIZE, generator=made) for n in layers}
    rows |= {Site("k_rot", n): torch.randn(N, KV_HEADS, SIZE, generator=made) for n in layers}
    at = dict.fromkeys(rows, torch.arange(N))
    engine = capabilities({n: replace(facts, keys_layer=n) for n in range(LAYERS)})
    return Activations(rows, at, at, stacked=stacks(list(layers), engine).entries)


@pytest.mark.parametrize("kind", KINDS)
def test_patterns(kind):
    """Those of Weir's own hook point, which are held to transformers elsewhere."""
    acts = attended(KINDS[kind])
    for layer in (1, 3):
        own = attention_pattern(acts["q_rot", layer], acts["k_rot", layer], torch.arange(N), KINDS[kind])
        assert (weir.attention_patterns(acts, layer) - own.transpose(0, 1)).abs().max() < 1e-6
    precise = weir.attention_patterns(acts, 3, dtype=torch.float64)
    assert precise.dtype == torch.float64 and (precise - own.transpose(0, 1)).abs().max() < 1e-6
    with refused("layer", r"block 2 was not captured.*\[1, 3\]"):
        weir.attention_patterns(acts, 2)
    with pytest.raises(KeyError, match="output_qk"):
        weir.attention_patterns({}, 2)


@pytest.mark.parametrize(("causal", "window", "start"), product([True, False], [(-1, -1), (2, 0), (1, 2)], [None, 0]))
def test_weights_are_what_their_definition_says(causal, window, start):
    made = torch.Generator().manual_seed(3)
    q, k = torch.randn(3, HEADS, SIZE, generator=made), torch.randn(6, KV_HEADS, SIZE, generator=made)
    weights = weir.compute_attention_weights(q, k, scale=0.5, causal=causal, sliding_window=window, q_start=start)
    left, right = window
    for head, i in product(range(HEADS), range(3)):
        at = i + (3 if start is None else start)
        last = at + max(right, 0) if causal else (at + right if right >= 0 else 5)
        seen = [j for j in range(6) if j <= last and (left < 0 or j >= at - left)]
        scores = torch.stack([0.5 * q[i, head] @ k[j, head // 2] for j in seen])
        expected = torch.zeros(6)
        expected[seen] = scores.softmax(0)
        assert (weights[head, i] - expected).abs().max() < 1e-6


def test_a_query_that_sees_nothing_has_zeros():
    q, k = torch.ones(1, 1, 2), torch.ones(2, 1, 2)
    assert weir.compute_attention_weights(q, k, scale=1.0, sliding_window=(0, 0), q_start=9).tolist() == [[[0.0, 0.0]]]


@pytest.mark.parametrize(
    ("field", "q", "k", "more"),
    [
        ("q", (3, 8), (3, 2, 8), {}),
        ("k", (3, 4, 8), (3, 3, 8), {}),
        ("k", (3, 4, 8), (3, 2, 4), {}),
        ("q_start", (3, 4, 8), (2, 2, 8), {}),
        ("alibi_slopes", (3, 4, 8), (3, 2, 8), {"alibi_slopes": [1.0]}),
        ("sinks", (3, 4, 8), (3, 2, 8), {"sinks": [1.0] * 5}),
    ],
)
def test_weights_of_what_does_not_fit(field, q, k, more):
    with refused(field, "."):
        weir.compute_attention_weights(torch.ones(q), torch.ones(k), scale=1.0, **more)


def test_a_file_keeps_them(tmp_path):
    acts = attended(KINDS["all"])
    back = Activations.load(acts.save(tmp_path / "x"))
    assert back.stacked == acts.stacked and torch.equal(back["attn_k"], acts["attn_k"])
    assert torch.equal(weir.attention_patterns(back, 1), weir.attention_patterns(acts, 1))
    assert "attn_q" in back and "qk_meta" in back and "residual_stream" not in back


def test_rows_that_lack_a_position_make_no_pattern():
    """They would be taken for those of other positions."""
    acts = attended(PLAIN)
    acts._positions = acts._positions | {Site("k_rot", 3): torch.arange(1, N + 1)}
    for name in ("attn_q", "attn_k"):
        with pytest.raises(weir.WeirError, match=r"lacks some of k_rot"):
            acts[name]
    assert acts["qk_layers"] == [1, 3] and acts["k_rot", 3].shape == (N, KV_HEADS, SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_answer_inline_and_to_be_fetched(dtype):
    acts = attended(KINDS["all"])
    acts._rows = {site: rows.to(dtype) for site, rows in acts._rows.items()}
    told, nothing = activations_field(acts, ServerLimits())
    found = told["activations"]
    assert not nothing and found.keys() == LENS_ANSWERS["activations"] - {"residual_stream"}
    assert found["attn_q"].keys() == LENS_ANSWERS["tensor"] and found["qk_layers"] == {"__json__": [1, 3]}
    fetched, frames = activations_field(acts, ServerLimits(), binary=True)
    assert fetched["activations"]["attn_q"].keys() == LENS_ANSWERS["fetched"]
    assert {one["handle"] for one in fetched["activations"].values() if "handle" in one} == frames.keys()
    for entry in (fetched["activations"][name] for name in ("attn_q", "attn_k")):
        assert entry["nbytes"] == len(frames[entry["handle"]]) and entry["compression"] == "zstd"
        assert (
            zstandard.frame_content_size(frames[entry["handle"]]) == torch.Size(entry["shape"]).numel() * dtype.itemsize
        )
    for answer in (weir.decode_activations(told), weir.decode_activations(fetched, fetch_bytes=frames.__getitem__)):
        assert all(torch.equal(answer[name], acts[name]) for name in ("attn_q", "attn_k"))
        assert answer["qk_meta"] == acts["qk_meta"] and answer["attn_q"].dtype == dtype
    with refused("fetch_bytes", "attn_q .* to be fetched from /v1/activations/"):
        weir.decode_activations(fetched)
    with refused("activations", "not a tensor of vllm-lens"):
        weir.decode_activations(fetched, fetch_bytes=lambda handle: frames[handle][:-1])


@pytest.mark.parametrize(("binary", "limit"), [(False, "LENS"), (True, "SPOOL")])
def test_an_answer_that_is_too_large(binary, limit):
    limits = ServerLimits(lens_bytes=10, spool_bytes=20)
    with refused("output_qk", rf"exceed the \d0 .*WEIR_SERVE_{limit}_BYTES"):
        activations_field(attended(PLAIN), limits, binary)
