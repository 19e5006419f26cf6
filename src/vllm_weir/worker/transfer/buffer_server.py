"""The server that shares a worker's host buffer with readers and frees what they release."""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import threading

from vllm_weir import messages
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.transfer.pinned_buffer import HostBuffer

logger = logging.getLogger(__name__)
TIMEOUT = 10.0
"""Seconds that a reader may take to map the buffer."""
PIECE_START = struct.Struct("<q")
"""A released piece, as readers name it: its first row."""


class BufferServer:
    """A stream socket to each reader, and a thread that listens to them.

    A socket carries the buffer's file descriptor to the reader, and back the starts of pieces that
    the reader has released. A reader whose socket closes has released everything.
    """

    def __init__(self, host: HostBuffer, arena: Arena, worker: str) -> None:
        self._host, self._arena, self._worker = host, arena, worker
        self._held: dict[str, set[int] | None] = {}
        """Endpoint -> starts of pieces that its reader holds; None for a reader that does not map
        the buffer."""
        self._gone: set[str] = set()
        """Endpoints of readers that have closed their socket."""
        self._endpoints: dict[socket.socket, str] = {}
        self._unparsed: dict[socket.socket, bytes] = {}
        """Bytes of a start of which the rest has not come."""
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, wake = socket.socketpair()
        self._selector.register(wake, selectors.EVENT_READ)
        self._wake_end = wake
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="weir-buffer-server", daemon=True)
        self._thread.start()

    def maps(self, endpoint: str) -> bool:
        """Return whether the reader maps the buffer; offer it to the reader on the first call.

        If not, rows have to travel in messages. Return True also for a reader that has gone, which
        needs no rows at all.
        """
        if endpoint not in self._held and endpoint not in self._gone:
            mapped = self._share(endpoint, messages.ReaderEndpoint.parse(endpoint))
            with self._lock:
                if endpoint not in self._gone:
                    self._held.setdefault(endpoint, set() if mapped else None)
        return self._held.get(endpoint, self._gone) is not None

    def allow_reader(self, endpoint: str, start: int, rows: int) -> None:
        """Note that the reader holds the piece of `rows` rows at row `start`; free it if the reader has gone."""
        self._host.prepare(start, rows)
        if endpoint.startswith(messages.KEPT):
            return
        with self._lock:
            if endpoint not in self._gone:
                held = self._held[endpoint]
                if held is not None:
                    held.add(start)
                return
        self._arena.release(start)

    def close(self) -> None:
        """Close all sockets and stop the thread."""
        self._stop = True
        self._wake.send(b"x")
        self._thread.join(timeout=5)

    def _share(self, endpoint: str, to: messages.ReaderEndpoint) -> bool:
        """Offer the buffer to a reader; return whether it has mapped it."""
        if not to.arenas:
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(TIMEOUT)
        try:
            connection.connect(to.arenas)
            hello = messages.encode(messages.WorkerHello(to.token, self._worker, self._host.rows, self._host.row_bytes))
            socket.send_fds(connection, [struct.pack("<I", len(hello)) + hello], [self._host.fd])
            if connection.recv(1) != b"k":
                raise OSError("the reader did not map the buffer")
        except OSError as e:
            logger.warning(
                "Weir cannot share memory with the reader at %s, so rows travel in messages, which is slower: %s",
                to.arenas,
                e,
            )
            connection.close()
            return False
        connection.setblocking(False)
        self._endpoints[connection] = endpoint
        self._unparsed[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)
        self._wake.send(b"x")
        return True

    def _run(self) -> None:
        while not self._stop:
            for key, _ in self._selector.select():
                connection = key.fileobj
                if connection is self._wake_end:
                    self._wake_end.recv(64)
                elif isinstance(connection, socket.socket):
                    self._read(connection)
        for connection in [*self._endpoints, self._wake, self._wake_end]:
            connection.close()

    def _read(self, connection: socket.socket) -> None:
        """Free the pieces that a reader has released."""
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(connection)
            return
        endpoint = self._endpoints[connection]
        data = self._unparsed[connection] + data
        whole = len(data) - len(data) % PIECE_START.size
        self._unparsed[connection] = data[whole:]
        for (start,) in PIECE_START.iter_unpack(data[:whole]):
            with self._lock:
                held = self._held.get(endpoint) or set()
                was_held = start in held
                held.discard(start)
            if was_held:
                self._arena.release(start)

    def _forget(self, connection: socket.socket) -> None:
        """Free all pieces of a reader that has closed its socket."""
        self._selector.unregister(connection)
        connection.close()
        endpoint = self._endpoints.pop(connection)
        del self._unparsed[connection]
        with self._lock:
            held = self._held.pop(endpoint, None) or set()
            self._gone.add(endpoint)
        for start in held:
            self._arena.release(start)
