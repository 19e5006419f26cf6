"""Steering where caller, scheduler and worker are different processes; tensor parallelism is in test_two_ranks."""

from __future__ import annotations

import asyncio
import gc

import pytest

import vllm_weir as weir
from tests.support.engines import async_llm
from tests.support.machine import engine_processes, needs
from tests.support.measure import becomes, nothing_held
from tests.support.steered import check, directory, prompt, sampling, tokens, truth, vectors

pytestmark = [pytest.mark.engine, needs(engine_processes)]
EVERYTHING = [weir.Capture("resid_post"), weir.Capture("resid_pre")]
D = 128


def cases(seed):
    v = vectors(seed)
    return [
        [weir.Add(v(D), 1, 2.0)],
        [weir.Ablate(v(3, D), "all", positions="generated")],
        [weir.Clamp(v(D), 2, value=3.0, positions="prompt"), weir.Add(v(2, D), 0, positions=[1, -1])],
        [],
        [weir.Replace(v(D), 1, alpha=0.5, positions={"token_ids": list(range(0, 500, 2))})],
        [weir.LowRank(v(2, D) / 10, v(2, D) / 10, v(2), 3, hook="resid_pre")],
    ]


def test_async_engine():
    from vllm.sampling_params import RequestOutputKind

    model_dir = directory()
    oracle = truth(model_dir)
    asked = cases(61)

    async def one(engine, k, params, name):
        last = None
        async for out in engine.generate(prompt(12 + 9 * k, k), params, name):
            last = out
        return last

    async def main():
        engine = async_llm(model_dir, block_size=32)
        try:
            for turn in range(2):
                params = [
                    weir.params(
                        sampling(6, output_kind=RequestOutputKind.CUMULATIVE), capture=EVERYTHING, interventions=c
                    )
                    for c in asked
                ]
                outs = await asyncio.gather(*(one(engine, k, p, f"t{turn}-{k}") for k, p in enumerate(params)))
                for out, case in zip(outs, asked, strict=True):
                    check(out, case, oracle)
                    assert len(out.receipt.steered) == len(case)
            weir.register(engine, "calm", asked[0][0].vector.array.copy())
            named = weir.params(sampling(6), capture=EVERYTHING, interventions=weir.Add("calm", 1, 2.0))
            check(await one(engine, 0, named, "named"), asked[0], oracle)
            with pytest.raises(weir.WeirError) as caught:
                await one(engine, 0, weir.params(sampling(6), interventions=weir.Add([1.0] * 5, 1)), "bad")
            assert caught.value.field == "interventions[0].vector"
            weir.set_global(engine, asked[0])
            out = await one(engine, 0, sampling(6), "global")
            made = list(out.outputs[0].token_ids)
            assert made == oracle.steered_greedy(tokens(12, 0), 6, asked[0], made)
            weir.clear_global(engine)
            streamed, seen = weir.params(sampling(6), interventions=asked[0]), None
            async for out in engine.generate(prompt(20, 3), streamed, "aborted"):
                seen = out
                break
            assert seen is not None
            out = await one(engine, 1, sampling(3), "plain")
            assert list(out.outputs[0].token_ids) == oracle.greedy(tokens(21, 1), 3)
            del out, outs, seen
            gc.collect()
            await nothing_held(engine, 2.0, lambda: one(engine, 1, sampling(2), "plain again"))
        finally:
            engine.shutdown(0)

    asyncio.run(asyncio.wait_for(main(), 600))


def test_a_pause_ends_requests_that_wait_for_the_tables():
    """vLLM's pauses and sleeps end all that is in flight, and each caller hears of it."""
    asked = [weir.Add(vectors(62)(3, D)[k], 1) for k in range(3)]

    async def one(engine, k, begun):
        params = weir.params(sampling(200), capture=weir.Capture("resid_post", 1), interventions=asked[k])
        async for out in engine.generate(prompt(12, k), params, f"p{k}"):
            begun.set()
        return out

    async def main():
        engine = async_llm(directory(), block_size=32, additional_config={"weir": {"max_programs": 1}})
        try:
            begun = [asyncio.Event() for _ in asked]
            jobs = [asyncio.create_task(one(engine, 0, begun[0]))]
            await begun[0].wait()
            jobs += [asyncio.create_task(one(engine, k, begun[k])) for k in (1, 2)]
            await becomes(lambda: len(engine.output_processor.request_states), 3, 30)
            await engine.pause_generation(mode="abort")
            for out in await asyncio.wait_for(asyncio.gather(*jobs), 90):
                assert out.outputs[0].finish_reason == "abort" and not out.receipt.complete
            await engine.resume_generation()
            assert (await one(engine, 1, begun[1])).receipt.complete
        finally:
            engine.shutdown(0)

    asyncio.run(asyncio.wait_for(main(), 600))
