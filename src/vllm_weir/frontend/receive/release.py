"""Release of a request's rows once its answer is out, whoever still refers to its outputs.

Dropping an output releases its rows. But frames of a cancelled task, and of generators that have
ended, can refer to outputs until Python's garbage collector runs, which may be minutes later.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar

from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.row_store import RowStore


class HeldSequences:
    """The sequences of one request of a server."""

    def __init__(self) -> None:
        self._held: list[tuple[weakref.ref[RowStore], weakref.ref[PendingSequence]]] = []

    def add(self, store: RowStore, pending: PendingSequence) -> None:
        self._held.append((weakref.ref(store), weakref.ref(pending)))

    def release(self) -> None:
        """Release all rows of the sequences' outputs."""
        for store_ref, pending_ref in self._held:
            store, pending = store_ref(), pending_ref()
            if store is not None and pending is not None:
                store.forget(pending)
        self._held.clear()


holding: ContextVar[HeldSequences | None] = ContextVar("weir_holding", default=None)
"""Where sequences that are admitted in this context are noted."""
