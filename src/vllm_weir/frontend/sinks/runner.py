"""A runner: one consumer, the thread that feeds it, and the queue before it."""

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

from safetensors import SafetensorError

from vllm_weir import consumers
from vllm_weir.consumers.base import EngineInfo, Finished
from vllm_weir.errors import WeirError
from vllm_weir.frontend.outputs.ticket import Ticket
from vllm_weir.frontend.sinks.delivery import Delivery
from vllm_weir.frontend.sinks.queue import BoundedQueue
from vllm_weir.schema.sinks import SinkDefinition

logger = logging.getLogger(__name__)
TICK = 1.0
CLOSING = 60.0
"""Seconds that a consumer has to take what is queued when its engine goes."""


class SinkRunner:
    """Feeds one consumer. What the consumer raises fails the rows in hand, and is counted; nothing else stops.

    Attributes:
        required: whether a request fails with it.

    Raises:
        WeirError: if the consumer is not installed, or refuses its options.
    """

    def __init__(self, name: str, definition: SinkDefinition, engine: EngineInfo, path: str) -> None:
        self.name, self.definition = name, definition
        self._consumer = consumers.make(definition.consumer, json.loads(definition.options), path)
        self.required = self._consumer.required if definition.required is None else definition.required
        try:
            self._consumer.open(engine)
        except Exception as e:
            where = f"{path}.{definition.consumer}"
            if isinstance(e, WeirError):
                raise WeirError(e.message, f"{where}.{e.field}" if e.field else where) from None
            raise WeirError(f"it cannot be opened: {type(e).__name__}: {e}", where) from e
        self._queue: BoundedQueue[Delivery] = BoundedQueue(definition.queue_bytes, definition.policy)
        self._call = threading.Lock()
        """Held while the consumer is called: `flush` comes from other threads."""
        self._pending: list[tuple[Finished, Ticket]] = []
        """Whose rows the consumer has taken and not published yet; under `_call`."""
        self.sequences = self.dropped = self.failed = 0
        self.last_error = ""
        self._held, self._count = 0, threading.Lock()
        self._spills: queue.SimpleQueue[Delivery | None] | None = None
        self._folder: tempfile.TemporaryDirectory | None = None
        if definition.policy == "spill":
            self._spills, self._folder = queue.SimpleQueue(), tempfile.TemporaryDirectory(prefix="weir-spill-")
            self._start(self._spill, "spill")
        self._thread = self._start(self._run, "sink")

    def offer(self, job: Delivery, patience: float) -> None:
        """Queue a job; its ticket tells how it ends. With the policy ``"block"`` waits up to `patience` seconds."""
        verdict = self._queue.put(job, patience)
        if verdict == "drop":
            self.dropped += 1
            job.over()
            job.ticket.close("dropped")
        elif verdict == "spill" and self._spills is not None:
            self._spills.put(job)

    def flush(self, timeout: float) -> None:
        """Wait until the consumer has taken what is queued, and has made it durable.

        Raises:
            WeirError: if it takes longer than `timeout` seconds, or fails.
        """
        if not self._queue.wait_done(timeout):
            raise WeirError(f"the sink {self.name!r} did not take everything within {timeout:g} s", "sink")
        try:
            self._publish(self._consumer.flush)
        except Exception as e:
            raise WeirError(f"the sink {self.name!r} could not be flushed: {type(e).__name__}: {e}", "sink") from e

    def hold(self, jobs: int) -> None:
        """So many more jobs may come to it later (fewer, if negative)."""
        with self._count:
            self._held += jobs

    @property
    def idle(self) -> bool:
        """Whether nothing waits for it."""
        return self._queue.idle and not self._held

    def report(self) -> dict[str, Any]:
        """State, as plain data."""
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
        """Take in nothing more: its thread gives the consumer what is queued, ends it, and ends."""
        self._queue.stop()

    @property
    def ended(self) -> bool:
        """Whether that is done."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """As `stop`, and wait for it."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=CLOSING)

    def _start(self, run: Callable[[], None], kind: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=f"weir-{kind}-{self.name}", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        ticked = time.monotonic()
        while True:
            try:
                job = self._queue.take(TICK)
            except queue.Empty:
                self._tick()
                ticked = time.monotonic()
                continue
            if job is None:
                break
            self._serve(job)
            self._queue.done()
            del job  # or it would hold its rows until the next one comes
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
        except BaseException:  # as in `_serve`
            logger.exception("the sink %s failed", self.name)

    def _publish(self, call: Callable[[], None]) -> None:
        """Call the consumer for no sequence in particular, and tell those whose rows it has published, or could not."""
        why = ""
        with self._call:
            try:
                call()
            except BaseException as e:
                self._note(e)
                why = self.last_error
                raise
            finally:
                waiting = []
                for request, ticket in self._pending:
                    if not self._is_pending(request):
                        ticket.revise("written")
                        continue
                    waiting.append((request, ticket))
                    if why:
                        ticket.revise(f"failed: {why}")
                self._pending = waiting

    def _note(self, e: BaseException) -> None:
        self.failed += 1
        self.last_error = f"{type(e).__name__}: {e}"

    def _serve(self, job: Delivery) -> None:
        state = "written"
        files: tuple[str, ...] = ()
        try:
            with self._call:
                for rows in job.rows():
                    self._consumer.take(rows)
                files = tuple(str(file) for file in self._consumer.finish(job.request) or ())
            self.sequences += 1
        except BaseException as e:  # noqa: BLE001 (a consumer may raise anything, SystemExit too; the request is told)
            # As text: a log record that kept the traceback would keep its frames, and the rows in them.
            logger.error("the sink %s failed at request %s\n%s", self.name, job.request.name, traceback.format_exc())
            self._note(e)
            state = f"failed: {self.last_error}"
            self._abort(job)
        job.over()
        with self._call:
            job.ticket.close(state, files)
            if state == "written" and self._is_pending(job.request):
                self._pending.append((job.request, job.ticket))

    def _is_pending(self, request: Finished) -> bool:
        try:
            return self._consumer.pending(request)
        except BaseException:
            logger.exception("the sink %s does not say whether request %s is written", self.name, request.name)
            return True

    def _abort(self, job: Delivery) -> None:
        try:
            with self._call:
                self._consumer.abort(job.request)
        except BaseException:
            logger.exception("the sink %s could not undo request %s", self.name, job.request.name)

    def _spill(self) -> None:
        assert self._spills is not None and self._folder is not None
        folder = Path(self._folder.name)
        while (job := self._spills.get()) is not None:
            try:
                job.spill(folder)
            except (WeirError, OSError, SafetensorError) as e:  # a full disk is a SafetensorError
                # The rows stay in memory; whoever takes them out meets a lost row again and reports it.
                logger.error("the sink %s could not spill request %s: %s", self.name, job.request.name, e)
            del job
