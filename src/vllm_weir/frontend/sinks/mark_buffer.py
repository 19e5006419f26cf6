"""Rows that wait to be marked: a buffer bounded in bytes and in time. Pure bookkeeping."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from vllm_weir.errors import WeirError

MOST_REMEMBERED = 10_000
"""Requests whose end is remembered, for what `weir.mark` says of them."""


class MarkableDelivery(Protocol):
    """What a buffer of marks holds."""

    @property
    def size(self) -> int: ...
    def evict(self, why: str) -> None: ...


class MarkBuffer:
    """Finished requests whose rows are kept for a while, and live ones that were marked before they finished.

    Args:
        most_bytes: of all the rows; the oldest go first.
        seconds: how long rows are kept.
        clock: seconds, ascending.
    """

    def __init__(self, most_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes, self._seconds, self._clock = most_bytes, seconds, clock
        self._held: OrderedDict[str, tuple[float, str, list[MarkableDelivery]]] = OrderedDict()
        """Internal id -> (when it is too late, the caller's id, what waits)."""
        self._live: dict[str, str] = {}
        """Internal id -> the caller's id, of requests that have not finished."""
        self._early: dict[str, dict[str, Any]] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._bytes = 0
        self._gone: deque[str] = deque()
        """Ids of requests that have gone since somebody last looked."""
        self._lock = threading.Lock()

    @contextmanager
    def _held_still(self) -> Iterator[None]:
        with self._lock:
            while self._gone:
                self._left(self._gone.popleft())
            yield

    def join(self, request_id: str, name: str) -> None:
        """A request whose rows are to be kept has been admitted; `name` is the id that the caller knows."""
        with self._held_still():
            self._live[request_id] = name

    def leave(self, request_id: str) -> None:
        """The request has gone without rows to keep (it was aborted); unknown ids are fine.

        Takes no lock: garbage may be collected, and this be called, in the middle of anything that holds it.
        """
        self._gone.append(request_id)

    def _left(self, request_id: str) -> None:
        name = self._live.pop(request_id, None)
        self._early.pop(request_id, None)
        if name is not None:
            self._end(request_id, name, "was aborted")

    def add(self, request_id: str, items: list[MarkableDelivery]) -> dict[str, Any] | None:
        """The request has finished: keep its rows; or its marks' metadata, if it was marked already."""
        now, size = self._clock(), sum(item.size for item in items)
        with self._held_still():
            name = self._live.pop(request_id, request_id)
            early = self._early.pop(request_id, None)
            if early is not None:
                self._end(request_id, name, "was marked already")
                return early
            self._held[request_id] = (now + self._seconds, name, items)
            self._bytes += size
            gone = self._expired(now)
            while self._bytes > self._most_bytes and self._held:
                gone += self._out(next(iter(self._held)), f"had to make room (marked_bytes is {self._most_bytes})")
        for item, why in gone:
            item.evict(why)
        return None

    def mark(self, name: str, metadata: dict[str, Any]) -> list[MarkableDelivery]:
        """What was kept of the request; empty if it is still running, and then its rows are written when it finishes.

        Raises:
            WeirError: if the request is unknown, or its rows are gone.
        """
        self.tidy()
        with self._held_still():
            found = [k for k, (_, own, _) in self._held.items() if name in (k, own)]
            live = [k for k, own in self._live.items() if name in (k, own)]
            if found or live:
                for key in live:
                    self._early[key] = {**self._early.get(key, {}), **metadata}
                out: list[MarkableDelivery] = []
                for key in found:
                    _, own, items = self._held.pop(key)
                    self._bytes -= sum(item.size for item in items)
                    self._end(key, own, "was marked already")
                    out += items
                return out
            why = self._ended.get(name)
        if why is None:
            raise WeirError(f"no request {name!r} with rows to mark is known here", "request_id")
        raise WeirError(f"request {name!r} {why}", "request_id")

    def answered_as(self, name: str) -> list[str]:
        """Ids of known requests that a server answers under this one: it, or ``<name>-<k>`` of several prompts."""
        with self._held_still():
            known = {*self._ended, *self._live.values(), *(own for _, own, _ in self._held.values())}
        if name in known:
            return [name]
        of_prompts = re.compile(re.escape(name) + r"-\d{1,9}", re.ASCII)
        return sorted(filter(of_prompts.fullmatch, known), key=lambda one: int(one.rpartition("-")[2]))

    def has(self, name: str) -> bool:
        """Whether the request can be marked."""
        with self._held_still():
            held = ((k, own) for k, (_, own, _) in self._held.items())
            return any(name in both for both in (*held, *self._live.items()))

    def had(self, name: str) -> bool:
        """Whether it could once."""
        with self._held_still():
            return name in self._ended

    def tidy(self) -> None:
        """Let go what is too old."""
        with self._held_still():
            gone = self._expired(self._clock())
        for item, why in gone:
            item.evict(why)

    @property
    def due(self) -> float | None:
        """When the oldest rows are too old; None if there are none."""
        with self._held_still():
            return next((when for when, _, _ in self._held.values()), None)

    @property
    def bytes(self) -> int:
        """Bytes that are kept."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._held)

    def _expired(self, now: float) -> list[tuple[MarkableDelivery, str]]:
        gone: list[tuple[MarkableDelivery, str]] = []
        while self._held and next(iter(self._held.values()))[0] <= now:
            gone += self._out(next(iter(self._held)), f"waited too long (marked_seconds is {self._seconds:g})")
        return gone

    def _out(self, key: str, why: str) -> list[tuple[MarkableDelivery, str]]:
        _, name, items = self._held.pop(key)
        self._bytes -= sum(item.size for item in items)
        self._end(key, name, f"is marked too late: its rows are gone, they {why}")
        return [(item, why) for item in items]

    def _end(self, key: str, name: str, why: str) -> None:
        for known in {key, name}:
            self._ended[known] = why
            self._ended.move_to_end(known)
        while len(self._ended) > MOST_REMEMBERED:
            self._ended.popitem(last=False)
