"""Requests for which nothing changes from token to token: kept as arrays, and planned all at once. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from vllm_weir.schema.selectors import NEVER
from vllm_weir.worker.planning.plan_builder import PlanBuilder
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.score_planner import ScorePlanner

_ARRAYS = ("ready", "row_seq", "site_set", "program", "group", "probe", "series", "reported", "endpoint")


class SteadyRequests:
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

    def __init__(self, row_seqs: RowSequences, scores: ScorePlanner) -> None:
        self._row_seqs, self._scores = row_seqs, scores
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

    def plan(
        self, builder: PlanBuilder, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Plan consecutive tokens of requests in the steady state, all arrays [n].

        Returns bool [n], for which of them that was possible: the others' rows need another extent or row sequence.
        """
        row_seqs = self._row_seqs
        indices = self.row_seq[slots]
        captures = indices >= 0
        indices = indices[captures]
        fits = np.ones(len(slots), bool)
        fits[captures] = (row_seqs.next_rank[indices] + counts[captures] <= row_seqs.end_rank[indices]) & (
            row_seqs.last_position[indices] - positions[captures] < row_seqs.rewind
        )
        if not fits.all():
            slots, tokens, positions, counts, captures = (
                array[fits] for array in (slots, tokens, positions, counts, captures)
            )
            indices = self.row_seq[slots][captures]
        if len(indices):
            self._capture(builder, slots[captures], indices, tokens[captures], positions[captures], counts[captures])
        builder.programs[_all_tokens(tokens, counts)] = self.program[slots].repeat(counts)
        groups = self.group[slots]
        is_reported = groups >= 0
        if is_reported.any():
            builder.steer_each(
                self.endpoint[slots[is_reported]],
                *(array[is_reported] for array in (groups, tokens, positions, counts)),
            )
        self._plan_scores(builder, slots, tokens, positions, counts)
        return fits

    def _capture(
        self,
        builder: PlanBuilder,
        slots: np.ndarray,
        indices: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """Capture consecutive tokens for the row sequences at `indices`, which have room; all arrays [n]."""
        row_seqs = self._row_seqs
        builder.site_sets[_all_tokens(tokens, counts)] = self.site_set[slots].repeat(counts)
        ranks = row_seqs.next_rank[indices]
        if (counts == 1).all():
            builder.capture_one_each(self.endpoint[slots], row_seqs, indices, ranks, tokens, positions)
        else:
            builder.capture_runs(self.endpoint[slots], row_seqs, indices, ranks, tokens, positions, counts)
        row_seqs.next_rank[indices] += counts
        row_seqs.last_position[indices] = positions + counts - 1

    def _plan_scores(
        self, builder: PlanBuilder, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray, counts: np.ndarray
    ) -> None:
        """Plan what is scored and measured of tokens of requests in the steady state, all arrays [n]."""
        is_scored = self.probe[slots] >= 0
        if is_scored.any():
            probes = self.probe[slots[is_scored]]
            self._scores.plan_each(builder.scores, probes, tokens[is_scored], counts[is_scored])
        is_read = self.series[slots] >= 0
        if is_read.any():
            slots = slots[is_read]
            builder.scores.read(
                self.endpoint[slots], self.series[slots], positions[is_read], counts[is_read], tokens[is_read],
                self.reported[slots],
            )  # fmt: skip

    def _grow(self, size: int) -> None:
        used = len(self.ready) if self._slot_of else 1
        for name in _ARRAYS:
            array = np.full(size, NEVER if name == "ready" else -1, np.int64)
            if self._slot_of:
                array[:used] = getattr(self, name)
            setattr(self, name, array)
        self._free.extend(range(size - 1, used - 1, -1))


def _all_tokens(first_tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the tokens of runs, int64, one run after the other."""
    if (counts == 1).all():
        return first_tokens
    run = np.arange(len(counts)).repeat(counts)
    return first_tokens[run] + np.arange(len(run)) - (counts.cumsum() - counts)[run]
