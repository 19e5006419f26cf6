"""The queue before a consumer: bounded in bytes, with what happens to rows that find no room."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Generic, Protocol, TypeVar


class QueueItem(Protocol):
    """What a queue needs of what waits in it."""

    @property
    def size(self) -> int:
        """Bytes that it holds in memory while it waits."""
        ...


ItemType = TypeVar("ItemType", bound=QueueItem)


class BoundedQueue(Generic[ItemType]):
    """First come, first served, one taker.

    Args:
        limit: bytes that may wait; one item may always wait, however large.
        policy: what `put` does without room: ``"block"``, ``"spill"`` or ``"drop"``.
    """

    def __init__(self, limit: int, policy: str) -> None:
        self._limit, self._policy = limit, policy
        self._items: deque[tuple[ItemType, int]] = deque()
        self._bytes = 0
        self._put = self._done = 0
        """Items that were ever put in, and dealt with."""
        self._stopped = False
        self._changed = threading.Condition()

    def put(self, item: ItemType, patience: float) -> str:
        """``"in"``; without room ``"spill"`` (it is in, and is to be taken out of memory) or ``"drop"`` (it is not).

        With the policy ``"block"`` it waits up to `patience` seconds for room, and then is in as well.
        """
        deadline = time.monotonic() + patience
        with self._changed:
            if self._stopped:
                return "drop"
            size, verdict = item.size, "in"
            if self._items and self._bytes + size > self._limit:
                if self._policy == "drop":
                    return "drop"
                verdict = "spill" if self._policy == "spill" else "in"
                while verdict == "in" and self._items and self._bytes + size > self._limit:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        break
            held = 0 if verdict == "spill" else size
            self._items.append((item, held))
            self._put += 1
            self._bytes += held
            self._changed.notify_all()
            return verdict

    def take(self, patience: float | None = None) -> ItemType | None:
        """The next item, waiting for it; None once the queue has stopped and is empty. `done` ends the work on it.

        Raises:
            queue.Empty: if nothing has come within `patience` seconds.
        """
        with self._changed:
            while not self._items:
                if self._stopped:
                    return None
                if not self._changed.wait(patience) and not self._items and not self._stopped:
                    raise queue.Empty
            item, held = self._items.popleft()
            self._bytes -= held
            self._changed.notify_all()
            return item

    def done(self) -> None:
        """The item last taken has been dealt with."""
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Take in nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait_done(self, timeout: float) -> bool:
        """Wait until everything that was put in before has been dealt with, whatever comes meanwhile."""
        deadline = time.monotonic() + timeout
        with self._changed:
            wanted = self._put
            while self._done < wanted:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is being dealt with."""
        return self._put == self._done

    @property
    def bytes(self) -> int:
        """Bytes that wait."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._items)
