"""What was made of things that many requests share, found again by which thing it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Thing = TypeVar("Thing")
Made = TypeVar("Made")
MOST = 1024


class IdentityCache(Generic[Thing, Made]):
    """What `make` makes of a thing that never changes, remembered for as many as `MOST` things."""

    def __init__(self, make: Callable[[Thing], Made]) -> None:
        self._make = make
        self._of: dict[int, tuple[Thing, Made]] = {}

    def __getitem__(self, thing: Thing) -> Made:
        found = self._of.get(id(thing))
        if found is None:
            if len(self._of) >= MOST:
                self._of.clear()
            found = self._of[id(thing)] = (thing, self._make(thing))  # held, so that its id stays its own
        return found[1]
