"""`RowSender`: the engine's end of a stream, which keeps batches until they are acknowledged."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.streaming.batches import BatchLayout, Cursor, Tensors, read_tensors
from vllm_weir.streaming.connection import Connection, accept, parse_address

logger = logging.getLogger(__name__)
ANSWER_SECONDS = 1.0
"""How long a stream that is closed waits for clients to take what they are told last."""
SEGMENT_BYTES = 32 << 20
"""Memory is taken in pieces of this size, or of a batch's if that is more."""
SPARE_SEGMENTS = 4
"""Pieces that wait to be written again."""


class _Segment:
    """A piece of shared memory with batches, one after the other.

    It is written again once none of its batches is kept and every client that mapped it has said that it has no view
    of it left: new memory costs several times what the copy does.

    Attributes:
        number: Of this use of the memory.
        used: Bytes written.
        kept: Batches that are not acknowledged.
        mapped: Clients that may have views of it.
        unknown: Whether a client has gone without a word about its views.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.begin(0)
        self.fd = os.memfd_create("weir-rows", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise

    def begin(self, number: int) -> None:
        """Use the memory from its first byte."""
        self.number, self.used, self.kept, self.unknown = number, 0, 0, False
        self.mapped: set[Connection] = set()

    def free(self) -> None:
        """Give the memory back, once no client has it; may be repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self.memory


@dataclass(eq=False)
class _Batch:
    number: int
    segment: _Segment
    offset: int
    nbytes: int
    header: list[list[Any]]
    cursor: Cursor
    done: bool = field(default=False)


class RowSender:
    """Keeps batches in shared memory, and gives each to the trainer that asks for its number.

    A batch is kept until it is acknowledged, so a trainer that was killed finds those that it has
    not. Thread-safe; one thread writes.

    Args:
        address: ``tcp://HOST:PORT`` (port 0 for any), or the path of a Unix socket; None for one in a
            new folder that only this user enters.
        token: What clients prove to know; None for a new one.
        ahead_bytes: Bytes of batches that are kept before `has_room` is false.
        start: The first batch.

    Attributes:
        address, token: For clients.

    Raises:
        WeirError: If it cannot listen there.
    """

    def __init__(self, address: str | None, token: str | None, ahead_bytes: int, start: Cursor) -> None:
        if token is not None and (not isinstance(token, str) or not token):
            raise WeirError("expected a text that is not empty", "token")
        if type(ahead_bytes) is not int or ahead_bytes < 1:
            raise WeirError(f"expected a number of bytes, at least 1, got {brief(ahead_bytes)}", "ahead_bytes")
        self.token = secrets.token_urlsafe(24) if token is None else token
        self._ahead_bytes = ahead_bytes
        self._changed = threading.Condition()
        self._batches: deque[_Batch] = deque()
        self._segment: _Segment | None = None  # that is written to
        self._segments = 0
        self._spare: list[_Segment] = []
        self._mapped: dict[int, _Segment] = {}  # by clients
        self._closed = False
        self._start, self._next, self._bytes = start.batch, start.batch, 0
        self._end: dict[str, Any] | None = None
        self._connections: set[Connection] = set()
        self._folder: str | None = None
        if address is None:
            self._folder = tempfile.mkdtemp(prefix="weir-rows-")
            address = os.path.join(self._folder, "socket")
        try:
            self._listener = _listen(address)
        except BaseException:
            self._remove_folder()
            raise
        if address.startswith("tcp://"):
            host, port = self._listener.getsockname()[:2]
            address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        self.address = address
        threading.Thread(target=self._accept, name="weir-rows", daemon=True).start()

    @property
    def clients(self) -> int:
        """How many are connected."""
        return len(self._connections)

    @property
    def has_room(self) -> bool:
        """Whether another batch may be made."""
        with self._changed:
            return self._bytes < self._ahead_bytes or self._end is not None

    def wait_for_room(self, seconds: float | None = None) -> bool:
        """Wait until there is room, or the stream has ended; return whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._bytes < self._ahead_bytes or self._end is not None, seconds)

    def wait_until_read(self, seconds: float | None = None) -> bool:
        """Wait until the stream has ended and all batches are acknowledged; return whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._end is not None and not self._batches, seconds)

    def reserve(self, layout: BatchLayout, rows: int) -> tuple[Tensors, int]:
        """Return tensors in shared memory that the next batch is written to, and the place for `publish`."""
        if self._segment is None or self._segment.used + layout.nbytes > self._segment.size:
            with self._changed:
                self._let_go_of_segment()
                spare = next((one for one in self._spare if one.size >= layout.nbytes), None)
                if spare is not None:
                    self._spare.remove(spare)
                self._segment = spare or _Segment(max(SEGMENT_BYTES, layout.nbytes))
                self._segment.begin(self._segments)
                self._segments += 1
        offset = self._segment.used
        return read_tensors(self._segment.memory, offset, layout.header(rows)), offset

    def publish(self, layout: BatchLayout, offset: int, rows: int, cursor: Cursor) -> None:
        """Give the reserved batch, of which so many rows are written, to clients."""
        with self._changed:
            if self._end is not None:
                return
            assert self._segment is not None
            batch = _Batch(self._next, self._segment, offset, layout.nbytes, layout.header(rows), cursor)
            self._segment.used += layout.nbytes
            self._segment.kept += 1
            self._batches.append(batch)
            self._bytes += batch.nbytes
            self._next += 1
            self._changed.notify_all()

    def finish(self, error: str | None = None) -> None:
        """Say that no further batch comes, and why if that is an error; those that are kept can be read."""
        with self._changed:
            if self._end is None:
                self._end = {"end": self._next} if error is None else {"error": error, "field": "stream"}
                self._changed.notify_all()

    def close(self) -> None:
        """End the stream, and forget what was not acknowledged."""
        self.finish("the stream was closed before all of it was read")
        with self._changed:
            connections, self._closed = list(self._connections), True
            self._let_go_of_segment()
            self._acknowledge(self._next)
            for segment in [*self._spare, *self._mapped.values()]:
                segment.free()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        # Who asked before is still told how the stream ended.
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RD)
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, ANSWER_SECONDS)
        for connection in connections:
            connection.close()
        if not self.address.startswith("tcp://"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _let_go_of_segment(self) -> None:
        """Write no further batch to the present segment; the lock is held."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self._reuse(segment)

    def _reuse(self, segment: _Segment) -> None:
        """Keep a segment for other batches, or free it, if nothing needs what is in it; the lock is held."""
        if segment.kept or segment is self._segment or (segment.mapped and not self._closed):
            return
        self._mapped.pop(segment.number, None)
        if self._closed or segment.unknown or len(self._spare) >= SPARE_SEGMENTS:
            segment.free()
        elif segment not in self._spare:
            self._spare.append(segment)

    def _unmapped(self, connection: Connection, segment: _Segment, unknown: bool = False) -> None:
        """Note that a client has no view of a segment left, or that nobody knows; the lock is held."""
        segment.mapped.discard(connection)
        segment.unknown |= unknown
        self._reuse(segment)

    def _acknowledge(self, before: int) -> None:
        """Mark the batches before a number as done; the lock is held."""
        for batch in self._batches:
            batch.done = batch.done or batch.number < before
        self._drop()

    def _drop(self) -> None:
        """Forget the first batches, as far as they are done; the lock is held."""
        while self._batches and self._batches[0].done:
            batch = self._batches.popleft()
            segment = batch.segment
            self._bytes -= batch.nbytes
            segment.kept -= 1
            self._reuse(segment)
        self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(sock,), name="weir-rows-client", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """Answer one client until it goes."""
        connection: Connection | None = None
        try:
            connection = accept(sock, self.token, self._start)
            with self._changed:
                self._connections.add(connection)
            while True:
                self._answer(connection, connection.receive()[0])
        except WeirError as e:
            logger.warning("a client of the stream of rows at %s was refused: %s", self.address, e)
        except (OSError, EOFError):
            pass  # it is gone, and finds what it has not acknowledged when it comes back
        finally:
            if connection is not None:
                with self._changed:
                    self._connections.discard(connection)
                    self._changed.notify_all()
                    for segment in [one for one in self._mapped.values() if connection in one.mapped]:
                        self._unmapped(connection, segment, unknown=True)
                connection.close()
            sock.close()

    def _answer(self, connection: Connection, message: dict[str, Any]) -> None:
        """Do what a client asks: {"done": n}, {"acknowledge": n}, {"unmapped": segment} and {"get": n}."""
        if not message or not all(type(number) is int and number >= 0 for number in message.values()):
            raise WeirError(f"unknown message {brief(message)}", "message")
        if (number := message.get("done")) is not None:
            with self._changed:
                index = number - (self._next - len(self._batches))
                if 0 <= index < len(self._batches):
                    self._batches[index].done = True
                self._drop()
        if (number := message.get("unmapped")) is not None:
            with self._changed:
                if (segment := self._mapped.get(number)) is not None:
                    self._unmapped(connection, segment)
        if (number := message.get("acknowledge")) is not None:
            with self._changed:
                self._acknowledge(number)
            connection.send({"acknowledged": number})
        if (number := message.get("get")) is not None:
            self._send(connection, number)

    def _send(self, connection: Connection, number: int) -> None:
        """Send a batch when it is there, or what has come instead."""
        with self._changed:
            self._changed.wait_for(lambda: number < self._next or self._end is not None)
            first = self._next - len(self._batches)
            if self._closed:  # which lets go of all batches
                connection.send(self._end or {})
                return
            if number < first:
                error = f"batch {number} was acknowledged and is gone; the stream goes on at batch {first}"
                connection.send({"error": error, "field": "cursor"})
                return
            if number >= self._next:
                connection.send(self._end or {})
                return
            batch = self._batches[number - first]
            if connection.local:
                batch.segment.mapped.add(connection)
                self._mapped[batch.segment.number] = batch.segment
            fd = os.dup(batch.segment.fd)  # stays open if the batch is acknowledged while it is sent
        try:
            header = {
                "batch": number, "bytes": batch.nbytes, "offset": batch.offset, "segment": batch.segment.number,
                "size": batch.segment.size, "tensors": batch.header, "cursor": batch.cursor,
            }  # fmt: skip
            if connection.local:
                connection.send(header, fd)
            else:
                connection.send(header)
                connection.send_file(fd, batch.offset, batch.nbytes)
        finally:
            os.close(fd)


def _listen(address: str) -> socket.socket:
    family, place = parse_address(address)
    listener = socket.socket(family)
    try:
        if family == socket.AF_UNIX:
            if os.path.exists(place):
                _remove_stale(address, place)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        if family == socket.AF_UNIX:
            os.chmod(place, 0o600)
        listener.listen(64)
    except OSError as e:
        listener.close()
        raise WeirError(f"cannot listen at {address}: {e}", "address") from e
    return listener


def _remove_stale(address: str, place: str) -> None:
    """Remove the socket of a process that is gone; WeirError if one listens, or it is another file."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(place)
        except ConnectionRefusedError:
            os.unlink(place)
            return
        except OSError as e:
            raise WeirError(f"{address} is not a socket ({e}); choose another path", "address") from e
    raise WeirError(f"another process listens at {address}; choose another path", "address")
