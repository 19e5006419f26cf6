"""Caches: of the values used last, and by the identity of a key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from cachetools import LRUCache

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """The most recently used values, up to a total size.

    The callers know what a value and its key take better than a `getsizeof` of cachetools could, so `put` is told.

    `max_bytes`: total size of all entries. `max_entry_bytes`: size of the largest entry that is kept; by default
    `max_bytes`.
    """

    def __init__(self, max_bytes: int, max_entry_bytes: int | None = None) -> None:
        self._entries: LRUCache[Hashable, tuple[Value, int]] = LRUCache(max_bytes, getsizeof=_size_of)
        self._max_entry_bytes = max_bytes if max_entry_bytes is None else max_entry_bytes
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        return int(self._entries.currsize)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of `key`, or None, and mark it as used."""
        with self._lock:
            entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Keep `value`, which takes about `size` bytes together with its key; too large a value is not kept."""
        if size <= self._max_entry_bytes:
            with self._lock:
                self._entries[key] = value, size

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


def _size_of(entry: tuple[Any, int]) -> int:
    return entry[1]


Source = TypeVar("Source")
Derived = TypeVar("Derived")
MAX_ENTRIES = 1024


class IdentityCache(Generic[Source, Derived]):
    """What `derive` returns for an object that never changes, remembered for up to `MAX_ENTRIES` objects.

    Not an LRU cache: it is asked for every scheduled request in every step, so a look-up is one dict access by `id`,
    without hashing the object, and a full cache starts afresh.
    """

    def __init__(self, derive: Callable[[Source], Derived]) -> None:
        self._derive = derive
        self._entries: dict[int, tuple[Source, Derived]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, source: Source) -> Derived:
        entry = self._entries.get(id(source))
        if entry is None:
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            # The source is kept alive, so that no other object can get its id.
            entry = self._entries[id(source)] = (source, self._derive(source))
        return entry[1]
