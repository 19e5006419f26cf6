"""Makes tensors of rows before anybody asks for them.

How many rows a sequence has if it generates all of its `max_tokens` is known when it is admitted.
So its tensors, of which a batch can have thousands, are made before the batch ends, not while the
caller waits (`Preslicer`). If a sequence ends sooner, its tensors are made when somebody looks at
them. Activations of prompts alone are made once their rows are here, while the request still
generates (`PromptSlicer`).
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary, ref

from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.derived.recipe import Recipe
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.tokens import SequenceTokens

logger = logging.getLogger(__name__)
DELAY = 16
"""Messages after a sequence's first rows until it is sliced: admitting other requests comes
first."""
PER_MESSAGE = 8
"""Sequences that are sliced after one message, of which each step sends one."""
PER_TURN = 8
"""The most sequences to look at in one go, while other threads of the process wait."""
MAX_DERIVED = 1 << 20
"""The most values of derived sites that are computed in the thread that receives everybody's rows."""


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
            _unless_it_fails(_preslice, pending)


def _preslice(pending: PendingSequence) -> bool:
    group, prompt_len = pending.memory, len(pending.prompt)
    for sites, selectors in group.spec.by_positions:
        bounds = selectors[0].bounds(prompt_len) if len(selectors) == 1 else None
        if bounds is not None:
            first, end = max(bounds[0], 0), min(bounds[1], pending.expected_end)
            pending.preslice(sites, presliceable_kind(group), first, end - first)
    return True


def _unless_it_fails(slice_rows: Callable[[PendingSequence], bool], pending: PendingSequence) -> bool:
    """Return what `slice_rows` returns, and True if it fails, which whoever asks for the rows finds out."""
    try:
        return slice_rows(pending)
    except (ValueError, RuntimeError, LookupError) as e:
        logger.error("Weir could not slice the rows of %s: %s: %s", pending.request_id, type(e).__name__, e)
        return True  # this thread serves other requests too


def captures_only_prompt(group: CaptureGroup, prompt_len: int) -> bool:
    """Return whether all values of a group are known to be of the prompt, and are quick to make.

    Rows are plain or reduced; of derived sites there are at most `MAX_DERIVED` values.
    """
    spec = group.spec
    asked = [*(selectors for _, selectors in spec.by_positions), *(recipe.positions for recipe in group.recipes)]
    if not asked:
        return False
    changed = spec.postprocess is not None or group.late or group.recast
    if changed and not group.folds:
        return False
    bounds = [selector.bounds(prompt_len) for selectors in asked for selector in selectors]
    if any(bound is None or bound[1] > prompt_len for bound in bounds):
        return False
    return sum(_count(recipe, prompt_len) for recipe in group.recipes) <= MAX_DERIVED


def _count(recipe: Recipe, prompt_len: int) -> int:
    """Return a bound on the values of a recipe whose positions are in the prompt."""
    spans = [selector.bounds(prompt_len) or (0, prompt_len) for selector in recipe.positions]
    rows = sum(max(0, end - max(first, 0)) for first, end in spans)
    return recipe.width(prompt_len) * min(rows, prompt_len)


class PromptSlicer:
    """The sequences whose activations can be made early. Only for the thread that receives rows, except `add`."""

    def __init__(self) -> None:
        self._waiting: WeakValueDictionary[str, PendingSequence] = WeakValueDictionary()
        self._due: dict[str, None] = {}
        """Ids of sequences that have got rows since they were looked at, in that order."""
        self._d_model = 0

    def add(self, pending: PendingSequence, d_model: int) -> None:
        self._d_model = d_model
        self._waiting[pending.request_id] = pending

    def note_arrivals(self, request_ids: Iterable[str]) -> None:
        if self._waiting:
            self._due.update((request_id, None) for request_id in request_ids if request_id in self._waiting)

    @property
    def has_due(self) -> bool:
        return bool(self._due)

    def slice_due(self) -> None:
        """Look at a few sequences, and make the activations of those whose rows are all here."""
        for request_id in list(itertools.islice(self._due, PER_TURN)):
            del self._due[request_id]
            pending = self._waiting.get(request_id)
            if pending is None:
                continue
            if _unless_it_fails(self._slice, pending):
                self._waiting.pop(request_id, None)

    def _slice(self, pending: PendingSequence) -> bool:
        """Make a sequence's activations; return False if rows are missing."""
        view = OutputView(
            pending=pending,
            part=pending.memory,
            tokens=SequenceTokens(pending.prompt, ()),
            start=0,
            finished=True,  # no more rows of its prompt will come
            aborted=False,
            cached_tokens=0,
            hit_limit=None,
            d_model=self._d_model,
            timeout=0.0,
        )
        if not view.arrived():
            return False
        activations = view.activations()
        for site in activations.sites[:1]:
            activations[site]  # the first look slices all of them
        pending.early_activations = activations
        return True
