"""`Engine`: a stream keeps an engine supplied and leaves nothing behind; workers are called by known names."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.unit.refusals import refused
from vllm_weir.frontend.engine import WORKER_FUNCTIONS, Engine

PARAMS = SamplingParams()


class LLMEngine:
    """Takes requests, and finishes one in each step."""

    def __init__(self, max_num_seqs: int = 2) -> None:
        model = SimpleNamespace(skip_tokenizer_init=True)
        scheduler = SimpleNamespace(max_num_seqs=max_num_seqs)
        self.vllm_config = SimpleNamespace(model_config=model, scheduler_config=scheduler)
        self.output_processor = SimpleNamespace(_weir_frontend=SimpleNamespace())
        self.live: dict[str, Any] = {}
        self.prompts: list[Any] = []
        self.most, self.aborted, self.silent = 0, 0, False
        self.fails: BaseException | None = None
        self.answers: list[Any] = []

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.live[request_id] = params  # as vLLM does, before its core is asked
        self.prompts.append(prompt)
        self.most = max(self.most, len(self.live))
        if self.fails is not None:
            raise self.fails

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.aborted += self.live.pop(request_id, None) is not None

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def step(self) -> list[Any]:
        request_id = next(iter(self.live))
        self.live.pop(request_id)
        return [] if self.silent else [SimpleNamespace(request_id=request_id, finished=True, outputs=[])]

    def collective_rpc(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        return self.answers or [(name, args)]


def test_every_output_comes_once_and_few_are_under_way() -> None:
    llm = LLMEngine(max_num_seqs=50)
    asked: Any = (([1, 2], PARAMS) if n % 2 else ([1, 2], PARAMS, f"k{n}") for n in range(300))
    keys = [key for key, _ in Engine(llm).stream(asked)]
    assert keys == [n if n % 2 else f"k{n}" for n in range(300)]
    assert llm.most == 100 and not llm.live and not llm.aborted
    assert llm.prompts[0] == {"type": "token", "prompt_token_ids": [1, 2]}
    llm.most = 0
    assert len(list(Engine(llm).stream([([1], PARAMS)] * 9, in_flight=3))) == 9 and llm.most == 3


def test_requests_are_taken_when_there_is_room_and_may_depend_on_outputs() -> None:
    llm, seen = LLMEngine(), []

    def requests() -> Iterator[Any]:
        yield [1], PARAMS, "first"
        while not seen:
            yield None
        yield [2], PARAMS, f"after {seen[0]}"

    for key, _ in Engine(llm).stream(requests()):
        seen.append(key)
    assert seen == ["first", "after first"]
    with refused("requests", "wait for an output"):
        list(Engine(llm).stream([None]))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TypeError("msgpack")])
def test_a_request_whose_sending_fails_is_taken_back(error: BaseException) -> None:
    llm = LLMEngine()

    def requests() -> Iterator[Any]:
        yield [1], PARAMS
        llm.fails = error
        yield [2], PARAMS

    with pytest.raises(type(error)):
        list(Engine(llm).stream(requests()))
    assert not llm.live and llm.aborted == 2


def test_what_is_left_is_aborted_when_nobody_waits_for_it() -> None:
    llm = LLMEngine()
    outputs = Engine(llm).stream(([1], PARAMS) for _ in range(10**9))
    assert [next(outputs)[0], next(outputs)[0]] == [0, 1]
    outputs.close()
    assert not llm.live and llm.aborted == 63  # of 65, two are done

    with pytest.raises(ZeroDivisionError):
        for key, _ in Engine(llm).stream(([1], PARAMS) for _ in range(10**9)):
            1 / key
    assert not llm.live


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_are_finished_ones_and_params_stay_as_they_are(kind: RequestOutputKind) -> None:
    llm, params = LLMEngine(), SamplingParams(output_kind=kind)
    outputs = Engine(llm).stream([([1], params), ([2], params)])
    next(outputs)
    (sent,) = llm.live.values()
    assert sent.output_kind is RequestOutputKind.FINAL_ONLY and params.output_kind is kind and not params.skip_clone
    outputs.close()


def test_what_cannot_be_streamed_is_refused() -> None:
    llm = LLMEngine()
    engine, wrong = Engine(llm), (([1], None), ([1],), [[1], PARAMS], "text")
    for request in wrong:
        given: Any = [([1], PARAMS), request]
        with refused(r"requests[1]", r"expected \(prompt, SamplingParams\)"):
            list(engine.stream(given))
    with refused("requests", "no tokenizer"):
        list(engine.stream([("text", PARAMS)]))
    for number in (0, True, 1.5):
        with refused("in_flight", "at least 1"):
            engine.stream([], in_flight=number)  # type: ignore[arg-type]
    assert not llm.live
    llm.live["another"] = PARAMS
    with refused("llm", "unfinished requests, whose outputs would be lost"):
        next(engine.stream([([1], PARAMS)]))


def test_an_output_that_vllm_owes_is_an_error() -> None:
    llm = LLMEngine()
    llm.silent = True
    with pytest.raises(RuntimeError, match="without an output of each request"):
        list(Engine(llm).stream([([1], PARAMS)]))


def test_workers_are_called_by_known_names_and_their_errors_are_raised() -> None:
    llm = LLMEngine()
    engine = Engine(llm)
    assert engine.call_workers("weir_usage", 1, 2) == [("weir_usage", (1, 2))]
    with refused("name", ", ".join(WORKER_FUNCTIONS)):
        engine.call_workers("weir_usag")
    llm.answers = [{}, {"error": "no room", "field": "layers"}]
    with refused("layers", "no room"):
        engine.call_workers("weir_keep_rows")
    llm.answers = [{"error": "no weights"}]
    with refused("llm", "no weights"):
        engine.call_workers("weir_weights")


def test_an_asynchronous_engine_says_so() -> None:
    class AsyncLLM(LLMEngine):
        async def collective_rpc(self, *_: Any) -> Any: ...  # type: ignore[override]

    engine = Engine(AsyncLLM())
    for call in (lambda: engine.stream([]), lambda: engine.call_workers("weir_usage"), engine.weights):
        with refused("llm", "AsyncLLM answers only asynchronously"):
            call()
