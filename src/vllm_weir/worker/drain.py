"""The drain: a thread that sends rows to the processes that asked for them, and then frees their place in the ring."""

from __future__ import annotations

import logging
import queue
import threading

import zmq

from vllm_weir import mail
from vllm_weir.worker.plan import Entry, Steered
from vllm_weir.worker.ring import Lease, Ring

logger = logging.getLogger(__name__)
SEND_TIMEOUT_MS = 60_000


class Drain:
    """Sends each step's rows on; a reader that cannot be reached loses its rows, never the engine its pace."""

    def __init__(self, ring: Ring, d_model: int, dtype: str) -> None:
        self.ring = ring
        self._d_model = d_model
        self._dtype = dtype
        self._row_bytes = ring.buffer[0].numel() * ring.buffer.element_size()
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket] = {}
        self._thread = threading.Thread(target=self._run, name="weir-drain", daemon=True)
        self._thread.start()

    def send(self, lease: Lease | None, entries: list[Entry], steered: list[Steered]) -> None:
        """Queue what a step did; `entries` are grouped by reply address, as the planner lays them out."""
        self._jobs.put((lease, entries, steered))

    def fail(self, reply: str, request_id: str, reason: str) -> None:
        """Tell a reader that a request's rows will not come, and why."""
        self._jobs.put((reply, {request_id: reason}))

    def close(self) -> None:
        """Send what is queued, then stop."""
        self._jobs.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if len(job) == 2:
                reply, failures = job
                self._post(reply, b"", failures=failures)
                continue
            lease, entries, steered = job
            self._send_spans(steered)
            if lease is None:
                continue
            try:
                self._send_rows(lease, entries)
            finally:
                self.ring.release(lease)
        for socket in self._sockets.values():
            socket.close(linger=1000)
        self._context.term()

    def _send_rows(self, lease: Lease, entries: list[Entry]) -> None:
        assert lease.read is not None, "a lease is sent only after it was shipped"
        rows = lease.read()
        first = 0
        while first < len(entries):
            reply, start = entries[first].reply, entries[first].start
            last = first
            pieces = []
            while last < len(entries) and entries[last].reply == reply:
                e = entries[last]
                positions = e.positions.astype("<i4").tobytes()
                pieces.append(mail.Piece(e.request_id, list(e.columns), positions, e.start - start))
                last += 1
            end = entries[last].start if last < len(entries) else lease.rows
            self._post(reply, rows[start * self._row_bytes : end * self._row_bytes], pieces=pieces)
            first = last

    def _send_spans(self, steered: list[Steered]) -> None:
        by_reply: dict[str, list[mail.Span]] = {}
        for s in steered:
            span = mail.Span(s.request_id, list(s.moves), s.positions.astype("<i4").tobytes())
            by_reply.setdefault(s.reply, []).append(span)
        for reply, spans in by_reply.items():
            self._post(reply, b"", spans=spans)

    def _post(self, reply: str, payload, **content) -> None:
        address, _, token = mail.split_reply(reply)
        header = mail.Header(token, self._d_model, self._dtype, **content)
        try:
            self._socket(address).send_multipart([mail.encode(header), payload], copy=True)
        except zmq.ZMQError as e:
            # The reader's own wait for these rows raises; the engine and the other readers go on.
            logger.error("Weir could not deliver rows to %s: %s", address, e)
            self._sockets.pop(address).close(linger=0)

    def _socket(self, address: str) -> zmq.Socket:
        if address not in self._sockets:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 64)
            socket.connect(address)
            self._sockets[address] = socket
        return self._sockets[address]
