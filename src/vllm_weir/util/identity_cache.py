"""A cache of values derived from objects that many requests share, found by the object's identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

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
