"""The sink manager: all sinks of one engine, and which rows go to which."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - whose end comes after ours only if it was announced before
import json
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_weir import consumers
from vllm_weir.config.mi_patch_env import NAME as ACT
from vllm_weir.consumers.base import EngineInfo, Finished
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.outputs.ticket import Ticket, labels_of
from vllm_weir.frontend.sinks.delivery import Delivery
from vllm_weir.frontend.sinks.mark_buffer import MarkBuffer
from vllm_weir.frontend.sinks.runner import SinkRunner
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.sinks import Sink, SinkDefinition

if TYPE_CHECKING:
    from vllm_weir.frontend.outputs.view import OutputView

MOST_OWN = 16
"""Sinks that requests have set up and that are kept open."""

LONGEST_NAME = 4000
"""Characters of a request's id, as its engine calls it; datasets take 4096, with a sequence's number and the like."""


class SinkManager:
    """Sinks of the engine's settings and of its requests.

    Args:
        definitions: the settings' sinks by name.
        marked_bytes, marked_seconds: bounds of the rows that wait to be marked.
        patience: seconds that a sink with the policy ``"block"`` may hold an output back.

    Attributes:
        everyone: what these sinks get of every request.

    Raises:
        WeirError: for a capture that is none, or a consumer that is not installed.
    """

    def __init__(
        self, definitions: Mapping[str, SinkDefinition], marked_bytes: int, marked_seconds: float, patience: float
    ) -> None:
        self.definitions = dict(definitions)
        self.everyone = tuple(c for name, d in definitions.items() for c in _captures(name, d))
        self.marks = MarkBuffer(marked_bytes, marked_seconds)
        self._patience = patience
        self._engine: EngineInfo | None = None
        self._runners: dict[str, SinkRunner] = {}
        self._own: OrderedDict[SinkDefinition, SinkRunner] = OrderedDict()
        self._ending: dict[SinkDefinition, SinkRunner] = {}
        """Sinks that requests had set up, and that were told to stop."""
        self._lock = threading.Lock()
        self._tidier: threading.Thread | None = None
        self._wake = threading.Event()
        self.close = weakref.finalize(self, _close, self._runners, self._own, self._ending)
        _close_before_exit(self)

    def open(self, engine: EngineInfo) -> None:
        """Set the settings' sinks up; raises WeirError if one refuses."""
        with self._lock:
            self._engine = engine
            self.everyone = tuple(_fitting(capture, engine.d_model) for capture in self.everyone)
            for name, definition in self.definitions.items():
                if name not in self._runners:
                    self._runners[name] = SinkRunner(name, definition, engine, f"settings.sinks.{name}")

    def prepare(self, parts: Sequence[CaptureGroup], request_id: str = "") -> None:
        """Make sure that the sinks of a request stand; raises WeirError, naming the field, if one refuses."""
        for part in parts:
            if not part.sink.memory:
                _check_name(request_id)
                self._runner(part.sink)

    def deliver(
        self, request_id: str, views: Sequence[OutputView], request: Finished, release: Callable[[], None], hold: bool
    ) -> list[Ticket]:
        """Send a finished sequence's rows on their ways.

        Args:
            request_id: the engine's own id.
            views: one for each part that has a sink.
            request: whose rows they are.
            release: to be called once for each view, when its rows are not needed here any more.
            hold: whether this thread may be held up while a sink has no room.
        """
        patience = self._patience if hold else 0.0
        tickets: list[Ticket] = []
        kept: list[_UnmarkedDelivery] = []
        times = Counter(view.part.sink for view in views)
        labels = labels_of([(view.part.sink, view.part.keep) for view in views])
        for view, label in zip(views, labels, strict=True):
            try:
                runner = self._runner(view.part.sink)
            except WeirError as e:  # the request's output says so; this thread serves everybody's
                tickets.append(Ticket(label, True))
                tickets[-1].close(f"failed: {e}")
                release()
                continue
            marked = view.part.keep == "marked"
            ticket = Ticket(label, runner.required, "held" if marked else "queued")
            own = replace(request, capture=view.part.told)
            if marked and times[view.part.sink] > 1:  # a consumer gets a sequence of one name once
                own = replace(own, name=f"{request.name}.marked", part="marked")
            job = Delivery(view, own, ticket, release)
            tickets.append(ticket)
            if marked:
                kept.append(_UnmarkedDelivery(job, runner))
            else:
                runner.offer(job, patience)
        metadata = self.marks.add(request_id, list(kept)) if kept else None
        if metadata is not None:
            for one in kept:
                one.send(metadata, patience)
        elif kept:
            self._tidy()
        return tickets

    def mark(self, name: str, metadata: dict[str, Any], hold: bool = True) -> list[Ticket]:
        """See `weir.mark`; `hold` as in `deliver`."""
        tickets = []
        for kept in self.marks.mark(name, metadata):
            assert isinstance(kept, _UnmarkedDelivery)
            kept.send(metadata, self._patience if hold else 0.0)
            tickets.append(kept.job.ticket)
        return tickets

    def flush(self, timeout: float) -> None:
        """Wait until every sink has taken what was sent to it, durably; WeirError names those that could not."""
        failures = []
        for runner in self._all():
            try:
                runner.flush(timeout)
            except WeirError as e:  # the others' rows are not to be lost with it
                failures.append(e)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise WeirError("; ".join(e.message for e in failures), "sink")

    def report(self) -> dict[str, dict[str, Any]]:
        """Sink -> its state."""
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
            return self._runners[sink.name]
        with self._lock:
            runner = self._own.get(sink.own)
            if runner is None:
                assert self._engine is not None
                if sink.own in self._ending:
                    self._ending.pop(sink.own).close()  # two at once would write the same files
                self._make_room(sink.path)
                runner = SinkRunner(sink.name, sink.own, self._engine, sink.path)
                self._own[sink.own] = runner
            self._own.move_to_end(sink.own)
            return runner

    def _make_room(self, path: str) -> None:
        if len(self._own) < MOST_OWN:
            return
        idle = next((d for d, r in self._own.items() if r.idle), None)
        if idle is None:
            raise WeirError(
                f"{MOST_OWN} sinks that requests have set up are busy; set one up for the engine and name it", path
            )
        # Its consumer may take long to end: nobody waits for that here.
        for definition in [d for d, r in self._ending.items() if r.ended]:
            del self._ending[definition]
        self._ending[idle] = self._own.pop(idle)
        self._ending[idle].stop()

    def _tidy(self) -> None:
        """Let go of what is not marked in time."""
        if self._tidier is None:
            self._tidier = threading.Thread(
                target=_keep_tidy, args=(weakref.ref(self), self._wake), name="weir-marks", daemon=True
            )
            self._tidier.start()
        self._wake.set()


class _UnmarkedDelivery:
    """A job that waits to be marked."""

    def __init__(self, job: Delivery, runner: SinkRunner) -> None:
        self.job, self._runner = job, runner
        runner.hold(1)

    @property
    def size(self) -> int:
        return self.job.size

    def send(self, metadata: dict[str, Any], patience: float) -> None:
        self.job.marked(metadata)
        self.job.ticket.state = "queued"
        self._runner.offer(self.job, patience)
        self._runner.hold(-1)

    def evict(self, why: str) -> None:
        self.job.evict(why)
        self._runner.hold(-1)


def check_sinks(definitions: Mapping[str, SinkDefinition]) -> None:
    """Raise WeirError for what can be known to be wrong before there is an engine."""
    for name, definition in definitions.items():
        _captures(name, definition)


def _captures(name: str, definition: SinkDefinition) -> list[Capture]:
    """What a sink of the settings gets of every request."""
    path = f"settings.sinks.{name}"
    declared = consumers.find(definition.consumer, path).captures
    wanted: Sequence[Any] = declared
    if definition.captures is not None:
        wanted = [json.loads(text) for text in definition.captures]
    out = []
    for k, one in enumerate(wanted):
        capture = Capture.from_json(one.to_json() if isinstance(one, Capture) else one, f"{path}.capture[{k}]")
        if not capture.sink.memory or capture.keep != "always":
            raise WeirError("the capture of a sink goes to that sink; leave sink and keep out", f"{path}.capture[{k}]")
        out.append(replace(capture, sink=Sink(name), keep=definition.keep))
    return out


def _fitting(capture: Capture, d_model: int) -> Capture:
    """As Vllm_mi_patch does: topk8 keeps all values of a row that has fewer than it is to keep."""
    compress = capture.compress
    if capture.sink.name != ACT or compress is None or compress.method != "topk8" or compress.k is None:
        return capture
    return replace(capture, compress=replace(compress, k=min(compress.k, d_model)))


def _keep_tidy(manager_of: weakref.ref[SinkManager], wake: threading.Event) -> None:
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
        manager.marks.tidy()
        del manager


_boards: weakref.WeakSet[SinkManager] = weakref.WeakSet()


def _close_before_exit(manager: SinkManager) -> None:
    """Close it while consumers can still start threads, as their last files may need: ``atexit`` is too late."""
    manager.close.atexit = not hasattr(threading, "_register_atexit")
    if not manager.close.atexit and not _boards:
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]
    _boards.add(manager)


def _close_all() -> None:
    for manager in list(_boards):
        manager.close()


def _close(runners: dict[str, SinkRunner], *own: dict[SinkDefinition, SinkRunner]) -> None:
    for runner in [*runners.values(), *(runner for some in own for runner in some.values())]:
        runner.close()


def _check_name(request_id: str) -> None:
    """Raise WeirError, before anything is generated, for an id under which no dataset would take rows."""
    if len(request_id) > LONGEST_NAME:
        most = f"rows that go to a sink want an id of at most {LONGEST_NAME:,} characters, not {len(request_id):,}"
        raise WeirError(most, "request_id")
    if not request_id.isascii() and any("\ud800" <= c <= "\udfff" for c in request_id):
        raise WeirError(f"rows that go to a sink want an id that is text, not {request_id[:80]!a}", "request_id")
