"""Drafts of speculative decoding: which tokens of a step hold. Pure numpy.

A step computes a sequence's next token and the drafts behind it. Only when its tokens are sampled is
it known which drafts are accepted: rows of the others are dropped before any reader is told of them,
and their positions are computed again in the next step. With asynchronous scheduling a step is
planned before the one ahead of it is sampled. Its positions are then planned as if every draft had
been accepted, and corrected here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_weir.worker.planning.columns import copied


@dataclass
class DraftedStep:
    """The requests with Weir's keys in a step, in batch order; arrays are int64 [n].

    Attributes:
        first_tokens: each one's first token in the step.
        counts: how many it has.
        drafts: how many of these, the last ones, are drafts.
        starts: planned position of the first token.
        restarted: requests that have joined, or go on after a preemption: their planned position is
            the true one.
        arrival_tokens, steered_tokens: endpoint -> int64 [m], first token of each of the plan's
            arrivals or steered positions; -1 for what no draft decides on.
        score_reads: SCORE_READ [m], what readers are told of scores.
        endpoints: addresses of the readers, by number.
    """

    request_ids: Sequence[str]
    first_tokens: np.ndarray
    counts: np.ndarray
    drafts: np.ndarray
    starts: np.ndarray
    restarted: Sequence[str] = ()
    arrival_tokens: Mapping[str, np.ndarray] = field(default_factory=dict)
    steered_tokens: Mapping[str, np.ndarray] = field(default_factory=dict)
    score_reads: np.ndarray | None = None
    endpoints: Sequence[str] = ()

    @property
    def undecided(self) -> bool:
        """Whether what was sampled decides on any of its tokens."""
        return bool(self.drafts.any())


@dataclass(frozen=True)
class VerifiedTokens:
    """Which tokens of a step hold, and where they are; arrays are int64 [n], by request."""

    first_tokens: np.ndarray  # each request's first token, ascending
    ends: np.ndarray  # the first of its tokens that does not hold
    shifts: np.ndarray  # how far behind the planned positions it really is

    def keep(self, entries: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return what holds of entries that each stand for a run of tokens.

        `entries`: [m], of a dtype with fields `position` and `count`, and maybe `stride`. `tokens`: int64 [m], the
        first token of each; -1 for entries that are kept as they are.
        """
        if not len(entries):
            return entries
        entries = copied(entries)
        request = np.maximum(np.searchsorted(self.first_tokens, tokens, "right") - 1, 0)
        stride = entries["stride"] if "stride" in (entries.dtype.names or ()) else 1
        left = np.where(tokens < 0, entries["count"], -(-(self.ends[request] - tokens) // stride))
        entries["count"] = np.minimum(entries["count"], np.maximum(left, 0))
        entries["position"] -= np.where(tokens < 0, 0, self.shifts[request])
        return entries[entries["count"] > 0]


class DraftLedger:
    """Follows where requests really are, while the host plans ahead of verification.

    `most_drafts`: how far ahead of its true position a token may be planned.
    """

    def __init__(self, most_drafts: int) -> None:
        self._most_drafts = most_drafts
        self._next: dict[str, int] = {}
        """Request -> position of its next token, for the requests of the last step."""

    def verify(self, step: DraftedStep, sampled: Mapping[str, int]) -> VerifiedTokens:
        """Take in the next step, in order.

        `step`: as planned. `sampled`: request -> tokens that were sampled for it: the accepted drafts and one more.
        Requests without drafts may be left out.
        """
        for request_id in step.restarted:
            self._next.pop(request_id, None)
        starts = step.starts.copy()
        for k, request_id in enumerate(step.request_ids):
            known = self._next.get(request_id)
            # Drafts do not explain any other start, so it is the true one.
            if known is not None and 0 <= step.starts[k] - known <= self._most_drafts:
                starts[k] = known
        accepted = np.fromiter((sampled.get(request_id, 0) - 1 for request_id in step.request_ids), np.int64)
        held = step.counts - step.drafts + np.clip(accepted, 0, step.drafts)
        self._next = dict(zip(step.request_ids, (starts + held).tolist(), strict=True))
        return VerifiedTokens(step.first_tokens, step.first_tokens + held, step.starts - starts)
