"""`SinkRunner`: one consumer with its queue and the thread that feeds it."""

from __future__ import annotations

import json
import logging
import queue
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_weir import consumers
from vllm_weir.consumers.base import Consumer, EngineInfo, Finished
from vllm_weir.controllers.async_controller import AsyncController
from vllm_weir.errors import WeirError
from vllm_weir.frontend.outputs.ticket import Ticket
from vllm_weir.frontend.sinks.delivery import Delivery
from vllm_weir.frontend.sinks.queue import BoundedQueue
from vllm_weir.schema.sinks import SinkDefinition

logger = logging.getLogger(__name__)
TICK = 1.0
"""Seconds between two calls of a consumer's `tick`."""
CLOSE_TIMEOUT = 60.0
"""Seconds that a consumer has to take what is queued when its engine closes."""


class SinkRunner:
    """One consumer with its queue and its thread.

    An exception of the consumer fails the delivery that it has in hand and is counted; the sink
    goes on.

    Args:
        definition: the consumer, its options, and the policy of its queue.
        path: the field that set the sink up, for errors.
        consumer: the consumer, if it has been made.

    Attributes:
        required: whether a request fails when its delivery fails.
        scored: whether the consumer gets scores, too.
        sequences, dropped, failed: counts of deliveries by outcome.
        last_error: what the consumer raised last.

    Raises:
        WeirError: if the consumer is not installed, or refuses its options.
    """

    def __init__(
        self, name: str, definition: SinkDefinition, engine: EngineInfo, path: str, consumer: Consumer | None = None
    ) -> None:
        self.name, self.definition = name, definition
        self._consumer = consumer or consumers.make(definition.consumer, json.loads(definition.options), path)
        self.scored = isinstance(self._consumer, AsyncController)
        self.required = self._consumer.required if definition.required is None else definition.required
        try:
            self._consumer.open(engine)
        except Exception as e:
            where = f"{path}.{definition.consumer}"
            if isinstance(e, WeirError):
                raise WeirError(e.message, f"{where}.{e.field}" if e.field else where) from None
            raise WeirError(f"the consumer cannot be opened: {type(e).__name__}: {e}", where) from e
        self._queue: BoundedQueue[Delivery] = BoundedQueue(definition.queue_bytes, definition.policy)
        self._consumer_lock = threading.Lock()
        """Held while the consumer is called, as `flush` calls it from other threads."""
        self._pending: list[tuple[Finished, Ticket]] = []
        """Sequences whose rows the consumer has taken and not published yet; under
        `_consumer_lock`."""
        self.sequences = self.dropped = self.failed = 0
        self.last_error = ""
        self._expected, self._expected_lock = 0, threading.Lock()
        """Deliveries that wait to be marked, and may still come."""
        self._spills: queue.SimpleQueue[Delivery | None] | None = None
        self._folder: tempfile.TemporaryDirectory | None = None
        if definition.policy == "spill":
            self._spills, self._folder = queue.SimpleQueue(), tempfile.TemporaryDirectory(prefix="weir-spill-")
            self._start(self._spill, "spill")
        self._thread = self._start(self._run, "sink")

    def offer(self, delivery: Delivery, patience: float) -> None:
        """Queue a delivery; with the policy ``"block"``, wait up to `patience` seconds for room."""
        verdict = self._queue.put(delivery, patience)
        if verdict == "drop":
            self.dropped += 1
            delivery.discard()
            delivery.ticket.close("dropped")
        elif verdict == "spill" and self._spills is not None:
            self._spills.put(delivery)

    def flush(self, timeout: float) -> None:
        """Wait until the consumer has taken what is queued and made it durable.

        Raise WeirError if it takes longer than `timeout` seconds, or fails.
        """
        if not self._queue.wait_done(timeout):
            raise WeirError(f"the sink {self.name!r} did not take everything within {timeout:g} s", "sink")
        try:
            self._publish(self._consumer.flush)
        except Exception as e:
            raise WeirError(f"the sink {self.name!r} could not be flushed: {type(e).__name__}: {e}", "sink") from e

    def expect(self, deliveries: int) -> None:
        """Expect so many more deliveries (fewer, if negative): the sink is not idle meanwhile."""
        with self._expected_lock:
            self._expected += deliveries

    @property
    def idle(self) -> bool:
        return self._queue.idle and not self._expected

    def report(self) -> dict[str, Any]:
        """Return the sink's state as plain data."""
        return {
            "consumer": self.definition.consumer,
            "policy": self.definition.policy,
            "queued": len(self._queue),
            "queued_bytes": self._queue.bytes,
            "sequences": self.sequences,
            "dropped": self.dropped,
            "failed": self.failed,
            "last_error": self.last_error,
        }

    def stop(self) -> None:
        """Refuse further deliveries; the thread hands the consumer what is queued, closes it, and ends."""
        self._queue.stop()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=CLOSE_TIMEOUT)

    def _start(self, run: Callable[[], None], kind: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=f"weir-{kind}-{self.name}", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        ticked = time.monotonic()
        while True:
            try:
                delivery = self._queue.take(TICK)
            except queue.Empty:
                self._tick()
                ticked = time.monotonic()
                continue
            if delivery is None:
                break
            self._deliver(delivery)
            self._queue.done()
            del delivery  # or its rows would be kept until the next one comes
            if time.monotonic() - ticked >= TICK:
                self._tick()
                ticked = time.monotonic()
        if self._spills is not None:
            self._spills.put(None)
        try:
            self._publish(self._consumer.close)
        except BaseException:
            logger.exception("the sink %s did not close", self.name)
        if self._folder is not None:
            self._folder.cleanup()

    def _tick(self) -> None:
        try:
            self._publish(self._consumer.tick)
        except BaseException:  # as in `_deliver`
            logger.exception("the sink %s failed", self.name)

    def _publish(self, call: Callable[[], None]) -> None:
        """Call the consumer's `tick`, `flush` or `close`; revise tickets of pending sequences."""
        why = ""
        with self._consumer_lock:
            try:
                call()
            except BaseException as e:
                self._count_failure(e)
                why = self.last_error
                raise
            finally:
                still_pending = []
                for request, ticket in self._pending:
                    if not self._is_pending(request):
                        ticket.revise("written")
                        continue
                    still_pending.append((request, ticket))
                    if why:
                        ticket.revise(f"failed: {why}")
                self._pending = still_pending

    def _count_failure(self, e: BaseException) -> None:
        self.failed += 1
        self.last_error = f"{type(e).__name__}: {e}"

    def _deliver(self, delivery: Delivery) -> None:
        state = "written"
        files: tuple[str, ...] = ()
        try:
            with self._consumer_lock:
                if isinstance(self._consumer, AsyncController):
                    self._consumer.score(delivery.request, delivery.scores())
                for rows in delivery.rows():
                    self._consumer.take(rows)
                files = tuple(str(file) for file in self._consumer.finish(delivery.request) or ())
            self.sequences += 1
        except BaseException as e:  # noqa: BLE001 - a consumer may raise anything, even SystemExit; the ticket says so
            # As text, since a log record with the traceback would keep its frames, and the rows in
            # them.
            logger.error(
                "the sink %s failed at request %s\n%s", self.name, delivery.request.name, traceback.format_exc()
            )
            self._count_failure(e)
            state = f"failed: {self.last_error}"
            self._abort(delivery)
        delivery.discard()
        with self._consumer_lock:
            delivery.ticket.close(state, files)
            if state == "written" and self._is_pending(delivery.request):
                self._pending.append((delivery.request, delivery.ticket))

    def _is_pending(self, request: Finished) -> bool:
        try:
            return self._consumer.pending(request)
        except BaseException:
            logger.exception("the sink %s does not say whether request %s is written", self.name, request.name)
            return True

    def _abort(self, delivery: Delivery) -> None:
        try:
            with self._consumer_lock:
                self._consumer.abort(delivery.request)
        except BaseException:
            logger.exception("the sink %s could not undo request %s", self.name, delivery.request.name)

    def _spill(self) -> None:
        assert self._spills is not None and self._folder is not None
        folder = Path(self._folder.name)
        while (delivery := self._spills.get()) is not None:
            try:
                delivery.spill(folder)
            except BaseException as e:  # noqa: BLE001 - a full disk, no memory for a copy, lost rows: later ones may do
                # The rows stay in memory. If they were lost, `_deliver` fails the same way and
                # reports it.
                self._queue.count(delivery)
                why = f"{type(e).__name__}: {e}"  # as in `_deliver`
                logger.error("the sink %s could not spill request %s: %s", self.name, delivery.request.name, why)
            del delivery
