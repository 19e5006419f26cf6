"""What objects of Weir's there are in this process, and how full their collections: what grows is a leak."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

COLLECTIONS = (list, dict, set, deque, Counter, OrderedDict, defaultdict, WeakKeyDictionary, WeakSet,
               WeakValueDictionary)  # fmt: skip


def census() -> Counter[str]:
    """Count the objects of each of Weir's classes, and the entries of the collections that are their attributes."""
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        cls = type(each)
        # `isinstance` would ask proxies and mocks for their classes.
        if not (isinstance(cls.__module__, str) and cls.__module__.startswith("vllm_weir.")):
            continue
        found[cls.__qualname__] += 1
        for name, value in _attributes(each):
            if type(value) in COLLECTIONS:
                found[f"{cls.__qualname__}.{name}"] += len(value)
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return what there is more of than before: class or attribute -> (before, after)."""
    return {name: (before.get(name, 0), n) for name, n in after.items() if n > before.get(name, 0)}


def _attributes(each: Any) -> Iterator[tuple[str, Any]]:
    yield from vars(each).items() if hasattr(each, "__dict__") else ()
    for cls in type(each).__mro__:
        for name in vars(cls).get("__slots__", ()):
            if name != "__weakref__" and hasattr(each, name):
                yield name, object.__getattribute__(each, name)
