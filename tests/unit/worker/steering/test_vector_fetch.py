"""Vectors on their way from the caller's process to a worker: many with one question, and none lost to another's."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
import torch
import zmq

import vllm_weir as weir
from tests.unit.request_strategies import served
from vllm_weir import messages
from vllm_weir.frontend.admission import engine_wire
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import InlineVectors, row_bytes
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.receiver import answer_query
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.schema.request import RequestSpec
from vllm_weir.worker.steering import vector_fetch
from vllm_weir.worker.steering.vector_fetch import VectorFetcher

D = 8
FACTS = EngineCapabilities(served(2), 2, D, "float32", 100)


class Caller:
    """Answers as the inbox does, and counts the questions."""

    def __init__(self, folder):
        self.store, self.asked, self.pending = RowStore(), [], []
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{folder}/vectors")
        self.reply = str(messages.ReaderEndpoint("", f"ipc://{folder}/vectors", "", "t"))
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.silent = False
        self.thread.start()

    def serve(self):
        while True:
            name, *_, question = self.socket.recv_multipart()
            if question == b"end":
                return
            self.asked.append(messages.decode_wanted(question).digests)
            if not self.silent:
                self.socket.send_multipart([name, b"", *answer_query(self.store, "t", question)])

    def use(self, *vectors):
        """A live request for each; returns their digests."""
        digests = []
        for vector in vectors:
            spec = RequestSpec((), (weir.Add(torch.as_tensor(vector), 1),))
            admitted = admit({"weir": spec.to_json()}, FACTS)
            self.pending.append(PendingSequence(f"r{len(self.pending)}", admitted, np.zeros(1, np.int64), self.store))
            self.store.open(self.pending[-1])
            digests += admitted.digests
        return digests

    def close(self):
        socket = self.context.socket(zmq.REQ)
        socket.connect(messages.ReaderEndpoint.parse(self.reply).vectors)
        socket.send(b"end")
        self.thread.join(timeout=60)
        socket.close(0)
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def caller(tmp_path):
    made = Caller(tmp_path)
    yield made
    made.close()


def rows(n, first=1.0):
    return [np.arange(first + k, first + k + D, dtype=np.float32) for k in range(n)]


def test_many_requests_ask_once(caller, monkeypatch):
    vectors = rows(50)
    digests = caller.use(*vectors)
    fetcher = VectorFetcher()
    fetcher.prefetch({caller.reply: [*digests, *digests[:7]]})
    for digest, vector in zip(digests, vectors, strict=True):
        assert fetcher.fetch(caller.reply, [digest])[digest].tolist() == vector.tolist()
    assert caller.asked == [digests]
    fetcher.clear()
    assert not fetcher._received
    assert fetcher.fetch(caller.reply, digests[:1])[digests[0]].tolist() == vectors[0].tolist()
    monkeypatch.setattr(vector_fetch, "MOST_AT_ONCE", 20)
    fetcher.prefetch({caller.reply: digests})
    assert [len(asked) for asked in caller.asked] == [50, 1, 20, 20, 10]


def test_what_came_along_is_not_asked_for(caller):
    vectors = rows(4)
    digests = caller.use(*vectors)
    fetcher = VectorFetcher()
    fetcher.add_inline(caller.reply, {d: row_bytes(v) for d, v in zip(digests[:2], vectors, strict=False)})
    fetcher.add_inline(caller.reply, {digests[2]: row_bytes(vectors[2]) + b"odd", digests[3]: b""})  # no vectors
    fetcher.prefetch({caller.reply: digests})
    assert caller.asked == [digests[2:]]
    for digest, vector in zip(digests, vectors, strict=True):
        assert fetcher.fetch(caller.reply, [digest])[digest].tolist() == vector.tolist()
    assert len(caller.asked) == 1
    fetcher.clear()
    assert fetcher.fetch(caller.reply, digests[:1])[digests[0]].tolist() == vectors[0].tolist()
    assert caller.asked[1:] == [digests[:1]], "it is kept for one step"


def site_request(vectors, capture=()):
    spec = RequestSpec(capture, tuple(weir.Add(torch.as_tensor(v), 1) for v in vectors))
    return admit({"weir": spec.to_json()}, FACTS)


def test_a_vector_travels_along_once_in_a_while():
    sender, (a, b, c, d) = InlineVectors(6 * D * 4), [site_request([v]) for v in rows(4)]
    assert sender.of(a) == {a.digests[0]: rows(1)[0].tobytes()}
    assert not sender.of(a) and sender.of(b) and sender.of(c) and not sender.of(a)
    assert list(sender.of(d)) == d.digests, "half of the table may be others'"
    assert not sender.of(a) and not sender.of(c) and list(sender.of(b)) == b.digests, "the longest unused is forgotten"
    assert list(sender.of(site_request([*rows(1), *rows(1, 9.0)]))) == site_request(rows(1, 9.0)).digests, (
        "only what is new"
    )


def test_more_than_so_much_does_not_travel_along(monkeypatch):
    monkeypatch.setattr(engine_wire, "MAX_BYTES", 4 * D * 4)
    sender, many = InlineVectors(100 * D * 4), rows(5)
    assert not sender.of(site_request(many)) and not sender.of(site_request(many))
    assert len(sender.of(site_request(many[:4]))) == 4, "what did not travel does not count as sent"
    assert len(sender.of(site_request(many))) == 1


def test_directions_always_travel_along():
    directions = torch.arange(2.0 * D).view(2, D)
    admitted = site_request(rows(1), (weir.Capture("resid_post", 1, project=directions),))
    sender = InlineVectors(100 * D * 4)
    assert len(sender.of(admitted)) == 3
    again = sender.of(admitted)
    assert [np.frombuffer(row, "<f4").tolist() for row in again.values()] == directions.tolist()
    plain = site_request([], (weir.Capture("resid_post", 1),))
    assert not sender.of(plain)


def test_an_unknown_vector_fails_its_own_request(caller):
    (known,) = caller.use(*rows(1))
    fetcher = VectorFetcher()
    fetcher.prefetch({caller.reply: ["0" * 32, known]})
    assert fetcher.fetch(caller.reply, [known])[known].tolist() == rows(1)[0].tolist()
    with pytest.raises(ValueError, match="does not know vector 0000"):
        fetcher.fetch(caller.reply, [known, "0" * 32])
    caller.pending.clear()
    with pytest.raises(ValueError, match="does not know"):
        VectorFetcher().fetch(caller.reply, [known])


def test_a_caller_that_is_silent_is_waited_for_once_in_a_step(caller, monkeypatch):
    monkeypatch.setattr(vector_fetch, "TIMEOUT_MS", 200)
    digests, other = caller.use(*rows(100)), str(messages.ReaderEndpoint("", "ipc:///nowhere/at/all", "", "t"))
    fetcher, caller.silent = VectorFetcher(), True
    before = time.monotonic()
    fetcher.prefetch({caller.reply: digests, other: digests})
    for reply in (caller.reply, other):
        for digest in digests:
            with pytest.raises(ValueError, match="did not answer"):
                fetcher.fetch(reply, [digest])
    assert time.monotonic() - before < 20, "each was waited for anew"
    fetcher.clear()
    caller.silent = False
    monkeypatch.setattr(vector_fetch, "TIMEOUT_MS", 5000)
    assert len(fetcher.fetch(caller.reply, digests)) == 100, "asked anew, on a new socket"


def test_sockets_are_kept_and_bounded(caller, monkeypatch):
    monkeypatch.setattr(vector_fetch, "TIMEOUT_MS", 10)
    monkeypatch.setattr(vector_fetch, "MOST_SOCKETS", 3)
    (digest,) = caller.use(*rows(1))
    fetcher = VectorFetcher()
    for k in range(6):
        fetcher._socket(f"ipc:///nowhere/{k}")
    assert len(fetcher._sockets) == 3
    monkeypatch.setattr(vector_fetch, "TIMEOUT_MS", 5000)
    fetcher.fetch(caller.reply, [digest])
    socket = fetcher._sockets[messages.ReaderEndpoint.parse(caller.reply).vectors]
    fetcher.fetch(caller.reply, [digest])
    assert (
        fetcher._sockets[messages.ReaderEndpoint.parse(caller.reply).vectors] is socket and len(fetcher._sockets) == 3
    )


def test_vectors_are_found_while_requests_come_and_go(caller):
    """The inbox's thread looks while the caller's threads admit."""
    digests, stop, broken = caller.use(*rows(30)), threading.Event(), []

    def look():
        while not stop.is_set():
            try:
                assert set(caller.store.vectors([*digests, "no"])) == set(digests)
            except Exception as e:  # noqa: BLE001 - for the main thread to see
                broken.append(e)
                return

    thread = threading.Thread(target=look)
    thread.start()
    admitted = caller.pending[0].admitted
    for k in range(500):
        caller.store.open(PendingSequence(f"x{k}", admitted, np.zeros(1, np.int64), caller.store))
    stop.set()
    thread.join()
    assert not broken


def test_a_fetcher_that_is_dropped_hangs_up(caller):
    fetcher = VectorFetcher()
    fetcher.fetch(caller.reply, caller.use(*rows(1)))
    context, fetcher.itself = fetcher._context, fetcher
    del fetcher
    gc.collect()
    assert context.closed
