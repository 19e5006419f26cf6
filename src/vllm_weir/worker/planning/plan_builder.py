"""Builds a step's plan: what happens to each token, and its ring rows. Pure numpy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_weir.schema.rows import CONTINUED, GROUP, MAXIMUM, SEEDED
from vllm_weir.worker.planning.columns import (
    ARRIVAL,
    COPY_RUN,
    PLACEMENT,
    RECORD,
    REDUCTION,
    ROW_COPY,
    STEERED,
    TOKEN_RUN,
    concatenate,
)
from vllm_weir.worker.planning.row_sequences import RowSequence, RowSequences
from vllm_weir.worker.planning.score_builder import ByEndpoint, ScoreBuilder
from vllm_weir.worker.planning.step_plan import ProgramsByPosition, ProgramsByToken, RequestFailure, StepPlan


@dataclass(frozen=True)
class _RequestReduction:
    """One request's part in the step's reductions."""

    tokens: np.ndarray  # int64 [n], of the step
    spans: np.ndarray  # int32 [n], as in `StepPlan`
    slots: np.ndarray  # int64 [n], ring row of each token's group, counted from the request's first one
    fields: tuple[int, ...]  # as in `REDUCTION`, `cell` still 0
    group_size: int  # ring rows of a group
    arena_row: int | None  # where the result goes; None if the step does not complete it


class PlanBuilder:
    """Collects what one step captures and steers, and builds its plan.

    Add requests in the steady state all at once, and the others one by one. Endpoints are given as
    their numbers in `SteadyRequests.endpoints`.

    Attributes:
        site_sets, programs, programs_by_token, programs_by_position, failures: as in `StepPlan`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.site_sets = np.full(size, -1, np.int32)
        self.programs = np.full(size, -1, np.int32)
        self.programs_by_token: list[ProgramsByToken] = []
        self.programs_by_position: list[ProgramsByPosition] = []
        self.failures: list[RequestFailure] = []
        self.scores = ScoreBuilder()
        self._placements: list[np.ndarray] = []
        self._num_placements = 0
        self._copy_runs: list[np.ndarray] = []
        self._token_runs: list[tuple[int, ...]] = []
        """See `TOKEN_RUN`."""
        self._run_arrays: list[np.ndarray] = []
        """TOKEN_RUN [n] each."""
        self._reductions: list[_RequestReduction] = []
        self._arrivals = ByEndpoint(ARRIVAL)
        self._steered = ByEndpoint(STEERED)
        self._steered_runs: list[tuple[int, ...]] = []
        """First token and endpoint's number, and then as in `STEERED`."""
        self._cancelled: list[tuple[int, int]] = []
        """(first token, token after the last one) of requests that failed."""

    def capture_one_each(
        self,
        endpoints: np.ndarray,
        row_seqs: RowSequences,
        indices: np.ndarray,
        ranks: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """Capture one token each for the row sequences at `indices`; all arrays [n]."""
        rank_sizes = row_seqs.rank_size[indices]
        placements = np.empty(len(tokens), PLACEMENT)
        placements["token"] = tokens
        placements["place"] = row_seqs.origin[indices] + ranks * rank_sizes
        placements["size"] = rank_sizes
        placements["ring_rows"] = row_seqs.ring_rows[indices]
        placements["codec"] = row_seqs.codec[indices]
        self._add_placements(placements)
        arrivals = np.empty(len(tokens), ARRIVAL)
        arrivals["row_seq"], arrivals["rank"], arrivals["position"] = row_seqs.number[indices], ranks, positions
        arrivals["count"] = arrivals["stride"] = 1
        self._arrivals.add(endpoints, arrivals, tokens)

    def capture_runs(
        self,
        endpoints: np.ndarray,
        row_seqs: RowSequences,
        indices: np.ndarray,
        ranks: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """Capture consecutive tokens for the row sequences at `indices`; all arrays [n]."""
        runs = np.empty(len(tokens), TOKEN_RUN)
        runs["token"], runs["count"], runs["endpoint"], runs["position"] = tokens, counts, endpoints, positions
        runs["rank"], runs["size"], runs["row_seq"] = ranks, row_seqs.rank_size[indices], row_seqs.number[indices]
        runs["place"] = row_seqs.origin[indices] + ranks * runs["size"]
        runs["ring_rows"], runs["codec"] = row_seqs.ring_rows[indices], row_seqs.codec[indices]
        self._run_arrays.append(runs)

    def capture_run(
        self,
        endpoint: int,
        row_seq: RowSequence,
        rank: int,
        place: int,
        token: int,
        position: int,
        count: int,
        site_set: int,
    ) -> None:
        """Capture `count` consecutive tokens and positions; they go to `place` and on."""
        self.site_sets[token : token + count] = site_set
        self._token_runs.append(
            (
                token, count, place, row_seq.rank_size, row_seq.ring_rows, row_seq.codec,
                endpoint, row_seq.number, rank, position,
            )
        )  # fmt: skip

    def capture_some(
        self,
        endpoint: int,
        row_seq: RowSequence,
        rank: int,
        place: int,
        tokens: np.ndarray,
        positions: np.ndarray,
        site_set: int,
    ) -> None:
        """Capture any `tokens` at any `positions`, [n] and ascending; they go to `place` and on."""
        self.site_sets[tokens] = site_set
        bounds = [(start, end) for start, end, _ in _consecutive_runs(tokens) if end - start > 1]
        if bounds:
            copy_runs = np.array(bounds, COPY_RUN)
            copy_runs["first"] += self._num_placements
            copy_runs["end"] += self._num_placements
            self._copy_runs.append(copy_runs)
        placements = np.empty(len(tokens), PLACEMENT)
        placements["token"] = tokens
        placements["place"] = place + np.arange(len(tokens)) * row_seq.rank_size
        placements["size"] = row_seq.rank_size
        placements["ring_rows"] = row_seq.ring_rows
        placements["codec"] = row_seq.codec
        self._add_placements(placements)
        self._add_arrivals(endpoint, row_seq.number, rank, positions, tokens)

    def reduce(
        self,
        endpoint: int,
        row_seq: RowSequence,
        site_set: int,
        tokens: np.ndarray,
        positions: np.ndarray,
        resumed: int,
        count: int,
        maximum: bool,
        arena_row: int | None,
    ) -> None:
        """Reduce the rows of `tokens` at `positions` (ascending), both int64 [n], into `row_seq`.

        `resumed`, `count` and `maximum` are as in `REDUCTION`; the result goes to `arena_row`, None if
        there is more to come.
        """
        groups = positions // GROUP
        heads = np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1])
        lasts = np.concatenate([heads[1:], [len(tokens)]]) - 1
        spans = np.full(len(tokens), -1, np.int32)
        spans[heads] = tokens[lasts] - tokens[heads] + 1 + (MAXIMUM if maximum else 0)
        if resumed == CONTINUED:
            spans[0] += SEEDED
        group_of_token = np.arange(len(heads)).repeat(lasts - heads + 1)
        self.site_sets[tokens] = site_set
        fields = (
            row_seq.number, 0, len(heads), len(row_seq.columns), resumed, count, arena_row is not None, maximum,
        )  # fmt: skip
        slots = group_of_token * row_seq.rank_size
        self._reductions.append(_RequestReduction(tokens, spans, slots, fields, row_seq.rank_size, arena_row))
        if arena_row is not None:
            arrival = np.array([(row_seq.number, 0, positions[-1], 1, 1)], ARRIVAL)
            self._arrivals.add(endpoint, arrival, int(tokens[-1]))

    def drop(self, endpoint: int, row_seq: int, tokens: np.ndarray, positions: np.ndarray) -> None:
        """Report that rows of a row sequence (its number) of `tokens` at `positions` are dropped."""
        self._add_arrivals(endpoint, row_seq, None, positions, tokens)

    def steer_each(
        self,
        endpoints: np.ndarray,
        groups: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray | int,
    ) -> None:
        """Report consecutive steered positions for each of the groups; all arrays [n]."""
        steered = np.empty(len(groups), STEERED)
        steered["group"], steered["position"], steered["count"], steered["stride"] = groups, positions, counts, 1
        self._steered.add(endpoints, steered, tokens)

    def steer_run(self, endpoint: int, group: int, token: int, position: int, count: int) -> None:
        """Report `count` consecutive steered tokens and positions of a group."""
        self._steered_runs.append((token, endpoint, group, position, count, 1))

    def steer_some(self, endpoint: int, group: int, positions: np.ndarray, offset: int | None = None) -> None:
        """Report any steered positions (ascending) of a group.

        They are tokens ``offset + positions`` of the step; of an earlier one if `offset` is None.
        """
        self._steered_runs.extend(
            (
                -1 if offset is None else offset + int(positions[start]),
                endpoint, group, int(positions[start]), end - start, stride,
            )
            for start, end, stride in _strided_runs(positions)
        )  # fmt: skip

    def cancel(self, first: int, count: int) -> None:
        """Undo whatever was added for the `count` tokens from `first` on."""
        end = first + count
        self._cancelled.append((first, end))
        self.site_sets[first:end] = self.programs[first:end] = -1
        self.programs_by_token = [c for c in self.programs_by_token if not first <= c.tokens[0] < end]
        self.programs_by_position = [c for c in self.programs_by_position if not first <= c.tokens[0] < end]

    def finish(self, endpoints: Sequence[str]) -> StepPlan | None:
        """Return the plan, None if nothing happens in the step; `endpoints` are the readers' addresses, by number."""
        self._expand_token_runs()
        self._expand_steered_runs()
        if self._is_empty():
            return None
        placements = concatenate(self._placements, PLACEMENT)
        self._apply_cancellations(placements)
        slots, spans = np.full(self.size, -1, np.int32), np.zeros(self.size, np.int32)
        group_rows, reductions, reduced = self._place_reductions(slots, spans)
        ring_rows = placements["ring_rows"]
        ends = group_rows + ring_rows.cumsum()
        first_rows = ends - ring_rows
        captured_tokens = np.ascontiguousarray(placements["token"])
        slots[captured_tokens] = first_rows
        if self._cancelled:
            slots[self.site_sets < 0] = -1
        copies, copy_runs, records = self._split_placements(placements, first_rows)
        runs, scored, score_reads = self.scores.finish(endpoints, self._cancelled)
        return StepPlan(
            slots=slots,
            site_sets=self.site_sets,
            programs=self.programs,
            rows=int(ends[-1]) if len(ends) else group_rows,
            captured_tokens=captured_tokens,
            copies=copies,
            copy_runs=copy_runs,
            arrivals=self._arrivals.sorted(endpoints),
            steered=self._steered.sorted(endpoints),
            programs_by_token=self.programs_by_token,
            programs_by_position=self.programs_by_position,
            failures=self.failures,
            records=records,
            spans=spans,
            group_rows=group_rows,
            reductions=reductions,
            reduced=reduced,
            runs=runs,
            scored=scored,
            score_reads=score_reads,
        )

    def drafted(self, endpoints: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the first tokens of the finished plan's arrivals and steered positions, see `DraftedStep`."""
        return self._arrivals.tokens(endpoints), self._steered.tokens(endpoints)

    def _is_empty(self) -> bool:
        if self._placements or self._reductions or self._arrivals or self._steered or self.failures or self.scores:
            return False
        return not (self.programs_by_position or (self.programs >= 0).any())

    def _apply_cancellations(self, placements: np.ndarray) -> None:
        """Give tokens of failed requests no ring rows and no place in the arena."""
        tokens = placements["token"]
        for first, end in self._cancelled:
            cancelled = (tokens >= first) & (tokens < end)
            placements["ring_rows"][cancelled] = placements["size"][cancelled] = 0
            self._reductions = [r for r in self._reductions if not first <= r.tokens[0] < end]

    def _split_placements(
        self, placements: np.ndarray, first_rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the plan's `copies`, `copy_runs` and `records`; `first_rows` are in the ring."""
        places, sizes, codecs = placements["place"], placements["size"], placements["codec"]
        as_records = codecs >= 0
        if not as_records.any():
            copies = np.empty(len(placements), ROW_COPY)
            copies["ring_row"], copies["arena_row"], copies["rows"] = first_rows, places, sizes
            return copies, concatenate(self._copy_runs, COPY_RUN), np.empty(0, RECORD)
        chosen = (~as_records).nonzero()[0]
        copies = np.empty(len(chosen), ROW_COPY)
        copies["ring_row"], copies["arena_row"], copies["rows"] = first_rows[chosen], places[chosen], sizes[chosen]
        chosen = (as_records & (sizes > 0)).nonzero()[0]
        records = np.empty(len(chosen), RECORD)
        records["ring_row"], records["arena_byte"], records["bytes"] = first_rows[chosen], places[chosen], sizes[chosen]
        records["ring_rows"], records["codec"] = placements["ring_rows"][chosen], codecs[chosen]
        return copies, np.empty(0, COPY_RUN), records

    def _place_reductions(self, slots: np.ndarray, spans: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """Place the groups of reductions in the first ring rows, and set `slots` and `spans`.

        Return `group_rows`, `reductions` and `reduced` of the plan.
        """
        if not self._reductions:
            return 0, np.empty(0, REDUCTION), np.empty(0, ROW_COPY)
        reductions = np.array([r.fields for r in self._reductions], REDUCTION)
        group_sizes = np.array([r.group_size for r in self._reductions])
        ends = (group_sizes * reductions["groups"]).cumsum()
        starts = ends - group_sizes * reductions["groups"]
        tokens = np.concatenate([r.tokens for r in self._reductions])
        tokens_each = [len(r.tokens) for r in self._reductions]
        spans[tokens] = np.concatenate([r.spans for r in self._reductions])
        slots[tokens] = np.concatenate([r.slots for r in self._reductions]) + starts.repeat(tokens_each)
        ring_rows_per_cell = group_sizes // reductions["columns"]
        reductions["cell"] = starts // ring_rows_per_cell
        done = reductions["done"].nonzero()[0]
        reduced = np.empty(len(done), ROW_COPY)
        reduced["ring_row"], reduced["rows"] = starts[done], group_sizes[done]
        reduced["arena_row"] = [r.arena_row for r in self._reductions if r.arena_row is not None]
        return int(ends[-1]), reductions, reduced

    def _expand_token_runs(self) -> None:
        """Add every token of the runs."""
        if self._token_runs:
            self._run_arrays.append(np.array(self._token_runs, TOKEN_RUN))
        if not self._run_arrays:
            return
        runs = concatenate(self._run_arrays, TOKEN_RUN)
        counts = runs["count"]
        ends = counts.cumsum()
        starts = ends - counts
        run_of_token = np.arange(len(runs)).repeat(counts)
        place_in_run = np.arange(len(run_of_token)) - starts[run_of_token]
        sizes = runs["size"][run_of_token]
        placements = np.empty(len(run_of_token), PLACEMENT)
        placements["token"] = runs["token"][run_of_token] + place_in_run
        placements["place"] = runs["place"][run_of_token] + place_in_run * sizes
        placements["size"] = sizes
        placements["ring_rows"] = runs["ring_rows"][run_of_token]
        placements["codec"] = runs["codec"][run_of_token]
        long = (counts > 1).nonzero()[0]
        copy_runs = np.empty(len(long), COPY_RUN)
        copy_runs["first"], copy_runs["end"] = starts[long] + self._num_placements, ends[long] + self._num_placements
        self._copy_runs.append(copy_runs)
        self._add_placements(placements)
        arrivals = np.empty(len(runs), ARRIVAL)
        for name in ("row_seq", "rank", "position", "count"):
            arrivals[name] = runs[name]
        arrivals["stride"] = 1
        self._arrivals.add(runs["endpoint"], arrivals, runs["token"])

    def _expand_steered_runs(self) -> None:
        if self._steered_runs:
            tokens, endpoints, *columns = np.array(self._steered_runs).T
            steered = np.empty(len(endpoints), STEERED)
            for name, column in zip(STEERED.names or (), columns, strict=True):
                steered[name] = column
            self._steered.add(endpoints, steered, tokens)

    def _add_placements(self, placements: np.ndarray) -> None:
        self._placements.append(placements)
        self._num_placements += len(placements)

    def _add_arrivals(
        self, endpoint: int, row_seq: int, rank: int | None, positions: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Report rows of `tokens` at `positions` (ascending), with ranks from `rank` on; None: dropped."""
        runs = _strided_runs(positions)
        arrivals = [
            (row_seq, -1 if rank is None else rank + start, positions[start], end - start, stride)
            for start, end, stride in runs
        ]
        self._arrivals.add(endpoint, np.array(arrivals, ARRIVAL), tokens[[start for start, _, _ in runs]])


def _consecutive_runs(values: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (start, end, 1) of the longest runs of consecutive values."""
    if int(values[-1]) - int(values[0]) == len(values) - 1:
        return [(0, len(values), 1)]
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    bounds = [0, *breaks.tolist(), len(values)]
    return [(start, end, 1) for start, end in itertools.pairwise(bounds)]


def _strided_runs(values: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (start, end, stride) of runs: one run if all values are equally spaced."""
    if int(values[-1]) - int(values[0]) == len(values) - 1:
        return [(0, len(values), 1)]
    steps = np.diff(values)
    if (steps == steps[0]).all():
        return [(0, len(values), int(steps[0]))]
    return _consecutive_runs(values)
