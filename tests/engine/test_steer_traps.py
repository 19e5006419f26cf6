"""What other systems get wrong when they steer, silently: one test for each."""

from __future__ import annotations

import copy

import pytest
import torch

import vllm_weir as weir
from tests.support.engines import close_all, get_llm
from tests.support.measure import rel_err
from tests.support.steered import check, chunks, directory, prompt, sampling, scheduler, tokens, truth, vectors
from vllm_weir.worker.planning.planner import Planner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
ENGINE = {"block_size": 32, "max_num_seqs": 128, "max_num_batched_tokens": 4096}
EVERYTHING = [weir.Capture("resid_post"), weir.Capture("resid_pre")]
D = 128


@pytest.fixture(scope="module", autouse=True)
def close_engines():
    yield
    close_all()


@pytest.fixture
def engine():
    model_dir = directory()
    return get_llm(model_dir, **ENGINE), truth(model_dir)


def ask(llm, case, length=40, seed=2, max_tokens=6, capture=EVERYTHING):
    params = weir.params(sampling(max_tokens), capture=capture, interventions=case)
    return llm.generate(prompt(length, seed), params, use_tqdm=False)[0]


def test_trap_01_positions_are_absolute_in_every_chunk_and_step(engine):
    """Not applied again at index 0 of each decode step, not lost in later chunks."""
    llm, oracle = engine
    case = [weir.Add(3 * vectors(1)(3, D), 1, positions=[0, 20, 41])]
    plain = ask(llm, [])
    for size in (None, 16, 7):
        with chunks(llm, size):
            out = ask(llm, case)
        check(out, case, oracle)
        assert out.receipt.steered == ({("resid_post", 1): 3},)
        before = oracle.steered((tokens(40, 2) + list(out.outputs[0].token_ids))[:-1], 40, [])[0]
        moved = (out.activations["resid_post", 1] - before["resid_post", 1]).abs().amax(1)
        assert rel_err(out.activations["resid_post", 0][:40], plain.activations["resid_post", 0][:40]) <= 1e-6
        assert all(moved[p] > 1 for p in (0, 20, 41))


def test_trap_02_steered_kv_is_never_read_by_a_plain_request(engine):
    llm, oracle = engine
    case = [weir.Add(4 * vectors(2)(D), 0)]
    llm.reset_prefix_cache()
    ask(llm, case, 100, capture=())
    (out,) = llm.generate(prompt(100, 2), sampling(6), use_tqdm=False)
    assert out.num_cached_tokens == 0
    assert list(out.outputs[0].token_ids) == oracle.greedy(tokens(100, 2), 6)
    llm.reset_prefix_cache()
    llm.generate(prompt(100, 2), sampling(6), use_tqdm=False)
    out = ask(llm, case, 100, capture=weir.Capture("resid_post", positions="sampled"))
    assert out.num_cached_tokens == 0
    check(out, case, oracle)


def test_trap_03_a_second_use_of_the_same_params_is_steered_alike(engine):
    llm, oracle = engine
    one, two = ([weir.Add(3 * vectors(s)(D), 1)] for s in (3, 4))
    shared = sampling(6)
    first, second = (weir.params(shared, capture=EVERYTHING, interventions=c) for c in (one, two))
    wires = copy.deepcopy([first.extra_args, second.extra_args])
    for _ in range(2):
        outs = llm.generate([prompt(20, k) for k in range(4)], [first, second, shared, first], use_tqdm=False)
        for out, case in zip(outs, (one, two, None, one), strict=True):
            if case is not None:
                check(out, case, oracle)
        assert list(outs[2].outputs[0].token_ids) == oracle.greedy(tokens(20, 2), 6)
    assert shared.extra_args is None and [first.extra_args, second.extra_args] == wires


def test_trap_05_children_of_n_are_steered(engine):
    """Every sequence of a request, not the first alone."""
    llm, oracle = engine
    case = [weir.Add(3 * vectors(5)(D), 1, positions="generated"), weir.Add(2 * vectors(6)(D), 2)]
    params = weir.params(sampling(6, n=3, temperature=1.0), capture=EVERYTHING, interventions=case)
    (out,) = llm.generate(prompt(20, 2), params, use_tqdm=False)
    assert len(out.outputs) == 3
    for completion in out.outputs:
        rows, _ = oracle.steered((tokens(20, 2) + list(completion.token_ids))[:-1], 20, case)
        for site in completion.activations.sites:
            assert rel_err(completion.activations[site], rows[tuple(site)]) <= 1e-5
        shared = completion.receipt.shared[1]  # a sibling's prompt may be in the prefix cache already
        assert completion.receipt.steered == ({("resid_post", 1): 5}, {("resid_post", 2): 25 - shared})


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_trap_08_both_halves_of_the_stream_are_steered(family):
    """What replaces a row replaces hidden + residual, and what reads one reads the sum."""
    model_dir = directory(family)
    llm, oracle = get_llm(model_dir, **ENGINE), truth(model_dir)
    row = vectors(8)(D)
    for case in ([weir.Replace(row, 1)], [weir.Clamp(row, 1, value=7.0)], [weir.Add(row, 1, 0.5, norm_match=True)]):
        out = ask(llm, case)
        check(out, case, oracle)
        if isinstance(case[0], weir.Replace):
            for site in (("resid_post", 1), ("resid_pre", 2)):
                assert rel_err(out.activations[site], row.expand(45, D)) <= 1e-6
        if isinstance(case[0], weir.Clamp):
            along = out.activations["resid_post", 1] @ (row / row.norm())
            assert (along - 7).abs().max() < 1e-4


@pytest.mark.parametrize("hook", ["pre_attn", "resid_pre"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen2", "llama"])
def test_trap_09_attention_sees_what_is_done_to_its_input(family, hook):
    model_dir = directory(family)
    llm, oracle = get_llm(model_dir, **ENGINE), truth(model_dir)
    case = [weir.Add(3 * vectors(9)(D), 1, hook=hook, positions=[2])]
    out, plain = ask(llm, case), ask(llm, [])
    check(out, case, oracle)
    # Position 8 meets position 2 in attention alone.
    assert (out.activations["resid_post", 1][8] - plain.activations["resid_post", 1][8]).abs().max() > 1e-3
    same = slice(0, 40)  # beyond the prompt other tokens follow
    a, b = out.activations["resid_post", 0][same], plain.activations["resid_post", 0][same]
    assert torch.equal(a, b)


def test_trap_11_a_name_is_its_content(engine):
    llm, oracle = engine
    old, new = (3 * vectors(s)(D) for s in (11, 12))
    llm.reset_prefix_cache()
    for vector in (old, new):
        weir.register(llm, "name", vector)
        out = ask(llm, [weir.Add("name", 1)], 100, capture=weir.Capture("resid_post", positions="sampled"))
        assert out.num_cached_tokens == 0
        check(out, [weir.Add(vector, 1)], oracle)
    weir.unregister(llm, "name")


def test_trap_12_nothing_is_dropped_in_silence(engine):
    llm, _ = engine
    row = vectors(13)(D)
    for item, field in (
        ({"op": "add", "vector": row.tolist(), "layers": [1, 4]}, "layers"),
        ({"op": "add", "vector": [float("nan")] + [0.0] * (D - 1), "layers": [1]}, "vector"),
        ({"op": "add", "vector": row.tolist(), "layers": [1], "positionz": "all"}, "positionz"),
    ):
        params = sampling(3)
        params.extra_args = {"weir": {"v": 1, "interventions": [item]}}
        with pytest.raises(weir.WeirError) as caught:
            llm.generate(prompt(9), params, use_tqdm=False)
        assert caught.value.field == f"interventions[0].{field}"


def test_trap_16_equal_requests_share_and_a_failed_plan_fails(engine, monkeypatch):
    llm, oracle = engine
    case = [weir.Add(3 * vectors(16)(D), 1)]
    llm.reset_prefix_cache()
    hits = [ask(llm, case, 100, capture=()).num_cached_tokens for _ in range(3)]
    assert hits == [0, 96, 96]

    def broken(self, *_args):
        raise ValueError("no row map")

    with monkeypatch.context() as patch:
        patch.setattr(Planner, "plan", broken)
        with pytest.raises(weir.WeirError, match="no row map"):
            ask(llm, case, 20, capture=())
    check(ask(llm, case, 20), case, oracle)


def test_trap_10_tokens_computed_again_keep_their_own_steering():
    """After a preemption generated tokens come back in a prefill; they stay generated."""
    model_dir = directory()
    llm, oracle = get_llm(model_dir, block_size=32, max_num_seqs=8, num_gpu_blocks_override=10), truth(model_dir)
    core, again = scheduler(llm), []
    original = core._preempt_request

    def preempt(request, *args, **kwargs):
        again.append(request.num_tokens - request.num_prompt_tokens)
        return original(request, *args, **kwargs)

    core._preempt_request = preempt
    v = vectors(10)
    case = [weir.Add(2 * v(D), 1, positions="prompt"), weir.Add(2 * v(D), 1, positions="generated")]
    try:
        params = weir.params(sampling(40), capture=EVERYTHING, interventions=case)
        outs = llm.generate([prompt(40, k) for k in range(5)], params, use_tqdm=False)
    finally:
        core._preempt_request = original
    assert max(again) > 5
    for out in outs:
        check(out, case, oracle)
        assert out.receipt.steered == ({("resid_post", 1): 40}, {("resid_post", 1): 39})


@pytest.mark.parametrize("caching", [True, False])
def test_a_request_whose_values_overflow_leaves_nothing_in_the_cache(caching):
    """Blocks of the KV cache come with what was in them, and zero times NaN is NaN."""
    model_dir = directory()
    llm, oracle = get_llm(model_dir, **ENGINE, enable_prefix_caching=caching), truth(model_dir)
    for case in (weir.Add(torch.ones(D), 0, scale=3e38), weir.Add(torch.ones(D), "all", scale=3e38, norm_match=True)):
        ask(llm, [case], 60, capture=())
        for seed in (2, 3):
            (out,) = llm.generate(prompt(40, seed), sampling(6, logprobs=1), use_tqdm=False)
            assert list(out.outputs[0].token_ids) == oracle.greedy(tokens(40, seed), 6)
            assert all(torch.tensor(p.logprob).isfinite() for step in out.outputs[0].logprobs for p in step.values())
