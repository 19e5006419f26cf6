"""The thread that waits for each step's copies and tells readers which rows have arrived."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import zmq

from vllm_weir import messages
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.columns import ARRIVAL, STEERED
from vllm_weir.worker.planning.drafts import DraftedStep, DraftLedger
from vllm_weir.worker.planning.score_builder import told_scores
from vllm_weir.worker.planning.step_plan import ScoreReads
from vllm_weir.worker.transfer.buffer_server import BufferServer

logger = logging.getLogger(__name__)
Keep = Callable[[str, messages.LayoutUpdate, np.ndarray, bytes, dict[str, str]], None]
SEND_TIMEOUT_MS = 60_000
"""How long a reader may keep a message waiting before it loses its rows."""


def _no_scores(_reads: ScoreReads | None) -> dict[str, np.ndarray]:
    return {}


@dataclass
class StepNotice:
    """What one step has to tell its readers, by their endpoint."""

    arrived: Callable[[], None]  # waits until the step's rows are in host memory; raises if they are lost
    # what has changed in the layout of each reader's rows
    layout_updates: dict[str, messages.LayoutUpdate] = field(default_factory=dict)
    arrivals: dict[str, np.ndarray] = field(default_factory=dict)  # which rows have arrived, ARRIVAL [n]
    steered: dict[str, np.ndarray] = field(default_factory=dict)  # what was steered, STEERED [n]
    failures: dict[str, dict[str, str]] = field(default_factory=dict)  # request id -> why it failed
    spill: bool = False  # whether readers should empty their retired extents
    scored: dict[str, np.ndarray] = field(default_factory=dict)  # which positions were scored, SCORED [n]
    # waits for their scores, and returns them by endpoint, float32; raises if they are lost. Given `score_reads`, it
    # returns those instead of what the plan names.
    scores: Callable[[ScoreReads | None], dict[str, np.ndarray]] = _no_scores
    drafted: DraftedStep | None = None  # what the step drafted, if drafts decide on what readers are told
    # waits until the step is sampled, and returns how many tokens of each request were, of all that have drafts; raises
    # if that is lost
    sampled: Callable[[], Mapping[str, int]] = dict
    score_reads: ScoreReads | None = None
    # waits for what users' functions gave, and returns it by endpoint
    told: Callable[[], Mapping[str, list[messages.Told]]] = dict

    def drop_rejected(self, ledger: DraftLedger) -> None:
        """Leave out what belongs to rejected drafts; waits until the step is sampled."""
        drafted = self.drafted
        if drafted is None:
            return
        verified = ledger.verify(drafted, self.sampled() if drafted.undecided else {})
        self.arrivals = {
            endpoint: verified.keep(arrivals, drafted.arrival_tokens[endpoint])
            for endpoint, arrivals in self.arrivals.items()
        }
        self.steered = {
            endpoint: verified.keep(steered, drafted.steered_tokens[endpoint])
            for endpoint, steered in self.steered.items()
        }
        if drafted.score_reads is not None and len(drafted.score_reads):
            reads = verified.keep(drafted.score_reads, drafted.score_reads["token"])
            self.scored, self.score_reads = told_scores(reads, drafted.endpoints)
            if self.score_reads is None:
                self.scores = _no_scores


class Notifier:
    """A queue of notices and the thread that sends them.

    A reader that cannot be reached loses its rows; the engine does not wait for it.

    `rows`: the host buffer, [rows, d_model]; `buffer_server`: knows which readers map the buffer; `keep`: stands for
    the readers in this process (`messages.KEPT`): called with the endpoint, the changes of its layout, its arrivals,
    the rows' bytes, and its failed requests.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        arena: Arena,
        buffer_server: BufferServer,
        worker: str,
        keep: Keep,
        engine: int = 0,
        uncertainty: int = 0,
    ) -> None:
        self._engine, self._waiting = engine, 0
        self._ledger = DraftLedger(uncertainty)
        self._keep = keep
        self._rows, self._arena, self._buffer_server, self._worker = rows, arena, buffer_server, worker
        self._bytes = rows.view(-1).view(torch.uint8)
        self._dtype = str(rows.dtype).removeprefix("torch.")
        self._remote: dict[int, tuple[int, list[messages.ExtentPlaced]]] = {}
        """Row sequence -> (bytes of a rank, extents), for readers that get their rows in
        messages."""
        self._notices: queue.SimpleQueue[StepNotice | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket] = {}
        self._thread = threading.Thread(target=self._run, name="weir-notifier", daemon=True)
        self._thread.start()

    def note_waiting(self, waiting: int) -> None:
        """Note how many requests of the engine wait for table space, which readers are told along with rows."""
        self._waiting = waiting

    def send(self, notice: StepNotice) -> None:
        """Tell the readers once the rows have arrived."""
        self._notices.put(notice)

    def fail(self, endpoint: str, request_id: str, reason: str) -> None:
        """Tell a reader that a request's rows will not come, and why."""
        self._notices.put(StepNotice(lambda: None, failures={endpoint: {request_id: reason}}))

    def settle(self, timeout: float) -> bool:
        """Wait until what is queued has been sent; return whether it was within `timeout` seconds."""
        done = threading.Event()
        self._notices.put(StepNotice(done.set))
        return done.wait(timeout)

    def close(self) -> None:
        """Send what is queued, then stop."""
        self._notices.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while (notice := self._notices.get()) is not None:
            broken, scores = "", {}
            told: Mapping[str, list[messages.Told]] = {}
            try:
                notice.arrived()
                notice.drop_rejected(self._ledger)
                scores = notice.scores(notice.score_reads)
                told = notice.told()
            except Exception as e:  # noqa: BLE001 - a dead thread would leave every reader waiting for its timeout
                broken = _describe(e)
            parts = (
                notice.layout_updates,
                notice.arrivals,
                notice.steered,
                notice.failures,
                notice.scored,
                told,
            )
            for endpoint in sorted(set().union(*parts)):
                self._tell(endpoint, notice, broken, scores.get(endpoint, _NO_SCORES), told.get(endpoint, []))
        for socket in self._sockets.values():
            socket.close(linger=1000)
        self._context.term()

    def _tell(
        self, endpoint: str, notice: StepNotice, broken: str, scores: np.ndarray, told: list[messages.Told]
    ) -> None:
        """Send one reader's part of a notice; `broken` says why its rows are lost, if they are."""
        layout_updates = notice.layout_updates.get(endpoint) or messages.LayoutUpdate()
        maps_buffer = True
        try:
            if endpoint.startswith(messages.KEPT):
                maps_buffer = False
                self._hand_over(endpoint, notice, layout_updates, broken)
            else:
                maps_buffer = self._announce(endpoint, notice, layout_updates, broken, scores, told)
        except Exception as e:  # noqa: BLE001 - as above
            self._report_loss(endpoint, layout_updates, _describe(e))
        for extent in layout_updates.retired:
            self._arena.release(extent.start)
            if not maps_buffer:  # nobody else releases the reader's hold
                self._arena.release(extent.start)
        for row_seq in layout_updates.closed:
            self._remote.pop(row_seq, None)

    def _hand_over(self, endpoint: str, notice: StepNotice, layout_updates: messages.LayoutUpdate, broken: str) -> None:
        """Give a reader in this process its part of a notice."""
        arrivals = _NO_ARRIVALS if broken else notice.arrivals.get(endpoint, _NO_ARRIVALS)
        failures = notice.failures.get(endpoint, {}) | ({"": broken} if broken else {})
        self._keep(endpoint, layout_updates, arrivals, self._fetch(layout_updates, arrivals), failures)

    def _announce(
        self,
        endpoint: str,
        notice: StepNotice,
        layout_updates: messages.LayoutUpdate,
        broken: str,
        scores: np.ndarray,
        told: list[messages.Told],
    ) -> bool:
        """Send the message; return whether the reader maps the buffer."""
        to = messages.ReaderEndpoint.parse(endpoint)
        arrivals = _NO_ARRIVALS if broken else notice.arrivals.get(endpoint, _NO_ARRIVALS)
        steered = _NO_STEERED if broken else notice.steered.get(endpoint, _NO_STEERED)
        failures = notice.failures.get(endpoint, {})
        header = self._header(to, layout_updates, failures, notice.spill, broken)
        if len(scores):
            header.scored, header.scores = notice.scored[endpoint].tobytes(), scores.tobytes()
        header.told = told
        frames = [messages.encode(header), arrivals.tobytes(), steered.tobytes()]
        maps_buffer = not (layout_updates or len(arrivals)) or self._buffer_server.maps(endpoint)
        if not maps_buffer:
            frames.append(self._fetch(layout_updates, arrivals))
        self._post(to.rows, frames)
        return maps_buffer

    def _report_loss(self, endpoint: str, layout_updates: messages.LayoutUpdate, reason: str) -> None:
        """Tell a reader that its rows are lost, so that it fails the requests that wait."""
        try:
            to = messages.ReaderEndpoint.parse(endpoint)
            self._post(to.rows, [messages.encode(self._header(to, layout_updates, {}, False, reason)), b"", b""])
        except Exception:
            logger.exception(
                "Weir could not tell the reader %s that rows are lost; its requests fail by their timeout", endpoint
            )

    def _header(
        self,
        to: messages.ReaderEndpoint,
        layout_updates: messages.LayoutUpdate,
        failures: dict,
        spill: bool,
        broken: str,
    ) -> messages.MessageHeader:
        d_model = self._rows.shape[1]
        return messages.MessageHeader(
            to.token,
            self._worker,
            d_model,
            self._dtype,
            layout_updates,
            failures,
            pressure=self._arena.pressure,
            spill=spill,
            broken=broken,
            engine=self._engine,
            waiting=self._waiting,
        )

    def _fetch(self, layout_updates: messages.LayoutUpdate, arrivals: np.ndarray) -> bytes:
        """Return the bytes of the ranks that have arrived, one after the other."""
        row_bytes = self._rows.shape[1] * self._rows.element_size()
        for row_seq in layout_updates.opened:
            self._remote[row_seq.row_seq] = (row_seq.rank_bytes(row_bytes), [])
        for placed in layout_updates.placed:
            self._remote[placed.row_seq][1].append(placed)
        parts = []
        for number, rank, _, count, _ in arrivals.tolist():
            if rank < 0:
                continue
            width, extents = self._remote[number]
            extent = next(x for x in reversed(extents) if x.rank <= rank)
            first = extent.start * row_bytes + (rank - extent.rank) * width
            parts.append(self._bytes[first : first + count * width].numpy().tobytes())
        return b"".join(parts)

    def _post(self, address: str, frames: list[bytes]) -> None:
        try:
            self._socket(address).send_multipart(frames, copy=True)
        except zmq.ZMQError as e:
            # The reader's own wait for these rows raises; the engine and the other readers go on.
            logger.error("Weir could not deliver rows to the reader at %s: %s", address, e)
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


_NO_ARRIVALS, _NO_STEERED, _NO_SCORES = np.empty(0, ARRIVAL), np.empty(0, STEERED), np.empty(0, np.float32)


def _describe(error: Exception) -> str:
    logger.error("Weir could not deliver a step's rows", exc_info=error)
    return f"the worker could not deliver a step's rows: {type(error).__name__}: {error}"
