"""The consumer ``stream``: each finished sequence once, in the order in which they finish, with its number."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.measure import eventually
from tests.unit.refusals import refused
from vllm_weir import codec, consumers
from vllm_weir.consumers.base import EngineInfo, Finished, Rows
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.hooks import Site
from vllm_weir.streaming.consumer import Stream
from vllm_weir.streaming.dataset import StreamedRows
from vllm_weir.streaming.sender import RowSender

SITES = [Site("resid_post", 1), Site("resid_post", 3)]


def finished(name: str) -> Finished:
    return Finished(name, 0, name, 3, 1, "length")


def values(number: int, site: Site, count: int) -> torch.Tensor:
    return torch.full((count, 4), 10.0 * number + site.layer)


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Makes a consumer that listens, and ends it."""
    opened = []

    def make(**options: Any) -> Stream:
        given = {"address": str(tmp_path / "socket"), "token_file": str(tmp_path / "token"), **options}
        one = consumers.make("stream", given, "sink")
        assert isinstance(one, Stream)
        one.open(EngineInfo("model", 4, 4, "float32"))
        opened.append(one)
        return one

    yield make
    for one in opened:
        one._sender.close()


def reader(tmp_path: Path, **options: Any) -> StreamedRows:
    return StreamedRows(str(tmp_path / "socket"), (tmp_path / "token").read_text(), **options)


def give(one: Stream, number: int, count: int = 3) -> Any:
    request = finished(f"r{number}")
    for site in SITES:
        at = torch.arange(count)
        one.take(Rows(request, site, at, at + 100, values(number, site, count)))
    return one.finish(request)


def test_each_sequence_once_with_its_number(made: Any, tmp_path: Path) -> None:
    one = made()
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    told = [give(one, n) for n in range(3)]
    assert told == [(f"{tmp_path / 'socket'}#{n}",) for n in range(3)]
    one._sender.finish()
    batches = list(reader(tmp_path))
    assert [batch.requests.tolist() for batch in batches] == [[n] * 3 for n in range(3)]
    for n, batch in enumerate(batches):
        assert batch.positions.tolist() == [0, 1, 2] and batch.token_ids.tolist() == [100, 101, 102]
        assert all(torch.equal(batch.rows[site], values(n, site, 3)) for site in SITES)


def test_batches_of_a_size_and_those_that_a_flush_ends(made: Any, tmp_path: Path) -> None:
    one = made(batch_size=4)
    for n in range(2):
        give(one, n)
    one.flush()
    give(one, 2)
    one.flush()
    one._sender.finish()
    assert [batch.requests.tolist() for batch in reader(tmp_path)] == [[0, 0, 0, 1], [1, 1], [2, 2, 2]]


def test_what_fails_leaves_no_number_out(made: Any, tmp_path: Path) -> None:
    one = made()
    give(one, 0)
    request, at = finished("bad"), torch.arange(3)
    one.take(Rows(request, SITES[0], at, at, values(1, SITES[0], 3)))
    with refused("", "at the same positions"):
        one.take(Rows(request, SITES[1], at + 1, at, values(1, SITES[1], 3)))
    one.abort(request)
    assert give(one, 2)[0].endswith("#1") and one.finish(finished("nothing")) == ()
    one._sender.finish()
    assert [batch.rows[SITES[0]][0, 0].item() for batch in reader(tmp_path)] == [1.0, 21.0]


def test_compressed_rows_are_decoded(made: Any, tmp_path: Path) -> None:
    one, request, compression = made(), finished("r"), Compression.parse("fp16")
    rows, at = torch.randn(3, 4), torch.arange(3)
    one.take(Rows(request, SITES[0], at, at, codec.encode(rows, compression), compression.header(4, "float32")))
    one.finish(request)
    one._sender.finish()
    (batch,) = reader(tmp_path)
    assert torch.equal(batch.rows[SITES[0]].float(), rows.half().float())


def test_who_asked_before_the_stream_was_closed_is_told_of_its_end(made: Any, tmp_path: Path, monkeypatch: Any) -> None:
    send = RowSender._send

    def late(self: RowSender, connection: Any, number: int) -> None:
        threading.Event().wait(0.3 * (number > 0))
        send(self, connection, number)

    monkeypatch.setattr(RowSender, "_send", late)
    one = made()
    give(one, 0)
    found = iter(reader(tmp_path))
    assert next(found).requests[0] == 0
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    assert next(found, None) is None
    eventually(closing.is_alive, False, 30)


def test_a_full_stream_waits_for_the_trainer(made: Any, tmp_path: Path) -> None:
    one = made(ahead_bytes=1)
    give(one, 0)
    thread = threading.Thread(target=give, args=(one, 1), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    found = iter(reader(tmp_path))
    assert next(found).requests[0] == 0
    closing = threading.Thread(target=lambda: (thread.join(), one.close()), daemon=True)
    closing.start()
    assert next(found).requests[0] == 1 and next(found, None) is None
    eventually(closing.is_alive, False, 30)


def test_wrong_options(tmp_path: Path) -> None:
    right = {"address": str(tmp_path / "socket"), "token_file": str(tmp_path / "token")}
    wrong = dict(address=None, token_file="", batch_size=0, sizes=1)
    for name, value in wrong.items():
        with refused("sink.stream" if name == "sizes" else f"sink.stream.{name}"):
            consumers.make("stream", right | {name: value}, "sink")
    (tmp_path / "token").touch()
    with refused("token_file", "is empty"):
        consumers.make("stream", right, "sink").open(EngineInfo("m", 1, 1, "float32"))
