"""The inbox: a socket of the caller's process on which workers deliver rows."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
import threading
import weakref

import msgspec
import numpy as np
import torch
import zmq

from vllm_weir import mail
from vllm_weir.frontend.store import Store

logger = logging.getLogger(__name__)


class Inbox:
    """Receives rows for a Store on a thread of its own.

    Args:
        store: where rows go.
        host: address of this machine when workers may live on others; None keeps to local sockets.
    """

    def __init__(self, store: Store, host: str | None = None) -> None:
        self._token = secrets.token_hex(16)
        context = zmq.Context()
        rows, vectors = context.socket(zmq.PULL), context.socket(zmq.ROUTER)
        rows.setsockopt(zmq.RCVHWM, 64)
        folder = None if host is not None else tempfile.mkdtemp(prefix="weir-")
        addresses = [_bind(socket, host, folder, name) for socket, name in ((rows, "rows"), (vectors, "vectors"))]
        self.reply = "\t".join([*addresses, self._token])
        stop = threading.Event()
        thread = threading.Thread(
            target=_serve, args=(context, rows, vectors, stop, store, self._token), name="weir-inbox", daemon=True
        )
        thread.start()
        self.close = weakref.finalize(self, _close, stop, thread, folder)


def _bind(socket: zmq.Socket, host: str | None, folder: str | None, name: str) -> str:
    if host is not None:
        return f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}"
    address = f"ipc://{folder}/{name}"
    socket.bind(address)
    return address


def _serve(context, rows: zmq.Socket, vectors: zmq.Socket, stop: threading.Event, store: Store, token: str) -> None:
    poller = zmq.Poller()
    poller.register(rows, zmq.POLLIN)
    poller.register(vectors, zmq.POLLIN)
    while not stop.is_set():
        for socket, _ in poller.poll(200):
            frames = socket.recv_multipart(copy=False)
            try:
                if socket is rows:
                    deliver(store, token, frames[0].bytes, frames[1].buffer if len(frames) > 1 else b"")
                else:
                    socket.send_multipart([frames[0].bytes, b"", *lend(store, token, frames[-1].bytes)])
            except (msgspec.MsgspecError, ValueError, RuntimeError) as e:
                logger.error("Weir dropped a message that it could not read: %s", e)
    rows.close(linger=0)
    vectors.close(linger=0)
    context.term()


def lend(store: Store, token: str, request: bytes) -> list[bytes]:
    """Vectors a worker asks for, float32 bytes each, empty for unknown ones. Raises ValueError for a wrong token."""
    wanted = mail.decode_wanted(request)
    if not secrets.compare_digest(wanted.token.encode(), token.encode()):
        raise ValueError("wrong token")
    rows = (store.vector(digest) for digest in wanted.digests)
    return [b"" if row is None else np.ascontiguousarray(row, "<f4").tobytes() for row in rows]


def deliver(store: Store, token: str, head: bytes, payload) -> None:
    """One message into the store; rows nobody waits for are dropped. Raises ValueError for a malformed message."""
    header = mail.decode(head)
    if not secrets.compare_digest(header.token.encode(), token.encode()):
        raise ValueError("wrong token")
    for request_id, reason in header.failures.items():
        if (pending := store.get(request_id)) is not None:
            pending.fail(reason)
    for span in header.spans:
        if (pending := store.get(span.request_id)) is not None:
            pending.add_span(span.moves, np.frombuffer(span.positions, "<i4"))
    if not header.pieces:
        return
    # The rows stay where they were received: every tensor is a view that keeps the message alive.
    rows = torch.frombuffer(payload, dtype=getattr(torch, header.dtype)).view(-1, header.d_model)
    for piece in header.pieces:
        pending = store.get(piece.request_id)
        if pending is None:
            continue
        positions = np.frombuffer(piece.positions, "<i4")
        count = len(positions) * len(piece.columns)
        block = rows[piece.start : piece.start + count].view(len(positions), len(piece.columns), header.d_model)
        pending.add(piece.columns, positions, block)


def _close(stop: threading.Event, thread: threading.Thread, folder: str | None) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=2)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
