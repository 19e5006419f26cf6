"""Whose turn it is in an event loop: plain requests first, then those that ask something of Weir, one by one."""

from __future__ import annotations

import asyncio
import functools
import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from tests.support import machine
from vllm_weir.frontend import pacing as module
from vllm_weir.frontend.pacing import Pacing, entry_of
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.state import ServerState


async def turns_of_the_loop(n: int = 20) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However slow the machine is."""
    monkeypatch.setattr(module, "MAX_WAIT_PLAIN", 60.0)


def in_a_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


async def called(pacing, way="wait_to_enter", turns=20):
    """A task that waits for its turn, once the loop has gone on."""
    task = asyncio.create_task(getattr(pacing, way)())
    await turns_of_the_loop(turns)
    return task


@in_a_loop
async def test_who_came_before_goes_first_and_nobody_who_comes_later():
    pacing = Pacing()
    entries = [pacing.enter(), pacing.enter()]
    asked = await called(pacing)
    later = pacing.enter()
    entries[0].leave()
    await turns_of_the_loop()
    assert not asked.done()
    entries[0].leave()  # says nothing new
    await turns_of_the_loop()
    assert not asked.done()
    entries[1].leave()
    await turns_of_the_loop()
    assert asked.done()
    after = await called(pacing)
    assert not after.done()
    later.leave()
    await after


@in_a_loop
async def test_those_that_queue_do_not_wait_again_for_who_comes_later():
    """Each waited for those that were there when its turn came: the longer the queue, the longer it took."""
    pacing = Pacing()
    first = pacing.enter()
    asked = [asyncio.create_task(pacing.wait_to_enter()) for _ in range(5)]
    await turns_of_the_loop()
    later = pacing.enter()
    after = await called(pacing)
    first.leave()
    await asyncio.gather(*asked)
    await turns_of_the_loop()
    assert not after.done()
    later.leave()
    await after


@pytest.mark.parametrize(("way", "most"), [("wait_to_enter", "MAX_ENTERING"), ("wait_to_respond", "MAX_RESPONDING")])
@in_a_loop
async def test_a_few_at_a_time_with_turns_for_others_between(way, most):
    pacing, order = Pacing(), []

    async def asked(name):
        await getattr(pacing, way)()
        order.append(name)

    async def other():
        while 39 not in order:
            await asyncio.sleep(0)
            order.append(-1)

    await asyncio.gather(*(asked(k) for k in range(40)), other())
    together = [len(list(some)) for theirs, some in itertools.groupby(order, lambda k: k >= 0) if theirs]
    assert [k for k in order if k >= 0] == list(range(40)) and max(together) == getattr(module, most)


@in_a_loop
async def test_who_waits_for_something_itself_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_PLAIN", 0.05)
    pacing = Pacing()
    pacing.enter()
    began = module.monotonic()
    await pacing.wait_to_enter()
    assert 0.04 < module.monotonic() - began < 30
    began = module.monotonic()
    await asyncio.gather(*(pacing.wait_to_enter() for _ in range(600)))
    assert module.monotonic() - began < 30, "each waited for it anew"


@in_a_loop
async def test_who_is_gone_while_waiting_lets_the_next_go():
    pacing = Pacing()
    entry = pacing.enter()
    first, second = (asyncio.create_task(pacing.wait_to_enter()) for _ in range(2))
    await turns_of_the_loop()
    first.cancel()
    await turns_of_the_loop()
    assert first.cancelled() and not second.done()
    entry.leave()
    await second


def paced(live=("plain",), pace=1000.0):
    pacing = Pacing()
    pacing.pace, pacing.live = pace, live
    return pacing


@in_a_loop
async def test_while_plain_requests_are_served_others_enter_at_a_pace():
    """A few at once, then one after the other in the order in which they came."""
    pacing, entered = paced(pace=200.0), []

    async def ask(name):
        await pacing.wait_to_enter()
        entered.append((name, module.monotonic() - began))

    began = module.monotonic()
    await asyncio.gather(*map(ask, range(module.BURST + 6)))
    assert [name for name, _ in entered] == list(range(module.BURST + 6))
    for k, (_, at) in enumerate(entered[module.BURST :], start=1):
        assert at >= k / 200 - 0.005


@pytest.mark.parametrize("by", ["the engine", "an entry"])
@in_a_loop
async def test_nobody_is_held_back_where_no_plain_request_is_served(by):
    states = {"r": "plain"} if by == "the engine" else {}
    pacing = paced(states, pace=0.1)
    entry = pacing.enter()
    if by == "the engine":
        entry.leave()
    asked = [asyncio.create_task(pacing._wait_for_pace()) for _ in range(module.BURST + 20)]
    await turns_of_the_loop()
    assert sum(one.done() for one in asked) == module.BURST
    states.clear()
    entry.leave()
    pacing._release()
    await asyncio.gather(*asked)
    await asyncio.gather(*(pacing.wait_to_enter() for _ in range(50)))


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
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, disable_chunked_mm_input=False),
        model_config=SimpleNamespace(model="m", get_vocab_size=lambda: 9, max_model_len=8, is_mm_prefix_lm=False),
    )
    vllm = SimpleNamespace(vllm_config=config, output_processor=Processor(), engine_core=SimpleNamespace())
    frontend = engine._make_frontend(vllm, SimpleNamespace(refusal="none of it is served"), hold=False)
    frontend.admit = lambda *asked: (SimpleNamespace(name=lambda caller, index: None, held=None), None)
    frontend.pacing.pace = 1.0
    add, states = engine.add_request(Processor.add_request, SimpleNamespace(refusal=None)), vllm.output_processor

    def request(name, extra):
        params = SimpleNamespace(extra_args=extra, output_kind=SimpleNamespace(name="DELTA"), max_tokens=3)
        prompt = {"prompt_token_ids": [1], "prompt_embeds": None, "mm_features": [], "lora_request": None}
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


@in_a_loop
async def test_nobody_is_held_back_for_longer_than_said(monkeypatch):
    monkeypatch.setattr(module, "MAX_DELAY", 0.02)
    pacing = paced(pace=0.05)
    began = module.monotonic()
    await asyncio.gather(*(pacing.wait_to_enter() for _ in range(1000)))
    assert module.monotonic() - began < 30  # one after the other: 100


@in_a_loop
async def test_who_goes_away_while_it_is_held_back_takes_nobody_s_place():
    pacing = paced(pace=10.0)
    first = [asyncio.create_task(pacing.wait_to_enter()) for _ in range(module.BURST)]
    await asyncio.gather(*first)
    gone, stays = (asyncio.create_task(pacing.wait_to_enter()) for _ in range(2))
    await turns_of_the_loop(4)
    gone.cancel()
    await stays
    assert gone.cancelled() and not pacing._delayed


@in_a_loop
async def test_a_server_that_is_not_to_pace_does_not():
    pacing = paced(pace=0.0)
    await asyncio.gather(*(pacing.wait_to_enter() for _ in range(100)))
    assert not pacing._delayed


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
@in_a_loop
async def test_a_plain_request_is_waited_for_until_the_engine_has_it_or_never_will(kind):
    from vllm_weir.patches import server as patches

    create = patches.create(Serving.create_completion, SimpleNamespace(serving_refusal=None))
    pacing = Pacing()
    serving = Serving(SimpleNamespace(frontend=SimpleNamespace(pacing=pacing), by_default=None))
    request = SimpleNamespace(name=kind, model_extra=None, vllm_xargs=None)
    plain = asyncio.create_task(create(serving, request))
    await asyncio.sleep(0)
    asked = await called(pacing)
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


@machine.needs(machine.module("vllm"))
@pytest.mark.parametrize("fails", [False, True])
@in_a_loop
async def test_the_engine_says_when_it_has_a_request(fails):
    from vllm_weir.patches import frontend as patches

    async def add_request(_engine, fails):
        if fails:
            raise ValueError("refused")

    pacing = Pacing()
    entry_of.set(pacing.enter())
    engine = SimpleNamespace(output_processor=SimpleNamespace())
    with pytest.raises(ValueError, match="refused") if fails else nullcontext():
        await patches.async_llm_add_request(add_request, None)(engine, fails)
    await pacing.wait_to_enter()
