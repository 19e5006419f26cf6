"""`OutputHolder`: the sequences of one engine whose outputs wait for the scores of their tokens."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic
from weakref import WeakSet, WeakValueDictionary

from vllm_weir.frontend.outputs.held_outputs import HeldOutputs, Release
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.row_store import RowStore

FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02
"""Seconds between looks for scores that have not arrived: at first, and at most."""


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
