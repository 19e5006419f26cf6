"""The drain: a thread that waits until a step's rows have arrived in host memory, and then tells their readers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import zmq

from vllm_weir import messages
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.transfer.buffer_server import BufferServer

logger = logging.getLogger(__name__)
SEND_TIMEOUT_MS = 60_000


@dataclass
class StepNotice:
    """What one step has to tell; keys are reply addresses."""

    arrived: Callable[[], None]
    layout_updates: dict[str, messages.LayoutUpdate] = field(default_factory=dict)
    marks: dict[str, np.ndarray] = field(default_factory=dict)
    steered: dict[str, np.ndarray] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)
    spill: bool = False


class Notifier:
    """Tells readers what has arrived; one that cannot be reached loses its rows, never the engine its pace.

    Args:
        rows: the host buffer, [rows, d_model].
        arena: which parts of it are in use.
        link: knows which readers map the buffer.
        worker: this worker's name.
        engine: its data-parallel engine.

    Attributes:
        waiting: requests of the engine that wait for table space, to be told along with rows.
    """

    def __init__(self, rows: torch.Tensor, arena: Arena, link: BufferServer, worker: str, engine: int = 0) -> None:
        self._engine, self.waiting = engine, 0
        self._rows, self._arena, self._link, self._worker = rows, arena, link, worker
        self._bytes = rows.view(-1).view(torch.uint8)
        self._dtype = str(rows.dtype).removeprefix("torch.")
        self._far: dict[int, tuple[int, list[messages.ExtentPlaced]]] = {}
        """Row sequence -> (bytes of a rank, extents), for readers that get their rows in messages."""
        self._jobs: queue.SimpleQueue[StepNotice | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket] = {}
        self._thread = threading.Thread(target=self._run, name="weir-drain", daemon=True)
        self._thread.start()

    def send(self, parcel: StepNotice) -> None:
        """Tell the readers once the rows have arrived."""
        self._jobs.put(parcel)

    def fail(self, reply: str, request_id: str, reason: str) -> None:
        """Tell a reader that a request's rows will not come, and why."""
        self._jobs.put(StepNotice(lambda: None, failures={reply: {request_id: reason}}))

    def close(self) -> None:
        """Send what is queued, then stop."""
        self._jobs.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while (parcel := self._jobs.get()) is not None:
            broken = ""
            try:
                parcel.arrived()
            except Exception as e:  # noqa: BLE001 - a dead thread would leave every reader waiting for its timeout
                broken = _reason(e)
            replies = (
                parcel.layout_updates.keys() | parcel.marks.keys() | parcel.steered.keys() | parcel.failures.keys()
            )
            for reply in sorted(replies):
                self._tell(reply, parcel, broken)
        for socket in self._sockets.values():
            socket.close(linger=1000)
        self._context.term()

    def _tell(self, reply: str, parcel: StepNotice, broken: str) -> None:
        """One reader's part of a parcel; `broken`: why its rows cannot be vouched for, if so."""
        layout_updates = parcel.layout_updates.get(reply) or messages.LayoutUpdate()
        near = True
        try:
            near = self._announce(reply, parcel, layout_updates, broken)
        except Exception as e:  # noqa: BLE001 - as above
            self._excuse(reply, layout_updates, _reason(e))
        for extent in layout_updates.retired:
            self._arena.let_go(extent.start)
            if not near:
                self._arena.let_go(extent.start)
        for row_seq in layout_updates.closed:
            self._far.pop(row_seq, None)

    def _announce(self, reply: str, parcel: StepNotice, layout_updates: messages.LayoutUpdate, broken: str) -> bool:
        """Send it; returns whether the reader maps the buffer."""
        to = messages.ReaderEndpoint.parse(reply)
        marks = _NONE if broken else parcel.marks.get(reply, _NONE)
        steered = _NONE if broken else parcel.steered.get(reply, _NONE)
        failures = parcel.failures.get(reply, {})
        header = self._header(to, layout_updates, failures, parcel.spill, broken)
        frames = [messages.encode(header), _bytes(marks), _bytes(steered)]
        near = not (layout_updates or len(marks)) or self._link.maps(reply)
        if not near:
            frames.append(self._fetch(layout_updates, marks))
        self._post(to.rows, frames)
        return near

    def _excuse(self, reply: str, layout_updates: messages.LayoutUpdate, broken: str) -> None:
        """Tell a reader that what was for it is lost: it fails the requests that wait."""
        try:
            to = messages.ReaderEndpoint.parse(reply)
            self._post(to.rows, [messages.encode(self._header(to, layout_updates, {}, False, broken)), b"", b""])
        except Exception:
            logger.exception("Weir could not tell the reader %s; its requests fail by their timeout", reply)

    def _header(
        self,
        to: messages.ReaderEndpoint,
        layout_updates: messages.LayoutUpdate,
        failures: dict,
        spill: bool,
        broken: str,
    ) -> messages.MessageHeader:
        d_model = self._rows.shape[1]
        load = (self._engine, self.waiting)
        pressure = self._arena.pressure
        return messages.MessageHeader(
            to.token, self._worker, d_model, self._dtype, layout_updates, failures, pressure, spill, broken, *load
        )

    def _fetch(self, layout_updates: messages.LayoutUpdate, marks: np.ndarray) -> bytes:
        """The marked ranks themselves, one after the other."""
        row_bytes = self._rows.shape[1] * self._rows.element_size()
        for row_seq in layout_updates.opened:
            self._far[row_seq.row_seq] = (row_seq.rank_bytes(row_bytes), [])
        for placed in layout_updates.placed:
            self._far[placed.row_seq][1].append(placed)
        parts = []
        for number, rank, _, count, _ in marks.tolist():
            if rank < 0:
                continue
            width, extents = self._far[number]
            extent = next(x for x in reversed(extents) if x.rank <= rank)
            first = extent.start * row_bytes + (rank - extent.rank) * width
            parts.append(self._bytes[first : first + count * width].numpy().tobytes())
        return b"".join(parts)

    def _post(self, address: str, frames: list[bytes]) -> None:
        try:
            self._socket(address).send_multipart(frames, copy=True)
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


_NONE = np.zeros((0, 5), np.int32)


def _reason(error: Exception) -> str:
    logger.error("Weir could not deliver a step's rows", exc_info=error)
    return f"the worker could not deliver a step's rows: {type(error).__name__}: {error}"


def _bytes(marks: np.ndarray) -> bytes:
    return np.ascontiguousarray(marks, "<i4").tobytes()
