"""`MarkBuffer`: rows that wait to be marked, bounded in bytes and in time. Pure bookkeeping."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from vllm_weir.errors import WeirError

MAX_ENDED = 10_000
"""Ended requests that are remembered, so that `weir.mark` can say why they cannot be marked."""


class MarkableDelivery(Protocol):
    """An item of a `MarkBuffer`."""

    @property
    def size(self) -> int: ...

    def evict(self) -> None:
        """Discard the rows, which were not marked in time."""


class MarkBuffer:
    """Finished requests whose rows wait to be marked, and marks of requests that still run.

    A request has two ids: the engine's, which is unique, and the one that the caller knows.

    Args:
        max_bytes: of all kept rows; the oldest are evicted first.
        seconds: how long rows are kept.
        clock: returns monotonic seconds.
    """

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._seconds, self._clock = max_bytes, seconds, clock
        self._held: OrderedDict[str, tuple[float, str, list[MarkableDelivery]]] = OrderedDict()
        """Engine's id -> (time of eviction, the caller's id, what waits)."""
        self._live: dict[str, str] = {}
        """Engine's id -> the caller's id, of requests that have not finished."""
        self._early: dict[str, dict[str, Any]] = {}
        """Engine's id -> metadata of marks of requests that have not finished."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Either id -> why the request cannot be marked any more."""
        self._bytes = 0
        self._abandoned: deque[str] = deque()
        """Engine's ids that `leave` was called with and that have not been processed yet."""
        self._lock = threading.Lock()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            while self._abandoned:
                self._remove_abandoned(self._abandoned.popleft())
            yield

    def join(self, request_id: str, name: str) -> None:
        """Add an admitted request whose rows are to be kept; `name` is the caller's id."""
        with self._locked():
            self._live[request_id] = name

    def leave(self, request_id: str) -> None:
        """Remove a request that was aborted; do nothing for one that has finished.

        Takes no lock, as a garbage collection may call this in a thread that holds it.
        """
        self._abandoned.append(request_id)

    def _remove_abandoned(self, request_id: str) -> None:
        name = self._live.pop(request_id, None)
        self._early.pop(request_id, None)
        if name is not None:
            self._end(request_id, name, "was aborted")

    def add(self, request_id: str, items: list[MarkableDelivery]) -> dict[str, Any] | None:
        """Keep the rows of a finished request and return None.

        If it was marked before it finished, return the marks' metadata instead.
        """
        now, size = self._clock(), sum(item.size for item in items)
        with self._locked():
            name = self._live.pop(request_id, request_id)
            early = self._early.pop(request_id, None)
            if early is not None:
                self._end(request_id, name, "was marked already")
                return early
            self._held[request_id] = (now + self._seconds, name, items)
            self._bytes += size
            evicted = self._expired(now)
            while self._bytes > self._max_bytes and self._held:
                evicted += self._evict(next(iter(self._held)), f"had to make room (marked_bytes is {self._max_bytes})")
        for item in evicted:
            item.evict()
        return None

    def mark(self, name: str, metadata: dict[str, Any]) -> list[MarkableDelivery]:
        """Mark a request; return what was kept of it, which the caller must send.

        The result is empty if the request is still running: its rows are sent when it finishes.

        Raises:
            WeirError: if the request is unknown, or its rows are gone.
        """
        self.evict_expired()
        with self._locked():
            kept = [k for k, (_, own, _) in self._held.items() if name in (k, own)]
            live = [k for k, own in self._live.items() if name in (k, own)]
            if kept or live:
                for key in live:
                    self._early[key] = {**self._early.get(key, {}), **metadata}
                marked: list[MarkableDelivery] = []
                for key in kept:
                    _, own, items = self._held.pop(key)
                    self._bytes -= sum(item.size for item in items)
                    self._end(key, own, "was marked already")
                    marked += items
                return marked
            why = self._ended.get(name)
        if why is None:
            raise WeirError(f"no request {name!r} with rows to mark is known here", "request_id")
        raise WeirError(f"request {name!r} {why}", "request_id")

    def answered_as(self, name: str) -> list[str]:
        """Return the callers' ids of known requests to which an HTTP response's id refers.

        These are the id itself, or ``<name>-<k>`` for a request with several prompts.
        """
        with self._locked():
            known = {*self._ended, *self._live.values(), *(own for _, own, _ in self._held.values())}
        if name in known:
            return [name]
        of_prompts = re.compile(re.escape(name) + r"-\d{1,9}", re.ASCII)
        return sorted(filter(of_prompts.fullmatch, known), key=lambda request_id: int(request_id.rpartition("-")[2]))

    def has(self, name: str) -> bool:
        with self._locked():
            held = ((k, own) for k, (_, own, _) in self._held.items())
            return any(name in both for both in (*held, *self._live.items()))

    def had(self, name: str) -> bool:
        """Return whether the request could be marked before, but not any more."""
        with self._locked():
            return name in self._ended

    def evict_expired(self) -> None:
        with self._locked():
            evicted = self._expired(self._clock())
        for item in evicted:
            item.evict()

    @property
    def due(self) -> float | None:
        with self._locked():
            return next((when for when, _, _ in self._held.values()), None)

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._held)

    def _expired(self, now: float) -> list[MarkableDelivery]:
        expired: list[MarkableDelivery] = []
        while self._held and next(iter(self._held.values()))[0] <= now:
            expired += self._evict(next(iter(self._held)), f"waited too long (marked_seconds is {self._seconds:g})")
        return expired

    def _evict(self, key: str, why: str) -> list[MarkableDelivery]:
        _, name, items = self._held.pop(key)
        self._bytes -= sum(item.size for item in items)
        self._end(key, name, f"is marked too late: its rows are gone, they {why}")
        return items

    def _end(self, key: str, name: str, why: str) -> None:
        for request_id in {key, name}:
            self._ended[request_id] = why
            self._ended.move_to_end(request_id)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
