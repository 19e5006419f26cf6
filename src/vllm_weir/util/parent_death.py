"""Engine processes that end when the process that started them is killed.

A killed process cannot end its children, and vLLM's would keep the memory that the next run needs.
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
"""Set in the environment of processes that shall end with their parent."""
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def children_that_end_with_us() -> Iterator[None]:
    """Make engines that are started inside end with this process.

    The kernel ties them to the thread that starts them, so nothing happens outside the main thread,
    which may end before the process.
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
    """Have the kernel kill this engine process when its parent ends.

    Every process that loads Weir calls this; it acts only in children of
    `children_that_end_with_us`.
    """
    if VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
