"""Runs whose engine gets the next prompts before it has done the last, and whose rows are written meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.extracting import FakeAheadEngine, FakeEngine, differences, run_fake, texts, write_jsonl
from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import PIECES_AHEAD
from vllm_weir.storage import load

COUNT = 120


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "t.jsonl", texts(COUNT))


class Started:
    """Starts one engine and keeps it."""

    def __init__(self, kind: type[FakeEngine] = FakeAheadEngine) -> None:
        self.kind = kind

    def __call__(self, wanted: Any) -> Any:
        self.engine = self.kind(wanted)
        return self.engine


def same_as_whole(out: Path, source: Path, tmp_path: Path) -> bool:
    """Whether a dataset equals that of an engine that reads a batch at a time."""
    run_fake(source, str(tmp_path / "whole"))
    return differences(load(out), load(tmp_path / "whole")) == []


def test_the_engine_has_few_pieces_at_once_and_always_a_next_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Started()
    assert run_fake(source, str(tmp_path / "out"), start_engine=start, batch=24).requests == COUNT
    assert start.engine.most[:2] == (PIECES_AHEAD, 24) and start.engine.reads == COUNT / (24 / PIECES_AHEAD)
    assert load(tmp_path / "out").requests == sorted(load(tmp_path / "out").requests)
    assert same_as_whole(tmp_path / "out", source, tmp_path)

    monkeypatch.setattr("vllm_weir.extraction.record_loop.PIECE_BYTES", 160 * FakeEngine.row_bytes)
    run_fake(source, str(tmp_path / "small"), start_engine=start, batch=COUNT)
    assert 120 < start.engine.most[2] <= 160  # the longest text has 40 tokens


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
        threading.Event().wait(0.01)
        counts = write(self, *args)
        written[0] += 1
        return counts

    monkeypatch.setattr(RecordLoop, "_write", slow)
    assert run_fake(source, str(tmp_path / "out"), start_engine=FakeAheadEngine, batch=24).requests == COUNT
    assert max(behind) <= 2 and written == read == [COUNT // 6]


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


def test_ctrl_c_finishes_what_the_engine_has(source: Path, tmp_path: Path) -> None:
    class Engine(FakeAheadEngine):
        def read(self, prompts: Any) -> Any:
            if self.reads == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return super().read(prompts)

    start, out = Started(Engine), tmp_path / "out"
    summary = run_fake(source, str(out), start_engine=start, batch=24, flush_seconds=60.0, shard_bytes=10**9)
    assert summary.interrupted and summary.requests == len(load(out)) == 6 * (5 + PIECES_AHEAD)
    assert run_fake(source, str(out), start_engine=FakeAheadEngine).held == summary.requests
    assert same_as_whole(out, source, tmp_path)


def test_a_bad_record_ends_the_run_behind_all_that_came_before_its_batch(tmp_path: Path) -> None:
    values = texts(COUNT)
    values[50] = " "
    source = write_jsonl(tmp_path / "bad.jsonl", values)
    with pytest.raises(WeirError, match=r"^record 50: .*the text is empty"):
        run_fake(source, str(tmp_path / "out"), start_engine=FakeAheadEngine, batch=24)
    assert len(load(tmp_path / "out")) == 48


@pytest.mark.parametrize("cause", ["engine", "disk"])
def test_a_failure_keeps_what_was_finished_and_drops_what_the_engine_has(
    cause: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, real = [False], os.pwrite

    def pwrite(*args: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)

    class Engine(FakeAheadEngine):
        def read(self, prompts: Any) -> Any:
            if self.reads == 8 and cause == "engine":
                raise RuntimeError("the engine died")
            full[0] = self.reads == 8
            return super().read(prompts)

    start, out = Started(Engine), tmp_path / "out"
    kind, message = (RuntimeError, "the engine died") if cause == "engine" else (WeirError, "No space left on device")
    with pytest.raises(kind, match=message):
        run_fake(source, str(out), start_engine=start, batch=24)
    full[0] = False
    assert start.engine.unread == PIECES_AHEAD - 1
    held = len(load(out))
    assert held == 48 if cause == "engine" else 42 <= held <= 54
    assert run_fake(source, str(out), start_engine=FakeAheadEngine).held == held
    assert same_as_whole(out, source, tmp_path)
