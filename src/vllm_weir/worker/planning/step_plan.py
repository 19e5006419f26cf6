"""A step's plan, and those of steps that repeat it. Pure numpy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from vllm_weir.schema.positions import ENDLESS
from vllm_weir.worker.planning.columns import COPY_RUN, RECORD, REDUCTION, ROW_COPY, RUN, concatenate, copied
from vllm_weir.worker.planning.row_sequences import RowSequences


@dataclass(frozen=True)
class ProgramsByToken:
    """Tokens whose program depends on their token id."""

    tokens: np.ndarray  # int64 [n], of the step
    token_sets: tuple[tuple[int, ...], ...]  # sets of token ids
    # int32 [2 ** sets], the program to choose: bit j of the index says whether the token's id is in ``token_sets[j]``
    programs: np.ndarray


@dataclass(frozen=True)
class ProgramsByPosition:
    """Tokens whose program depends on their position, which only the device knows."""

    tokens: np.ndarray  # int64 [n], of the step
    first: int  # the first position that any of them may have
    programs: np.ndarray  # int32 [m], of the positions from `first` on


class ScoreReads(NamedTuple):
    """Which cells of a step's tokens are sent to readers.

    Attributes:
        tokens, columns: as many tokens, and cells of each, hold them all.
        places: endpoint -> int64 [n]: where its numbers stand in an array [tokens, columns].
    """

    tokens: int
    columns: int
    places: dict[str, np.ndarray]


class RequestFailure(NamedTuple):
    """A request that cannot be served any further, and why."""

    endpoint: str
    request_id: str
    reason: str


@dataclass(frozen=True)
class StepPlan:
    """What one step does; dtypes in capitals are those of `vllm_weir.worker.planning.columns`.

    Attributes:
        slots: int32 [tokens], ring row of a token's first captured row, counted within the step, -1
            for none.
        site_sets: int32 [tokens], what is captured, -1 for nothing.
        programs: int32 [tokens], what is done to the token, -1 for nothing.
        rows: ring rows that the step writes.
        captured_tokens: int64 [m], the tokens whose rows are captured unreduced.
        copies: ROW_COPY [n], the rows of each captured token that is sent uncompressed, in the
            order of `captured_tokens`; 0 rows for tokens of a request that failed while the step
            was planned.
        copy_runs: COPY_RUN, of `copies`; the other copies stand alone.
        arrivals: endpoint -> ARRIVAL [m].
        steered: endpoint -> STEERED [m].
        programs_by_token, programs_by_position: programs that are still to be chosen on the device.
        failures: requests that cannot be served any further.
        records: RECORD [n], the captured tokens that are sent as records of a codec.
        spans: int32 [tokens], for tokens whose rows are reduced: see `vllm_weir.schema.rows`
            for a group's first one, -1 for the others; 0 for all other tokens.
        group_rows: ring rows of the groups of reductions, which come before all others.
        reductions: REDUCTION [n], reductions to go on with.
        reduced: ROW_COPY, the results of reductions that the step completes.
        runs: RUN [n], tokens that probes read or that gates decide on, by tap.
        scored: endpoint -> SCORED [m].
        score_reads: the scores and factors of `scored`; None if there are none.
    """

    slots: np.ndarray
    site_sets: np.ndarray
    programs: np.ndarray
    rows: int
    captured_tokens: np.ndarray
    copies: np.ndarray
    copy_runs: np.ndarray = field(default_factory=lambda: np.empty(0, COPY_RUN))
    arrivals: dict[str, np.ndarray] = field(default_factory=dict)
    steered: dict[str, np.ndarray] = field(default_factory=dict)
    programs_by_token: list[ProgramsByToken] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    records: np.ndarray = field(default_factory=lambda: np.empty(0, RECORD))
    spans: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    group_rows: int = 0
    reductions: np.ndarray = field(default_factory=lambda: np.empty(0, REDUCTION))
    reduced: np.ndarray = field(default_factory=lambda: np.empty(0, ROW_COPY))
    runs: np.ndarray = field(default_factory=lambda: np.empty(0, RUN))
    scored: dict[str, np.ndarray] = field(default_factory=dict)
    score_reads: ScoreReads | None = None
    programs_by_position: list[ProgramsByPosition] = field(default_factory=list)

    @property
    def acting_tokens(self) -> np.ndarray:
        """int32 [n]: tokens on which taps act; those that begin a group of reduced rows first."""
        acts = (self.programs >= 0) | ((self.slots >= 0) & (self.spans >= 0))
        for by_token in self.programs_by_token:
            acts[by_token.tokens] = True
        for by_position in self.programs_by_position:
            acts[by_position.tokens] = True
        tokens = np.flatnonzero(acts).astype(np.int32)
        return tokens[np.argsort(self.spans[tokens] <= 0, kind="stable")]

    @functools.cached_property
    def segments(self) -> np.ndarray:
        """ROW_COPY [m]: the fewest pieces that hold all rows and reductions that are sent."""
        return concatenate([segments_of(self.copies), self.reduced], ROW_COPY)

    @functools.cached_property
    def rows_per_copy(self) -> int:
        """Rows of every copy, 0 if they differ."""
        rows = self.copies["rows"]
        return int(rows[0]) if len(rows) and (rows == rows[0]).all() else 0

    def in_lanes(self, stride: int, first_group_row: int = 0) -> StepPlan:
        """Return the plan with the n-th captured token in slot ``n * stride``.

        Groups of reduced rows begin at ring row `first_group_row`.
        """
        slots = self.slots.copy()
        slots[self.spans != 0] += first_group_row
        # Captured tokens without a site set belong to requests that failed during planning.
        captured = self.captured_tokens
        slots[captured] = np.where(self.site_sets[captured] >= 0, np.arange(len(captured)) * stride, -1)
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return StepPlan(**values | {"slots": slots})

    def lanes_of(self, slots: np.ndarray) -> np.ndarray:
        """Return where in `captured_tokens` the tokens with these `slots` are; both int64 [n]."""
        live = np.flatnonzero(self.site_sets[self.captured_tokens] >= 0)
        return live[np.searchsorted(self.slots[self.captured_tokens[live]], slots)]

    @functools.cached_property
    def has_records(self) -> bool:
        """Whether rows are sent as records of a codec."""
        return len(self.records) > 0


class AdvancedPlan(StepPlan):
    """The plan of the `times`-th step after `base`: every request is `times` positions on.

    Its arrays are made when they are first read, since few steps need all of them.
    """

    _base: StepPlan
    _times: int

    def __init__(self, base: StepPlan, times: int) -> None:
        values = vars(base)
        self.__dict__.update({name: values[name] for name in _SHARED})
        self.__dict__.update(_base=base, _times=times, has_records=base.has_records)

    @functools.cached_property
    def copies(self) -> np.ndarray:  # type: ignore[override]
        copies = copied(self._base.copies)
        copies["arena_row"] += copies["rows"] * self._times
        return copies

    @functools.cached_property
    def records(self) -> np.ndarray:  # type: ignore[override]
        records = copied(self._base.records)
        records["arena_byte"] += records["bytes"] * self._times
        return records

    @functools.cached_property
    def arrivals(self) -> dict[str, np.ndarray]:  # type: ignore[override]
        return {
            endpoint: _advanced(arrivals, ("rank", "position"), self._times)
            for endpoint, arrivals in self._base.arrivals.items()
        }

    @functools.cached_property
    def steered(self) -> dict[str, np.ndarray]:  # type: ignore[override]
        return {
            endpoint: _advanced(steered, ("position",), self._times) for endpoint, steered in self._base.steered.items()
        }

    @functools.cached_property
    def scored(self) -> dict[str, np.ndarray]:  # type: ignore[override]
        return {
            endpoint: _advanced(scored, ("position",), self._times) for endpoint, scored in self._base.scored.items()
        }

    @functools.cached_property
    def segments(self) -> np.ndarray:
        rows_per_copy = self._base.rows_per_copy
        if not rows_per_copy:
            return segments_of(self.copies)
        return _advanced(self._base.segments, ("arena_row",), rows_per_copy * self._times)


_SHARED = (
    "slots", "site_sets", "programs", "rows", "captured_tokens", "copy_runs", "programs_by_token", "failures", "spans",
    "group_rows", "reductions", "reduced", "runs", "score_reads", "programs_by_position",
)  # fmt: skip
"""Attributes that an advanced plan shares with its base."""


def _advanced(array: np.ndarray, names: Sequence[str], by: int) -> np.ndarray:
    """Return a copy with `by` added to some fields."""
    array = copied(array)
    for name in names:
        column = array[name]
        column += by
    return array


def segments_of(copies: np.ndarray) -> np.ndarray:
    """Return ROW_COPY [m]: the fewest pieces that hold all rows of ROW_COPY [n], in their order."""
    sent = copies["rows"].nonzero()[0]
    if not len(sent):
        return np.empty(0, ROW_COPY)
    ring_rows, arena_rows, rows = (copies[name][sent] for name in ("ring_row", "arena_row", "rows"))
    follows = (arena_rows[1:] == arena_rows[:-1] + rows[:-1]) & (ring_rows[1:] == ring_rows[:-1] + rows[:-1])
    first = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    last = np.concatenate([first[1:], [len(sent)]]) - 1
    segments = np.empty(len(first), ROW_COPY)
    segments["ring_row"], segments["arena_row"] = ring_rows[first], arena_rows[first]
    segments["rows"] = ring_rows[last] + rows[last] - ring_rows[first]
    return segments


class RepeatedSteps:
    """Successive steps of one batch in which every request advances by one token, unchanged.

    Args:
        request_ids: the batch.
        computed: int64 [n], position of each one's token in the first such step.
        plan: the first such step's plan.
        row_seqs: where rows go.
        indices: int64 [m], the row sequences that the batch's rows go to.
    """

    def __init__(
        self,
        request_ids: Sequence[str],
        computed: np.ndarray,
        plan: StepPlan | None,
        row_seqs: RowSequences,
        indices: np.ndarray,
    ) -> None:
        self._request_ids, self._next_computed, self._plan = list(request_ids), computed + 1, plan
        self._one_each = np.ones(len(computed), np.int64).tobytes()
        self._row_seqs, self._indices, self._epoch = row_seqs, indices, row_seqs.epoch
        self._times = 0
        self._room = ENDLESS
        if len(indices):
            self._room = int((row_seqs.end_rank[indices] - row_seqs.next_rank[indices]).min())

    def continues(self, request_ids: Sequence[str], counts: np.ndarray, computed: np.ndarray) -> bool:
        """Return whether this batch is the last one, one position on; arrays are int64 [n]."""
        return (
            self._times < self._room
            and self._epoch == self._row_seqs.epoch  # else an extent may have been retired
            and computed.tobytes() == self._next_computed.tobytes()
            and counts.tobytes() == self._one_each
            and self._request_ids == request_ids
        )

    def next(self) -> StepPlan | None:
        """Return the plan of the next step, of which `continues` must hold."""
        self._times += 1
        self._next_computed += 1
        if len(self._indices):
            self._row_seqs.defer_advance(self._indices, self._times)
        return None if self._plan is None else AdvancedPlan(self._plan, self._times)
