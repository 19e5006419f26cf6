"""`IdentityCache`: results of a function, cached by the identity of its argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
MAX_ENTRIES = 1024


class IdentityCache(Generic[Key, Value]):
    """The values of a function for up to `MAX_ENTRIES` objects that never change.

    `functools.lru_cache` and cachetools compare keys by hash and equality, which takes too long for
    the nested tuples that are keys here.
    """

    def __init__(self, function: Callable[[Key], Value]) -> None:
        self._function = function
        self._entries: dict[int, tuple[Key, Value]] = {}

    def __getitem__(self, key: Key) -> Value:
        entry = self._entries.get(id(key))
        if entry is None:
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            # The key is kept, so that no other object gets its id.
            entry = self._entries[id(key)] = (key, self._function(key))
        return entry[1]
