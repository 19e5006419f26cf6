"""Rows inside attention and MLP, on engines as they are used, against transformers in fp32."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import vllm_weir as weir
from tests.conformance.inside import INNER
from tests.engine.common import (
    BOUND,
    assert_nothing_is_held,
    directory,
    ids_of,
    oracle,
    prompts,
    sampling,
    tokens,
    verify,
)
from tests.support.engines import get_llm
from tests.support.machine import BATCHES, cpu, needs
from tests.support.measure import alike, rel_err
from tests.support.models import INNER_LACKS, INNER_MODELS, NO_NEURONS
from tests.support.oracle import Oracle
from tests.support.steered import chunks

pytestmark = pytest.mark.engine
HEADS = dict.fromkeys(INNER_MODELS, (4, 2, 32)) | {"qwen3": (4, 2, 64), "gpt2": (4, 4, 32)}
"""Family -> heads, key-value heads, and what a head has of a row."""
NEURONS = {"llama": 448, "gemma2": 192, "qwen3": 192, "gpt2": 512}
LENGTHS = (40, 21, 9, 1, 30)


class Case(NamedTuple):
    """A model, its engine, its reference and the points that it has inside its blocks."""

    family: str
    llm: Any
    truth: Oracle
    hooks: tuple[str, ...]

    @property
    def layers(self) -> int:
        return self.truth.num_layers

    def everything(self, positions: Any = "all") -> list[weir.Capture]:
        return [weir.Capture(hook, positions=positions) for hook in (*self.hooks, "resid_post")]

    def wanted(self, positions: Any = "all") -> dict[tuple[str, int], list[Any]]:
        hooks = (*self.hooks, "resid_post")
        return {(hook, layer): [positions] for hook in hooks for layer in range(self.layers)}


@pytest.fixture(scope="module", params=INNER_MODELS)
def case(request: pytest.FixtureRequest, root) -> Case:
    where = directory(root, request.param, INNER_MODELS[request.param])
    llm = get_llm(where, block_size=32, max_num_seqs=16)
    hooks = tuple(hook for hook in INNER if hook not in INNER_LACKS[request.param])
    return Case(request.param, llm, oracle(where), hooks)


def run(case: Case, asked: Any, lengths: Any = LENGTHS) -> list[Any]:
    return case.llm.generate(prompts(lengths), asked, use_tqdm=False)


def one(case: Case, *captures: weir.Capture, length: int = 12, max_tokens: int = 4) -> Any:
    (out,) = run(case, weir.params(sampling(max_tokens), capture=list(captures)), [length])
    return out


def reference(case: Case, out: Any) -> dict[tuple[str, int], torch.Tensor]:
    return case.truth.rows(ids_of(out)[:-1])


def test_sites(case):
    verdicts = {(v.hook, v.layer): v for v in weir.sites(case.llm)}
    for layer in range(case.layers):
        for hook in INNER:
            verdict = verdicts[hook, layer]
            assert verdict.supported == (hook in case.hooks) == (not verdict.reason), verdict
    for hook in sorted(INNER_LACKS[case.family]):
        with pytest.raises(weir.WeirError) as e:
            one(case, weir.Capture(hook, 0))
        assert e.value.field == "capture[0].hook"


@pytest.mark.parametrize("size", [None, 7])
def test_rows(case, size):
    """Prompt and generated tokens, every point of every block, whole and chunked prompts, beside plain requests."""
    asked = [weir.params(sampling(6), capture=case.everything()), sampling(6)] * 3
    with chunks(case.llm, size):
        outs = run(case, asked[: len(LENGTHS)])
    for out in outs[::2]:
        verify(out, case.wanted(), case.truth)
        theirs, generated = reference(case, out), len(out.prompt_token_ids)
        for site in case.wanted():
            error = rel_err(out.activations[site][generated:], theirs[site][generated:])
            assert error <= BOUND, (site, "generated tokens alone")
    assert all(out.activations is None for out in outs[1::2])
    del outs, out
    assert_nothing_is_held(case.llm)


def test_shapes(case):
    out = one(case, *case.everything(), length=10, max_tokens=3)
    acts, n = out.activations, 12
    heads, kv_heads, d_head = HEADS[case.family]
    for hook in ("q", "q_rot", "z"):
        assert acts[hook, 1].shape == (n, heads, d_head)
    for hook in ("k", "v", "k_rot"):
        assert acts[hook, 1].shape == (n, kv_heads, d_head)
    for hook in ("pattern", "attn_scores"):
        assert acts[hook, 1].shape == (n, heads, n)
    for hook in ("attn_in", "mlp_in"):
        assert acts[hook, 1].shape == (n, case.truth.hidden_size)
    for hook in NO_NEURONS & set(case.hooks):
        assert acts[hook, 1].shape == (n, NEURONS[case.family])
    if case.family == "mixtral":
        assert acts["router_logits", 1].shape == (n, 8)
        assert acts["expert_ids", 1].shape == acts["expert_weights", 1].shape == (n, 2)


def test_what_the_points_are_to_each_other(case):
    """The engine's own rows obey the definitions, whatever the reference says."""
    acts = one(case, *case.everything(), length=30).activations
    for layer in range(case.layers):
        pattern, v, z = (acts[hook, layer] for hook in ("pattern", "v", "z"))
        assert rel_err(pattern.sum(-1), torch.ones(pattern.shape[:2])) <= BOUND
        assert rel_err(acts["attn_scores", layer].softmax(-1), pattern) <= BOUND
        v = v.repeat_interleave(z.shape[1] // v.shape[1], 1)
        assert rel_err(torch.einsum("qhk,khd->qhd", pattern, v), z) <= BOUND
        if case.family == "mixtral":
            best = acts["router_logits", layer].float().softmax(-1).topk(2)
            assert torch.equal(best.indices, acts["expert_ids", layer].long())
            weights = best.values / best.values.sum(-1, keepdim=True)
            assert rel_err(weights, acts["expert_weights", layer]) <= BOUND


@pytest.mark.parametrize("positions", ["last_prompt", "generated", [0, -1, 5], "2:30:3"])
def test_patterns_of_chosen_queries(case, positions):
    """Rows of the chosen positions, with keys up to the last of them, in whole and chunked prompts."""
    for size in (None, 8):
        with chunks(case.llm, size):
            out = one(case, *(weir.Capture(h, [0, 1], positions) for h in ("pattern", "attn_scores", "z")), length=24)
        theirs = reference(case, out)
        for site in out.activations.sites:
            at = out.activations.positions_of(*site)
            expected = theirs[tuple(site)][at]
            if site.hook != "z":
                expected = expected[..., : int(at[-1]) + 1]
            assert rel_err(out.activations[site], expected) <= BOUND, (site, size)
            assert out.receipt.captured[site] == len(at)


def test_prefix_cache(case):
    """A later request of a prompt has its rows; only those that need earlier positions compute them again."""
    prompt = {"prompt_token_ids": tokens(80, 77)}
    for captures, hits in (
        ([], None),
        ([weir.Capture("z", positions="sampled")], True),
        ([weir.Capture("pattern", positions="last_prompt")], None),
        (case.everything(), False),
    ):
        asked = weir.params(sampling(4), capture=captures) if captures else sampling(4)
        (out,) = case.llm.generate([prompt], asked, use_tqdm=False)
        if hits is not None:
            assert (out.receipt.cached_tokens > 0) == hits
        if not captures:
            continue
        theirs = reference(case, out)
        for site in out.activations.sites:
            at = out.activations.positions_of(*site)
            expected = theirs[tuple(site)][at]
            if site.hook in ("pattern", "attn_scores"):
                expected = expected[..., : int(at[-1]) + 1]
            assert rel_err(out.activations[site], expected) <= BOUND, site


def test_heads_and_neurons(case):
    """Those that were picked, in the order given."""
    picked = [weir.Capture(hook, 1, heads=[3, 1]) for hook in ("q", "q_rot", "z", "pattern", "attn_scores")]
    picked += [weir.Capture(hook, [0, 1], heads=[1]) for hook in ("k", "v", "k_rot")]
    neurons = [170, 3, 191]
    picked += [weir.Capture(hook, 1, neurons=neurons) for hook in ("mlp_pre", "mlp_post") if hook in case.hooks]
    out = one(case, *picked)
    theirs = reference(case, out)
    for site in out.activations.sites:
        rows = theirs[tuple(site)]
        if site.hook.startswith("mlp"):
            expected = rows[:, neurons]
        else:
            expected = rows[:, [1]] if site.hook[0] in "kv" else rows[:, [3, 1]]
        assert rel_err(out.activations[site], expected) <= BOUND, site
    whole = one(case, weir.Capture("z", 1)).activations["z", 1]
    assert alike(out.activations["z", 1], whole[:, [3, 1]])


@pytest.mark.parametrize(
    ("how", "by_hand"),
    [("last", lambda x: x[-1:]), ("mean", lambda x: x.mean(0, keepdim=True)), ("max", lambda x: x.amax(0, True))],
)
def test_reductions(case, how, by_hand):
    """One row a site, also where a row is wider or narrower than the stream."""
    hooks = [hook for hook in ("z", "k", "mlp_post", "mlp_in") if hook in case.hooks]
    for size in (None, 7):
        with chunks(case.llm, size):
            out = one(case, *(weir.Capture(hook, reduce=how) for hook in hooks), length=25)
        theirs = reference(case, out)
        for site in out.activations.sites:
            rows = theirs[tuple(site)]
            assert out.activations[site].shape == (1, *rows.shape[1:])
            error = (out.activations[site].double() - by_hand(rows.double())).abs().max() / rows.abs().max()
            assert error <= BOUND, (site, size)
            assert out.receipt.captured[site] == 1


def test_products_with_directions(case):
    generator = torch.Generator().manual_seed(0)
    heads, _, d_head = HEADS[case.family]
    widths = {"z": heads * d_head, "mlp_in": case.truth.hidden_size}
    if case.family in NEURONS:
        widths["mlp_post"] = NEURONS[case.family]
    directions = {hook: torch.randn(3, width, generator=generator) for hook, width in widths.items()}
    out = one(case, *(weir.Capture(hook, 1, project=those) for hook, those in directions.items()))
    theirs = reference(case, out)
    for hook, those in directions.items():
        assert out.activations[hook, 1].shape == (15, 3)
        assert rel_err(out.activations[hook, 1], theirs[hook, 1].flatten(1) @ those.T) <= BOUND, hook


@needs(cpu(BATCHES))
def test_neighbours_are_as_without_it(case):
    """Requests beside those that read are the same to the bit."""
    plain = run(case, sampling(6, logprobs=5))
    reading = weir.params(sampling(6, logprobs=5), capture=case.everything())
    beside = run(case, [sampling(6, logprobs=5) if i % 2 else reading for i in range(len(LENGTHS))])
    for before, after in zip(plain, beside, strict=True):
        assert before.outputs[0].token_ids == after.outputs[0].token_ids
        for was, now in zip(before.outputs[0].logprobs, after.outputs[0].logprobs, strict=True):
            assert {t: p.logprob for t, p in was.items()} == {t: p.logprob for t, p in now.items()}


def test_refused_captures(case):
    refused = [
        (lambda: weir.Capture("resid_post", 0, heads=[0]), "heads"),
        (lambda: weir.Capture("attn_in", 0, heads=[0]), "heads"),
        (lambda: weir.Capture("z", 0, neurons=[0]), "neurons"),
        (lambda: weir.Capture("z", 0, heads=[4]), "heads"),
        (lambda: weir.Capture("z", 0, heads=[-1]), "heads"),
        (lambda: weir.Capture("k", 0, heads=[HEADS[case.family][1]]), "heads"),
    ]
    if case.family in NEURONS:
        refused += [
            (lambda: weir.Capture("mlp_post", 0, neurons=[NEURONS[case.family]]), "neurons"),
            (lambda: weir.Capture("mlp_post", 0, heads=[0]), "heads"),
            (lambda: weir.Capture("mlp_post", 0, compress="rp8"), "compress"),
        ]
    else:
        refused += [
            (lambda: weir.Capture("router_logits", 0, heads=[0]), "heads"),
            (lambda: weir.Capture("k", 0, compress="full8"), "compress"),
        ]
    for make, field in refused:
        with pytest.raises(weir.WeirError) as e:
            one(case, make())
        assert e.value.field.split(".")[-1] == field, (field, str(e.value))
    verify(one(case, weir.Capture("z")), {("z", layer): ["all"] for layer in range(case.layers)}, case.truth)
