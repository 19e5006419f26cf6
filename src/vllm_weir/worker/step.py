"""A step's plan, and the draft from which it is made. Pure numpy."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_weir.worker.strands import Strand, Strands

PACKED = -2
"""A job whose number of directions is this or less is sent compressed, by codec ``PACKED - number``."""


@dataclass(frozen=True)
class Lookup:
    """Tokens whose program hangs on which token they are: bit j of the index into `programs` says whether it is in
    `token_sets` [j]."""

    tokens: np.ndarray
    token_sets: tuple[tuple[int, ...], ...]
    programs: np.ndarray


@dataclass(frozen=True)
class Fold:
    """Rows to be reduced into one for each column.

    Attributes:
        strand: number of the strand that the result goes to.
        how: ``"last"``, ``"mean"`` or ``"max"``.
        slots: int64 [n], ring row of each token's first column.
        columns: how many.
        cell: ring row at which the result is to be left, or -1: more rows are still to come.
    """

    strand: int
    how: str
    slots: np.ndarray
    columns: int
    cell: int


@dataclass(frozen=True)
class StepPlan:
    """What one step does.

    Attributes:
        slots, profiles, programs: int32 [tokens], -1 for none; slots count from 0 within the step.
        rows: ring rows that the step writes.
        tokens: int64 [m], the captured tokens; one for each job unless something is treated.
        folds: reductions to go on with.
        jobs: int64 [n, 5], what is sent: ring row, arena row, number of rows, ring rows of the same token that stand
            before it, and number of the directions with which those are multiplied to make it, or -1.
        runs: (start, end) in `jobs` of tokens that follow each other in the step and in the arena; the other jobs
            stand alone.
        marks: reply address -> int32 [m, 5], see `mail.MARK_FIELDS`.
        steered: reply address -> int32 [m, 4], see `mail.STEER_FIELDS`.
        lookups: programs still to be chosen on the device.
        failures: (reply address, request, reason): requests that cannot be served any further.
        packs: int64 [n, 5], rows that are sent compressed: ring row after a token's last, byte of the arena, bytes,
            ring rows of the token, and ``-2 - number`` of the codec.
    """

    slots: np.ndarray
    profiles: np.ndarray
    programs: np.ndarray
    rows: int
    tokens: np.ndarray
    jobs: np.ndarray
    folds: list[Fold]
    runs: list[tuple[int, int]]
    marks: dict[str, np.ndarray]
    steered: dict[str, np.ndarray]
    lookups: list[Lookup]
    failures: list[tuple[str, str, str]]
    packs: np.ndarray = field(default_factory=lambda: np.zeros((0, 5), np.int64))

    @functools.cached_property
    def segments(self) -> np.ndarray:
        """int64 [m, 3]: the fewest pieces (slot, arena row, rows) that hold all that is sent."""
        slots, rows, widths, _, _ = self.jobs[self.jobs[:, 2] > 0].T
        if not len(slots):
            return np.zeros((0, 3), np.int64)
        follows = (rows[1:] == rows[:-1] + widths[:-1]) & (slots[1:] == slots[:-1] + widths[:-1])
        first = np.concatenate([[0], np.flatnonzero(~follows) + 1])
        ends = np.concatenate([first[1:], [len(slots)]]) - 1
        return np.stack([slots[first], rows[first], slots[ends] + widths[ends] - slots[first]], 1)

    @functools.cached_property
    def treated(self) -> bool:
        """Whether something is made of rows before it is sent."""
        return bool(self.folds) or len(self.packs) > 0 or bool((self.jobs[:, 4] >= 0).any())


class Repeat:
    """A step in which everybody went on as before, one token each: the next such step differs by ones.

    Args:
        ids, computed: the batch, and position of each one's token.
        plan: the step's plan.
        strands, x: the strands that its rows went to, by index.
    """

    def __init__(self, ids: Sequence[str], computed: np.ndarray, plan: StepPlan, strands: Strands, x: np.ndarray):
        self._ids, self._computed, self._plan, self._strands, self._x = list(ids), computed, plan, strands, x
        self._even = len(plan.jobs) > 0 and bool((plan.jobs[:, 2] == plan.jobs[0, 2]).all())

    def next(self, ids: Sequence[str], computed: np.ndarray) -> StepPlan | None:
        """The plan for the batch if it repeats the last one, one position on, else None."""
        last, x, strands = self._plan, self._x, self._strands
        if self._ids != ids or not np.array_equal(computed, self._computed + 1):
            return None
        if (strands.rank[x] >= strands.limit[x]).any():  # the extent is full, or was retired meanwhile
            return None
        jobs, packs = (x + x[:, 2:3] * (0, 1, 0, 0, 0) for x in (last.jobs, last.packs))
        marks = {reply: marks + _NEXT_MARK for reply, marks in last.marks.items()}
        steered = {reply: marks + _NEXT_STEERED for reply, marks in last.steered.items()}
        strands.rank[x] += 1
        strands.last[x] += 1
        plan = replace(last, jobs=jobs, packs=packs, marks=marks, steered=steered)
        if self._even and "segments" in last.__dict__:
            segments = last.segments.copy()
            segments[:, 1] += jobs[0, 2]
            plan.__dict__["segments"] = segments
        self._computed, self._plan = computed, plan
        return plan


_NEXT_MARK = np.array((0, 1, 1, 0, 0), np.int32)
_NEXT_STEERED = np.array((0, 1, 0, 0), np.int32)


@dataclass
class Draft:
    """Collects what the tokens of one step do; numbers of replies are those of `Seats.replies`."""

    size: int
    lookups: list[Lookup] = field(default_factory=list)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    _tokens: list[np.ndarray] = field(default_factory=list)
    _totals: list[np.ndarray] = field(default_factory=list)
    _folds: list[tuple[int, str, np.ndarray, int, int]] = field(default_factory=list)
    _jobs: list[np.ndarray] = field(default_factory=list)
    _runs: list[tuple[int, int]] = field(default_factory=list)
    _marks: list[np.ndarray] = field(default_factory=list)
    _steered: list[np.ndarray] = field(default_factory=list)
    _forgotten: list[tuple[int, int]] = field(default_factory=list)
    _taken: int = 0

    def __post_init__(self) -> None:
        self.profiles = np.full(self.size, -1, np.int32)
        self.programs = np.full(self.size, -1, np.int32)

    def take(self, replies, strands: Strands, x, ranks, tokens, positions) -> None:
        """One row of each strand `x` (indices), all arrays [n]."""
        n = len(x)
        width, lead = strands.width[x], strands.lead[x]
        rows = strands.origin[x] + ranks * width
        jobs = np.stack([tokens, rows, width, lead, strands.directions[x]], 1)
        self._add(tokens, strands.taken[x], jobs)
        marks = np.ones((n, 6), np.int64)
        marks[:, 0], marks[:, 1], marks[:, 2], marks[:, 3] = replies, strands.number[x], ranks, positions
        self._marks.append(marks)

    def take_run(self, reply: int, strands: Strands, strand: Strand, rank: int, row: int, tokens, positions) -> None:
        """Rows `rank`.. of one strand, from arena row `row`; `tokens` and `positions` [n] ascending."""
        n, i = len(tokens), strand.index
        width, lead = int(strands.width[i]), int(strands.lead[i])
        jobs = np.empty((n, 5), np.int64)
        jobs[:, 0], jobs[:, 1] = tokens, row + np.arange(n) * width
        jobs[:, 2:] = width, lead, strands.directions[i]
        for start, end, _ in _runs(tokens):
            if end - start > 1:
                self._runs.append((self._taken + start, self._taken + end))
        self._add(tokens, np.full(n, strands.taken[i]), jobs)
        self._marks.append(
            np.array([(reply, strand.number, rank + a, positions[a], b - a, s) for a, b, s in _even_runs(positions)])
        )

    def fold(self, reply: int, strands: Strands, strand: Strand, how: str, tokens, positions, row: int | None) -> None:
        """Reduce the rows of `tokens`; the result goes to arena row `row` if there are no more to come."""
        columns, last = len(strand.columns), tokens[-1:]
        totals = np.full(len(tokens), columns)
        jobs = np.zeros((0, 5), np.int64)
        if row is not None:
            cell = int(strands.width[strand.index])
            totals[-1] += cell
            jobs = np.array([(last[0], row, cell, columns, -1)], np.int64)
            self._marks.append(np.array([(reply, strand.number, 0, positions[-1], 1, 1)]))
        self._add(tokens, totals, jobs)
        self._folds.append((strand.number, how, tokens, columns, -1 if row is None else int(last[0])))

    def drop(self, reply: int, number: int, positions) -> None:
        """Rows that found no room."""
        self._marks.append(np.array([(reply, number, -1, positions[a], b - a, s) for a, b, s in _even_runs(positions)]))

    def steer(self, replies, groups, positions) -> None:
        """One position of each group, all arrays [n]."""
        marks = np.ones((len(groups), 5), np.int64)
        marks[:, 0], marks[:, 1], marks[:, 2] = replies, groups, positions
        self._steered.append(marks)

    def steer_run(self, reply: int, group: int, positions) -> None:
        """Positions of one group."""
        self._steered.append(np.array([(reply, group, positions[a], b - a, s) for a, b, s in _even_runs(positions)]))

    def forget(self, first: int, count: int) -> None:
        """These tokens do nothing after all."""
        self._forgotten.append((first, first + count))
        self.profiles[first : first + count] = self.programs[first : first + count] = -1
        self.lookups = [x for x in self.lookups if not first <= x.tokens[0] < first + count]

    def finish(self, replies: Sequence[str]) -> StepPlan | None:
        """The plan; None if nothing happens in the step."""
        if not (self._tokens or self._steered or self._marks or self.failures or (self.programs >= 0).any()):
            return None
        tokens = np.concatenate(self._tokens) if self._tokens else np.zeros(0, np.int64)
        totals = np.concatenate(self._totals) if self._tokens else np.zeros(0, np.int64)
        jobs = np.concatenate(self._jobs) if self._jobs else np.zeros((0, 5), np.int64)
        for first, end in self._forgotten:
            totals[(tokens >= first) & (tokens < end)] = 0
            jobs[(jobs[:, 0] >= first) & (jobs[:, 0] < end), 2] = 0
            self._folds = [f for f in self._folds if not first <= f[2][0] < end]
        ends = totals.cumsum()
        slots = np.full(self.size, -1, np.int32)
        slots[tokens] = ends - totals
        jobs[:, 0] = slots[jobs[:, 0]] + jobs[:, 3]
        folds = [
            Fold(number, how, slots[of].astype(np.int64), columns, -1 if cell < 0 else int(slots[cell]) + columns)
            for number, how, of, columns, cell in self._folds
        ]
        if self._forgotten:
            slots[self.profiles < 0] = -1
        rows = int(ends[-1]) if len(ends) else 0
        packs, runs = jobs[:0], self._runs
        if len(jobs) and jobs[:, 4].min() <= PACKED:
            packed = jobs[:, 4] <= PACKED
            packs, jobs, runs = jobs[packed & (jobs[:, 2] > 0)], jobs[~packed], []
        marks, steered = _by_reply(self._marks, replies), _by_reply(self._steered, replies)
        return StepPlan(
            slots, self.profiles, self.programs, rows, tokens, jobs, folds, runs, marks, steered, self.lookups,
            self.failures, packs,
        )  # fmt: skip

    def _add(self, tokens, totals, jobs) -> None:
        self._tokens.append(tokens)
        self._totals.append(totals)
        self._jobs.append(jobs)
        self._taken += len(jobs)


def _runs(values: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, end, 1) of the longest runs of consecutive values."""
    if int(values[-1]) - int(values[0]) == len(values) - 1:
        return [(0, len(values), 1)]
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    bounds = [0, *breaks.tolist(), len(values)]
    return [(a, b, 1) for a, b in itertools.pairwise(bounds)]


def _even_runs(values: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, end, stride): as `_runs`, or one run if all the steps are equal."""
    if int(values[-1]) - int(values[0]) == len(values) - 1:
        return [(0, len(values), 1)]
    steps = np.diff(values)
    if (steps == steps[0]).all():
        return [(0, len(values), int(steps[0]))]
    return _runs(values)


def _by_reply(parts: list[np.ndarray], replies: Sequence[str]) -> dict[str, np.ndarray]:
    if not parts:
        return {}
    every = np.concatenate(parts).astype(np.int32)
    if len(replies) == 1:
        return {replies[0]: every[:, 1:]}
    return {replies[k]: every[every[:, 0] == k, 1:] for k in np.unique(every[:, 0])}
