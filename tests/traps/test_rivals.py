"""Mistakes that other libraries make silently and that no other test is about.

Numbers are those of `tests/unit/test_traps.py`. Of the others: parameters that are changed (3), `test_user_objects`;
children of n (5) and rows of sampled tokens (15), `test_requests`; preemption (6), `test_preemption`; how blocks are
called (7) and halves of the stream (8), `test_families`; steering by position, in chunks and in the cache (1, 2, 9, 10,
11, 16), `test_steer_ops`, `test_steer_cache` and `test_steer_refusals`.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import (
    asking,
    directory,
    prompts,
    sampling,
    tokens,
    verify,
)
from tests.support.engines import async_llm
from tests.support.machine import engine_processes, needs

pytestmark = pytest.mark.engine("default")
LAYERS = 4


def run_all(engine, live):
    done = {}
    for name, (prompt, params) in live.items():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        done |= {out.request_id: out for out in engine.step() if out.finished}
    return done


def test_trap_04_request_ids_match_whole_not_by_prefix(llm, truth):
    names = ["a", "a-b", "a-b-c", "b", "ab", "a-", "0_a", "1_a"]
    asked = {name: asking([i], LAYERS) for i, name in enumerate(names)}
    live = {name: (prompts([10 + i])[0], asked[name][0]) for i, name in enumerate(names)}
    plain = {f"{name}-b": (prompts([10])[0], sampling()) for name in names if f"{name}-b" not in live}
    done = run_all(llm.llm_engine, live | plain)
    for name in names:
        verify(done[name], asked[name][1], truth)
    assert all(done[name].activations is None for name in plain)


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
