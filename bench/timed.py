"""Timing of methods in place, for the profiles."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any


def timed(owner: Any, name: str, log: Callable[[float, float], None]) -> None:
    """Tell `log` when every call of a method began and ended, in seconds of `time.perf_counter`."""
    original, clock = getattr(owner, name), time.perf_counter

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        began = clock()
        try:
            return original(*args, **kwargs)
        finally:
            log(began, clock())

    setattr(owner, name, wrapper)
