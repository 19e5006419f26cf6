"""Who goes first in an event loop: plain requests; those that ask something of Weir go a few at a time.

What Weir adds to a request costs the loop some milliseconds, and nobody who did not ask for it should wait for that.
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

PATIENCE = 0.1
"""Seconds for which a plain request is waited for at most: after that it waits for something itself, an image say."""
ADMITTED, ANSWERED = 2, 8
"""Requests of Weir's that go on between two turns of the loop for others, in the one direction and in the other."""
LATEST = 1.0
"""Seconds for which a request of Weir's is held back at most while plain ones are served."""
TICK = 0.05
"""Seconds after which it is looked at least whether one must be held back any longer."""
AT_ONCE = 4
"""Requests of Weir's that may come together before they are held back."""


class PlainEntry:
    """A plain request on its way to the engine: the `number`-th of all, since `since`."""

    def __init__(self, pacing: Pacing, number: int) -> None:
        self._pacing = pacing
        self.number, self.since = number, monotonic()

    def leave(self) -> None:
        """It is with the engine, or will never be; to say so again does nothing."""
        self._pacing.left(self)


class Pacing:
    """One engine's requests in one event loop. A request of Weir's waits for the plain ones that were on their way to
    the engine when it came, and for no later one. While plain ones are served, so many a second enter, and each before
    it has waited for `LATEST`: it cannot starve.

    Attributes:
        pace: requests of Weir's a second while plain ones are served; 0: as many as come.
        live: vLLM's states of all requests that are in the engine.
    """

    def __init__(self) -> None:
        self.pace = 0.0
        self.live: Collection[Any] = ()
        self._own: WeakSet[Any] = WeakSet()
        self._held: deque[tuple[float, asyncio.Future[None]]] = deque()
        """Requests that are held back: until when at most, and what they wait for."""
        self._credit, self._counted = float(AT_ONCE), monotonic()
        self._numbers = itertools.count()
        self._entries: dict[PlainEntry, None] = {}
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._door, self._exit = asyncio.Semaphore(ADMITTED), asyncio.Semaphore(ANSWERED)

    def mine(self, state: Any) -> None:
        """A request of Weir's is in the engine, whose state of it this is."""
        if self.pace:
            self._own.add(state)

    @property
    def _plain(self) -> bool:
        """Whether plain requests are served."""
        return bool(self._entries) or len(self.live) > len(self._own)

    @property
    def held(self) -> int:
        """How many requests of Weir's are held back by the pace now."""
        return sum(not gone.done() for _, gone in self._held)

    def enter(self) -> PlainEntry:
        """A plain request is here."""
        entry = PlainEntry(self, next(self._numbers))
        self._entries[entry] = None
        return entry

    def left(self, entry: PlainEntry) -> None:
        """See `PlainEntry.leave`."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        oldest = next(iter(self._entries), None)
        while self._waiting and (oldest is None or self._waiting[0][0] < oldest.number):
            _, gone = self._waiting.popleft()
            if not gone.done():
                gone.set_result(None)

    async def admission(self) -> None:
        """Returns when a request that asks something of Weir may go on its way to the engine."""
        await asyncio.sleep(0)  # those that came at the same time have entered then
        while (oldest := next(iter(self._entries), None)) is not None and oldest.since + PATIENCE < monotonic():
            self.left(oldest)
        if self._entries:
            gone = asyncio.get_running_loop().create_future()
            self._waiting.append((next(self._numbers), gone))
            await asyncio.wait([gone], timeout=PATIENCE)
        await self._measured()
        async with self._door:
            await asyncio.sleep(0)

    async def _measured(self) -> None:
        """Returns when one more request of Weir's is not too many for the plain ones."""
        if not self.pace or (not self._held and self._may_go()):
            return
        gone = asyncio.get_running_loop().create_future()
        self._held.append((monotonic() + LATEST, gone))
        if len(self._held) == 1:
            self._later()
        await gone

    def _may_go(self, until: float = float("inf")) -> bool:
        now = monotonic()
        self._credit = min(self._credit + (now - self._counted) * self.pace, AT_ONCE)
        self._counted = now
        if self._credit >= 1:
            self._credit -= 1
            return True
        return until <= now or not self._plain

    def _later(self) -> None:
        asyncio.get_running_loop().call_later(min(1 / self.pace, TICK), self._release)

    def _release(self) -> None:
        while self._held and (self._held[0][1].done() or self._may_go(self._held[0][0])):
            _, gone = self._held.popleft()
            if not gone.done():
                gone.set_result(None)
        if self._held:
            self._later()

    async def answer(self) -> None:
        """Returns when a request that asked something of Weir, and has its last output, may go on to its answer."""
        async with self._exit:
            await asyncio.sleep(0)


entry_of: ContextVar[PlainEntry | None] = ContextVar("weir_entry", default=None)
"""The entry of the request that a task serves, if it is a plain one."""
