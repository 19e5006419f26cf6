"""Lines that say that a command is at work, for logs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

EVERY = 30.0
"""Seconds between two lines."""


@contextlib.contextmanager
def told(state: Callable[[], str]) -> Iterator[None]:
    """Print what is being done on stderr every half minute, unless that is a terminal.

    Args:
        state: returns the line.
    """
    if sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def tell() -> None:
        while not done.wait(EVERY):
            print(state(), file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name="weir-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
