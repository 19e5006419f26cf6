"""Tensor parallelism: two ranks hold the same stream; one of them sends it, or each its share."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.common import SELECTORS, asking, directory, oracle, prompts, same_rows, verify
from tests.support.engines import DEFAULTS, close_all, get_llm
from tests.support.measure import rel_err

pytestmark = pytest.mark.engine
CLOSE_OTHERS = True


def run(llm, layers):
    asked = [asking(selector, layers)[0] for selector in SELECTORS]
    return llm.generate(prompts(), asked, use_tqdm=False)


@pytest.mark.parametrize("ship", ["first", "split"])
def test_two_ranks_give_the_rows_of_one(root, ship):
    model_dir = directory(root)
    truth = oracle(model_dir)
    one = run(get_llm(model_dir), truth.num_layers)
    for out in one:  # rows are assembled before their engine goes
        assert out.activations is not None
    close_all()
    env, settings = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, {"weir": {"ship": ship}}
    llm = get_llm(model_dir, tensor_parallel_size=2, env=env, additional_config=settings)
    reports = llm.collective_rpc("weir_report")
    assert len(reports) == 2 and sorted(bool(r["ring_rows"]) for r in reports) == [ship == "split", True]
    two = run(llm, truth.num_layers)
    for a, b in zip(one, two, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        same_rows(b.activations, a.activations, 1e-4)
        reference = truth.rows((list(b.prompt_token_ids) + list(b.outputs[0].token_ids))[:-1])
        for site in b.activations.sites:
            at = b.activations.positions_of(*site)
            if len(at):
                assert rel_err(b.activations[site], reference[tuple(site)][at]) <= 1e-4
    close_all()


def test_every_data_parallel_engine_delivers(root, monkeypatch):
    """Twelve requests over the two engines of one AsyncLLM: all rows arrive, and they come from both."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model_dir = directory(root)
    truth = oracle(model_dir)
    close_all()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    async def run():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model_dir), data_parallel_size=2, **DEFAULTS))

        async def one(number):
            asked, wanted = asking("all", truth.num_layers, 5)
            async for out in engine.generate(prompts([4 + number])[0], asked, f"r{number}"):
                last = out
            await asyncio.to_thread(lambda: last.activations)
            return last, wanted

        try:
            return await asyncio.gather(*(one(number) for number in range(12)))
        finally:
            engine.shutdown()

    sources = set()
    for out, wanted in asyncio.run(run()):
        verify(out, wanted, truth)
        sources |= {id(strip.mirror) for strip in out.outputs[0]._weir_view.pending.strips}
    assert len(sources) == 2
