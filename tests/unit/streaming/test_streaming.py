"""Streams of rows without an engine: each batch once, whatever dies, and no more of them than there is room for."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.streaming import stream
from vllm_weir.streaming.batches import Cursor
from vllm_weir.streaming.dataset import StreamedRows

D = 4
TCP = "tcp://127.0.0.1:0"


class Acts(dict):
    def __init__(self, rows, positions):
        super().__init__(rows)
        self.sites, self.positions, self.token_ids = list(rows), positions, positions + 1000


def rows_of(number: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    count = random.Random(number).randint(0, 9)
    return torch.randn(count, D, generator=torch.Generator().manual_seed(number)).to(dtype)


class FakeEngine:
    """Runs requests like `Engine.stream`: a few at once, which finish in another order."""

    taken = 0

    def __init__(self, llm):
        self.fail_at = getattr(llm, "fail_at", None)

    def stream(self, requests, in_flight):
        under_way, ended, rng = [], False, random.Random(0)
        while True:
            while not ended and len(under_way) < (in_flight or 5):
                request = next(requests, "ended")
                ended = request == "ended"
                if ended or request is None:
                    break
                FakeEngine.taken += 1
                under_way.append(request)
            if not under_way:
                return
            prompt, _, number = under_way.pop(rng.randrange(len(under_way)))
            if number == self.fail_at:
                raise WeirError("the engine is out of order")
            from vllm_weir.schema.hooks import Site

            rows = rows_of(prompt)
            acts = Acts({Site("resid_post", 1): rows}, torch.arange(len(rows)))
            receipt = SimpleNamespace(complete=True, dropped=0)
            yield number, SimpleNamespace(outputs=[SimpleNamespace(activations=acts)], receipt=receipt, request_id="r")


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setattr(stream, "Engine", FakeEngine)
    FakeEngine.taken = 0


def requests(count):
    return ((number, None) for number in range(count))


def expected(count):
    parts = [rows_of(number) for number in range(count)]
    owners = [number for number, part in enumerate(parts) for _ in part]
    return torch.cat(parts), torch.tensor(owners)


def joined(batches):
    return torch.cat([b.rows["resid_post", 1] for b in batches]), torch.cat([b.requests for b in batches])


@pytest.mark.parametrize("address", [None, TCP])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_comes_once_and_in_order(address, workers):
    with stream.stream_rows(None, requests(60), batch_size=16, address=address) as rows:
        batches = list(DataLoader(rows, batch_size=None, num_workers=workers, timeout=60 * bool(workers)))
        assert rows.wait(60)
    found, owners = joined(batches)
    values, wanted = expected(60)
    assert torch.equal(found, values) and torch.equal(owners, wanted) and found.dtype == torch.bfloat16
    assert [len(b.positions) for b in batches[:-1]] == [16] * (len(batches) - 1)
    assert [b.cursor.batch for b in batches] == list(range(1, len(batches) + 1))
    assert all(torch.equal(b.token_ids, b.positions + 1000) for b in batches)


def test_a_batch_for_each_request_that_has_rows():
    with stream.stream_rows(None, requests(30), batch_size=None) as rows:
        batches = list(rows)
    assert [b.requests.unique().tolist() for b in batches] == [[n] for n in range(30) if len(rows_of(n))]


@pytest.mark.parametrize(("cut", "row"), [(0, 0), (1, 0), (2, 2), (9, 2)])
def test_an_engine_that_died_goes_on_from_the_cursor(cut, row):
    """Between two requests, and in the middle of one."""
    with stream.stream_rows(None, requests(40), batch_size=8) as rows:
        first = [batch for batch, _ in zip(rows, range(cut), strict=False)]
    cursor = first[-1].cursor if first else Cursor()
    assert cursor.row == row
    with stream.stream_rows(None, requests(40), batch_size=8, start=json.loads(json.dumps(cursor))) as rows:
        found, owners = joined([*first, *rows])
    values, wanted = expected(40)
    assert torch.equal(found, values) and torch.equal(owners, wanted)


def test_shards_share_the_batches_and_pickled_streams_read_them():
    with stream.stream_rows(None, requests(40), batch_size=8, checkpoints=True) as rows:
        again = pickle.loads(pickle.dumps(rows))  # noqa: S301 - its own
        assert type(again) is StreamedRows and again.checkpoints
        parts = [list(StreamedRows(rows.address, rows.token, shard=(i, 2), checkpoints=True)) for i in range(2)]
        every = list(again)
    assert [tuple(b.cursor) for b in every[0::2]] == [tuple(b.cursor) for b in parts[0]]
    assert [tuple(b.cursor) for b in every[1::2]] == [tuple(b.cursor) for b in parts[1]]


def test_what_waits_is_bounded_and_the_engine_is_not_asked_meanwhile():
    """A batch takes four tensors of a page each; the requests under way add theirs."""
    with stream.stream_rows(None, requests(10_000), batch_size=8, ahead_bytes=10 * 4 * 4096) as rows:
        taken = -1
        while taken != FakeEngine.taken or not taken:
            taken = FakeEngine.taken
            time.sleep(0.3)
        assert taken < 60
        assert len(list(zip(rows, range(40), strict=False))) == 40
        assert FakeEngine.taken > taken
    assert FakeEngine.taken < 200


@pytest.mark.parametrize("workers", [0, 2])
def test_room_for_one_batch_is_enough(workers):
    with stream.stream_rows(None, requests(60), batch_size=16, ahead_bytes=1) as rows:
        batches = list(DataLoader(rows, batch_size=None, num_workers=workers, timeout=60 * bool(workers)))
    assert torch.equal(joined(batches)[0], expected(60)[0])


@pytest.mark.parametrize("address", [None, TCP])
def test_a_trainer_that_is_killed_misses_and_repeats_nothing(tmp_path, address):
    with stream.stream_rows(None, requests(150), batch_size=8, address=address) as rows:
        command = [sys.executable, str(Path(__file__).with_name("trainer.py")), rows.address, rows.token]
        checkpoint = tmp_path / "checkpoint.json"
        for kill in range(3):
            begun = checkpoint.read_text() if checkpoint.exists() else ""
            trainer = subprocess.Popen([*command, str(checkpoint), "3", "0.01"])
            while not checkpoint.exists() or checkpoint.read_text() == begun:
                assert trainer.poll() is None
                time.sleep(0.01)
            time.sleep(0.02 * kill)
            os.kill(trainer.pid, signal.SIGKILL)
            trainer.wait()
        assert "whole" not in json.loads(checkpoint.read_text())
        subprocess.run([*command, str(checkpoint), "3", "0"], check=True, timeout=120)
        assert rows.wait(60)
    state = json.loads(checkpoint.read_text())
    wanted = {str(n): list(range(1000, 1000 + len(rows_of(n)))) for n in range(150) if len(rows_of(n))}
    assert state["whole"] and state["requests"] == wanted
    assert state["sum"] == pytest.approx(float(expected(150)[0].double().sum()), abs=1e-6)


def test_what_a_trainer_changes_stays_its_own():
    with stream.stream_rows(None, requests(40), batch_size=8, checkpoints=True) as rows:
        for batch in rows:
            batch.rows["resid_post", 1].zero_()
            batch.requests.zero_()
        found, owners = joined(rows)
    values, wanted = expected(40)
    assert torch.equal(found, values) and torch.equal(owners, wanted)


def test_an_error_comes_after_the_batches_before_it():
    with stream.stream_rows(SimpleNamespace(fail_at=30), requests(40), batch_size=None, in_flight=1) as rows:
        seen = []
        with refused("stream", "a request failed: the engine is out of order"):
            seen.extend(batch.requests[0].item() for batch in rows)
        with pytest.raises(WeirError, match="out of order"):
            rows.wait(60)
    assert seen == [] or seen == [n for n in range(30) if len(rows_of(n))]


def test_what_is_refused():
    with refused("batch_size", "at least 1"):
        stream.stream_rows(None, [], batch_size=0)
    with refused("start", "cursor"):
        stream.stream_rows(None, [], start=(1, 2))
    with refused("ahead_bytes", "at least 1"):
        stream.stream_rows(None, [], ahead_bytes=0)
    for address in ("udp://a:1", "tcp://a", "tcp://a:b", "x" * 200):
        with refused("address", "tcp://HOST:PORT"):
            stream.stream_rows(None, [], address=address)
    with stream.stream_rows(None, requests(40), batch_size=8) as rows:
        with refused("token", "not that of the stream"):
            list(StreamedRows(rows.address, "another"))
        with refused("shard", "0 <= i < n"):
            StreamedRows(rows.address, rows.token, shard=(2, 2))
        with refused("cursor", "cursor of a batch"):
            StreamedRows(rows.address, rows.token, -1)
        with refused("address", "another process listens"):
            stream.stream_rows(None, [], address=rows.address)
        assert len(list(rows)) > 3
        with refused("cursor", "batch 0 was acknowledged and is gone"):
            list(rows)
    with refused("address", "no stream of rows"):
        list(StreamedRows(rows.address, rows.token, wait_seconds=0.1))
    with (
        refused("start", "has 6 rows, so that these are other requests"),
        stream.stream_rows(None, requests(40), start=(1, 0, 7)) as rows,
    ):
        rows.wait(60)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x02\x00\x00\x00{}", b"\x08\x00\x00\x00[[[[[[[["])
def test_strangers_are_turned_away_and_disturb_nobody(sent):
    with stream.stream_rows(None, requests(40), batch_size=8, address=TCP) as rows:
        host, port = rows.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(sent)
            stranger.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        assert torch.equal(joined(list(rows))[0], expected(40)[0])


def test_close_ends_a_reader_and_leaves_no_socket():
    rows = stream.stream_rows(None, requests(10**6), batch_size=8, ahead_bytes=1 << 20)
    reader = iter(StreamedRows(rows.address, rows.token))
    next(reader)
    closing = threading.Thread(target=rows.close)
    closing.start()
    with pytest.raises(WeirError, match="before"):
        for _ in reader:
            pass
    closing.join(60)
    assert not Path(rows.address).parent.exists()


@pytest.mark.parametrize("hold", [False, True])
def test_memory_is_written_again_once_no_view_of_it_is_left(monkeypatch, hold):
    from vllm_weir.streaming import sender

    monkeypatch.setattr(sender, "SEGMENT_BYTES", 8 * 4096)  # two batches
    made = []
    create = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda *args: made.append(args) or create(*args))
    with stream.stream_rows(None, requests(400), batch_size=8, ahead_bytes=8 * 4096) as rows:
        kept, copies = [], []
        for batch in rows:
            copies.append(batch.rows["resid_post", 1].clone())
            if hold:
                kept.append(batch)
            del batch
    assert torch.equal(torch.cat(copies), expected(400)[0])
    assert all(torch.equal(b.rows["resid_post", 1], copy) for b, copy in zip(kept, copies, strict=False))
    assert len(made) > len(copies) // 3 if hold else len(made) < len(copies) // 8
