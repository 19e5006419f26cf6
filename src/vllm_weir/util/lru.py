"""A cache bounded in bytes, for any number of threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """The most recently used values, up to a total size.

    Args:
        max_bytes: total size of all entries.
        max_entry_bytes: size of the largest entry that is kept; by default `max_bytes`.
    """

    def __init__(self, max_bytes: int, max_entry_bytes: int | None = None) -> None:
        # cachetools.LRUCache does the same in several times the time, and admission is full of look-ups.
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._size, self._max_bytes = 0, max_bytes
        self._max_entry_bytes = max_bytes if max_entry_bytes is None else min(max_entry_bytes, max_bytes)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Total size of all entries in bytes, as `put` was told."""
        return self._size

    def get(self, key: Hashable) -> Value | None:
        """Return the value of `key`, or None, and mark it as used."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Keep `value`, which takes about `size` bytes together with its key; too large a value is not kept."""
        if size > self._max_entry_bytes:
            return
        with self._lock:
            if (replaced := self._entries.pop(key, None)) is not None:
                self._size -= replaced[1]
            self._entries[key] = value, size
            self._size += size
            while self._size > self._max_bytes:
                self._size -= self._entries.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget all entries."""
        with self._lock:
            self._entries.clear()
            self._size = 0
