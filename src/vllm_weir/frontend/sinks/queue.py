"""`BoundedQueue`: a queue bounded in bytes, with a policy for what does not fit."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Generic, Protocol, TypeVar


class QueueItem(Protocol):
    """An item of a `BoundedQueue`."""

    @property
    def size(self) -> int:
        """Bytes of memory that the item holds while it waits."""
        ...


ItemType = TypeVar("ItemType", bound=QueueItem)


class BoundedQueue(Generic[ItemType]):
    """A first-in, first-out queue with one consuming thread.

    Args:
        limit: bytes that may wait; one item may always wait, however large.
        policy: what `put` does without room: ``"block"``, ``"spill"`` or ``"drop"``.
    """

    def __init__(self, limit: int, policy: str) -> None:
        self._limit, self._policy = limit, policy
        self._items: deque[tuple[ItemType, int]] = deque()
        self._bytes = 0
        self._put = self._done = 0
        """Items that were ever put in, and finished."""
        self._stopped = False
        self._changed = threading.Condition()

    def put(self, item: ItemType, patience: float) -> str:
        """Put an item in, if the policy allows, and return what happened.

        That is ``"in"``; ``"spill"``: it is in, and the caller must move it out of memory; ``"drop"``: it is
        not in. With the policy ``"block"``, it is put in all the same after `patience` seconds.
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
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or not self._changed.wait(remaining):
                        break
            memory = 0 if verdict == "spill" else size
            self._items.append((item, memory))
            self._put += 1
            self._bytes += memory
            self._changed.notify_all()
            return verdict

    def take(self, patience: float | None = None) -> ItemType | None:
        """Wait for the next item and return it.

        The result is None once the queue has stopped and is empty. Call `done` when the item is
        finished.

        Raises:
            queue.Empty: if nothing has come within `patience` seconds.
        """
        with self._changed:
            while not self._items:
                if self._stopped:
                    return None
                if not self._changed.wait(patience) and not self._items and not self._stopped:
                    raise queue.Empty
            item, memory = self._items.popleft()
            self._bytes -= memory
            self._changed.notify_all()
            return item

    def count(self, item: ItemType) -> None:
        """Count the memory of an item that could not be moved out of it, if it still waits."""
        with self._changed:
            for k, (waiting, memory) in enumerate(self._items):
                if waiting is item:
                    self._items[k] = (item, item.size)
                    self._bytes += item.size - memory
                    return

    def done(self) -> None:
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait_done(self, timeout: float) -> bool:
        """Return whether every item put in so far was finished within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            target = self._put
            while self._done < target:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(remaining)
            return True

    @property
    def idle(self) -> bool:
        return self._put == self._done

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._items)
