"""Who goes first in an event loop: plain requests; those that ask something of Weir go a few at a time.

What Weir adds to a request costs the loop some milliseconds, and nobody who did not ask for it should wait for that.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from contextvars import ContextVar
from time import monotonic

PATIENCE = 0.1
"""Seconds for which a plain request is waited for at most: after that it waits for something itself, an image say."""
ADMITTED, ANSWERED = 2, 8
"""Requests of Weir's that go on between two turns of the loop for others, in the one direction and in the other."""


class Entry:
    """A plain request on its way to the engine: the `number`-th of all, since `since`."""

    def __init__(self, turns: Turns, number: int) -> None:
        self._turns = turns
        self.number, self.since = number, monotonic()

    def leave(self) -> None:
        """It is with the engine, or will never be; to say so again does nothing."""
        self._turns.left(self)


class Turns:
    """One engine's requests in one event loop. A request of Weir's waits for the plain ones that were on their way to
    the engine when it came, and for no later one: it cannot starve."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._entries: dict[Entry, None] = {}
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._door, self._exit = asyncio.Semaphore(ADMITTED), asyncio.Semaphore(ANSWERED)

    def enter(self) -> Entry:
        """A plain request is here."""
        entry = Entry(self, next(self._numbers))
        self._entries[entry] = None
        return entry

    def left(self, entry: Entry) -> None:
        """See `Entry.leave`."""
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
        async with self._door:
            await asyncio.sleep(0)

    async def answer(self) -> None:
        """Returns when a request that asked something of Weir, and has its last output, may go on to its answer."""
        async with self._exit:
            await asyncio.sleep(0)


entry_of: ContextVar[Entry | None] = ContextVar("weir_entry", default=None)
"""The entry of the request that a task serves, if it is a plain one."""
