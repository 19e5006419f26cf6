"""The place where workers deliver to the caller's process, served by one thread."""

from __future__ import annotations

import array
import logging
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq

from vllm_weir import messages
from vllm_weir.frontend.admission.engine_wire import row_bytes
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.frontend.receive.row_store import RowStore

logger = logging.getLogger(__name__)
TIMEOUT = 10.0
"""Seconds that a worker may take to introduce itself."""
MAX_HELLO = 4096
"""Bytes of a worker's first message at most."""
RETRY = 50
"""Milliseconds until a worker that has not read what it was told is told the rest."""


class Receiver:
    """The sockets and the thread that receive rows for a `RowStore`.

    Args:
        host: address of this machine if workers may run on others; None for local sockets only.

    Attributes:
        endpoint: the address that requests carry to the workers, a `messages.ReaderEndpoint` as
            text.
        close: stops receiving.
    """

    def __init__(self, store: RowStore, host: str | None = None) -> None:
        context = zmq.Context()
        folder = tempfile.mkdtemp(prefix="weir-")
        state = _ReceiverState(store, context, folder, host)
        self.endpoint = str(state.endpoint)
        thread = threading.Thread(target=state.serve, name="weir-receiver", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _close, state, thread, folder)


class WorkerConnection(NamedTuple):
    """A worker's connection.

    Attributes:
        stream: does not block once the worker has introduced itself.
        worker: the worker's name.
        unsent: starts of released pieces that the socket had no room for; the first may be cut.
    """

    stream: socket.socket
    worker: str
    unsent: bytearray


class _ReceiverState:
    """What the thread works with. It has no reference to the `Receiver`, with whose garbage collection it ends."""

    def __init__(self, store: RowStore, context: zmq.Context, folder: str, host: str | None) -> None:
        self.store, self.context = store, context
        self.stop = False
        self.pid = os.getpid()
        self.row_socket, self.vector_socket = context.socket(zmq.PULL), context.socket(zmq.ROUTER)
        self.row_socket.setsockopt(zmq.RCVHWM, 64)
        self.buffer_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.buffer_socket.bind(f"{folder}/arenas")
        self.buffer_socket.listen(64)
        self.endpoint = messages.ReaderEndpoint(
            _bind(self.row_socket, host, folder, "rows"),
            _bind(self.vector_socket, host, folder, "vectors"),
            f"{folder}/arenas",
            secrets.token_hex(16),
        )
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        # Not closed when the thread ends: a late `wake` would write to whatever has got the
        # descriptor's number.
        weakref.finalize(self, os.close, self.wake_fd).atexit = False
        self.buffers: dict[str, MappedBuffer] = {}
        """By worker."""
        self.connections: dict[int, WorkerConnection] = {}
        """By file descriptor."""

    def wake(self) -> None:
        """Wake the thread; safe during garbage collection."""
        if not self.stop:
            os.eventfd_write(self.wake_fd, 1)

    def serve(self) -> None:
        """Receive until `stop` is set."""
        poller = zmq.Poller()
        for source in (self.row_socket, self.vector_socket, self.buffer_socket.fileno(), self.wake_fd):
            poller.register(source, zmq.POLLIN)
        while not self.stop:
            has_more = self.store.prepare()
            rest = RETRY if any(connection.unsent for connection in self.connections.values()) else None
            for source, _ in poller.poll(0 if has_more else rest):
                try:
                    self._handle(source, poller)
                except (msgspec.MsgspecError, ValueError, KeyError, RuntimeError, OSError, StopIteration) as e:
                    logger.error("Weir dropped a message that it could not read: %s: %s", type(e).__name__, e)
            self._return_pieces()
        for connection in self.connections.values():
            connection.stream.close()
        self.buffer_socket.close()
        self.row_socket.close(linger=0)
        self.vector_socket.close(linger=0)
        self.context.term()
        self.buffers.clear()  # they refer to this object

    def _handle(self, source: Any, poller: zmq.Poller) -> None:
        if source is self.row_socket:
            frames = self.row_socket.recv_multipart(copy=False)
            deliver(self.store, self.endpoint.token, [f.buffer for f in frames], self._mapped)
        elif source is self.vector_socket:
            name, *_, query = self.vector_socket.recv_multipart()
            self.vector_socket.send_multipart([name, b"", *answer_query(self.store, self.endpoint.token, query)])
        elif source == self.wake_fd:
            os.eventfd_read(self.wake_fd)
        elif source == self.buffer_socket.fileno():
            connection = self._accept()
            self.connections[connection.stream.fileno()] = connection
            poller.register(connection.stream.fileno(), zmq.POLLIN)
        else:  # a worker says nothing after its hello, so this one has gone
            connection = self.connections.pop(source)
            poller.unregister(source)
            connection.stream.close()

    def _accept(self) -> WorkerConnection:
        """Accept a worker's connection and map the buffer that it sends."""
        connection, _ = self.buffer_socket.accept()
        fds: list[int] = []
        try:
            connection.settimeout(TIMEOUT)
            hello = messages.decode_hello(_receive(connection, fds))
            if not fds or not secrets.compare_digest(hello.token.encode(), self.endpoint.token.encode()):
                raise ValueError("wrong token")
            mapped = MappedBuffer(fds.pop(0), hello.rows, hello.row_bytes, self.wake)
            connection.sendall(b"k")
            connection.setblocking(False)  # this thread serves the other workers, too
            # Only after it was sent: a worker that has hung up because this took too long sends its
            # rows in messages.
            self.buffers[hello.worker] = mapped
        except BaseException:
            connection.close()
            raise
        finally:
            for unused in fds:
                os.close(unused)
        return WorkerConnection(connection, hello.worker, bytearray())

    def _mapped(self, worker: str) -> MappedBuffer:
        if worker not in self.buffers:
            self.buffers[worker] = MappedBuffer()
        return self.buffers[worker]

    def _return_pieces(self) -> None:
        """Tell the workers which pieces of their buffers are not needed here."""
        for stream, worker, unsent in self.connections.values():
            dropped = self.buffers[worker].dropped
            if dropped:
                unsent += array.array("q", (dropped.popleft() for _ in range(len(dropped)))).tobytes()
            if not unsent:
                continue
            try:
                del unsent[: stream.send(unsent)]
            except BlockingIOError:  # the worker does not read at present
                continue
            except OSError as e:  # the worker has gone, and its memory with it
                logger.debug("A worker has gone: %s", e)
                unsent.clear()


def _receive(connection: socket.socket, fds: list[int]) -> bytes:
    """Receive a message that follows its length; append file descriptors to `fds`."""
    data, found, _, _ = socket.recv_fds(connection, MAX_HELLO, 4)
    fds += found
    if len(data) < 4:
        raise ValueError("the message is cut off")
    (length,) = struct.unpack_from("<I", data)
    while len(data) < 4 + min(length, MAX_HELLO):
        more = connection.recv(MAX_HELLO)
        if not more:
            raise ValueError("the message is cut off")
        data += more
    return data[4 : 4 + length]


def _bind(zsocket: zmq.Socket, host: str | None, folder: str, name: str) -> str:
    if host is not None:
        return f"tcp://{host}:{zsocket.bind_to_random_port(f'tcp://{host}')}"
    address = f"ipc://{folder}/{name}"
    zsocket.bind(address)
    return address


def answer_query(store: RowStore, token: str, query: bytes) -> list[bytes]:
    """Return the vectors that a worker asks for, float32 bytes each, empty for unknown ones.

    Raises:
        ValueError: if the query has the wrong token.
    """
    wanted = messages.decode_wanted(query)
    if not secrets.compare_digest(wanted.token.encode(), token.encode()):
        raise ValueError("wrong token")
    vectors = store.vectors(wanted.digests)
    return [row_bytes(vectors[digest]) if digest in vectors else b"" for digest in wanted.digests]


def deliver(
    store: RowStore, token: str, frames: Sequence[bytes | memoryview], mapped_of: Callable[[str], MappedBuffer]
) -> None:
    """Hand one message, see `vllm_weir.messages`, to the store, which drops rows that nobody waits for.

    `mapped_of` is the buffer of a worker, by its name.

    Raises:
        ValueError: if the message is malformed or lacks the token.
    """
    if len(frames) < 3:
        raise ValueError(f"the message has {len(frames)} frames, expected at least 3")
    header = messages.decode(frames[0])
    if not secrets.compare_digest(header.token.encode(), token.encode()):
        raise ValueError("wrong token")
    arrivals = np.frombuffer(frames[1], "<i4").reshape(-1, len(messages.MARK_FIELDS))
    steered = np.frombuffer(frames[2], "<i4").reshape(-1, len(messages.STEER_FIELDS))
    store.receive(header, mapped_of(header.worker), arrivals, steered, frames[3] if len(frames) > 3 else b"")


def _close(state: _ReceiverState, thread: threading.Thread, folder: str) -> None:
    if os.getpid() != state.pid:
        return  # in a forked child, the thread and the folder are its parent's
    state.stop = True
    os.eventfd_write(state.wake_fd, 1)
    if thread is not threading.current_thread():
        thread.join(timeout=2)
    shutil.rmtree(folder, ignore_errors=True)
