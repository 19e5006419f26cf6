"""Nothing stays behind: 1,000 short requests, a third of them aborted midway."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest

import vllm_weir as weir
from tests.engine.common import (
    BOUND,
    SELECTORS,
    asking,
    assert_nothing_is_held,
    directory,
    frontend,
    prompts,
    reached,
    sampling,
    tokens,
    verify,
)
from tests.support.engines import close_all, get_llm
from tests.support.machine import on_cpu
from tests.support.measure import eventually

pytestmark = pytest.mark.engine("default")


def test_1000_requests_a_third_aborted(llm):
    engine, draw = llm.llm_engine, random.Random(5)
    finished, aborted = set(), set()
    waiting = [f"q-{i}" for i in range(1000)]
    live: list[str] = []
    while waiting or engine.has_unfinished_requests():
        while waiting and len(live) < 60:
            request_id = waiting.pop()
            number = int(request_id[2:])
            selector = SELECTORS[number % len(SELECTORS)]
            selector = selector if reached(selector, 1 + number % 23, 1 + number % 5) else "all"
            params = weir.params(sampling(1 + number % 5), capture=weir.Capture("resid_post", [number % 4], selector))
            engine.add_request(request_id, {"prompt_token_ids": tokens(1 + number % 23, number)}, params)
            live.append(request_id)
            if number % 3 == 0 and draw.random() < 0.3:  # some never run at all
                engine.abort_request([request_id])
                live.remove(request_id)
                aborted.add(request_id)
        for out in engine.step():
            if out.finished:
                assert out.activations is not None and out.receipt.complete
                finished.add(out.request_id)
                live.remove(out.request_id)
        for request_id in [r for r in live if int(r[2:]) % 3 == 0 and draw.random() < 0.5]:
            engine.abort_request([request_id])
            live.remove(request_id)
            aborted.add(request_id)
    del out
    assert len(finished) + len(aborted) == 1000 and len(aborted) > 200
    assert_nothing_is_held(llm)


def test_rows_live_as_long_as_their_output(llm, truth):
    params, wanted = asking("all", truth.num_layers)
    kept = llm.generate(prompts([4, 5]), params, use_tqdm=False)
    llm.generate(prompts([4] * 20), params, use_tqdm=False)
    eventually(lambda: len(frontend(llm).store), 2, 1)
    for out in kept:
        verify(out, wanted, truth)
    del kept, out
    assert_nothing_is_held(llm)


def test_an_aborted_request_gives_the_rows_it_has_and_harms_nobody(llm, truth):
    from vllm.sampling_params import RequestOutputKind

    params, wanted = asking("all", truth.num_layers, max_tokens=30)
    params.output_kind = RequestOutputKind.CUMULATIVE
    engine, last = llm.llm_engine, {}
    for name in ("gone", "stays"):
        engine.add_request(name, {"prompt_token_ids": tokens(9)}, params)
    for step in range(200):
        if step == 5:
            engine.abort_request(["gone"])
        for out in engine.step():
            last[out.request_id] = out
        if not engine.has_unfinished_requests():
            break
    assert not last["gone"].receipt.complete and len(last["gone"].outputs[0].token_ids) < 30
    ids = list(last["gone"].prompt_token_ids) + list(last["gone"].outputs[0].token_ids)
    reference = truth.rows(ids[:-1])
    rows = last["gone"].activations
    assert rows.positions.tolist() == list(range(len(ids) - 1))
    for site in rows.sites:
        assert (rows[site] - reference[tuple(site)]).abs().max() <= BOUND * reference[tuple(site)].abs().max()
    verify(last["stays"], wanted, truth)
    del last, out, rows
    assert_nothing_is_held(llm)


def test_a_closed_engine_leaves_neither_threads_nor_its_model(root):
    def threads():
        gc.collect()
        return [t for t in threading.enumerate() if t.name.startswith("weir-")]

    # The first engine of a process imports much as it starts, and exceptions of those imports hold its frames.
    get_llm(directory(root))
    close_all()
    before = threads()
    # Threads of engines that other tests have closed may be about to notice that.
    ending = {t for t in before if t.name != "weir-receiver"}
    llm = get_llm(directory(root))
    out = llm.generate(prompts([5]), asking("all", 4)[0], use_tqdm=False)[0]
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    model = weakref.ref(worker.model_runner.get_model())
    pins = set() if on_cpu() else {"weir-pin"}  # pins host memory, which a CPU's copies do not need
    started = {t.name for t in threads() if t not in ending}
    assert started == {"weir-receiver", "weir-buffer-server", "weir-notifier", *pins}
    del llm, worker
    close_all()
    assert set(threads()) <= set(before) and model() is None
    assert out.activations["resid_post", 0].isfinite().all(), "rows outlive the engine"
