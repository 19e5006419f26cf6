"""Cut ahead: tensors of rows that are still to come, made while the model computes them.

A sequence that generates all the tokens that it may has rows whose number is known when it comes. Thousands of tensors
are then ready when a batch ends, instead of being made one after the other while its caller waits. Of a sequence that
ends before, the tensors are made when they are looked at, as without this.
"""

from __future__ import annotations

import logging
from collections import deque
from weakref import ref

from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.receive.pending_sequence import PendingSequence

logger = logging.getLogger(__name__)
LATER = 16
"""Messages after its first rows that a sequence is left alone: until then, whoever admits others needs the time."""
FEW = 8
"""Sequences that are cut after one message, which comes with each step."""


def kind_ahead(part: CaptureGroup) -> str:
    """The kind of views that hold a part's rows as they are handed out; "" if more is made of them."""
    postprocess = part.spec.postprocess
    if part.late:
        return ""
    if postprocess is None:
        return "" if part.recast else "rows"
    return "packed" if postprocess.compression is not None else ""


class Preslicer:
    """Sequences whose rows have a place, in the order in which they came. Belongs to the thread that receives rows."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, ref[PendingSequence]]] = deque()
        self._messages, self._left = 0, 0

    def add(self, pending: PendingSequence) -> None:
        """A sequence's first rows have come."""
        self._queue.append((self._messages + LATER, ref(pending)))

    def look(self) -> None:
        """Rows have arrived."""
        self._messages, self._left = self._messages + 1, FEW

    def make(self) -> None:
        """Cut what is due; sequences that nobody waits for any more cost nothing, so however many come, none stay."""
        while self._left and self._queue and self._queue[0][0] <= self._messages:
            pending = self._queue.popleft()[1]()
            if pending is None:
                continue
            self._left -= 1
            try:
                _cut(pending)
            except (ValueError, RuntimeError, LookupError) as e:
                # Whoever asks for the rows is told then; others' rows come by this thread, too.
                logger.error("Weir could not cut the rows of %s: %s: %s", pending.request_id, type(e).__name__, e)


def _cut(pending: PendingSequence) -> None:
    part, prompt_len = pending.memory, len(pending.prompt)
    for sites, selectors in part.spec.by_positions:
        bounds = selectors[0].bounds(prompt_len) if len(selectors) == 1 else None
        if bounds is not None:
            first = max(bounds[0], 0)
            pending.cut(sites, kind_ahead(part), first, min(bounds[1], pending.foreseen) - first)
