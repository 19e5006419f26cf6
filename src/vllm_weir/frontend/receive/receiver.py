"""The receiver: where workers deliver to the caller's process. One thread serves all of it."""

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
from typing import Any

import msgspec
import numpy as np
import zmq

from vllm_weir import messages
from vllm_weir.frontend.admission.inline_vectors import row_bytes
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.frontend.receive.row_store import RowStore

logger = logging.getLogger(__name__)
TIMEOUT = 10.0
MAX_HELLO = 4096


class Receiver:
    """Receives rows for a `RowStore`.

    Args:
        store: where rows go.
        host: address of this machine when workers may live on others; None keeps to local sockets.
    """

    def __init__(self, store: RowStore, host: str | None = None) -> None:
        context = zmq.Context()
        folder = tempfile.mkdtemp(prefix="weir-")
        frontend = _ReceiverState(store, context, folder, host)
        self.reply = str(frontend.reply)
        thread = threading.Thread(target=frontend.serve, name="weir-receiver", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _close, frontend, thread, folder)


class _ReceiverState:
    """What the thread works with; it must not refer to the `Receiver`, whose end stops it."""

    def __init__(self, store: RowStore, context: zmq.Context, folder: str, host: str | None) -> None:
        self.store, self.context = store, context
        self.stop = False
        self.process = os.getpid()
        self.rows, self.vectors = context.socket(zmq.PULL), context.socket(zmq.ROUTER)
        self.rows.setsockopt(zmq.RCVHWM, 64)
        self.arenas = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.arenas.bind(f"{folder}/arenas")
        self.arenas.listen(64)
        self.reply = messages.ReaderEndpoint(
            _bind(self.rows, host, folder, "rows"),
            _bind(self.vectors, host, folder, "vectors"),
            f"{folder}/arenas",
            secrets.token_hex(16),
        )
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        # Not when the thread ends: whoever is about to ring would ring what has got its number since.
        weakref.finalize(self, os.close, self.bell).atexit = False
        self.mirrors: dict[str, MappedBuffer] = {}
        self.lines: dict[int, tuple[socket.socket, str]] = {}

    def ring(self) -> None:
        """Wake the thread; safe while garbage is collected."""
        if not self.stop:
            os.eventfd_write(self.bell, 1)

    def serve(self) -> None:
        poller = zmq.Poller()
        for source in (self.rows, self.vectors, self.arenas.fileno(), self.bell):
            poller.register(source, zmq.POLLIN)
        while not self.stop:
            more = self.store.prepare()
            for source, _ in poller.poll(0 if more else None):
                try:
                    self._handle(source, poller)
                except (msgspec.MsgspecError, ValueError, KeyError, RuntimeError, OSError, StopIteration) as e:
                    logger.error("Weir dropped a message that it could not read: %s: %s", type(e).__name__, e)
            self._return_pieces()
        for line, _ in self.lines.values():
            line.close()
        self.arenas.close()
        self.rows.close(linger=0)
        self.vectors.close(linger=0)
        self.context.term()
        self.mirrors.clear()  # they refer to this

    def _handle(self, source: Any, poller: zmq.Poller) -> None:
        if source is self.rows:
            frames = self.rows.recv_multipart(copy=False)
            deliver(self.store, self.reply.token, [f.buffer for f in frames], self._mapped)
        elif source is self.vectors:
            name, *_, question = self.vectors.recv_multipart()
            self.vectors.send_multipart([name, b"", *lend(self.store, self.reply.token, question)])
        elif source == self.bell:
            os.eventfd_read(self.bell)
        elif source == self.arenas.fileno():
            line, worker = self._accept()
            self.lines[line.fileno()] = (line, worker)
            poller.register(line.fileno(), zmq.POLLIN)
        else:  # workers say nothing more on their lines: this one has gone
            line, _ = self.lines.pop(source)
            poller.unregister(source)
            line.close()

    def _accept(self) -> tuple[socket.socket, str]:
        line, _ = self.arenas.accept()
        fds: list[int] = []
        try:
            line.settimeout(TIMEOUT)
            hello = messages.decode_hello(_receive(line, fds))
            if not fds or not secrets.compare_digest(hello.token.encode(), self.reply.token.encode()):
                raise ValueError("wrong token")
            mapped = MappedBuffer(fds.pop(0), hello.rows, hello.row_bytes, self.ring)
            line.sendall(b"k")
            # Not before: a worker that has hung up, tired of waiting, sends its rows in messages.
            self.mirrors[hello.worker] = mapped
        except BaseException:
            line.close()
            raise
        finally:
            for unused in fds:
                os.close(unused)
        return line, hello.worker

    def _mapped(self, worker: str) -> MappedBuffer:
        if worker not in self.mirrors:
            self.mirrors[worker] = MappedBuffer()
        return self.mirrors[worker]

    def _return_pieces(self) -> None:
        for line, worker in list(self.lines.values()):
            dropped = self.mirrors[worker].dropped
            if dropped:
                starts = array.array("q", (dropped.popleft() for _ in range(len(dropped))))
                try:
                    line.sendall(starts.tobytes())
                except OSError as e:  # the worker has gone, and its memory with it
                    logger.debug("a worker went away: %s", e)


def _receive(line: socket.socket, fds: list[int]) -> bytes:
    """A message with its length before it; the file descriptors that come along go into `fds`."""
    data, found, _, _ = socket.recv_fds(line, MAX_HELLO, 4)
    fds += found
    if len(data) < 4:
        raise ValueError("the message is cut off")
    (length,) = struct.unpack_from("<I", data)
    while len(data) < 4 + min(length, MAX_HELLO):
        more = line.recv(MAX_HELLO)
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


def lend(store: RowStore, token: str, request: bytes) -> list[bytes]:
    """Vectors a worker asks for, float32 bytes each, empty for unknown ones. Raises ValueError for a wrong token."""
    wanted = messages.decode_wanted(request)
    if not secrets.compare_digest(wanted.token.encode(), token.encode()):
        raise ValueError("wrong token")
    rows = store.vectors(wanted.digests)
    return [row_bytes(rows[d]) if d in rows else b"" for d in wanted.digests]


def deliver(
    store: RowStore, token: str, frames: Sequence[bytes | memoryview], mapped_of: Callable[[str], MappedBuffer]
) -> None:
    """One message into the store; rows nobody waits for are dropped. Raises ValueError for a malformed message."""
    if len(frames) < 3:
        raise ValueError("the message lacks parts")
    header = messages.decode(frames[0])
    if not secrets.compare_digest(header.token.encode(), token.encode()):
        raise ValueError("wrong token")
    marks = np.frombuffer(frames[1], "<i4").reshape(-1, len(messages.MARK_FIELDS))
    steered = np.frombuffer(frames[2], "<i4").reshape(-1, len(messages.STEER_FIELDS))
    store.receive(header, mapped_of(header.worker), marks, steered, frames[3] if len(frames) > 3 else b"")


def _close(frontend: _ReceiverState, thread: threading.Thread, folder: str) -> None:
    if os.getpid() != frontend.process:
        return  # a forked child that ends: the thread and the folder are its parent's
    frontend.stop = True
    os.eventfd_write(frontend.bell, 1)
    if thread is not threading.current_thread():
        thread.join(timeout=2)
    shutil.rmtree(folder, ignore_errors=True)
