"""Sequences that a probe ends, in vLLM's own output processor: texts, reasons, statistics, streams, aborts."""

from __future__ import annotations

import asyncio
import time
from copy import copy

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists

import vllm_weir as weir
from tests.unit.scored import D, Worker, admitted, opened, probe, rule
from vllm_weir.frontend.lookup import TRACKER
from vllm_weir.frontend.outputs.held_outputs import OutputHolder
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.frontend.tracker import Tracker
from vllm_weir.patches import frontend as patches
from vllm_weir.patches.held_outputs import OutputReader, StoppableDetokenizer, get_output, get_output_async

PROMPT = [5, 6, 7]
P = len(PROMPT)
TEXT = "Tom went to the garden. Tom was happy."
RULES = (rule(),)


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(weir.demo_model())


@pytest.fixture
def engine(tokenizer, monkeypatch):
    original = RequestState._new_completion_output
    original = getattr(original, "__wrapped__", original)
    monkeypatch.setattr(RequestState, "_new_completion_output", patches.new_completion_output(original, None))
    return Engine(tokenizer)


class Engine:
    """vLLM's side of the caller's process, an engine that puts out what it is told to, and a worker that scores."""

    def __init__(self, tokenizer, timeout=30.0):
        self.tokenizer = tokenizer
        self.tokens = tokenizer.encode(TEXT, add_special_tokens=False)
        self.store = RowStore()
        self.worker = Worker(self.store)
        self.holder = OutputHolder(self.store, timeout)
        self.reader = OutputReader(self.holder)
        self.processor = OutputProcessor(tokenizer, log_stats=True)
        self.steps: list[EngineCoreOutputs] = []
        self.aborted: list[str] = []
        self.generated = self.finished = 0

    def add(self, name="r", kind=RequestOutputKind.FINAL_ONLY, probes=None, stops=RULES, n=1, queue=None, **more):
        params = SamplingParams(output_kind=kind, n=n, max_tokens=20, **more)
        request = EngineCoreRequest(
            name, PROMPT, None, params, None, time.time(), None, None, None, external_req_id=f"outer-{name}"
        )
        parent = ParentRequest(request) if n > 1 else None
        for index in range(n):
            one = request
            if parent is not None:
                one = copy(request)
                one.request_id, one.sampling_params = parent.get_child_info(index)
            self.processor.add_request(one, "prompt", parent, index, queue)
            if probes is None or probes:
                pending = opened(self.store, admitted(probes or [probe()], stops), PROMPT, one.request_id)
                state = self.processor.request_states[one.request_id]
                tracker = Tracker(pending, None, D, 0.5, held=self.holder.open(pending))
                setattr(state, TRACKER, tracker)
                state.detokenizer = StoppableDetokenizer(state.detokenizer, tracker.held)

    def out(self, name, *indices, reason=None, logprobs=False):
        ids = [self.tokens[i] for i in indices]
        lists = None
        if logprobs:
            columns = np.array(ids)[:, None]
            lists = LogprobsLists(columns, -columns.astype(np.float32), np.ones(len(ids), int))
        return EngineCoreOutput(name, ids, new_logprobs=lists, finish_reason=reason)

    def step(self, *outputs, **more):
        self.steps.append(EngineCoreOutputs(outputs=list(outputs), **more))

    def process(self, outputs):
        stats = IterationStats()
        done = self.processor.process_outputs(outputs.outputs, outputs.timestamp, stats)
        self.aborted += done.reqs_to_abort
        self.generated += stats.num_generation_tokens
        self.finished += len(stats.finished_requests)
        return done.request_outputs

    def read(self):
        return self.process(self.reader.read(lambda: self.steps.pop(0)))

    def each(self, count, name="r", **more):
        """Put out the first tokens of a sequence one by one."""
        for k in range(count):
            self.step(self.out(name, k, **more))

    def text(self, count):
        return self.tokenizer.decode(self.tokens[:count]).strip()


def test_the_token_that_ends_it_keeps_its_text(engine):
    engine.add()
    engine.each(4)
    engine.worker.send(("r", 0, [[0.0]] * P + [[0.1], [0.2], [0.9]]))
    assert engine.read() == engine.read() == engine.read() == []
    (result,) = engine.read()
    (completion,) = result.outputs
    assert result.finished and result.request_id == "outer-r"
    assert completion.token_ids == engine.tokens[:3] and completion.text.strip() == engine.text(3)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "probe:p")
    assert engine.aborted == ["r"] and not engine.processor.request_states
    assert engine.generated == 3 and engine.finished == 1, "the fourth token is not counted"
    engine.step(engine.out("r", 4))
    assert engine.read() == [] and engine.generated == 3


@pytest.mark.parametrize(("score", "reason", "count"), [(0.1, "length", 2), (0.9, "stop", 1)])
def test_what_the_engine_ends_comes_whole_unless_a_probe_ended_it_before(engine, score, reason, count):
    engine.add()
    engine.step(engine.out("r", 0))
    engine.step(engine.out("r", 1, reason=FinishReason.LENGTH))
    engine.worker.send(("r", P, [[score]]))
    assert engine.read() == []
    (result,) = engine.read()
    (completion,) = result.outputs
    assert completion.finish_reason == reason and completion.token_ids == engine.tokens[:count]
    assert (completion.stop_reason == "probe:p") is (count == 1)
    assert engine.aborted == ["r"] * (count == 1) and engine.generated == count and engine.finished == 1


def test_a_stop_string_in_the_token_that_a_probe_ends_is_named(engine):
    engine.add(stop=["went"], include_stop_str_in_output=True)
    engine.each(3)
    engine.worker.send(("r", P, [[0.1], [0.9]]))
    assert engine.read() == engine.read() == []
    (result,) = engine.read()
    assert result.outputs[0].stop_reason == "went" and result.outputs[0].text.strip() == engine.text(2) == "Tom went"


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_stream_has_no_token_after_it(engine, kind):
    engine.add(kind=kind, logprobs=0)
    engine.each(4, logprobs=True)
    engine.worker.send(("r", 0, [[0.0]] * P + [[0.1], [0.2], [0.9]]))
    out = [completion for _ in range(4) for result in engine.read() for completion in result.outputs]
    delta = kind == RequestOutputKind.DELTA
    ends = [1, 2, 3]
    assert [c.token_ids for c in out] == [engine.tokens[e - 1 if delta else 0 : e] for e in ends]
    text = "".join(c.text for c in out) if delta else out[-1].text
    assert text.strip() == engine.text(3) == "Tom went to"
    for c in out if delta else out[-1:]:  # vLLM goes on appending to the list that it has handed out
        assert [list(step) for step in c.logprobs] == [[token] for token in c.token_ids]
    assert [c.finish_reason for c in out] == [None, None, "stop"]
    scored = [c.scores.positions["p"].tolist() for c in out]
    assert scored == [[0, 1, 2, 3], [4], [5]] if delta else scored == [list(range(P + e)) for e in ends]
    assert out[-1].scores["p"][-1].item() == pytest.approx(0.9), "the score that ended it is there"


def test_several_tokens_in_one_output(engine):
    engine.add(logprobs=0)
    engine.step(engine.out("r", 0, 1, 2, 3, reason=FinishReason.STOP, logprobs=True))
    engine.worker.send(("r", P, [[0.1], [0.9], [0.1]]))
    (result,) = engine.read()
    (completion,) = result.outputs
    assert completion.token_ids == engine.tokens[:2] and completion.text.strip() == engine.text(2)
    assert len(completion.logprobs) == 2 and completion.stop_reason == "probe:p" and engine.generated == 2


def test_sequences_of_one_request_end_each_for_itself(engine):
    engine.add(n=2)
    names = ["0_r", "1_r"]
    for k in range(3):
        reason = FinishReason.LENGTH if k == 2 else None
        engine.step(*(engine.out(name, k, reason=reason) for name in names))
    engine.worker.send(("0_r", P, [[0.9], [0.1]]), ("1_r", P, [[0.1], [0.1]]))
    results = [result for _ in range(3) for result in engine.read()]
    (result,) = results
    assert [c.stop_reason for c in result.outputs] == ["probe:p", None]
    assert [c.token_ids for c in result.outputs] == [engine.tokens[:1], engine.tokens[:3]]
    assert result.finished and engine.aborted == ["0_r"] and engine.finished == 2


def test_others_are_not_held_back(engine):
    engine.add("r")
    engine.add("plain", probes=[])
    engine.step(engine.out("plain", 0, reason=FinishReason.LENGTH), engine.out("r", 0))
    (result,) = engine.read()
    assert result.request_id == "outer-plain" and engine.generated == 1


def test_a_request_that_the_caller_aborts_leaves_nothing_behind(engine):
    engine.add()
    engine.step(engine.out("r", 0))
    assert engine.read() == [] and len(engine.holder) == 1
    engine.processor.abort_requests(["r"], internal=True)
    assert not len(engine.holder)
    engine.step(engine.out("r", 1))
    assert engine.read() == []


def test_weights_are_named_as_they_were_when_a_token_was_computed(engine):
    engine.add()
    engine.step(engine.out("r", 0), weight_version="a")
    engine.step(engine.out("r", 1, reason=FinishReason.LENGTH), weight_version="b", engine_index=0)
    engine.worker.send(("r", P, [[0.1]]))
    versions = []
    for _ in range(3):
        outputs = engine.reader.read(lambda: engine.steps.pop(0))
        versions.append((outputs.weight_version, [o.new_token_ids for o in outputs.outputs]))
    assert versions == [("a", []), ("a", [engine.tokens[:1]]), ("b", [engine.tokens[1:2]])]


def test_a_client_that_blocks_waits_no_longer_than_the_timeout(tokenizer, engine):
    engine = Engine(tokenizer, timeout=0.05)
    engine.add()
    engine.each(2)
    assert engine.read() == []
    before = time.monotonic()
    (result,) = engine.read()
    assert time.monotonic() - before >= 0.05 and result.finished and engine.aborted == ["r"]
    with pytest.raises(weir.WeirError, match=r"the scores at position 3 did not arrive within 0\.05 s"):
        patches._verify(patches_view(result))


def patches_view(result):
    return getattr(result.outputs[0], patches._VIEW)


class Client:
    """Stands for vLLM's clients of an engine core."""

    def __init__(self):
        self.queue: asyncio.Queue = asyncio.Queue()

    async def get_output_async(self):
        outputs = await self.queue.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    get = get_output_async


Client.get_output_async = get_output_async(Client.get, None)


async def started(engine, *outputs):
    """A client that has these outputs, and the task that reads them."""
    client = Client()
    client._weir_reader = engine.reader

    async def handle():
        while True:
            engine.process(await client.get_output_async())

    for some in outputs:
        client.queue.put_nowait(EngineCoreOutputs(outputs=[some]))
    return client, asyncio.create_task(handle())


async def until(holds):
    """Wait for what the tasks are about to do."""
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


def collector(engine, name="r", kind=RequestOutputKind.DELTA, **more):
    queue = RequestOutputCollector(kind, name)
    engine.add(name, kind=kind, queue=queue, **more)
    return queue


async def soon(queue):
    return await asyncio.wait_for(queue.get(), 20)


def test_late_scores_hold_nobody_else_up(engine):
    async def go():
        client, task = await started(engine)
        held, plain = collector(engine), collector(engine, "plain", probes=[])
        for k in range(2):
            client.queue.put_nowait(EngineCoreOutputs(outputs=[engine.out("r", k), engine.out("plain", k)]))
            assert (await soon(plain)).outputs[0].token_ids == engine.tokens[k : k + 1]
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert held.output is None, "the loop turns"
        engine.worker.send(("r", 0, [[0.0]] * P + [[0.1]]))
        assert (await soon(held)).outputs[0].token_ids == engine.tokens[:1]
        client.queue.put_nowait(EngineCoreOutputs(outputs=[engine.out("r", 2, reason=FinishReason.LENGTH)]))
        await until(client.queue.empty)
        engine.worker.send(("r", P + 1, [[0.9]]))
        last = await soon(held)
        assert last.finished and last.outputs[0].stop_reason == "probe:p", "without another step of the engine"
        assert engine.generated == 4
        task.cancel()

    asyncio.run(go())


def test_scores_that_never_come_end_the_stream_with_the_error(tokenizer, engine):
    engine = Engine(tokenizer, timeout=0.05)

    async def go():
        queue = collector(engine)
        _, task = await started(engine, engine.out("r", 0), engine.out("r", 1))
        last = await soon(queue)
        assert last.finished and engine.aborted == ["r"]
        with pytest.raises(weir.WeirError, match=r"did not arrive within 0\.05 s"):
            patches._verify(patches_view(last))
        task.cancel()

    asyncio.run(go())


@pytest.mark.parametrize("behind", [False, True])
def test_an_engine_that_dies_is_heard_at_once(engine, behind):
    async def go():
        collector(engine)
        client, task = await started(engine, *(engine.out("r", k) for k in range(1 + behind)))
        await until(lambda: client.queue.empty() and engine.holder.behind == behind)
        client.queue.put_nowait(RuntimeError("the engine is dead"))
        with pytest.raises(RuntimeError, match="dead"):
            await asyncio.wait_for(task, 20)

    asyncio.run(go())


def test_whoever_stops_reading_leaves_no_task(engine):
    async def go():
        collector(engine)
        client, task = await started(engine, engine.out("r", 0), engine.out("r", 1))
        await until(lambda: client.queue.empty() and engine.holder.behind)
        task.cancel()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    asyncio.run(go())


def test_clients_of_engines_without_weir_are_as_they_were():
    class Plain:
        def get_output(self):
            return "outputs"

    assert get_output(Plain.get_output, None)(Plain()) == "outputs"


def test_late_outputs_count_for_the_engine_that_they_came_from(engine):
    async def go():
        client = Client()
        client._weir_reader = engine.reader
        engine.add()
        for k in range(2):
            client.queue.put_nowait(EngineCoreOutputs(engine_index=1, outputs=[engine.out("r", k)]))
            assert (await client.get_output_async()).outputs == []
        reading = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0.02)
        engine.worker.send(("r", P, [[0.1]]))
        later = await asyncio.wait_for(reading, 20)
        assert later.engine_index == 1 and [one.new_token_ids for one in later.outputs] == [engine.tokens[:1]]
        client.queue.put_nowait(EngineCoreOutputs(engine_index=0, outputs=[engine.out("other", 0)]))
        assert (await client.get_output_async()).engine_index == 0
        client._weir_reader = None

    asyncio.run(go())
