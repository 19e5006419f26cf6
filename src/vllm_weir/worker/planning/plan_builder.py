"""The builder by which a step's plan is made: collects what its tokens do. Pure numpy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm_weir.schema.reductions import CELL, COLUMNS, CONTINUED, DONE, FIELDS, GROUP, MAXIMUM, SEEDED
from vllm_weir.worker.planning.row_sequences import RowSequence, RowSequences
from vllm_weir.worker.planning.step_plan import PACKED, StepPlan, TokenLookup


class _Fold(NamedTuple):
    """A request's part in the step's reductions.

    Attributes:
        tokens, spans: of the step, [n].
        at: ring row of each token's group, from the request's first one on, [n].
        numbers: see `vllm_weir.schema.reductions.FIELDS`.
        rows: of the ring.
        row: of the arena, for the result; None if it is not complete.
        width: ring rows of a group.
    """

    tokens: np.ndarray
    spans: np.ndarray
    at: np.ndarray
    numbers: tuple[int, ...]
    rows: int
    row: int | None
    width: int


_NO_FOLDS, _NO_RESULTS = np.zeros((0, len(FIELDS)), np.int64), np.zeros((0, 3), np.int64)


@dataclass
class PlanBuilder:
    """What the tokens of one step do; numbers of replies are those of `SteadyState.replies`."""

    size: int
    lookups: list[TokenLookup] = field(default_factory=list)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    _tokens: list[np.ndarray] = field(default_factory=list)
    _totals: list[np.ndarray] = field(default_factory=list)
    _folds: list[_Fold] = field(default_factory=list)
    _jobs: list[np.ndarray] = field(default_factory=list)
    _runs: list[tuple[int, int]] = field(default_factory=list)
    _marks: list[np.ndarray] = field(default_factory=list)
    _steered: list[np.ndarray] = field(default_factory=list)
    _forgotten: list[tuple[int, int]] = field(default_factory=list)
    _taken: int = 0
    _rows: list[tuple[int, ...]] = field(default_factory=list)
    """Runs of tokens whose rows follow each other: token, count, row, width, lead, directions, ring rows of a token,
    and the mark without its stride."""
    _moves: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """The same of what is steered: marks with the reply's number before them."""

    def __post_init__(self) -> None:
        self.profiles = np.full(self.size, -1, np.int32)
        self.programs = np.full(self.size, -1, np.int32)

    def take(
        self,
        replies: np.ndarray,
        row_seqs: RowSequences,
        x: np.ndarray,
        ranks: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """One token each of the row sequences `x` (by index); all arrays [n]."""
        n = len(tokens)
        jobs = np.empty((n, 5), np.int64)
        width = row_seqs.width[x]
        jobs[:, 0], jobs[:, 1], jobs[:, 2] = tokens, row_seqs.origin[x] + ranks * width, width
        jobs[:, 3], jobs[:, 4] = row_seqs.lead[x], row_seqs.directions[x]
        self._add(tokens, row_seqs.taken[x], jobs)
        marks = np.ones((n, 6), np.int64)
        marks[:, 0], marks[:, 1], marks[:, 2], marks[:, 3] = replies, row_seqs.number[x], ranks, positions
        self._marks.append(marks)

    def take_run(
        self, reply: int, row_seq: RowSequence, rank: int, row: int, token: int, position: int, count: int, profile: int
    ) -> None:
        """Rows `rank`.. of one row sequence, to arena row `row` and on; tokens and positions follow each other."""
        self.profiles[token : token + count] = profile
        self._rows.append((token, count, row, *row_seq.shape, reply, row_seq.number, rank, position))

    def take_some(
        self,
        reply: int,
        row_seq: RowSequence,
        rank: int,
        row: int,
        tokens: np.ndarray,
        positions: np.ndarray,
        profile: int,
    ) -> None:
        """As `take_run`, of any `tokens` and `positions` [n] (ascending)."""
        n = len(tokens)
        width, lead, directions, taken = row_seq.shape
        self.profiles[tokens] = profile
        jobs = np.empty((n, 5), np.int64)
        jobs[:, 0], jobs[:, 1] = tokens, row + np.arange(n) * width
        jobs[:, 2:] = width, lead, directions
        for start, end, _ in _stretches(tokens):
            if end - start > 1:
                self._runs.append((self._taken + start, self._taken + end))
        self._add(tokens, np.full(n, taken), jobs)
        self._marks.append(
            np.array([(reply, row_seq.number, rank + a, positions[a], b - a, s) for a, b, s in _even(positions)])
        )

    def fold(
        self,
        reply: int,
        row_seq: RowSequence,
        profile: int,
        tokens: np.ndarray,
        positions: np.ndarray,
        resumed: int,
        count: int,
        maximum: bool,
        row: int | None,
    ) -> None:
        """Reduce the rows of `tokens` at `positions` [n] (ascending), `count` with those before; the result goes to
        arena row `row`, if there are no more to come. `resumed`: as in `vllm_weir.worker.tap.reductions`."""
        groups = positions // GROUP
        heads = np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1])
        lasts = np.concatenate([heads[1:], [len(tokens)]]) - 1
        spans = np.full(len(tokens), -1, np.int32)
        spans[heads] = tokens[lasts] - tokens[heads] + 1 + (MAXIMUM if maximum else 0)
        if resumed == CONTINUED:
            spans[0] += SEEDED
        of = np.arange(len(heads)).repeat(lasts - heads + 1)
        self.profiles[tokens] = profile
        columns, width = len(row_seq.columns), row_seq.shape[0]
        numbers = (row_seq.number, 0, len(heads), columns, resumed, count, row is not None, maximum)
        self._folds.append(_Fold(tokens, spans, of * width, numbers, len(heads) * width, row, width))
        if row is not None:
            self._marks.append(np.array([(reply, row_seq.number, 0, positions[-1], 1, 1)]))

    def drop(self, reply: int, number: int, positions: np.ndarray) -> None:
        """Rows that found no room."""
        self._marks.append(np.array([(reply, number, -1, positions[a], b - a, s) for a, b, s in _even(positions)]))

    def steer(self, replies: np.ndarray, groups: np.ndarray, positions: np.ndarray) -> None:
        """One position of each group, all arrays [n]."""
        marks = np.ones((len(groups), 5), np.int64)
        marks[:, 0], marks[:, 1], marks[:, 2] = replies, groups, positions
        self._steered.append(marks)

    def steer_run(self, reply: int, group: int, position: int, count: int) -> None:
        """`count` positions of one group that follow each other."""
        self._moves.append((reply, group, position, count, 1))

    def steer_some(self, reply: int, group: int, positions: np.ndarray) -> None:
        """Any positions of one group, ascending."""
        self._moves.extend((reply, group, int(positions[a]), b - a, s) for a, b, s in _even(positions))

    def forget(self, first: int, count: int) -> None:
        """These tokens do nothing after all."""
        self._forgotten.append((first, first + count))
        self.profiles[first : first + count] = self.programs[first : first + count] = -1
        self.lookups = [x for x in self.lookups if not first <= x.tokens[0] < first + count]

    def finish(self, replies: Sequence[str]) -> StepPlan | None:
        """The plan; None if nothing happens in the step."""
        if self._rows:
            self._spread()
        if self._moves:
            self._steered.append(np.array(self._moves))
        found = self._tokens or self._folds or self._steered or self._marks or self.failures
        if not (found or (self.programs >= 0).any()):
            return None
        tokens = np.concatenate(self._tokens) if self._tokens else np.zeros(0, np.int64)
        totals = np.concatenate(self._totals) if self._tokens else np.zeros(0, np.int64)
        jobs = np.concatenate(self._jobs) if self._jobs else np.zeros((0, 5), np.int64)
        for first, end in self._forgotten:
            totals[(tokens >= first) & (tokens < end)] = 0
            jobs[(jobs[:, 0] >= first) & (jobs[:, 0] < end), 2] = 0
            self._folds = [f for f in self._folds if not first <= f.tokens[0] < end]
        slots, spans = np.full(self.size, -1, np.int32), np.zeros(self.size, np.int32)
        cells, folds, results = self._place_folds(slots, spans)
        ends = cells + totals.cumsum()
        slots[tokens] = ends - totals
        jobs[:, 0] = slots[jobs[:, 0]] + jobs[:, 3]
        if self._forgotten:
            slots[self.profiles < 0] = -1
        rows = int(ends[-1]) if len(ends) else cells
        packs, runs = jobs[:0], self._runs
        if len(jobs) and jobs[:, 4].min() <= PACKED:
            packed = jobs[:, 4] <= PACKED
            packs, jobs, runs = jobs[packed & (jobs[:, 2] > 0)], jobs[~packed], []
        marks, steered = _by_reply(self._marks, replies), _by_reply(self._steered, replies)
        return StepPlan(
            slots,
            self.profiles,
            self.programs,
            rows,
            tokens,
            jobs,
            runs,
            marks,
            steered,
            self.lookups,
            self.failures,
            packs,
            spans,
            cells,
            folds,
            results,
        )

    def _place_folds(self, slots: np.ndarray, spans: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """Ring rows that groups take, and `folds` and `results` of the plan."""
        if not self._folds:
            return 0, _NO_FOLDS, _NO_RESULTS
        folds = np.array([f.numbers for f in self._folds], np.int64)
        ends = np.array([f.rows for f in self._folds]).cumsum()
        starts = np.concatenate([[0], ends[:-1]])
        tokens = np.concatenate([f.tokens for f in self._folds])
        spans[tokens] = np.concatenate([f.spans for f in self._folds])
        lengths = [len(f.tokens) for f in self._folds]
        slots[tokens] = np.concatenate([f.at for f in self._folds]) + starts.repeat(lengths)
        widths = np.array([f.width for f in self._folds])
        folds[:, CELL] = starts // (widths // folds[:, COLUMNS])
        done = folds[:, DONE] != 0
        rows = np.array([-1 if f.row is None else f.row for f in self._folds])
        return int(ends[-1]), folds, np.stack([starts, rows, widths], 1)[done]

    def _spread(self) -> None:
        """Every token of `_rows`."""
        rows = np.array(self._rows, np.int64)
        first, count, row, width = rows[:, :4].T
        run = np.arange(len(rows)).repeat(count)
        ends = count.cumsum()
        within = np.arange(len(run)) - (ends - count)[run]
        tokens = first[run] + within
        jobs = rows[run, 1:6]
        jobs[:, 0], jobs[:, 1] = tokens, row[run] + within * width[run]
        starts = (self._taken + ends - count).tolist()
        self._runs.extend((start, start + n) for start, n in zip(starts, count.tolist(), strict=True) if n > 1)
        self._add(tokens, rows[run, 6], jobs)
        marks = np.ones((len(rows), 6), np.int64)
        marks[:, :4], marks[:, 4] = rows[:, 7:], count
        self._marks.append(marks)

    def _add(self, tokens: np.ndarray, totals: np.ndarray, jobs: np.ndarray) -> None:
        self._tokens.append(tokens)
        self._totals.append(totals)
        self._jobs.append(jobs)
        self._taken += len(jobs)


def _stretches(values: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, end, 1) of the longest runs of consecutive values."""
    if int(values[-1]) - int(values[0]) == len(values) - 1:
        return [(0, len(values), 1)]
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    bounds = [0, *breaks.tolist(), len(values)]
    return [(a, b, 1) for a, b in itertools.pairwise(bounds)]


def _even(values: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, end, stride): as `_stretches`, or one run if all the steps are equal."""
    if int(values[-1]) - int(values[0]) == len(values) - 1:
        return [(0, len(values), 1)]
    steps = np.diff(values)
    if (steps == steps[0]).all():
        return [(0, len(values), int(steps[0]))]
    return _stretches(values)


def _by_reply(parts: list[np.ndarray], replies: Sequence[str]) -> dict[str, np.ndarray]:
    if not parts:
        return {}
    every = (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int32)
    if len(replies) == 1:
        return {replies[0]: every[:, 1:]}
    return {replies[k]: every[every[:, 0] == k, 1:] for k in np.unique(every[:, 0])}
