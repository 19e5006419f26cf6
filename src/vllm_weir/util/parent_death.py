"""Processes of an engine end with the one that has started it: when that is killed, it cannot end them itself.

vLLM's go on then, and hold the memory that the next run needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

VARIABLE = "WEIR_END_WITH_PARENT"
"""Set for the processes that this concerns."""
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def children_that_end_with_us() -> Iterator[None]:
    """Engines that are started inside end with the thread that starts them: none that may end before the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def end_with_parent() -> None:
    """To be called by every process of an engine; nothing in the one that the engine belongs to, or elsewhere."""
    if VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
