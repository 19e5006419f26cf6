"""`frozen_heap`: collections of garbage that look at new objects alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
