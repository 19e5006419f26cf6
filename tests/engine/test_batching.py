"""Rows under chunked prefill, prefix-cache hits, preemption and a ring smaller than the batch."""

from __future__ import annotations

import pytest

import vllm_weir as weir
from tests.engine.common import (
    SELECTORS,
    asking,
    assert_nothing_is_held,
    directory,
    frontend,
    oracle,
    prompts,
    sampling,
    scheduler,
    tokens,
    verify,
)
from tests.support.engines import get_llm
from tests.support.models import FAMILIES
from tests.support.steered import SteeredOracle, check, vectors

pytestmark = pytest.mark.engine
CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 12, "block_size": 32}


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_and_prefix_hits(root, family):
    """Chunks of 16 tokens, shared by up to 10 requests; the second round meets the first one's prefix cache."""
    model_dir = directory(root, family)
    llm, truth = get_llm(model_dir, **CHUNKED), oracle(model_dir)
    asked = [asking(selector, truth.num_layers) for selector in SELECTORS]
    hits = []
    for _ in range(2):
        outs = llm.generate(prompts(), [params for params, _ in asked], use_tqdm=False)
        for out, (_, wanted) in zip(outs, asked, strict=True):
            verify(out, wanted, truth)
            assert out.receipt.cached_tokens == out.num_cached_tokens
            limit = out.receipt.hit_limit
            assert limit is None or out.num_cached_tokens <= limit
        hits.append([out.num_cached_tokens for out in outs])
    by_selector = dict(zip(map(str, SELECTORS), hits[1], strict=True))
    assert by_selector["all"] == by_selector["prompt"] == 0
    assert sum(hits[1]) > 0, hits


PROMPT = tokens(100, 3)
CAPS = [
    # selector, first wanted position, tokens from the cache with blocks of 32
    ("all", 0, 0),
    ("prompt", 0, 0),
    ("last_prompt", 99, 96),
    ("sampled", 99, 96),
    ("generated", 100, 96),
    ("40:", 40, 32),
    ([70, 90], 70, 64),
    (-1, 99, 96),
    ([10_000, 101], 101, 96),
    ({"token_ids": [PROMPT[66]]}, PROMPT.index(PROMPT[66]), PROMPT.index(PROMPT[66]) // 32 * 32),
    ({"token_ids": [513]}, 100, 96),
    ({"not_token_ids": PROMPT[:66]}, next(p for p, t in enumerate(PROMPT) if t not in PROMPT[:66]), 64),
    ({"not_token_ids": PROMPT}, 100, 96),
]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_capture_caps_the_prefix_hit_at_its_first_position(root, family):
    model_dir = directory(root, family)
    llm, truth = get_llm(model_dir, **CHUNKED), oracle(model_dir)
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": PROMPT}
    llm.generate(prompt, sampling(2), use_tqdm=False)
    (plain,) = llm.generate(prompt, sampling(2), use_tqdm=False)
    assert plain.num_cached_tokens == 96 and plain.activations is None
    for selector, limit, cached in CAPS:
        params, wanted = asking(selector, truth.num_layers, max_tokens=4)
        (out,) = llm.generate(prompt, params, use_tqdm=False)
        verify(out, wanted, truth)
        assert (out.receipt.hit_limit, out.receipt.cached_tokens) == (limit, cached), selector
    (plain,) = llm.generate(prompt, sampling(2), use_tqdm=False)
    assert plain.num_cached_tokens == 96


@pytest.mark.parametrize(
    ("family", "caching"), [("llama", True), ("llama", False), ("gemma2", True), ("mistral", False)]
)
def test_rows_survive_preemption(root, family, caching):
    """A KV cache that holds two of six requests to their ends: the others are thrown out and computed again."""
    model_dir = directory(root, family)
    llm = get_llm(
        model_dir,
        block_size=32,
        num_gpu_blocks_override=10 if family != "gemma2" else 14,
        max_model_len=160,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        enable_prefix_caching=caching,
    )
    truth, preempted = oracle(model_dir), []
    sched = scheduler(llm)
    preempt = sched._preempt_request

    def counting(request, *args, **kwargs):
        preempted.append((request.request_id, request.num_computed_tokens))
        return preempt(request, *args, **kwargs)

    sched._preempt_request = counting
    try:
        selectors = ["all", "generated", "sampled", "prompt", "30:90:2", {"token_ids": list(range(0, 510, 2))}]
        asked = [asking(selector, truth.num_layers, max_tokens=90) for selector in selectors]
        outs = llm.generate(prompts([30, 31, 40, 33, 32, 35]), [p for p, _ in asked], use_tqdm=False)
    finally:
        sched._preempt_request = preempt
    assert preempted, "nothing was preempted: this test shows nothing"
    assert any(computed > 40 for _, computed in preempted), "nobody had generated tokens to recompute"
    for out, (_, wanted) in zip(outs, asked, strict=True):
        verify(out, wanted, truth)


def test_a_ring_smaller_than_the_batch(root):
    """128 ring rows and 8 rows a token: steps are cut to 16 tokens, rows wait for room, all of them arrive."""
    model_dir = directory(root)
    settings = {"weir": {"buffer_bytes": 1 << 16}}
    llm, truth = get_llm(model_dir, additional_config=settings), oracle(model_dir)
    capabilities = frontend(llm).engine.capabilities
    assert capabilities.ring_rows == 128
    params = weir.params(sampling(6), capture=[weir.Capture("resid_post"), weir.Capture("resid_pre")])
    wanted = {(hook, layer): ["all"] for hook in ("resid_post", "resid_pre") for layer in range(4)}
    outs = llm.generate(prompts([60] * 12 + [1, 2, 3, 4] * 6), params, use_tqdm=False)
    for out in outs:
        verify(out, wanted, truth)
    del out, outs
    assert_nothing_is_held(llm)


def test_a_ring_smaller_than_the_prompt_of_a_request_that_waited_for_the_tables(root):
    """Its rows bound the steps from when it is let in, not only those before."""
    model_dir = directory(root)
    settings = {"weir": {"buffer_bytes": 1 << 16, "max_programs": 1}}
    llm, truth = get_llm(model_dir, additional_config=settings), SteeredOracle(model_dir)
    capture = [weir.Capture("resid_post"), weir.Capture("resid_pre")]
    cases = [[weir.Add(vectors(70 + k)(truth.hidden_size), 1, positions=[40])] for k in range(3)]
    params = [weir.params(sampling(4), capture=capture, interventions=case) for case in cases]
    for out, case in zip(llm.generate(prompts([60, 50, 61]), params, use_tqdm=False), cases, strict=True):
        check(out, case, truth)
        assert set(out.receipt.captured.values()) == {len(out.prompt_token_ids) + 3}
    del out
    assert_nothing_is_held(llm)


def test_a_capture_that_cannot_fit_the_ring_is_refused(root):
    """Without chunked prefill a whole prompt is one step: what would not fit is refused, the rest is served."""
    model_dir = directory(root)
    settings = {"weir": {"buffer_bytes": 1 << 16}}
    llm = get_llm(model_dir, additional_config=settings, enable_chunked_prefill=False, max_num_batched_tokens=256)
    truth = oracle(model_dir)
    params, wanted = asking("all", truth.num_layers)
    with pytest.raises(weir.WeirError, match="buffer_bytes") as e:
        llm.generate(prompts([15]), params, use_tqdm=False)
    assert e.value.field == "capture"
    for out in llm.generate(prompts([14, 13, 5, 14]), params, use_tqdm=False):
        verify(out, wanted, truth)
    # Prompts that record nothing are longer than a step of those behind them may be.
    (alone,) = llm.generate(prompts([100]), sampling(4), use_tqdm=False)
    asked = [sampling(4), params, params, sampling(4), params]
    first, *others = llm.generate(prompts([100, 14, 14, 90, 13]), asked, use_tqdm=False)
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids and len(others[2].outputs[0].token_ids) == 4
    for out in (others[0], others[1], others[3]):
        verify(out, wanted, truth)
