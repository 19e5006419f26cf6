"""Ending an engine's processes with the process that started them.

When that one is killed it cannot end them itself; vLLM's own would go on and hold the memory that the next run needs.
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
"""Set in the environment of the processes that end with their parent."""
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def children_that_end_with_us() -> Iterator[None]:
    """Let engines that are started inside the block end with this process.

    Has no effect outside the main thread: Linux ends a child with the *thread* that started it, and only the main
    thread lives as long as the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if previous is not None:
            os.environ[VARIABLE] = previous


def end_with_parent() -> None:
    """Let this process end with its parent, if it belongs to an engine started in `children_that_end_with_us`."""
    if VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
