"""What stays the same for a live request from token to token, as arrays. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from vllm_weir.schema.selectors import NEVER

_ARRAYS = ("ready", "row_seq", "site_set", "program", "group", "probe", "series", "reported", "endpoint")


class SteadyState:
    """A slot for every live request with Weir's keys; slot 0 stands for all other requests.

    Attributes:
        endpoints: addresses of the readers, by number.
        ready: int64 [slots], first position from which the slot's other values hold for every
            token.
        row_seq: int64 [slots], index of the row sequence that rows go to, -1 for none.
        site_set: int64 [slots], what is captured, -1 for nothing.
        program: int64 [slots], program of its tokens, -1 for none.
        group: int64 [slots], number of the interventions that are reported to the reader, -1 for
            none.
        probe: int64 [slots], row of its first probe, -1 if none reads its tokens.
        series: int64 [slots], number under which the reader knows its scores, -1 if they are not
            reported.
        reported: int64 [slots], how many numbers are reported for each token.
        endpoint: int64 [slots], number of its reader in `endpoints`.
    """

    def __init__(self) -> None:
        self.endpoints: list[str] = []
        self._endpoint_numbers: dict[str, int] = {}
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = []
        self._grow(64)

    ready: np.ndarray
    row_seq: np.ndarray
    site_set: np.ndarray
    program: np.ndarray
    group: np.ndarray
    probe: np.ndarray
    series: np.ndarray
    reported: np.ndarray
    endpoint: np.ndarray

    def add_request(self, request_id: str, endpoint: str) -> None:
        """Give a slot to a request whose reader is at `endpoint`, if it has none."""
        if request_id in self._slot_of:
            return
        if not self._free:
            self._grow(2 * len(self.ready))
        if not self._slot_of:
            self.endpoints.clear()
            self._endpoint_numbers.clear()
        slot = self._free.pop()
        self._slot_of[request_id] = slot
        self.ready[slot] = NEVER
        self.endpoint[slot] = self.number_of(endpoint)

    def number_of(self, endpoint: str) -> int:
        """Return the number of a reader's address."""
        number = self._endpoint_numbers.get(endpoint)
        if number is None:
            number = self._endpoint_numbers[endpoint] = len(self.endpoints)
            self.endpoints.append(endpoint)
        return number

    def remove_request(self, request_id: str) -> None:
        """Free a request's slot; unknown ids are ignored."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self.ready[slot] = NEVER
            self._free.append(slot)

    def slot_of(self, request_id: str) -> int:
        return self._slot_of[request_id]

    def slots_of(self, request_ids: Sequence[str]) -> np.ndarray:
        """Return int64 [n], 0 for requests without a slot."""
        return np.fromiter(map(self._slot_of.get, request_ids, repeat(0)), np.int64, len(request_ids))

    def unsettle(self, slot: int) -> None:
        """Note that the slot's values do not hold for the tokens that follow."""
        self.ready[slot] = NEVER

    def settle(self, slot: int, ready: int, row_seq: int, site_set: int, program: int, group: int) -> None:
        """Set a slot's values, which hold for every token from position `ready` on; no probe reads these."""
        self.ready[slot], self.row_seq[slot], self.site_set[slot] = ready, row_seq, site_set
        self.program[slot], self.group[slot] = program, group
        self.probe[slot] = self.series[slot] = -1

    def settle_scores(self, slot: int, probe: int, series: int, reported: int) -> None:
        """Set also what is scored and measured of every token of a slot."""
        self.probe[slot], self.series[slot], self.reported[slot] = probe, series, reported

    def _grow(self, size: int) -> None:
        used = len(self.ready) if self._slot_of else 1
        for name in _ARRAYS:
            array = np.full(size, NEVER if name == "ready" else -1, np.int64)
            if self._slot_of:
                array[:used] = getattr(self, name)
            setattr(self, name, array)
        self._free.extend(range(size - 1, used - 1, -1))
