"""Data parallelism: rows come from every engine. Tensor parallelism is in test_two_ranks."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.common import asking, directory, oracle, prompts, verify
from tests.support.engines import async_llm
from tests.support.machine import GIB, binding, engine_processes, memory, needs, ranks

pytestmark = [pytest.mark.engine, pytest.mark.thorough, needs(engine_processes, memory(3 * GIB), ranks(2))]


def test_every_data_parallel_engine_delivers(root, monkeypatch):
    """Twelve requests over the two engines of one AsyncLLM: all rows arrive, and they come from both."""
    model_dir = directory(root)
    truth = oracle(model_dir)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding(2))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    async def run():
        engine = async_llm(model_dir, data_parallel_size=2)

        async def one(number):
            asked, wanted = asking("all", truth.num_layers, 5)
            async for out in engine.generate(prompts([4 + number])[0], asked, f"r{number}"):
                last = out
            await asyncio.to_thread(lambda: last.activations)
            return last, wanted

        try:
            return await asyncio.gather(*(one(number) for number in range(12)))
        finally:
            engine.shutdown(0)

    sources = set()
    for out, wanted in asyncio.run(run()):
        verify(out, wanted, truth)
        sources |= {id(row_view.mapped) for row_view in out.outputs[0]._weir_view.pending.row_views}
    assert len(sources) == 2
