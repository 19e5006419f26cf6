"""Remembering what was made of something, within bounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """The values that were used last, up to `most` bytes of them all and `largest` of one. For any threads."""

    def __init__(self, most: int, largest: int | None = None) -> None:
        self._most, self._largest = most, most if largest is None else largest
        self._known: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def size(self) -> int:
        """Bytes of all that is kept, as they were given."""
        return self._bytes

    def get(self, key: Hashable) -> Value | None:
        """What is remembered under `key`, or None."""
        with self._lock:
            found = self._known.get(key)
            if found is None:
                return None
            self._known.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Remember `value`; `size`: about the bytes that it and its key take."""
        if size > self._largest:
            return
        with self._lock:
            before = self._known.pop(key, None)
            self._bytes += size - (before[1] if before is not None else 0)
            self._known[key] = value, size
            while self._bytes > self._most:
                self._bytes -= self._known.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._known.clear()
            self._bytes = 0
