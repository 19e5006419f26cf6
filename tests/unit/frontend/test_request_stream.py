"""`RequestStream`: whatever goes wrong, nothing of it is left in an engine; its outputs are finished ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_weir.frontend.request_stream import RequestStream


class Engine:
    """Takes requests, and finishes one in each step."""

    def __init__(self, max_num_seqs: int = 2) -> None:
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs))
        self.live: dict[str, Any] = {}
        self.most = 0
        self.fails: BaseException | None = None

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.live[request_id] = params  # as vLLM does, before its core is asked
        self.most = max(self.most, len(self.live))
        if self.fails is not None:
            raise self.fails

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.live.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def step(self) -> list[Any]:
        request_id = next(iter(self.live))
        self.live.pop(request_id)
        return [SimpleNamespace(request_id=request_id, finished=True, outputs=[])]


def test_every_output_comes_once_and_the_window_bounds_what_is_under_way():
    engine, done = Engine(max_num_seqs=50), []
    stream = RequestStream(engine)
    for _ in range(300):
        stream.wait_for_room()
        stream.submit([1, 2], SamplingParams(), done.append)
    stream.drain()
    assert len({out.request_id for out in done}) == len(done) == 300
    assert engine.most == stream.window == 100 and not engine.live


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TypeError("msgpack")])
def test_a_request_whose_sending_fails_is_taken_back(error):
    engine = Engine()
    stream = RequestStream(engine)
    stream.submit([1], SamplingParams(), lambda out: None)
    engine.fails = error
    with pytest.raises(type(error)):
        stream.submit([2], SamplingParams(), lambda out: None)
    assert len(engine.live) == 2
    stream.abort()
    assert not engine.live


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_are_finished_ones_and_a_callback_may_submit_more(kind):
    engine, seen = Engine(), []
    stream = RequestStream(engine)

    def twice(out: Any) -> None:
        seen.append(out.request_id)
        if len(seen) == 1:
            stream.submit([3], SamplingParams(), twice)

    stream.submit([1], SamplingParams(output_kind=kind), twice)
    (params,) = engine.live.values()
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    stream.drain()
    assert len(seen) == 2
