"""Runs whose engine gets the next prompts before it has done the last, and whose rows are written meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.extracting import FakeAheadEngine, FakeEngine, run_fake, texts, write_jsonl
from tests.unit.extraction.test_run import same_as_whole
from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import PIECES_AHEAD, VllmEngine
from vllm_weir.frontend.engine import Engine
from vllm_weir.storage import load

COUNT, BATCH = 128, 2 * PIECES_AHEAD


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "t.jsonl", texts(COUNT))


class Started:
    """Starts one engine and keeps it."""

    def __call__(self, wanted: Any) -> Any:
        self.engine = FakeAheadEngine(wanted)
        return self.engine


def test_the_engine_has_few_pieces_at_once_and_always_a_next_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Started()
    assert run_fake(source, str(tmp_path / "out"), start_engine=start, batch=BATCH).requests == COUNT
    assert start.engine.most[:2] == (PIECES_AHEAD, BATCH) and start.engine.reads == COUNT / 2
    assert load(tmp_path / "out").requests == sorted(load(tmp_path / "out").requests)
    assert same_as_whole(tmp_path / "out", source, tmp_path)

    monkeypatch.setattr("vllm_weir.extraction.record_loop.PIECE_BYTES", 1600 * FakeEngine.row_bytes)
    run_fake(source, str(tmp_path / "small"), start_engine=start, batch=COUNT)
    assert 900 < start.engine.most[2] <= 1600  # pieces of up to 100 tokens; the longest text has 40


def test_rows_that_are_not_yet_written_are_bounded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not keep up holds the engine back: one piece is written, and one waits."""
    read, written, behind = [0], [0], []
    real = FakeEngine.read

    def counting(self: FakeEngine, prompts: Sequence[list[int]]) -> Any:
        behind.append(read[0] - written[0])
        read[0] += 1
        return real(self, prompts)

    monkeypatch.setattr(FakeEngine, "read", counting)
    from vllm_weir.extraction.record_loop import RecordLoop

    write = RecordLoop._write

    def slow(self: RecordLoop, *args: Any) -> Any:
        threading.Event().wait(0.002)
        counts = write(self, *args)
        written[0] += 1
        return counts

    monkeypatch.setattr(RecordLoop, "_write", slow)
    assert run_fake(source, str(tmp_path / "out"), start_engine=FakeAheadEngine, batch=BATCH).requests == COUNT
    assert max(behind) <= 2 and written == read == [COUNT // 2]


def test_the_next_texts_are_encoded_while_the_engine_reads(source: Path, tmp_path: Path) -> None:
    encoded = [threading.Event() for _ in range(COUNT // 8 + 1)]
    threads = set()

    class Engine(FakeEngine):
        def encode(self, values: Any) -> Any:
            threads.add(threading.current_thread())
            out = super().encode(values)
            next(event for event in encoded if not event.is_set()).set()
            return out

        def read(self, prompts: Any) -> Any:
            assert self.reads + 1 == COUNT // 8 or encoded[self.reads + 1].wait(60)
            return super().read(prompts)

    assert run_fake(source, str(tmp_path / "out"), start_engine=Engine).requests == COUNT
    assert len(threads) == 1 and threading.main_thread() not in threads


def test_a_bad_record_ends_the_run_behind_all_that_came_before_its_batch(tmp_path: Path) -> None:
    values = texts(COUNT)
    values[50] = " "
    source = write_jsonl(tmp_path / "bad.jsonl", values)
    with pytest.raises(WeirError, match=r"^record 50: .*the text is empty"):
        run_fake(source, str(tmp_path / "out"), start_engine=FakeAheadEngine, batch=BATCH)
    assert len(load(tmp_path / "out")) == BATCH


def finished(name: str, ids: list[int]) -> Any:
    outputs = [SimpleNamespace(token_ids=[0], finish_reason="length")]
    return SimpleNamespace(request_id=name, finished=True, prompt_token_ids=ids, outputs=outputs)


class Vllm:
    """As much of ``vllm.LLM`` as `VllmEngine` drives; each step ends the newest request that it has."""

    def __init__(self) -> None:
        self.live, self.aborted, self.most = {}, [], 0
        self.vllm_config = SimpleNamespace(model_config=None, scheduler_config=SimpleNamespace(max_num_seqs=1))
        self.output_processor = SimpleNamespace(_weir_frontend=SimpleNamespace())

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.live[name] = prompt["prompt_token_ids"]
        self.most = max(self.most, sum(map(len, self.live.values())))

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def step(self) -> list[Any]:
        name, ids = self.live.popitem()
        return [finished(name, ids)]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names


def on_vllm(row_bytes: int = 1) -> Any:
    engine = VllmEngine.__new__(VllmEngine)
    engine.llm, engine.params, engine.row_bytes = Vllm(), SamplingParams(), row_bytes
    engine.engine = Engine(engine.llm)
    engine.reading = SimpleNamespace(rows=lambda output: [output.prompt_token_ids])
    return engine


def test_vllm_s_outputs_come_in_the_order_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompts = on_vllm(), [[k] * (1 + k % 5) for k in range(30)]
    pieces = [prompts[k : k + 3] for k in range(0, 30, 3)]
    read = [row for outputs in engine.read_ahead(iter(pieces)) for output in outputs for row in output.rows]
    assert read == prompts and not engine.llm.aborted and engine.llm.most > 4 * 3
    assert [output.rows for output in engine.read(prompts[:2])] == [[prompts[0]], [prompts[1]]]
    assert list(engine.read_ahead(iter([]))) == []

    monkeypatch.setattr("vllm_weir.extraction.engine.PIECE_BYTES", 200)
    for row_bytes, most in ((10, 20), (100, 12), (7, 28)):
        bounded = on_vllm(row_bytes)
        assert sum(map(len, bounded.read_ahead(iter(pieces)))) == 30
        assert bounded.llm.most <= most  # tokens of 200 bytes, or of one piece


def test_vllm_drops_what_nobody_waits_for() -> None:
    engine = on_vllm()
    outputs = engine.read_ahead(iter([[[1]], [[2]], [[3]], [[4]], [[5]]]))
    assert next(outputs)[0].rows == [[1]]  # as the oldest it is the last to end
    outputs.close()
    assert engine.llm.aborted == [] and not engine.llm.live

    def step_the_oldest() -> list[Any]:
        name = next(iter(engine.llm.live))
        return [finished(name, engine.llm.live.pop(name))]

    engine.llm.step = step_the_oldest
    outputs = engine.read_ahead(iter([[[6]], [[7]], [[8], [9]]]))
    assert next(outputs)[0].rows == [[6]]
    outputs.close()
    assert [engine.llm.live[name] for name in engine.llm.aborted] == [[7], [8], [9]]


def test_an_output_that_vllm_owes_is_an_error() -> None:
    engine = on_vllm()
    engine.llm.step = lambda: engine.llm.live.clear() or []
    with pytest.raises(RuntimeError, match="without an output of each request"):
        list(engine.read_ahead(iter([[[1]]])))
