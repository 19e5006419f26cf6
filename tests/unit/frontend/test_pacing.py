"""Whose turn it is in an event loop: plain requests first, then those that ask something of Weir, one by one."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from tests.support import machine
from vllm_weir.frontend import pacing as module
from vllm_weir.frontend.pacing import Pacing, entry_of
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.state import ServerState


async def pacing_of_the_loop(n: int = 20) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However slow the machine is."""
    monkeypatch.setattr(module, "MAX_WAIT_PLAIN", 60.0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_who_came_before_goes_first_and_nobody_who_comes_later():
    async def go():
        pacing = Pacing()
        entries = [pacing.enter(), pacing.enter()]
        asked = asyncio.create_task(pacing.wait_to_enter())
        await pacing_of_the_loop()
        later = pacing.enter()
        entries[0].leave()
        await pacing_of_the_loop()
        assert not asked.done()
        entries[0].leave()  # says nothing new
        await pacing_of_the_loop()
        assert not asked.done()
        entries[1].leave()
        await pacing_of_the_loop()
        assert asked.done()
        after = asyncio.create_task(pacing.wait_to_enter())
        await pacing_of_the_loop()
        assert not after.done()
        later.leave()
        await after

    run(go())


def test_those_that_queue_do_not_wait_again_for_who_comes_later():
    """Each waited for those that were there when its turn came: the longer the queue, the longer it took."""

    async def go():
        pacing = Pacing()
        first = pacing.enter()
        asked = [asyncio.create_task(pacing.wait_to_enter()) for _ in range(5)]
        await pacing_of_the_loop()
        later = pacing.enter()
        after = asyncio.create_task(pacing.wait_to_enter())
        await pacing_of_the_loop()
        first.leave()
        await asyncio.gather(*asked)
        await pacing_of_the_loop()
        assert not after.done()
        later.leave()
        await after

    run(go())


@pytest.mark.parametrize("way", ["wait_to_enter", "wait_to_respond"])
def test_a_few_at_a_time_with_turns_for_others_between(way):
    async def go():
        pacing, order = Pacing(), []

        async def asked(name):
            await getattr(pacing, way)()
            order.append(name)

        async def other():
            while 39 not in order:
                await asyncio.sleep(0)
                order.append(-1)

        await asyncio.gather(*(asked(k) for k in range(40)), other())
        return order

    order = run(go())
    most = {"wait_to_enter": module.MAX_ENTERING, "wait_to_respond": module.MAX_RESPONDING}[way]
    together = [len(list(some)) for theirs, some in itertools.groupby(order, lambda k: k >= 0) if theirs]
    assert [k for k in order if k >= 0] == list(range(40)) and max(together) == most


def test_who_waits_for_something_itself_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_PLAIN", 0.1)

    async def go():
        pacing = Pacing()
        pacing.enter()
        began = module.monotonic()
        await pacing.wait_to_enter()
        assert 0.08 < module.monotonic() - began < 30
        began = module.monotonic()
        await asyncio.gather(*(pacing.wait_to_enter() for _ in range(600)))
        assert module.monotonic() - began < 30, "each waited for it anew"

    run(go())


def test_who_is_gone_while_waiting_lets_the_next_go():
    async def go():
        pacing = Pacing()
        entry = pacing.enter()
        first, second = (asyncio.create_task(pacing.wait_to_enter()) for _ in range(2))
        await pacing_of_the_loop()
        first.cancel()
        await pacing_of_the_loop()
        assert first.cancelled() and not second.done()
        entry.leave()
        await second

    run(go())


def paced(live=("plain",), pace=1000.0):
    pacing = Pacing()
    pacing.pace, pacing.live = pace, live
    return pacing


def test_while_plain_requests_are_served_others_enter_at_a_pace():
    """A few at once, then one after the other in the order in which they came."""

    async def go():
        pacing, entered = paced(pace=50.0), []

        async def ask(name):
            await pacing.wait_to_enter()
            entered.append((name, module.monotonic() - began))

        began = module.monotonic()
        await asyncio.gather(*map(ask, range(module.BURST + 6)))
        return entered

    entered = run(go())
    assert [name for name, _ in entered] == list(range(module.BURST + 6))
    for k, (_, at) in enumerate(entered[module.BURST :], start=1):
        assert at >= k / 50 - 0.005


@pytest.mark.parametrize("by", ["the engine", "an entry"])
def test_nobody_is_held_back_where_no_plain_request_is_served(by):
    async def go():
        states = {"r": "plain"} if by == "the engine" else {}
        pacing = paced(states, pace=0.1)
        entry = pacing.enter()
        if by == "the engine":
            entry.leave()
        asked = [asyncio.create_task(pacing._wait_for_pace()) for _ in range(module.BURST + 20)]
        await pacing_of_the_loop()
        assert sum(one.done() for one in asked) == module.BURST
        states.clear()
        entry.leave()
        pacing._release()
        await asyncio.gather(*asked)
        await asyncio.gather(*(pacing.wait_to_enter() for _ in range(50)))

    run(go())


def test_a_server_takes_its_pace_from_its_environment():
    limits = ServerLimits.load({"WEIR_SERVE_PACE": "7.5"})
    frontend = SimpleNamespace(serve=lambda rows: None, pacing=Pacing())
    ServerState(None, frontend, limits, CollectorRegistry())
    assert frontend.pacing.pace == 7.5 and ServerLimits().pace == 64


@machine.needs(machine.module("vllm"))
def test_which_requests_in_the_engine_are_plain():
    """Those whose states are not of requests of Weir's, as long as vLLM has them."""
    from vllm_weir.patches import frontend as engine

    class State(SimpleNamespace):
        __hash__ = object.__hash__

    class Processor:
        def __init__(self):
            self.request_states, self.tokenizer = {}, None

        def add_request(self, request):
            self.request_states[request.request_id] = State(request_index=0)

    config = SimpleNamespace(
        additional_config={"weir": {}},
        parallel_config=SimpleNamespace(
            nnodes=1, data_parallel_size=1, data_parallel_size_local=1, distributed_executor_backend=None
        ),
        speculative_config=None,
        kv_transfer_config=None,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        model_config=SimpleNamespace(model="m", get_vocab_size=lambda: 9, max_model_len=8, is_mm_prefix_lm=False),
    )
    vllm = SimpleNamespace(vllm_config=config, output_processor=Processor(), engine_core=SimpleNamespace())
    frontend = engine._make_frontend(vllm, SimpleNamespace(refusal="none of it is served"), hold=False)
    frontend.admit = lambda *asked: (SimpleNamespace(name=lambda caller, index: None, held=None), None)
    frontend.pacing.pace = 1.0
    add, states = engine.add_request(Processor.add_request, SimpleNamespace(refusal=None)), vllm.output_processor

    def request(name, extra):
        params = SimpleNamespace(extra_args=extra, output_kind=SimpleNamespace(name="DELTA"), max_tokens=3)
        prompt = {"prompt_token_ids": [1], "prompt_embeds": None, "mm_features": []}
        return SimpleNamespace(request_id=name, sampling_params=params, resumable=False, **prompt)

    found = [frontend.pacing._serves_plain]
    for name, extra in (("a", {"weir": {"v": 1}}), ("b", None), ("c", {"weir": {"v": 1}})):
        add(states, request(name, extra))
        found.append(frontend.pacing._serves_plain)
    for name in "bac":
        del states.request_states[name]
        found.append(frontend.pacing._serves_plain)
    frontend.close()
    assert found == [False, False, True, True, False, False, False] and not len(frontend.pacing._own)


def test_nobody_is_held_back_for_longer_than_said(monkeypatch):
    monkeypatch.setattr(module, "MAX_DELAY", 0.1)

    async def go():
        pacing = paced(pace=0.05)
        began = module.monotonic()
        await asyncio.gather(*(pacing.wait_to_enter() for _ in range(1000)))
        assert module.monotonic() - began < 30  # one after the other: 100

    run(go())


def test_who_goes_away_while_it_is_held_back_takes_nobody_s_place():
    async def go():
        pacing = paced(pace=100.0)
        first = [asyncio.create_task(pacing.wait_to_enter()) for _ in range(module.BURST)]
        await asyncio.gather(*first)
        gone, stays = (asyncio.create_task(pacing.wait_to_enter()) for _ in range(2))
        await pacing_of_the_loop(4)
        gone.cancel()
        await stays
        assert gone.cancelled() and not pacing._delayed

    run(go())


def test_a_server_that_is_not_to_pace_does_not():
    async def go():
        pacing = paced(pace=0.0)
        await asyncio.gather(*(pacing.wait_to_enter() for _ in range(100)))
        assert not pacing._delayed

    run(go())


class Serving:
    """Stands for vLLM's: requests named "fail" fail, "slow" ones wait until they are told, after their admission."""

    def __init__(self, server):
        self.engine_client = SimpleNamespace(_weir_server=server)
        self.admitted, self.begins, self.told = [], asyncio.Event(), asyncio.Event()

    async def create_completion(self, request):
        await self.begins.wait()
        if request.name == "fail":
            raise ValueError("no such model")
        entry = entry_of.get()
        if entry is not None:
            self.admitted.append(request.name)
            entry.leave()
        if request.name == "slow":
            await self.told.wait()
        return entry


@machine.needs(machine.module("vllm"))
@pytest.mark.parametrize("kind", ["plain", "fail", "slow", "cancelled"])
def test_a_plain_request_is_waited_for_until_the_engine_has_it_or_never_will(kind):
    from vllm_weir.patches import server as patches

    create = patches.create(Serving.create_completion, SimpleNamespace(serving_refusal=None))

    async def go():
        pacing = Pacing()
        serving = Serving(SimpleNamespace(frontend=SimpleNamespace(pacing=pacing)))
        request = SimpleNamespace(name=kind, model_extra=None, vllm_xargs=None)
        plain = asyncio.create_task(create(serving, request))
        await asyncio.sleep(0)
        asked = asyncio.create_task(pacing.wait_to_enter())
        await pacing_of_the_loop()
        assert not asked.done()
        if kind == "cancelled":
            plain.cancel()
        serving.begins.set()
        await asyncio.wait_for(asked, 60)
        assert serving.admitted == ([kind] if kind in ("plain", "slow") else [])
        assert plain.done() == (kind != "slow") or kind == "plain"
        serving.told.set()
        await asyncio.gather(plain, return_exceptions=True)
        assert entry_of.get() is None

    run(go())


@machine.needs(machine.module("vllm"))
def test_the_engine_says_when_it_has_a_request():
    from vllm_weir.patches import frontend as patches

    async def add_request(_engine, fails):
        if fails:
            raise ValueError("refused")

    async def go(fails):
        pacing = Pacing()
        entry_of.set(pacing.enter())
        engine = SimpleNamespace(output_processor=SimpleNamespace())
        called = patches.async_llm_add_request(add_request, None)(engine, fails)
        if fails:
            with pytest.raises(ValueError, match="refused"):
                await called
        else:
            await called
        await asyncio.wait_for(pacing.wait_to_enter(), 60)

    for fails in (False, True):
        asyncio.run(go(fails))
