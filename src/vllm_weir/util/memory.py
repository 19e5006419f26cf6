"""The memory of a process and its machine: collections of garbage, and how much there is."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Let collections pass over all objects that exist now, until this is left.

    A process that has imported torch and vLLM has a million of them, and many new ones make Python
    look through all of them again and again. They are unfrozen at the end, or what of them nobody
    uses by then would never be collected. Where something is frozen already, as in vLLM's servers,
    nothing is changed: `unfreeze` would undo that too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
