"""Early hand-outs: rows of prompts are complete long before the output is, and are cut while its reader still waits."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from weakref import WeakValueDictionary

from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.tokens import SequenceTokens

logger = logging.getLogger(__name__)
FEW = 8
"""Sequences that are looked at in one go: whoever else needs the interpreter does not wait for more."""


def ends_with_the_prompt(part: CaptureGroup, prompt_len: int) -> bool:
    """Whether the rows of a part, as the model has them or reduced, are known to be of the prompt only."""
    spec = part.spec
    if not spec.site_requests or (not part.folds and (spec.postprocess is not None or part.late or part.recast)):
        return False
    bounds = [selector.bounds(prompt_len) for _, selectors in spec.by_positions for selector in selectors]
    return all(b is not None and b[1] <= prompt_len for b in bounds)


class PromptSlicer:
    """Sequences whose hand-out can be made early. Belongs to the thread that receives rows, but for `add`."""

    def __init__(self) -> None:
        self._waiting: WeakValueDictionary[str, PendingSequence] = WeakValueDictionary()
        self._due: dict[str, None] = {}
        """Those of which rows have come since they were looked at, in that order."""
        self._d_model = 0

    def add(self, pending: PendingSequence, d_model: int) -> None:
        """Make this sequence's hand-out once its rows are here."""
        self._d_model = d_model
        self._waiting[pending.request_id] = pending

    def look(self, request_ids: Iterable[str]) -> None:
        """Rows of these have arrived."""
        if self._waiting:
            self._due.update((name, None) for name in request_ids if name in self._waiting)

    @property
    def due(self) -> bool:
        """Whether there is something to look at."""
        return bool(self._due)

    def make(self) -> None:
        """Look at a few sequences; of those whose rows are here, make the hand-out."""
        for name in list(itertools.islice(self._due, FEW)):
            del self._due[name]
            pending = self._waiting.get(name)
            if pending is None:
                continue
            try:
                made = self._make(pending)
            except (ValueError, RuntimeError, LookupError) as e:
                # Whoever asks for the rows is told then; others' rows come by this thread, too.
                logger.error("Weir could not make the hand-out of %s early: %s: %s", name, type(e).__name__, e)
                made = True
            if made:
                self._waiting.pop(name, None)

    def _make(self, pending: PendingSequence) -> bool:
        """Whether it is made."""
        view = OutputView(
            pending=pending,
            part=pending.memory,
            tokens=SequenceTokens(pending.prompt, ()),
            start=0,
            finished=True,  # there is nothing more to come of its prompt
            aborted=False,
            cached_tokens=0,
            hit_limit=None,
            d_model=self._d_model,
            timeout=0.0,
        )
        if not view.arrived():
            return False
        early = view.activations()
        for site in early.sites[:1]:
            early[site]  # the first look cuts all of them
        pending.early = early
        return True
