"""The drain: what one step breaks is told at once, and the thread goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zmq

from vllm_weir import messages
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.frontend.receive.receiver import deliver
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.columns import ARRIVAL
from vllm_weir.worker.transfer.notifier import Notifier, StepNotice

D = 4


class FakeLink:
    """Knows whether readers map the buffer."""

    def __init__(self, near: bool):
        self.near, self.error = near, None

    def maps(self, reply):
        if self.error:
            raise self.error
        return self.near


class Reader:
    """The other end of a drain."""

    def __init__(self, folder, near=True):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.bind(f"ipc://{folder}/rows")
        self.reply = str(messages.ReaderEndpoint(f"ipc://{folder}/rows", "", "", "t"))
        self.rows = torch.arange(80.0).view(20, D)
        self.arena, self.link = Arena(20), FakeLink(near)
        self.drain = Notifier(self.rows, self.arena, self.link, "w", lambda *part: self.keep(*part))

    def hear(self):
        frames = self.socket.recv_multipart()
        return messages.decode(frames[0]), [len(f) for f in frames[1:]], frames

    def parcel(self, arrived=lambda: None, **layout_updates):
        arrivals = np.array([(1, 0, 0, 1, 1)], ARRIVAL)
        return StepNotice(
            arrived,
            layout_updates={self.reply: messages.LayoutUpdate(**layout_updates)},
            arrivals={self.reply: arrivals},
        )

    def close(self):
        self.drain.close()
        self.socket.close(0)
        self.context.term()


@pytest.fixture(params=[True, False], ids=["mapped", "messages"])
def reader(tmp_path, request):
    made = Reader(tmp_path, request.param)
    yield made
    made.close()


def fail():
    raise RuntimeError("the device is lost")


def opening(start):
    return {"opened": [messages.SequenceOpened(1, "r", [3, 6])], "placed": [messages.ExtentPlaced(1, 0, 2, start)]}


def test_a_copy_that_failed_is_told_and_the_next_step_is_served(reader):
    start = reader.arena.allocate(4)
    reader.drain.send(reader.parcel(fail, **opening(start)))
    header, sizes, _ = reader.hear()
    assert "the device is lost" in header.broken and sizes[:2] == [0, 0] and header.layout_updates.opened
    reader.drain.send(reader.parcel())
    header, sizes, frames = reader.hear()
    assert not header.broken and sizes[0] == 20
    if not reader.link.near:
        assert np.frombuffer(frames[3], np.float32).tolist() == list(range(8))


def test_what_cannot_be_announced_is_excused_and_its_memory_let_go(reader):
    start = reader.arena.allocate(4)
    reader.arena.release(start)  # the reader's hold
    reader.link.error = ValueError("no such reader")
    reader.drain.send(reader.parcel(retired=[messages.ExtentRetired(1, 0, 1, start)]))
    header, _, _ = reader.hear()
    assert "no such reader" in header.broken and header.layout_updates.retired
    reader.link.error = None
    reader.drain.fail(reader.reply, "r", "because")
    assert reader.hear()[0].failures == {"r": "because"}
    assert reader.arena.used == 0


def test_an_address_that_nobody_can_read_stops_nothing(reader):
    reader.drain.send(StepNotice(lambda: None, failures={"nonsense": {"r": "x"}}))
    reader.drain.fail(reader.reply, "r", "because")
    assert reader.hear()[0].failures == {"r": "because"}


def test_a_reader_in_the_process_is_handed_its_rows_and_holds_nothing(reader):
    """It gets bytes, and the failures that others are told; `settle` waits for all of it."""
    got = []
    reader.keep = lambda *part: got.append(part)
    outside, reader.reply = reader.reply, messages.KEPT + "key"
    start = reader.arena.allocate(4)
    reader.drain.send(reader.parcel(**opening(start), retired=[messages.ExtentRetired(1, 0, 2, start)]))
    reader.drain.send(reader.parcel(fail))
    reader.drain.fail(reader.reply, "r", "because")
    assert reader.drain.settle(10)
    endpoint, layout, arrivals, payload, failures = got[0]
    assert endpoint == reader.reply and layout.opened[0].request_id == "r" and not failures
    assert arrivals.tolist() == [(1, 0, 0, 1, 1)]
    assert np.frombuffer(payload, np.float32).tolist() == reader.rows[start : start + 2].flatten().tolist()
    assert "the device is lost" in got[1][4][""] and not len(got[1][2]) and got[2][4] == {"r": "because"}
    assert reader.arena.used == 0

    def broken(*_):
        raise RuntimeError("no room")

    reader.keep = broken
    reader.drain.fail(reader.reply, "r", "because")
    reader.drain.fail(outside, "s", "then")
    assert reader.hear()[0].failures == {"s": "then"}


def test_the_reader_fails_every_request_that_it_waits_for():
    class Waiting:
        failure = None

    store, one, other = RowStore(), Waiting(), Waiting()
    other.failure = "its own reason"
    store._pending["one"], store._pending["other"] = one, other
    header = messages.MessageHeader("t", "w", D, "float32", broken="lost")
    deliver(store, "t", [messages.encode(header), b"", b""], lambda worker: MappedBuffer())
    assert (one.failure, other.failure) == ("lost", "its own reason")


def test_rows_of_a_later_extent_are_sent_from_where_they_lie(tmp_path):
    """To a reader elsewhere: ranks go on from one extent to the next."""
    reader = Reader(tmp_path, near=False)
    try:
        first, second = reader.arena.allocate(4), reader.arena.allocate(6)
        reader.drain.send(reader.parcel(**opening(first)))
        reader.hear()
        arrivals = np.array([(1, 3, 7, 2, 1)], ARRIVAL)
        placed = messages.LayoutUpdate(placed=[messages.ExtentPlaced(1, 2, 3, second)])
        reader.drain.send(
            StepNotice(lambda: None, layout_updates={reader.reply: placed}, arrivals={reader.reply: arrivals})
        )
        frames = reader.hear()[2]
        wanted = reader.rows[second + 2 : second + 6]  # two rows a rank
        assert np.frombuffer(frames[3], np.float32).tolist() == wanted.flatten().tolist()
    finally:
        reader.close()
