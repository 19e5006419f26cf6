"""The link: lends the worker's host buffer to the processes that read from it, and hears what they are done with."""

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
START = struct.Struct("<q")


class BufferServer:
    """One stream socket to each reader. It carries the buffer's file descriptor there, and back the starts of pieces
    that the reader has dropped; when it closes, the reader has dropped everything."""

    def __init__(self, host: HostBuffer, arena: Arena, worker: str) -> None:
        self._host, self._arena, self._worker = host, arena, worker
        self._lent: dict[str, set[int] | None] = {}
        """Reply address -> pieces that its reader holds; None for a reader that cannot map the buffer."""
        self._gone: set[str] = set()
        """Readers that have hung up."""
        self._names: dict[socket.socket, str] = {}
        self._rest: dict[socket.socket, bytes] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, wake = socket.socketpair()
        self._selector.register(wake, selectors.EVENT_READ)
        self._wake_end = wake
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="weir-link", daemon=True)
        self._thread.start()

    def maps(self, reply: str) -> bool:
        """Whether the reader needs no rows in messages; asked for the first time, the buffer is lent to it."""
        if reply not in self._lent and reply not in self._gone:
            lent = self._lend(reply, messages.ReaderEndpoint.parse(reply))
            with self._lock:
                if reply not in self._gone:
                    self._lent.setdefault(reply, set() if lent else None)
        return self._lent.get(reply, self._gone) is not None

    def grant(self, reply: str, start: int) -> None:
        """The reader holds the piece at `start`."""
        with self._lock:
            if reply not in self._gone:
                lent = self._lent[reply]
                if lent is not None:
                    lent.add(start)
                return
        self._arena.let_go(start)

    def close(self) -> None:
        """Hang up."""
        self._stop = True
        self._wake.send(b"x")
        self._thread.join(timeout=5)

    def _lend(self, reply: str, to: messages.ReaderEndpoint) -> bool:
        if not to.arenas:
            return False
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(TIMEOUT)
        try:
            line.connect(to.arenas)
            hello = messages.encode(messages.WorkerHello(to.token, self._worker, self._host.rows, self._host.row_bytes))
            socket.send_fds(line, [struct.pack("<I", len(hello)) + hello], [self._host.fd])
            if line.recv(1) != b"k":
                raise OSError("it did not take the buffer")
        except OSError as e:
            # Rows then travel in messages: slower, never wrong.
            logger.warning("Weir cannot share memory with the reader at %s: %s", to.arenas, e)
            line.close()
            return False
        line.setblocking(False)
        self._names[line] = reply
        self._rest[line] = b""
        self._selector.register(line, selectors.EVENT_READ)
        self._wake.send(b"x")
        return True

    def _run(self) -> None:
        while not self._stop:
            for key, _ in self._selector.select():
                line = key.fileobj
                if line is self._wake_end:
                    self._wake_end.recv(64)
                elif isinstance(line, socket.socket):
                    self._hear(line)
        for line in [*self._names, self._wake, self._wake_end]:
            line.close()

    def _hear(self, line: socket.socket) -> None:
        try:
            data = line.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        reply = self._names[line]
        if not data:
            self._selector.unregister(line)
            line.close()
            del self._names[line], self._rest[line]
            with self._lock:
                held = self._lent.pop(reply, None) or set()
                self._gone.add(reply)
            for start in held:
                self._arena.let_go(start)
            return
        data = self._rest[line] + data
        whole = len(data) - len(data) % START.size
        self._rest[line] = data[whole:]
        for (start,) in START.iter_unpack(data[:whole]):
            with self._lock:
                held = self._lent.get(reply) or set()
                known = start in held
                held.discard(start)
            if known:
                self._arena.let_go(start)
