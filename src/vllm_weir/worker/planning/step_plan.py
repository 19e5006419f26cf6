"""A step's plan, and those of steps that repeat it. Pure numpy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from vllm_weir.schema.positions import ENDLESS
from vllm_weir.schema.reductions import FIELDS
from vllm_weir.worker.planning.row_sequences import RowSequences

PACKED = -2
"""A job whose last number is this or less is sent as what codec ``PACKED - number`` makes of it."""


@dataclass(frozen=True)
class TokenLookup:
    """Tokens whose program hangs on which token they are: bit j of the index into `programs` says whether it is in
    `token_sets` [j]."""

    tokens: np.ndarray
    token_sets: tuple[tuple[int, ...], ...]
    programs: np.ndarray


@dataclass(frozen=True)
class StepPlan:
    """What one step does.

    Attributes:
        slots, profiles, programs: int32 [tokens], -1 for none; slots count from 0 within the step.
        rows: ring rows that the step writes.
        tokens: int64 [m], the captured tokens whose rows are recorded, one for each job.
        jobs: int64 [n, 5], what is sent: ring row, arena row, number of rows, ring rows of the same token that stand
            before it (0), and -1.
        runs: (start, end) in `jobs` of tokens that follow each other in the step and in the arena; the other jobs
            stand alone.
        marks: reply address -> int32 [m, 5], see `mail.MARK_FIELDS`.
        steered: reply address -> int32 [m, 4], see `mail.STEER_FIELDS`.
        lookups: programs still to be chosen on the device.
        failures: (reply address, request, reason): requests that cannot be served any further.
        packs: int64 [n, 5], rows that are sent compressed: ring row after a token's last, byte of the arena, bytes,
            ring rows of the token, and ``-2 - number`` of the codec.
        spans: int32 [tokens], of tokens whose rows are reduced: see `vllm_weir.worker.tap.reductions` for a group's
            first one, -1 for the others; 0 for all other tokens.
        cells: ring rows of groups, which come before all others.
        folds: int64 [n, len(folds.FIELDS)], reductions to go on with; cells are counted in cells.
        results: int64 [n, 3] of ring row, arena row and rows: reductions that the step completes.
    """

    slots: np.ndarray
    profiles: np.ndarray
    programs: np.ndarray
    rows: int
    tokens: np.ndarray
    jobs: np.ndarray
    runs: list[tuple[int, int]]
    marks: dict[str, np.ndarray]
    steered: dict[str, np.ndarray]
    lookups: list[TokenLookup]
    failures: list[tuple[str, str, str]]
    packs: np.ndarray = field(default_factory=lambda: np.zeros((0, 5), np.int64))
    spans: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    cells: int = 0
    folds: np.ndarray = field(default_factory=lambda: np.zeros((0, len(FIELDS)), np.int64))
    results: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))

    @property
    def listed(self) -> np.ndarray:
        """int32: tokens that the step does something to, those that begin a group of reduced rows first."""
        acts = (self.programs >= 0) | ((self.slots >= 0) & (self.spans >= 0))
        for lookup in self.lookups:
            acts[lookup.tokens] = True
        tokens = np.flatnonzero(acts).astype(np.int32)
        return tokens[np.argsort(self.spans[tokens] <= 0, kind="stable")]

    @functools.cached_property
    def segments(self) -> np.ndarray:
        """int64 [m, 3]: the fewest pieces (slot, arena row, rows) that hold all that is sent."""
        return np.concatenate([segments_of(self.jobs), self.results])

    @functools.cached_property
    def even(self) -> int:
        """Rows of every job, 0 if they differ."""
        width = int(self.jobs[0, 2]) if len(self.jobs) else 0
        return width if (self.jobs[:, 2] == width).all() else 0

    def in_lanes(self, stride: int, cells: int = 0) -> StepPlan:
        """The same with the n-th recorded token in slot n times `stride`, and groups from ring row `cells` on."""
        slots = self.slots.copy()
        slots[self.spans != 0] += cells
        # A token of a request that failed while it was planned is still among `tokens`, without a profile.
        slots[self.tokens] = np.where(self.profiles[self.tokens] >= 0, np.arange(len(self.tokens)) * stride, -1)
        known = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return StepPlan(**known | {"slots": slots})

    def lanes_of(self, slots: np.ndarray) -> np.ndarray:
        """int64 [n], places in `tokens` of those whose rows start at `slots` [n]."""
        live = np.flatnonzero(self.profiles[self.tokens] >= 0)
        return live[np.searchsorted(self.slots[self.tokens[live]], slots)]

    @functools.cached_property
    def treated(self) -> bool:
        """Whether something is made of rows before it is sent."""
        return len(self.packs) > 0


class AdvancedPlan(StepPlan):
    """The plan of the `times`-th step after one from which everybody goes on by one position a step.

    What hardly any step needs is made when it is looked at.
    """

    _base: StepPlan
    _times: int

    def __init__(self, base: StepPlan, times: int) -> None:
        known = vars(base)
        self.__dict__.update({name: known[name] for name in _LASTING})
        self.__dict__.update(_base=base, _times=times, treated=base.treated)

    @functools.cached_property
    def jobs(self) -> np.ndarray:  # type: ignore[override]
        return self._moved(self._base.jobs)

    @functools.cached_property
    def packs(self) -> np.ndarray:  # type: ignore[override]
        return self._moved(self._base.packs)

    @functools.cached_property
    def marks(self) -> dict[str, np.ndarray]:  # type: ignore[override]
        return {reply: marks + _NEXT_MARK * self._times for reply, marks in self._base.marks.items()}

    @functools.cached_property
    def steered(self) -> dict[str, np.ndarray]:  # type: ignore[override]
        return {reply: marks + _NEXT_STEERED * self._times for reply, marks in self._base.steered.items()}

    @functools.cached_property
    def segments(self) -> np.ndarray:
        step = self._base.even
        if not step:
            return segments_of(self.jobs)
        segments = self._base.segments.copy()
        segments[:, 1] += step * self._times
        return segments

    def _moved(self, jobs: np.ndarray) -> np.ndarray:
        return jobs + jobs[:, 2:3] * np.array((0, self._times, 0, 0, 0)) if len(jobs) else jobs


_LASTING = (
    "slots", "profiles", "programs", "rows", "tokens", "runs", "lookups", "failures", "spans", "cells", "folds",
    "results",
)  # fmt: skip
_NEXT_MARK = np.array((0, 1, 1, 0, 0), np.int32)
_NEXT_STEERED = np.array((0, 1, 0, 0), np.int32)


def segments_of(jobs: np.ndarray) -> np.ndarray:
    """As `StepPlan.segments`."""
    slots, rows, widths, _, _ = jobs[jobs[:, 2] > 0].T
    if not len(slots):
        return np.zeros((0, 3), np.int64)
    follows = (rows[1:] == rows[:-1] + widths[:-1]) & (slots[1:] == slots[:-1] + widths[:-1])
    first = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    ends = np.concatenate([first[1:], [len(slots)]]) - 1
    return np.stack([slots[first], rows[first], slots[ends] + widths[ends] - slots[first]], 1)


class RepeatedSteps:
    """Steps in which everybody goes on as before, one token each: they differ by ones.

    Args:
        ids, computed: the batch, and position of each one's token.
        plan: the first such step's plan.
        row_seqs, x: the row sequences that its rows go to, by index.
    """

    def __init__(
        self, ids: Sequence[str], computed: np.ndarray, plan: StepPlan | None, row_seqs: RowSequences, x: np.ndarray
    ) -> None:
        self._ids, self._following, self._plan = list(ids), computed + 1, plan
        self._ones = np.ones(len(computed), np.int64).tobytes()
        self._row_seqs, self._x, self._epoch = row_seqs, x, row_seqs.epoch
        self._times = 0
        self._room = int((row_seqs.limit[x] - row_seqs.rank[x]).min()) if len(x) else ENDLESS

    def goes_on(self, ids: Sequence[str], counts: np.ndarray, computed: np.ndarray) -> bool:
        """Whether the batch, with int64 arrays, is the last one's, one position on."""
        return (
            self._times < self._room
            and self._epoch == self._row_seqs.epoch  # else an extent may have been retired
            and computed.tobytes() == self._following.tobytes()
            and counts.tobytes() == self._ones
            and self._ids == ids
        )

    def next(self) -> StepPlan | None:
        """The plan of the next step, if it `goes_on`."""
        self._times += 1
        self._following += 1
        if len(self._x):
            self._row_seqs.lag_by(self._x, self._times)
        return None if self._plan is None else AdvancedPlan(self._plan, self._times)
