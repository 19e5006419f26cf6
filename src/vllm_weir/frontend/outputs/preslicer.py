"""Slices rows into tensors before the rows arrive, while the model computes them.

How many rows a sequence has if it generates all of its `max_tokens` is known when it is admitted.
So its tensors, of which a batch can have thousands, are made before the batch ends, not while the
caller waits. If a sequence ends sooner, its tensors are made when somebody looks at them.
"""

from __future__ import annotations

import logging
from collections import deque
from weakref import ref

from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.receive.pending_sequence import PendingSequence

logger = logging.getLogger(__name__)
DELAY = 16
"""Messages after a sequence's first rows until it is sliced: admitting other requests comes
first."""
PER_MESSAGE = 8
"""Sequences that are sliced after one message, of which each step sends one."""


def presliceable_kind(group: CaptureGroup) -> str:
    """Return the kind of row sequence that a group hands out unchanged; "" if it changes rows."""
    postprocess = group.spec.postprocess
    if group.late:
        return ""
    if postprocess is None:
        return "" if group.recast else "rows"
    return "packed" if postprocess.compression is not None else ""


class Preslicer:
    """The queue of sequences to slice, in the order of their first rows. Only for the thread that receives rows."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, ref[PendingSequence]]] = deque()
        """(number of the message from which it may be sliced, sequence)."""
        self._messages = 0
        self._left = 0
        """Sequences that may still be sliced before the next message."""

    def add(self, pending: PendingSequence) -> None:
        self._queue.append((self._messages + DELAY, ref(pending)))

    def note_message(self) -> None:
        self._messages, self._left = self._messages + 1, PER_MESSAGE

    def slice_due(self) -> None:
        """Slice the sequences whose time has come; those that nobody waits for do not count."""
        while self._left and self._queue and self._queue[0][0] <= self._messages:
            pending = self._queue.popleft()[1]()
            if pending is None:
                continue
            self._left -= 1
            try:
                _preslice(pending)
            except (ValueError, RuntimeError, LookupError) as e:
                # The error is raised for whoever asks for the rows; this thread serves other
                # requests too.
                logger.error("Weir could not slice the rows of %s: %s: %s", pending.request_id, type(e).__name__, e)


def _preslice(pending: PendingSequence) -> None:
    group, prompt_len = pending.memory, len(pending.prompt)
    for sites, selectors in group.spec.by_positions:
        bounds = selectors[0].bounds(prompt_len) if len(selectors) == 1 else None
        if bounds is not None:
            first, end = max(bounds[0], 0), min(bounds[1], pending.expected_end)
            pending.preslice(sites, presliceable_kind(group), first, end - first)
