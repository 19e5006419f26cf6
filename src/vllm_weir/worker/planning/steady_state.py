"""Seats: what is the same for a live request from one generated token to the next, as arrays. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from vllm_weir.schema.selectors import NEVER


class SteadyState:
    """One seat for every live request with Weir's keys; seat 0 stands for all the others.

    Attributes (arrays by seat):
        ready: first position from which the rest of the seat holds for every token.
        row_seq: index of the row sequence that its rows go to, -1 for none.
        profile: what is recorded.
        program: what its tokens undergo, -1 for nothing.
        group: number of the interventions to vouch for, -1 for none.
        reply: number of its reader in `replies`.
    """

    def __init__(self) -> None:
        self.replies: list[str] = []
        self._reply_numbers: dict[str, int] = {}
        self._of: dict[str, int] = {}
        self._free: list[int] = []
        self._grow(64)

    ready: np.ndarray
    row_seq: np.ndarray
    profile: np.ndarray
    program: np.ndarray
    group: np.ndarray
    reply: np.ndarray

    def take(self, request_id: str, reply: str) -> None:
        """A seat for a request that joins (or has one already) and answers to `reply`."""
        if request_id in self._of:
            return
        if not self._free:
            self._grow(2 * len(self.ready))
        if not self._of:
            self.replies.clear()
            self._reply_numbers.clear()
        seat = self._free.pop()
        self._of[request_id] = seat
        self.ready[seat] = NEVER
        number = self._reply_numbers.get(reply)
        if number is None:
            number = self._reply_numbers[reply] = len(self.replies)
            self.replies.append(reply)
        self.reply[seat] = number

    def leave(self, request_id: str) -> None:
        """The request's seat is free."""
        seat = self._of.pop(request_id, None)
        if seat is not None:
            self.ready[seat] = NEVER
            self._free.append(seat)

    def number(self, request_id: str) -> int:
        """A request's seat."""
        return self._of[request_id]

    def of(self, request_ids: Sequence[str]) -> np.ndarray:
        """int64 [n], 0 for requests without a seat."""
        return np.fromiter(map(self._of.get, request_ids, repeat(0)), np.int64, len(request_ids))

    def wait(self, seat: int) -> None:
        """What follows is not the same for every token."""
        self.ready[seat] = NEVER

    def settle(self, seat: int, ready: int, row_seq: int, profile: int, program: int, group: int) -> None:
        """This holds for every token from position `ready` on."""
        self.ready[seat], self.row_seq[seat], self.profile[seat] = ready, row_seq, profile
        self.program[seat], self.group[seat] = program, group

    def _grow(self, size: int) -> None:
        old = len(self.ready) if self._of else 1
        for name in ("ready", "row_seq", "profile", "program", "group", "reply"):
            array = np.full(size, NEVER if name == "ready" else -1, np.int64)
            if self._of:
                array[:old] = getattr(self, name)
            setattr(self, name, array)
        self._free.extend(range(size - 1, old - 1, -1))
