"""The inbox goes on receiving, whoever comes and goes, whatever was lost on the way."""

from __future__ import annotations

import gc
import glob
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import zmq

from tests.support.measure import eventually
from tests.unit.delivery_harness import Post
from tests.unit.frontend.receive.test_delivery import LAYERS, D, Request, content
from vllm_weir import messages
from vllm_weir.frontend.outputs.slicers import PER_TURN
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.frontend.receive.receiver import TIMEOUT, Receiver, WorkerConnection, _ReceiverState, deliver
from vllm_weir.frontend.receive.row_store import RowStore

SCRIPT = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from vllm_weir.frontend.receive.receiver import Receiver
from vllm_weir.frontend.receive.row_store import RowStore
receiver = Receiver(RowStore())
before = [sorted(files) for _, _, files in os.walk(sys.argv[1])]
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
assert [sorted(files) for _, _, files in os.walk(sys.argv[1])] == before, "its child took the sockets along"
receiver.close()
assert not os.listdir(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where receivers have their sockets."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.thorough
def test_a_child_that_ends_leaves_the_sockets_of_its_parent(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("said", [b"", b"\x01", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00{"])
def test_a_worker_that_ends_while_it_introduces_itself_stops_nobody(said, tmp_path, monkeypatch):
    before = set(threading.enumerate())
    receiver = Receiver(RowStore())
    (thread,) = set(threading.enumerate()) - before
    (arenas,) = glob.glob(f"{tmp_path}/*/arenas")
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(arenas)
            line.sendall(said)
            line.shutdown(socket.SHUT_WR)
            line.settimeout(60)
            assert line.recv(1) == b"", "turned away"
    thread.join(0.2)
    assert thread.is_alive()
    receiver.close()
    assert not os.listdir(tmp_path)


def test_what_rings_while_the_thread_ends_rings_nothing_else(tmp_path, monkeypatch):
    """A busy thread sees that it is to stop before it is woken for that: the bell was closed then, its number free."""
    before, make, write, bells = set(threading.enumerate()), os.eventfd, os.eventfd_write, []
    store = RowStore()
    monkeypatch.setattr(store, "prepare", lambda: time.sleep(0.001) or True)
    monkeypatch.setattr(os, "eventfd", lambda *args: bells.append(make(*args)) or bells[-1])
    receiver = Receiver(store)
    (thread,) = set(threading.enumerate()) - before

    def late(fd, value):
        thread.join(60)
        assert not thread.is_alive()
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    receiver.close()
    assert not os.listdir(tmp_path)
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bells[0])


def test_files_of_strangers_are_closed(tmp_path, monkeypatch):
    receiver = Receiver(RowStore())
    (arenas,) = glob.glob(f"{tmp_path}/*/arenas")
    (tmp_path / "theirs").write_bytes(b"x" * 64)
    said = msgspec.msgpack.encode({"token": "no", "worker": "w", "rows": 1, "row_bytes": 64})
    with open(tmp_path / "theirs") as theirs, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(arenas)
        socket.send_fds(line, [struct.pack("<I", len(said)) + said], [theirs.fileno()] * 2)
        line.settimeout(60)
        assert line.recv(1) == b""
        receiver.close()  # and with it the thread
        held = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        assert list(held).count(os.path.realpath(tmp_path / "theirs")) == 1


@contextmanager
def introduced(receiver, name, file):
    """Connect as a worker that shares a file of 64 bytes; yield the connection, and the reader's side of the file."""
    state = receiver.close.peek()[2][0]
    reply = messages.ReaderEndpoint.parse(receiver.endpoint)
    said = messages.encode(messages.WorkerHello(reply.token, name, 1, 64))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line, open(file, "w+b") as rows:
        rows.truncate(64)
        line.settimeout(TIMEOUT / 2)
        line.connect(reply.arenas)
        socket.send_fds(line, [struct.pack("<I", len(said)) + said], [rows.fileno()])
        assert line.recv(1) == b"k"
        eventually(lambda: name in state.buffers, True, 30)
        yield line, state.buffers[name]


def read(line, count, size=1 << 16):
    """Read the starts of so many released pieces."""
    data = b""
    while len(data) < 8 * count:
        data += line.recv(size)
    return list(struct.unpack(f"<{count}q", data))


def test_a_worker_that_does_not_read_holds_nobody_up_and_misses_nothing(tmp_path, monkeypatch):
    """Its process is stopped, say, while far more pieces of its memory are released than a socket holds."""
    receiver = Receiver(RowStore())
    count = 60_000
    with introduced(receiver, "stopped", tmp_path / "a") as (stopped, pieces):
        for start in range(count):
            pieces.drop(start)
        with introduced(receiver, "other", tmp_path / "b") as (other, others):
            others.drop(7)
            assert read(other, 1) == [7]
        assert read(stopped, count, 4099) == list(range(count))
        pieces.drop(3)
        assert read(stopped, 1) == [3]
        for start in range(count):  # and it ends without reading them
            pieces.drop(start)
    state = receiver.close.peek()[2][0]
    eventually(lambda: len(state.connections), 0, 30)
    receiver.close()


def test_what_is_cut_goes_on_where_it_was_cut(tmp_path, monkeypatch):
    came, takes = bytearray(), itertools.cycle([3, 0, 13, 1])

    class Narrow:
        def send(self, data):
            size = next(takes)
            if not size:
                raise BlockingIOError
            came.extend(data[:size])
            return min(size, len(data))

    context = zmq.Context()
    state = _ReceiverState(RowStore(), context, str(tmp_path), None)
    state.buffers["w"], state.connections[99] = MappedBuffer(), WorkerConnection(Narrow(), "w", bytearray())
    for start in range(20):
        state.buffers["w"].drop(start)
        state._return_pieces()
    while state.connections[99].unsent:
        state._return_pieces()
    assert bytes(came) == struct.pack("<20q", *range(20))
    state.buffer_socket.close()
    context.destroy(linger=0)


@contextmanager
def mailed(count, greet=lambda reply: None):
    """Yield requests whose prompts' rows come to a `Receiver` as messages of a worker, once it has been greeted."""
    post = Post(LAYERS, near=False)
    requests = [Request(post, f"r{i}", [("resid_post", "all", "prompt")], 4, 1, [1] * 5) for i in range(count)]
    for one in requests:
        one.join()
    _, (layout_updates, marks, steered) = post.step([(one.name, 4, 0) for one in requests], content, deliver=False)
    (own,) = layout_updates.values()
    receiver, context = Receiver(post.store), zmq.Context()
    reply = messages.ReaderEndpoint.parse(receiver.endpoint)
    header = messages.encode(messages.MessageHeader(reply.token, "w", D, "float32", own))
    try:
        greet(reply)
        with context.socket(zmq.PUSH) as worker:
            worker.connect(reply.rows)
            worker.send_multipart([header, marks.tobytes(), steered.tobytes(), post._fetch(own, marks)])
            yield requests
    finally:
        receiver.close()
        context.destroy(linger=0)


def not_early(requests):
    return [one.name for one in requests if one.pending.early_activations is None]


def test_rows_of_a_worker_that_did_not_wait_for_its_answer_come_in_messages(tmp_path, monkeypatch):
    """This process was held up (stopped, say) for longer than a worker waits."""
    goes_on = threading.Event()

    def late(said, decode=messages.decode_hello):
        goes_on.wait(60)
        return decode(said)

    def greet(reply):
        said = messages.encode(messages.WorkerHello(reply.token, "w", 100, 4 * D))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line, open(tmp_path / "rows", "w+b") as rows:
            rows.truncate(100 * 4 * D)
            line.connect(reply.arenas)
            socket.send_fds(line, [struct.pack("<I", len(said)) + said], [rows.fileno()])
        goes_on.set()

    monkeypatch.setattr(messages, "decode_hello", late)
    with mailed(1, greet) as requests:
        eventually(lambda: not_early(requests), [], 30)  # or its rows were not understood


def test_a_message_with_parts_missing_is_malformed():
    header = messages.encode(messages.MessageHeader("t", "w", D, "float32", messages.LayoutUpdate()))
    for frames in ([header], [header, b""]):
        with pytest.raises(ValueError, match="frames"):
            deliver(RowStore(), "t", frames, lambda _: MappedBuffer())


def test_rows_whose_place_was_lost_on_the_way_are_the_asker_s_error_alone():
    """Early hand-outs are made in the thread that receives everybody's rows."""
    post = Post(LAYERS)
    lost, whole = (Request(post, name, [("resid_post", "all", "prompt")], 4, 1, [1] * 5) for name in ("r0", "r1"))
    lost.join()
    _, (layout_updates, marks, steered) = post.step([("r0", 4, 0)], content, deliver=False)
    for one in layout_updates.values():
        one.placed.clear()
    post.deliver((layout_updates, marks, steered))
    whole.join()
    post.step([("r1", 4, 0)], content)
    assert whole.pending.early_activations is not None and lost.pending.early_activations is None
    with pytest.raises(Exception):  # noqa: B017 - any but silence
        lost.tracker.view([1], False, "length", 0).activations()
    assert np.array_equal(whole.tracker.view([1], False, "length", 0).activations().positions, np.arange(4))


def test_hand_outs_are_made_early_by_the_thread_that_receives_the_rows():
    """Nobody looks; the rows come of more sequences than are looked at in one go."""
    with mailed(2 * PER_TURN + 1) as requests:
        eventually(lambda: not_early(requests), [], 30)
        made = [one.pending.early_activations for one in requests]
        assert all(early["resid_post", 0].equal(made[0]["resid_post", 0]) for early in made)
        for one, early in zip(requests, made, strict=True):
            assert one.tracker.view([1], False, "length", 0).activations() is early
