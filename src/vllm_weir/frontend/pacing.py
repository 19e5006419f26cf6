"""`Pacing`: plain requests go first in a server's event loop, the others a few at a time.

What Weir adds to a request occupies the loop for some milliseconds, and plain requests should not
wait for that.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Collection
from contextvars import ContextVar
from time import monotonic
from typing import Any
from weakref import WeakSet

MAX_WAIT_PLAIN = 0.1
"""The most seconds to wait for one plain request; one that takes longer is itself waiting, say for
an image."""
MAX_ENTERING, MAX_RESPONDING = 2, 8
"""Requests with Weir's keys that enter the engine, and that go on to their responses, in one turn
of the loop."""
MAX_DELAY = 1.0
"""The most seconds for which the pace delays a request."""
TICK = 0.05
"""The most seconds between two checks of the delayed requests."""
BURST = 4
"""Requests that may come at once before the pace delays them."""


class PlainEntry:
    """A plain request on its way to the engine.

    Attributes:
        number: how many requests came before it.
        since: when it came, in seconds of the monotonic clock.
    """

    def __init__(self, pacing: Pacing, number: int) -> None:
        self._pacing = pacing
        self.number, self.since = number, monotonic()

    def leave(self) -> None:
        """Record that the request has entered the engine, or never will; doing so again changes nothing."""
        self._pacing.remove(self)


class Pacing:
    """The order in which one engine's requests enter it from one event loop.

    A request with Weir's keys waits for the plain requests that were on their way to the engine
    when it came, and for no later one. While plain requests are served, at most `pace` of the
    others enter per second; none is delayed for longer than `MAX_DELAY` by that, so none starves.

    Attributes:
        pace: requests with Weir's keys per second while plain ones are served; 0 for no bound.
        live: vLLM's states of all requests in the engine.
    """

    def __init__(self) -> None:
        self.pace = 0.0
        self.live: Collection[Any] = ()
        self._own: WeakSet[Any] = WeakSet()
        """States in `live` of requests with Weir's keys."""
        self._delayed: deque[tuple[float, asyncio.Future[None]]] = deque()
        """Requests that the pace delays: latest time to enter, and the future that they wait
        for."""
        self._credit, self._credited_at = float(BURST), monotonic()
        self._numbers = itertools.count()
        self._entries: dict[PlainEntry, None] = {}
        """Plain requests on their way to the engine, oldest first."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Requests with Weir's keys that wait for those in `_entries`: number, and the future that
        they wait for."""
        self._entering, self._responding = asyncio.Semaphore(MAX_ENTERING), asyncio.Semaphore(MAX_RESPONDING)

    def add_own(self, state: Any) -> None:
        """Add vLLM's state of a request with Weir's keys that has entered the engine."""
        if self.pace:
            self._own.add(state)

    @property
    def _serves_plain(self) -> bool:
        return bool(self._entries) or len(self.live) > len(self._own)

    @property
    def held(self) -> int:
        return sum(not admitted.done() for _, admitted in self._delayed)

    def enter(self) -> PlainEntry:
        entry = PlainEntry(self, next(self._numbers))
        self._entries[entry] = None
        return entry

    def remove(self, entry: PlainEntry) -> None:
        """Stop waiting for a plain request; does nothing if that has been done."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        oldest = next(iter(self._entries), None)
        while self._waiting and (oldest is None or self._waiting[0][0] < oldest.number):
            _, admitted = self._waiting.popleft()
            if not admitted.done():
                admitted.set_result(None)

    async def wait_to_enter(self) -> None:
        """Wait until a request with Weir's keys may enter the engine."""
        await asyncio.sleep(0)  # let plain requests that came at the same time register first
        while (oldest := next(iter(self._entries), None)) is not None and oldest.since + MAX_WAIT_PLAIN < monotonic():
            self.remove(oldest)
        if self._entries:
            admitted = asyncio.get_running_loop().create_future()
            self._waiting.append((next(self._numbers), admitted))
            await asyncio.wait([admitted], timeout=MAX_WAIT_PLAIN)
        await self._wait_for_pace()
        async with self._entering:
            await asyncio.sleep(0)

    async def _wait_for_pace(self) -> None:
        """Wait until plain requests leave room for another."""
        if not self.pace or (not self._delayed and self._may_enter()):
            return
        admitted = asyncio.get_running_loop().create_future()
        self._delayed.append((monotonic() + MAX_DELAY, admitted))
        if len(self._delayed) == 1:
            self._schedule_release()
        await admitted

    def _may_enter(self, latest: float = float("inf")) -> bool:
        """Return whether one more request may enter now, and spend credit for it if there is some.

        From the time `latest` on, it may enter in any case.
        """
        now = monotonic()
        self._credit = min(self._credit + (now - self._credited_at) * self.pace, BURST)
        self._credited_at = now
        if self._credit >= 1:
            self._credit -= 1
            return True
        return latest <= now or not self._serves_plain

    def _schedule_release(self) -> None:
        asyncio.get_running_loop().call_later(min(1 / self.pace, TICK), self._release)

    def _release(self) -> None:
        while self._delayed and (self._delayed[0][1].done() or self._may_enter(self._delayed[0][0])):
            _, admitted = self._delayed.popleft()
            if not admitted.done():
                admitted.set_result(None)
        if self._delayed:
            self._schedule_release()

    async def wait_to_respond(self) -> None:
        """Wait until a request with Weir's keys that has its last output may be answered."""
        async with self._responding:
            await asyncio.sleep(0)


entry_of: ContextVar[PlainEntry | None] = ContextVar("weir_entry", default=None)
"""The entry of the request that a task serves, if it is a plain one."""
