"""Makes activations of prompts once their rows are here, while the request still generates."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from weakref import WeakValueDictionary

from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.derived.recipe import Recipe
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.tokens import SequenceTokens

logger = logging.getLogger(__name__)
PER_TURN = 8
"""The most sequences to look at in one go, while other threads of the process wait."""
MAX_DERIVED = 1 << 20
"""The most values of derived sites that are computed in the thread that receives everybody's rows."""


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
            try:
                done = self._slice(pending)
            except (ValueError, RuntimeError, LookupError) as e:
                # The error is raised for whoever asks for the rows; this thread serves other
                # requests too.
                logger.error("Weir could not slice the rows of %s: %s: %s", request_id, type(e).__name__, e)
                done = True
            if done:
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
