"""`LruCache`: a least-recently-used cache bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """The most recently used values, up to a number of bytes. Thread-safe.

    cachetools.LRUCache would need this class around it all the same, for the lock, for sizes that
    callers give and for values that are too large, which it refuses with an exception.

    Args:
        max_bytes: of all values together.
        max_value_bytes: of one value; larger ones are not kept. None: `max_bytes`.
    """

    def __init__(self, max_bytes: int, max_value_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._max_value_bytes = max_bytes if max_value_bytes is None else max_value_bytes
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all values, as they were given."""
        return self._bytes

    def get(self, key: Hashable) -> Value | None:
        """Return the value that is kept under `key`, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Keep a value; `size` is about the bytes that it and its key take."""
        if size > self._max_value_bytes:
            return
        with self._lock:
            replaced = self._entries.pop(key, None)
            self._bytes += size - (replaced[1] if replaced is not None else 0)
            self._entries[key] = value, size
            while self._bytes > self._max_bytes:
                self._bytes -= self._entries.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0
