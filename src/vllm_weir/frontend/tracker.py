"""`Tracker`: the outputs of one sequence, and the deliveries to its sinks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

from vllm_weir.consumers.base import Finished
from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.outputs.held_outputs import HeldOutputs
from vllm_weir.frontend.outputs.ticket import Ticket
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.tokens import SequenceTokens
from vllm_weir.frontend.sinks.manager import SinkManager


class Tracker:
    """The outputs of one sequence.

    While anything refers to it or its views, the sequence's rows are kept.

    Args:
        first: the most tokens that may come from the prefix cache; None for no limit.
        timeout: seconds that a view waits for rows.
        asked: whether the request itself asked for anything; others only have rows for sinks.
        hold: whether `view` may block while a sink has no room.
        held: what holds the sequence's outputs back until their tokens have scores; None if nothing does.
        continuation: tokens after the prompt that the request was given, and which count as generated.
        warms: whether the request only warms the engine up, and is not to be counted.
    """

    def __init__(
        self,
        pending: PendingSequence,
        first: int | None,
        d_model: int,
        timeout: float,
        manager: SinkManager | None = None,
        asked: bool = True,
        hold: bool = False,
        held: HeldOutputs | None = None,
        continuation: Sequence[int] = (),
        warms: bool = False,
    ) -> None:
        self.pending, self.held, self.warms = pending, held, warms
        self._continuation = continuation
        self._first = first
        self._d_model = d_model
        self._timeout = timeout
        self._manager, self._asked, self._hold = manager, asked, hold
        self._caller, self._index = pending.request_id, 0
        self._seen = self._seen_scores = 0

    def name(self, request_id: str, index: int) -> None:
        """Set the id by which the caller knows the request, and which of its sequences this is."""
        self._caller, self._index = request_id, index
        if self._manager is not None and any(part.keep == "marked" for part in self.pending.admitted.parts):
            marks = self._manager.marks
            marks.join(self.pending.request_id, request_id)
            weakref.finalize(self, marks.leave, self.pending.request_id).atexit = False

    def view(self, generated: Sequence[int], delta: bool, reason: str | None, cached_tokens: int) -> OutputView:
        """Return the view for an output; of a finished sequence, also send its rows to its sinks.

        Token ids may be appended to `generated` later. `delta`: whether the view has only rows that no earlier
        output had; `reason`: why the sequence finished, None if it has not.
        """
        if reason == "error":  # what was computed for it may be wrong
            why = "the engine ended it with an error, such as keys and values that could not be loaded; send it again"
            self.pending.failure = self.pending.failure or why
        memory, *others = self.pending.admitted.parts
        if self._continuation:
            generated = [*self._continuation, *generated]
        view = OutputView(
            pending=self.pending,
            part=memory,
            tokens=SequenceTokens(self.pending.prompt, generated),
            start=self._seen if delta else 0,
            finished=reason is not None,
            aborted=reason in ("abort", "error"),
            cached_tokens=cached_tokens,
            hit_limit=self._first,
            d_model=self._d_model,
            timeout=self._timeout,
            asked=self._asked,
            scored_start=self._seen_scores if delta else 0,
            judged=0 if self.held is None else min(self.held.judged, len(generated)),
        )
        self._seen, self._seen_scores = view.end, view.scored_end
        if self._manager is not None and reason is not None and not view.aborted:
            if self.pending.admitted.probes:
                others += self._manager.scored_parts(memory, others)
            if not others:
                return view
            view.tickets = self._deliver(self._manager, view, others, reason)
        return view

    def _deliver(
        self, manager: SinkManager, view: OutputView, parts: Sequence[CaptureGroup], reason: str
    ) -> list[Ticket]:
        request = Finished(
            request_id=self._caller,
            index=self._index,
            name=self.pending.request_id,
            prompt_tokens=view.tokens.prompt_len,
            generated_tokens=view.tokens.generated,
            finish_reason=reason,
        )
        views = [replace(view, part=part, start=0, scored_start=0) for part in parts]
        self.pending.claim(len(views) + view.part.has_rows)
        return manager.deliver(self.pending.request_id, views, request, self.pending.unclaim, self._hold)
