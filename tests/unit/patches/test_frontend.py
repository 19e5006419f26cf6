"""What the wrappers in the caller's process read off vLLM's configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_weir.frontend.lookup import TRACKER
from vllm_weir.patches.frontend import _uncounted, may_be_remote


class OnRay:
    uses_ray = True


class Own:
    uses_ray = False


@pytest.mark.parametrize(
    ("change", "remote"),
    [
        ({}, False),
        ({"nnodes": 2}, True),
        ({"data_parallel_size": 2}, True),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2}, False),
        *(
            ({"distributed_executor_backend": one}, one in ("ray", OnRay))
            for one in (None, "mp", "uni", "ray", OnRay, Own)
        ),
    ],
)
def test_workers_on_other_machines(change, remote):
    """Rows come over TCP where they may be."""
    plain = dict(nnodes=1, data_parallel_size=1, data_parallel_size_local=1, distributed_executor_backend="mp")
    assert may_be_remote(SimpleNamespace(**plain | change)) is remote


def test_requests_that_warm_up_are_not_counted():
    """Nor are steps of theirs alone; others are, and all are once it is over."""

    class Processor:
        def _update_stats_from_output(self, req_state, *rest):
            seen.append((req_state.name, *rest))

        _update_stats_from_finished = _update_stats_from_output

    class Loggers:
        def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
            seen.append(iteration_stats and iteration_stats.name)

    def state(name, **more):
        return SimpleNamespace(name=name, **more)

    def work():
        for one in states:
            engine.output_processor._update_stats_from_output(one, 1)
            engine.output_processor._update_stats_from_finished(one, 2)
        for step in (None, *steps):
            engine.logger_manager.record(scheduler_stats=None, iteration_stats=step, engine_idx=0)
        found = list(seen)
        seen.clear()
        return found

    seen = []
    states = [state("plain"), *(state(str(w), **{TRACKER: SimpleNamespace(warms=w)}) for w in (True, False))]
    steps = [state("empty", num_generation_tokens=0, finished_requests=[])]
    steps += [state("one", num_generation_tokens=1, finished_requests=[])]
    steps += [state("ends", num_generation_tokens=0, finished_requests=[1])]
    engine = SimpleNamespace(output_processor=Processor(), logger_manager=Loggers())
    before = work()
    with _uncounted(engine):
        inside = work()
    assert inside == [one for one in before[:6] if one[0] != "True"] + [None, None, "one", "ends"]
    assert before == work() and len(before) == 10
    assert not vars(engine.output_processor) and not vars(engine.logger_manager)
    with _uncounted(SimpleNamespace(output_processor=Processor(), logger_manager=None)):
        pass
