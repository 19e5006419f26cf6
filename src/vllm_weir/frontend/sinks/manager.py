"""The sink manager: the sinks of one engine, and the deliveries to them."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its exit hook must run after ours, so be registered before
import json
import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_weir import consumers
from vllm_weir.consumers.base import Consumer, EngineInfo, Finished
from vllm_weir.controllers.async_controller import AsyncController
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.outputs.ticket import Ticket, labels_of
from vllm_weir.frontend.sinks.delivery import Delivery
from vllm_weir.frontend.sinks.mark_buffer import MarkBuffer
from vllm_weir.frontend.sinks.runner import SinkRunner
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.gates import PREFIX
from vllm_weir.schema.request import ResolvedSpec, parse_captures
from vllm_weir.schema.sinks import Sink, SinkDefinition

if TYPE_CHECKING:
    from vllm_weir.frontend.outputs.view import OutputView

logger = logging.getLogger(__name__)
MAX_OWN_SINKS = 16
"""Sinks set up by requests that are open at once."""
MAX_ID_LENGTH = 4000
"""Characters of the engine's id of a request; datasets take 4096, with suffixes such as a
sequence's number."""


class SinkManager:
    """The sinks of the engine's settings and of its requests.

    Args:
        patience: seconds that a sink with the policy ``"block"`` may delay an output.

    Attributes:
        everyone: captures of every request, for the settings' sinks.
        marks: rows that wait to be marked.
        served: whether clients of a server read what becomes of rows, see `Ticket`.
        close: hands the sinks what is queued and closes them; runs by itself when the manager is
            collected.

    Raises:
        WeirError: if a definition has an invalid capture, or a consumer that is not installed.
    """

    def __init__(
        self, definitions: Mapping[str, SinkDefinition], marked_bytes: int, marked_seconds: float, patience: float
    ) -> None:
        self.definitions = dict(definitions)
        self._consumers = {name: _made(name, definition) for name, definition in definitions.items()}
        """Made early: which captures a consumer declares may depend on its options."""
        self.everyone = tuple(
            c for name, d in definitions.items() for c in captures_for(name, d, self._consumers[name], _path(name))
        )
        self.served = False
        self._controllers: dict[str, tuple[SinkDefinition, AsyncController]] = {}
        self._removed: dict[str, SinkRunner] = {}
        """Closed runners of controllers, for sequences that were to go there."""
        self.marks = MarkBuffer(marked_bytes, marked_seconds)
        self._patience = patience
        self._engine: EngineInfo | None = None
        self._runners: dict[str, SinkRunner] = {}
        self._own: OrderedDict[SinkDefinition, SinkRunner] = OrderedDict()
        self._ending: dict[SinkDefinition, SinkRunner] = {}
        """Sinks set up by requests, no longer in use, whose threads may still run."""
        self._lock = threading.Lock()
        self._evicter: threading.Thread | None = None
        self._wake = threading.Event()
        """Set when rows are added to `marks`, so that the evicter looks when they are due."""
        self.close = weakref.finalize(self, _close, self._runners, self._own, self._ending)
        _close_before_exit(self)

    def open(self, engine: EngineInfo) -> None:
        """Set up the settings' sinks; raise WeirError if a consumer cannot be opened."""
        with self._lock:
            self._engine = engine
            fits = {name for name, definition in self.definitions.items() if definition.fits_width}
            self.everyone = tuple(_fitting(c, engine.d_model) if c.sink.name in fits else c for c in self.everyone)
            for name, definition in self.definitions.items():
                if name not in self._runners:
                    self._runners[name] = _opened(name, definition, engine, _path(name), self._consumers[name])
            for name, (definition, controller) in self._controllers.items():
                if name not in self._runners:
                    path = f"settings.controllers.{name.removeprefix(PREFIX)}"
                    self._runners[name] = _opened(name, definition, engine, path, controller)

    def add_controller(self, name: str, definition: SinkDefinition, controller: AsyncController, path: str) -> None:
        """Send finished sequences with scores to a controller from now on, and rows that it captures.

        It is not opened yet; its `actions` are set. Errors name the field `path`.

        Raises:
            WeirError: if the controller cannot be opened.
        """
        captures = captures_for(name, definition, controller, path)
        with self._lock:
            if self._engine is not None:
                self._runners[name] = _opened(name, definition, self._engine, path, controller)
            self._controllers = {**self._controllers, name: (definition, controller)}
            self.everyone = (*self.everyone, *captures)

    def remove_controller(self, name: str) -> None:
        """Hand a controller what is queued, and close it; sequences that finish later are dropped there."""
        with self._lock:
            self._controllers = {key: one for key, one in self._controllers.items() if key != name}
            self.everyone = tuple(capture for capture in self.everyone if capture.sink.name != name)
            runner = self._runners.get(name)
            if runner is not None:
                self._removed[name] = runner  # first: `_runner` looks in both without the lock
                del self._runners[name]
        if runner is not None:
            runner.close()

    def controller(self, name: str) -> AsyncController | None:
        found = self._controllers.get(name)
        return None if found is None else found[1]

    @property
    def takes_scores(self) -> bool:
        return bool(self._controllers)

    def scored_parts(self, memory: CaptureGroup, others: Sequence[CaptureGroup]) -> list[CaptureGroup]:
        """Return empty groups for controllers that get scores of a sequence, and none of its rows.

        `memory` is what comes back on its output, `others` are its groups for sinks.
        """
        served = {part.sink.name for part in others}
        return [
            CaptureGroup(ResolvedSpec(()), {}, memory.dtype, Sink(name))
            for name in self._controllers
            if name not in served
        ]

    def prepare(self, parts: Sequence[CaptureGroup], request_id: str = "") -> None:
        """Set up the sinks of a request; raise WeirError naming the field, if a consumer cannot be opened."""
        for part in parts:
            if not part.sink.memory:
                _check_name(request_id)
                self._runner(part.sink)

    def deliver(
        self, request_id: str, views: Sequence[OutputView], request: Finished, release: Callable[[], None], hold: bool
    ) -> list[Ticket]:
        """Send a finished sequence's rows to its sinks, or keep those that wait to be marked; return their tickets.

        There is a view for each capture group that has a sink; `release` is called once for each, when its
        rows are no longer needed in memory. `hold`: whether this call may block while a sink has no room.
        """
        patience = self._patience if hold else 0.0
        tickets: list[Ticket] = []
        kept: list[_UnmarkedDelivery] = []
        groups_of_sink = Counter(view.part.sink for view in views)
        labels = labels_of([(view.part.sink, view.part.keep) for view in views])
        for view, label in zip(views, labels, strict=True):
            try:
                runner = self._runner(view.part.sink)
            except WeirError as e:  # raising would stop the outputs of all requests
                logger.error("the sink %s failed at request %s: %s", label, request.name, e)
                tickets.append(Ticket(label, True, served=self.served))
                tickets[-1].close(f"failed: {e}")
                release()
                continue
            marked = view.part.keep == "marked"
            ticket = Ticket(label, runner.required, "held" if marked else "queued", self.served)
            of_group = replace(request, capture=view.part.notes)
            if marked and groups_of_sink[view.part.sink] > 1:  # a consumer gets each name once
                of_group = replace(of_group, name=f"{request.name}.marked", part="marked")
            delivery = Delivery(view, of_group, ticket, release, runner.scored)
            tickets.append(ticket)
            if marked:
                kept.append(_UnmarkedDelivery(delivery, runner))
            else:
                runner.offer(delivery, patience)
        metadata = self.marks.add(request_id, list(kept)) if kept else None
        if metadata is not None:
            for unmarked in kept:
                unmarked.send(metadata, patience)
        elif kept:
            self._wake_evicter()
        return tickets

    def mark(self, name: str, metadata: dict[str, Any], hold: bool = True) -> list[Ticket]:
        """Mark a request, as `weir.mark` does; `hold` as in `deliver`."""
        tickets = []
        for unmarked in self.marks.mark(name, metadata):
            assert isinstance(unmarked, _UnmarkedDelivery)
            unmarked.send(metadata, self._patience if hold else 0.0)
            tickets.append(unmarked.delivery.ticket)
        return tickets

    def flush(self, timeout: float) -> None:
        """Wait until every sink has made durable what was sent to it; raise WeirError naming those that could not."""
        failures = []
        for runner in self._all():
            try:
                runner.flush(timeout)
            except WeirError as e:  # go on, so that the rows of the other sinks are flushed
                failures.append(e)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise WeirError("; ".join(e.message for e in failures), "sink")

    def report(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            sinks = [Sink(name) for name in self._runners] + [Sink(own.consumer, own) for own in self._own]
            runners = [*self._runners.values(), *self._own.values()]
        labels = labels_of([(sink, "always") for sink in sinks])
        return {label: runner.report() for label, runner in zip(labels, runners, strict=True)}

    def _all(self) -> list[SinkRunner]:
        with self._lock:
            return [*self._runners.values(), *self._own.values()]

    def _runner(self, sink: Sink) -> SinkRunner:
        if sink.own is None:
            return self._runners.get(sink.name) or self._removed[sink.name]
        with self._lock:
            runner = self._own.get(sink.own)
            if runner is None:
                assert self._engine is not None
                if sink.own in self._ending:
                    self._ending.pop(sink.own).close()  # two at once could write the same files
                self._stop_idle(sink.path)
                runner = SinkRunner(sink.name, sink.own, self._engine, sink.path)
                self._own[sink.own] = runner
            self._own.move_to_end(sink.own)
            return runner

    def _stop_idle(self, path: str) -> None:
        """Stop an idle sink if there are too many; raise WeirError if none is idle."""
        if len(self._own) < MAX_OWN_SINKS:
            return
        idle = next((d for d, r in self._own.items() if r.idle), None)
        if idle is None:
            raise WeirError(
                f"{MAX_OWN_SINKS} sinks set up by requests are busy; define the sink in the settings and name it", path
            )
        for definition in [d for d, r in self._ending.items() if r.ended]:
            del self._ending[definition]
        self._ending[idle] = self._own.pop(idle)
        self._ending[idle].stop()  # does not wait, as closing the consumer may take long

    def _wake_evicter(self) -> None:
        """Have rows evicted that are not marked in time."""
        if self._evicter is None:
            self._evicter = threading.Thread(
                target=_evict_expired, args=(weakref.ref(self), self._wake), name="weir-marks", daemon=True
            )
            self._evicter.start()
        self._wake.set()


class _UnmarkedDelivery:
    """A delivery that waits to be marked."""

    def __init__(self, delivery: Delivery, runner: SinkRunner) -> None:
        self.delivery, self._runner = delivery, runner
        runner.expect(1)

    @property
    def size(self) -> int:
        return self.delivery.size

    def send(self, metadata: dict[str, Any], patience: float) -> None:
        self.delivery.set_mark(metadata)
        self.delivery.ticket.state = "queued"
        self._runner.offer(self.delivery, patience)
        self._runner.expect(-1)

    def evict(self) -> None:
        self.delivery.evict()
        self._runner.expect(-1)


def check_sinks(definitions: Mapping[str, SinkDefinition]) -> None:
    for name, definition in definitions.items():
        captures_for(name, definition, consumers.find(definition.consumer, _path(name)), _path(name))


def _path(name: str) -> str:
    return f"settings.sinks.{name}"


def _made(name: str, definition: SinkDefinition) -> Consumer:
    return consumers.make(definition.consumer, json.loads(definition.options), _path(name))


def _opened(name: str, definition: SinkDefinition, engine: EngineInfo, path: str, consumer: Consumer) -> SinkRunner:
    """Open a consumer; raise WeirError if it cannot be, or declares other captures than before."""
    before = captures_for(name, definition, consumer, path)
    runner = SinkRunner(name, definition, engine, path, consumer)
    if captures_for(name, definition, consumer, path) != before:
        runner.close()
        raise WeirError(
            "it set its captures in open, when requests may run already; set them in __init__ or on the class",
            f"{path}.{definition.consumer}",
        )
    return runner


def captures_for(
    name: str, definition: SinkDefinition, consumer: Consumer | type[Consumer], path: str
) -> list[Capture]:
    """Return the captures of every request for a sink or a controller.

    `definition` may say what it gets; otherwise the object `consumer` declares it, as its class alone does
    not know what ``__init__`` adds.

    Raises:
        WeirError: naming a field under `path`, if one is invalid.
    """
    given: Any = consumer.captures
    if definition.captures is not None:
        given = [json.loads(text) for text in definition.captures]
    elif isinstance(given, property):
        given = ()
    captures = []
    for k, capture in enumerate(parse_captures(given, f"{path}.capture")):
        if not capture.sink.memory or capture.keep != "always":
            raise WeirError("the captures of a sink always go to it; leave sink and keep out", f"{path}.capture[{k}]")
        captures.append(replace(capture, sink=Sink(name), keep=definition.keep))
    return captures


def _fitting(capture: Capture, d_model: int) -> Capture:
    compress = capture.compress
    if compress is None or compress.method != "topk8" or compress.k is None:
        return capture
    return replace(capture, compress=replace(compress, k=min(compress.k, d_model)))


def _evict_expired(manager_of: weakref.ref[SinkManager], wake: threading.Event) -> None:
    while True:
        manager = manager_of()
        if manager is None:
            return
        due = manager.marks.due
        del manager
        wake.wait(1.0 if due is None else min(1.0, max(0.01, due - time.monotonic())))
        wake.clear()
        manager = manager_of()
        if manager is None:
            return
        manager.marks.evict_expired()
        del manager


_managers: weakref.WeakSet[SinkManager] = weakref.WeakSet()


def _close_before_exit(manager: SinkManager) -> None:
    """Close a manager at exit, before ``atexit`` hooks: consumers may start threads until then."""
    manager.close.atexit = not hasattr(threading, "_register_atexit")
    if not manager.close.atexit and not _managers:
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]
    _managers.add(manager)


def _close_all() -> None:
    for manager in list(_managers):
        manager.close()


def _close(runners: dict[str, SinkRunner], *own: dict[SinkDefinition, SinkRunner]) -> None:
    for runner in [*runners.values(), *(runner for some in own for runner in some.values())]:
        runner.close()


def _check_name(request_id: str) -> None:
    if len(request_id) > MAX_ID_LENGTH:
        why = f"rows that go to a sink need an id of at most {MAX_ID_LENGTH:,} characters, not {len(request_id):,}"
        raise WeirError(why, "request_id")
    if not request_id.isascii() and any("\ud800" <= c <= "\udfff" for c in request_id):
        raise WeirError(f"rows that go to a sink need an id that is valid text, not {request_id[:80]!a}", "request_id")
