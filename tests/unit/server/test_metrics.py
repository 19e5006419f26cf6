"""What the metrics count, and that gauges follow what workers say."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tests.support.measure import becomes
from tests.unit.admin_app import FACTS, LAYERS, D
from tests.unit.frontends import frontend_of
from vllm_weir import messages
from vllm_weir.frontend import pacing as pacing_module
from vllm_weir.frontend.pacing import BURST
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.server import metrics
from vllm_weir.server.metrics import ServerMetrics
from vllm_weir.server.shared.result_files import ResultFiles

PROMPT = [5, 6, 7, 8, 9]
NOTHING = np.zeros((0, 5), np.int32), np.zeros((0, 4), np.int32), b""


@pytest.fixture
def frontend():
    frontend = frontend_of(FACTS)
    yield frontend
    frontend.close()


def value(registry, name, **labels):
    return registry.get_sample_value(name, {"model_name": "m", **labels})


def finished(frontend, generated, cached=0, delta=False, **weir_object):
    tracker, _ = frontend.admit("r", {"weir": {"v": 1, **weir_object}}, PROMPT, len(PROMPT), 8)
    if delta:
        tracker.view(generated[:2], True, None, cached)
    return tracker.view(generated, delta, "stop", cached)


ADD = {"op": "add", "vector": [1.0] * D, "layers": [0, 1]}
ROWS = len(PROMPT) + 3 - 1
ALL = {"hook": "resid_post", "layers": "all"}


@pytest.mark.parametrize(
    ("weir_object", "rows", "size"),
    [
        ({"capture": [ALL]}, LAYERS * ROWS, LAYERS * ROWS * D * 4),
        ({"capture": [{**ALL, "layers": [1], "positions": "generated"}]}, 2, 2 * D * 4),
        ({"capture": [{**ALL, "reduce": "mean"}]}, LAYERS, LAYERS * D * 4),
        ({"capture": [{**ALL, "project": [[1.0] * D] * 3}]}, LAYERS * ROWS, LAYERS * ROWS * 3 * 4),
        ({"interventions": [ADD]}, 0, 0),
    ],
)
@pytest.mark.parametrize("delta", [False, True])
def test_rows_and_bytes(frontend, weir_object, rows, size, delta):
    """Also where the last output of a stream has only the last rows."""
    registry = CollectorRegistry()
    meter = ServerMetrics(frontend, "m", registry=registry)
    meter.finished(finished(frontend, [1, 2, 3], delta=delta, **weir_object))
    assert value(registry, "weir_rows_captured_total") == rows
    assert value(registry, "weir_bytes_out_total") == size


@pytest.mark.parametrize(
    ("interventions", "cached", "tokens"),
    [
        ([], 0, 0),
        ([ADD], 0, ROWS),
        ([ADD], 4, ROWS - 4),
        ([{**ADD, "positions": "prompt"}, {**ADD, "positions": "last_prompt"}], 0, len(PROMPT)),
        ([{**ADD, "positions": "prompt"}, {**ADD, "positions": "generated"}], 2, ROWS - 2),
        ([{**ADD, "vector": [[1.0] * D, [0.0] * D, [1.0] * D], "positions": "2:5"}], 0, 2),
        ([{**ADD, "scale": 0.0}], 0, 0),
        ([{**ADD, "positions": [0, 50]}], 0, 1),
    ],
)
def test_steered_tokens(frontend, interventions, cached, tokens):
    registry = CollectorRegistry()
    meter = ServerMetrics(frontend, "m", registry=registry)
    meter.finished(finished(frontend, [1, 2, 3], cached, interventions=interventions))
    assert value(registry, "weir_steered_tokens_total") == tokens


def test_gauges_follow_the_workers_while_requests_live(frontend, monkeypatch, tmp_path):
    """An engine has its fullest worker's fill; with the last request gone the gauges are zero and the task ends."""
    monkeypatch.setattr(metrics, "PERIOD", 0.01)
    registry = CollectorRegistry()
    spool = ResultFiles(tmp_path, 1 << 20, 600.0)

    def tell(worker, engine, pressure, waiting):
        header = messages.MessageHeader("t", worker, D, "float32", pressure=pressure, engine=engine, waiting=waiting)
        frontend.store.receive(messages.decode(messages.encode(header)), MappedBuffer(), *NOTHING)

    async def live():
        meter = ServerMetrics(frontend, "m", spool, registry)
        assert value(registry, "weir_buffer_fill", engine="0") == 0
        tracker, _ = frontend.admit("r", {"weir": {"v": 1, "capture": [ALL]}}, PROMPT, len(PROMPT), 8)
        meter.admitted()
        task = meter._task
        meter.admitted()
        assert meter._task is task  # one for all requests
        for told in (("a", 0, 0.25, 3), ("b", 0, 0.5, 3), ("c", 1, 0.125, 0)):
            tell(*told)
        (tmp_path / f"{'0' * 32}.safetensors").write_bytes(bytes(100))
        spool.sweep()
        names = [(n, {"engine": e}) for n in FILL_AND_WAIT for e in "01"] + [("weir_spool_bytes", {})]
        await becomes(lambda: [value(registry, n, **labels) for n, labels in names], [0.5, 0.125, 3, 0, 100], 60)
        assert not task.done()
        del tracker
        await asyncio.wait_for(task, 60)
        assert all(value(registry, n, engine=e) == 0 for n in FILL_AND_WAIT for e in "01")

    asyncio.run(live())


FILL_AND_WAIT = ("weir_buffer_fill", "weir_requests_waiting")


def test_requests_that_are_held_back_are_told(frontend, monkeypatch):
    """Also while no other is in the engine: they are looked at until the last has gone on or away."""
    monkeypatch.setattr(metrics, "PERIOD", 0.01)
    monkeypatch.setattr(pacing_module, "MAX_DELAY", 60.0)
    registry = CollectorRegistry()

    async def held(number):
        await becomes(lambda: value(registry, "weir_requests_held"), number, 60)

    async def live():
        meter, pacing = ServerMetrics(frontend, "m", registry=registry), frontend.pacing
        assert value(registry, "weir_requests_held") == 0
        pacing.pace, pacing.live = 1e-6, ("plain",)
        asked = [asyncio.create_task(pacing.wait_to_enter()) for _ in range(BURST + 3)]
        await becomes(lambda: all(one.done() for one in asked[:BURST]), True, 60)
        meter.admitted()
        await held(3)
        asked[-1].cancel()
        await held(2)
        assert not meter._task.done() and not len(frontend.store)
        pacing.live = ()
        await asyncio.gather(*asked[:-1])
        await asyncio.wait_for(meter._task, 60)
        assert value(registry, "weir_requests_held") == 0

    asyncio.run(live())


def test_errors(frontend):
    registry = CollectorRegistry()
    meter = ServerMetrics(frontend, "m", registry=registry)
    meter.refused()
    meter.refused()
    meter.failed()
    assert value(registry, "weir_errors_total", reason="refused") == 2
    assert value(registry, "weir_errors_total", reason="failed") == 1


def test_a_step_says_how_many_requests_wait():
    """The scheduler's wrapper tells the workers along with the step, and says nothing otherwise."""
    from types import SimpleNamespace

    from vllm_weir.patches import scheduler as core

    class Waiting(list):
        def release(self, _live):
            return []

    class Scheduler:
        def __init__(self) -> None:
            self.requests, self.running, self.waiting, self.max_num_scheduled_tokens = {}, [], [], 8
            self.scheduler_config = SimpleNamespace(enable_chunked_prefill=True)

    scheduler, waiting = Scheduler(), Waiting("abc")
    budget = SimpleNamespace(tokens=lambda _live, limit: limit)
    core._states[scheduler] = SimpleNamespace(waiting=waiting, budget=budget, connectors=None, most_whole=0)
    schedule = core.schedule(lambda _self: SimpleNamespace(), None)
    assert vars(schedule(scheduler)) == {core.WAITING: 3}
    waiting.clear()
    assert vars(schedule(scheduler)) == {}
