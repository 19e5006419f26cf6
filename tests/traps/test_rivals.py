"""The mistakes that other libraries make silently, one test for each that concerns reading; numbers as in docs."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import (
    asking,
    assert_nothing_is_held,
    directory,
    ids_of,
    oracle,
    prompts,
    sampling,
    scheduler,
    tokens,
    verify,
)
from tests.support.engines import async_llm, get_llm
from tests.support.machine import engine_processes, needs

pytestmark = pytest.mark.engine
LAYERS = 4


@pytest.fixture
def llm(root):
    return get_llm(directory(root))


@pytest.fixture
def truth(root):
    return oracle(directory(root))


def run_all(engine, live):
    done = {}
    for name, (prompt, params) in live.items():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        done |= {out.request_id: out for out in engine.step() if out.finished}
    return done


def test_trap_03_sampling_params_are_not_mutated(llm, truth):
    params, wanted = asking("all", LAYERS, output_kind=_final())
    held = copy.deepcopy({name: getattr(params, name) for name in params.__struct_fields__})
    for length in (5, 9, 5):
        (out,) = llm.generate(prompts([length]), params, use_tqdm=False)
        verify(out, wanted, truth)
    assert {name: getattr(params, name) for name in params.__struct_fields__} == held


def test_trap_04_request_ids_match_whole_not_by_prefix(llm, truth):
    names = ["a", "a-b", "a-b-c", "b", "ab", "a-", "0_a", "1_a"]
    asked = {name: asking([i], LAYERS) for i, name in enumerate(names)}
    live = {name: (prompts([10 + i])[0], asked[name][0]) for i, name in enumerate(names)}
    plain = {f"{name}-b": (prompts([10])[0], sampling()) for name in names if f"{name}-b" not in live}
    done = run_all(llm.llm_engine, live | plain)
    for name in names:
        verify(done[name], asked[name][1], truth)
    assert all(done[name].activations is None for name in plain)


def test_trap_04_order_holds_from_ten_prompts_on(llm, truth):
    params, wanted = asking("all", LAYERS)
    batch = prompts([3 + i for i in range(25)])
    for prompt, out in zip(batch, llm.generate(batch, params, use_tqdm=False), strict=True):
        assert list(out.prompt_token_ids) == prompt["prompt_token_ids"]
        verify(out, wanted, truth)


@pytest.mark.parametrize("seed", [2, None])
def test_trap_05_children_of_n_are_captured(llm, truth, seed):
    """Without a seed vLLM gives all of them the same params object."""
    params, wanted = asking("all", LAYERS, n=4, temperature=1.0, seed=seed)
    (out,) = llm.generate(prompts([9]), params, use_tqdm=False)
    assert len(out.outputs) == 4
    for completion in out.outputs:
        verify(out, wanted, truth, completion)


def test_trap_06_preemption_gives_every_row_once(root, truth):
    llm = get_llm(directory(root), block_size=32, num_gpu_blocks_override=8, max_model_len=128, max_num_seqs=4)
    sched, count = scheduler(llm), []
    preempt = sched._preempt_request
    sched._preempt_request = lambda request, *a, **k: (
        count.append(request.num_computed_tokens),
        preempt(request, *a, **k),
    )[1]
    try:
        params, wanted = asking("all", LAYERS, max_tokens=70)
        outs = llm.generate(prompts([30, 31, 40, 33]), params, use_tqdm=False)
    finally:
        sched._preempt_request = preempt
    assert any(computed > 40 for computed in count)
    for out in outs:
        verify(out, wanted, truth)
    del out, outs
    assert_nothing_is_held(llm)  # nor where the rows from before the preemptions were


def test_trap_07_positional_and_keyword_blocks_alike(root):
    """Blocks called by position, by keyword and with arguments in another order; outputs of one part and of two."""
    for family in ("gpt2", "llama", "opt"):
        model_dir = directory(root, family)
        truth = oracle(model_dir)
        params, wanted = asking("all", truth.num_layers)
        (out,) = get_llm(model_dir).generate(prompts([12]), params, use_tqdm=False)
        verify(out, wanted, truth)


def test_trap_08_both_halves_of_hidden_and_residual(llm, truth):
    """Llama's blocks return (hidden, residual): either half alone is far from the stream."""
    (out,) = llm.generate(prompts([12]), weir.params(sampling(), capture=weir.Capture()), use_tqdm=False)
    verify(out, {("resid_post", layer): ["all"] for layer in range(LAYERS)}, truth)
    rows = out.activations["resid_post", 2]
    half = truth.rows(ids_of(out)[:-1])["resid_post", 2] - truth.rows(ids_of(out)[:-1])["resid_pre", 2]
    assert (rows - half).abs().max() > 0.1 * rows.abs().max()


@pytest.mark.parametrize("layer", [-1, LAYERS, 99, float("nan"), 1.0, True])
def test_trap_12_layers_out_of_range_are_refused(llm, layer):
    with pytest.raises(weir.WeirError) as e:
        llm.generate(prompts([5]), weir.params(sampling(), capture=weir.Capture(layers=[layer])), use_tqdm=False)
    assert "layers" in e.value.field
    with pytest.raises(weir.WeirError) as e:
        llm.generate(prompts([5]), sampling(extra_args={"output_residual_stream": [layer]}), use_tqdm=False)
    assert "output_residual_stream" in e.value.field


@needs(engine_processes)
def test_trap_13_concurrent_and_streamed_responses_are_whole(root, truth):
    async def main():
        engine = async_llm(directory(root))
        try:

            async def one(i):
                async for out in engine.generate({"prompt_token_ids": tokens(5 + i % 30, i)}, params, f"r{i}"):
                    pass
                return await asyncio.to_thread(lambda: (out.activations, out)[1])

            return await asyncio.gather(*[one(i) for i in range(64)])
        finally:
            engine.shutdown(0)

    params, wanted = asking("all", LAYERS)
    for out in asyncio.run(main()):
        verify(out, wanted, truth)


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_trap_15_n_outputs_have_n_sampled_rows(llm, truth, max_tokens):
    capture = [weir.Capture("resid_post", 3, "sampled"), weir.Capture("resid_post", 0, "all")]
    params = weir.params(sampling(max_tokens), capture=capture)
    (out,) = llm.generate(prompts([7]), params, use_tqdm=False)
    assert out.activations["resid_post", 3].shape[0] == len(out.outputs[0].token_ids) == max_tokens
    assert out.activations["resid_post", 0].shape[0] == 7 + max_tokens - 1
    verify(out, {("resid_post", 3): ["sampled"], ("resid_post", 0): ["all"]}, truth)


def test_trap_17_rows_come_without_calls_into_the_engine(llm, truth, monkeypatch):
    """Nothing asks the workers for rows: with every RPC to them forbidden, they arrive all the same."""

    def forbidden(*_args, **_kwargs):
        raise AssertionError("an RPC between steps")

    params, wanted = asking("all", LAYERS)
    for owner in (llm, llm.llm_engine, llm.llm_engine.engine_core):
        monkeypatch.setattr(owner, "collective_rpc", forbidden)
    outs = llm.generate(prompts([5, 30, 64]), params, use_tqdm=False)
    for out in outs:
        verify(out, wanted, truth)
    assert torch.equal(outs[0].activations.positions, torch.arange(12))


def _final():
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.FINAL_ONLY
