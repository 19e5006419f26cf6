"""Outputs of one sequence that wait for the scores of their tokens before anybody gets them.

The engine computes the row of a generated token, and with it its score, in the step after it has sampled the token. So
each output waits for the next one: then its tokens' scores are known, or on their way.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Sequence
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.schema.gates import StopRule

COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
FAILED = "failed"
"""The ``stop_reason`` of a sequence that ends because it has failed; its caller gets the error instead."""
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02
"""Seconds between looks for scores that have not arrived: at first, and at most."""


class Release(NamedTuple):
    """An output to be handed on.

    Attributes:
        output: as it was added.
        tokens: how many of its tokens, from the first on, the caller gets.
        cut: whether that is not all of them.
    """

    output: Any
    tokens: int
    cut: bool = False


class _Held(NamedTuple):
    """An output, and how many generated tokens the sequence has before and with it."""

    output: Any
    first: int
    end: int


class HeldOutputs:
    """The outputs of one sequence of a request with probes, held until the scores of their tokens are known.

    When the engine ends the sequence, its last token has no score and goes out with the one before it. Where a rule of
    ``stop_when`` holds for a token, that token is the sequence's last.

    Args:
        stops: what ends generation; the scores are compared in float32.

    Attributes:
        judged: how many of the generated tokens have known scores, or none by their probes' positions.
        ends_at: how many generated tokens the caller gets; None while nothing has ended the sequence, and if the
            engine does.
        stop_reason: what has ended it, as vLLM's ``stop_reason``.
        behind_since: when it was first found to wait for the scores of token `judged`; for whoever keeps the time.
    """

    def __init__(self, pending: PendingSequence, stops: Sequence[StopRule] = ()) -> None:
        self.pending = pending
        self.judged = 0
        self.ends_at: int | None = None
        self.stop_reason = ""
        self.behind_since: float | None = None
        self._stops = [(rule, COMPARE[rule.op], np.float32(rule.threshold)) for rule in stops]
        self._prompt_len = len(pending.prompt)
        self._steady = [
            None if probe.positions.needs_token_ids else probe.positions.steady(self._prompt_len)
            for probe in pending.admitted.probes
        ]
        self._queue: deque[_Held] = deque()
        self._tokens: list[int] = []
        self._due = 0
        """Tokens whose rows the engine has computed, by the outputs that were added."""
        self._finished = False

    def add(self, output: Any, tokens: Sequence[int], finished: bool) -> None:
        """Take in the engine's next output, with these tokens; `finished` if it is the engine's last one.

        Does nothing once the sequence has ended.
        """
        if self.ends_at is not None:
            return
        first = len(self._tokens)
        self._tokens.extend(tokens)
        if tokens:
            self._due = len(self._tokens) - 1
        self._finished |= finished
        self._queue.append(_Held(output, first, len(self._tokens)))

    @property
    def behind(self) -> bool:
        """Whether outputs wait for scores that the workers have computed."""
        return bool(self._queue) and self.ends_at is None and self.judged < self._due

    @property
    def awaited(self) -> int:
        """The position whose scores come next."""
        return self._prompt_len + self.judged

    def fail(self) -> None:
        """End the sequence with the first output that is held, whatever its scores."""
        if self._queue and self.ends_at is None:
            self.ends_at, self.stop_reason = self._queue[0].end, FAILED

    def advance(self) -> bool:
        """Look at the scores that have arrived; return whether outputs still wait for some."""
        while self.ends_at is None and self.judged < self._due:
            position, token = self.awaited, self._tokens[self.judged]
            scored = [self._is_scored(k, position, token) for k in range(len(self._steady))]
            if any(scored):
                row = self.pending.scores.row(position)
                if row is None:
                    return bool(self._queue)
                self._judge(row, scored)
            self.judged += 1
            self.behind_since = None
        return False

    def release(self) -> list[Release]:
        """Return the outputs that the caller may have now, in order; each is returned once."""
        self.advance()
        end = len(self._tokens) if self._finished and not self.behind else self.judged
        if self.ends_at is not None:
            end = self.ends_at
        out: list[Release] = []
        while self._queue and self._queue[0].end <= end:
            held = self._queue.popleft()
            out.append(Release(held.output, held.end - held.first))
            if self.stop_reason == FAILED:
                break
        if self.ends_at is not None:
            if self._queue and self._queue[0].first < end:
                held = self._queue[0]
                out.append(Release(held.output, end - held.first, cut=True))
            self._queue.clear()
        return out

    def _judge(self, row: np.ndarray, scored: Sequence[bool]) -> None:
        """Note that the sequence ends with token `judged` if a rule holds for its scores."""
        cells = self.pending.admitted.cells.scores
        for rule, holds, threshold in self._stops:
            if scored[rule.probe] and holds(row[cells[rule.probe] + rule.output], threshold):
                self.ends_at, self.stop_reason = self.judged + 1, f"probe:{rule.name}"
                return

    def _is_scored(self, probe: int, position: int, token: int) -> bool:
        steady = self._steady[probe]
        if steady is not None and position >= steady[0]:
            return steady[1]
        selector = self.pending.admitted.probes[probe].positions
        return bool(selector.mask(np.array([position]), self._prompt_len, np.array([token]))[0])


class OutputHolder:
    """Holds outputs back until the scores of their tokens have arrived; fails sequences whose scores do not.

    Sequences are held weakly: whoever drops a sequence drops its outputs.

    Args:
        timeout: seconds after which a sequence without its scores fails.
    """

    def __init__(self, store: RowStore, timeout: float) -> None:
        self._store, self._timeout = store, timeout
        self._held: WeakValueDictionary[str, HeldOutputs] = WeakValueDictionary()
        self._behind: WeakSet[HeldOutputs] = WeakSet()
        self._pause = FIRST_PAUSE

    def __len__(self) -> int:
        return len(self._held)

    def open(self, pending: PendingSequence) -> HeldOutputs:
        """Hold back the outputs of a sequence as long as anybody refers to the result."""
        held = self._held[pending.request_id] = HeldOutputs(pending, pending.admitted.stops)
        return held

    def find(self, request_id: str) -> HeldOutputs | None:
        return self._held.get(request_id)

    @property
    def behind(self) -> bool:
        return bool(self._behind)

    @property
    def pause(self) -> float | None:
        """Seconds until one should `release` again, longer from time to time; None if nothing is on its way."""
        if not self._behind:
            return None
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause

    def wait(self, touched: Collection[HeldOutputs]) -> None:
        """Wait for the scores of these sequences, at most for the timeout."""

        def done() -> bool:
            return not any(held.pending.failure is None and held.advance() for held in touched)

        if not done():
            self._store.wait(done, self._timeout)

    def release(self, touched: Collection[HeldOutputs] = (), expired: bool = False) -> list[Release]:
        """Return the outputs that may go on, of the sequences `touched` by outputs and of those that were behind.

        `expired`: whether they have waited long enough, see `wait`.
        """
        released: list[Release] = []
        now = monotonic()
        for held in {*touched, *self._behind}:
            released += self._advance(held, now, expired)
        if released or not self._behind:
            self._pause = FIRST_PAUSE
        return released

    def _advance(self, held: HeldOutputs, now: float, expired: bool) -> list[Release]:
        pending = held.pending
        if pending.failure is None and held.advance():
            held.behind_since = held.behind_since or now
            if expired or now - held.behind_since > self._timeout:
                pending.failure = (
                    f"the scores at position {held.awaited} did not arrive within {self._timeout:g} s; see the "
                    "worker's log for the cause"
                )
        if pending.failure is not None:
            held.fail()
        released = held.release()
        if held.behind:
            self._behind.add(held)
        else:
            self._behind.discard(held)
        return released
