"""The plan of one step: which row of the ring every scheduled token's sites go to. Pure numpy.

A token that is captured gets a *profile* (the set of taps whose rows are wanted) and a *slot* (the ring row of its
first wanted tap); the tap at place k of the profile writes ring row ``slot + k``. So only wanted rows are written, and
everything one step captures is one contiguous piece of the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.spec.hooks import Site
from vllm_weir.spec.positions import Positions
from vllm_weir.spec.request import ResolvedSpec

STAGES = 3
"""Moments at one tap: before resid_post's interventions, between those and the next block's resid_pre's, after both."""


def tap_of(site: Site) -> int:
    """The tap that serves a residual-stream site: tap 0 is what enters block 0, tap L+1 what leaves block L."""
    return site.layer if site.hook == "resid_pre" else site.layer + 1


def column_of(site: Site, before: bool) -> int:
    """Column of the rank table: the tap and the stage at which the site's row is read."""
    stage = (1 if before else 2) if site.hook == "resid_pre" else (0 if before else 1)
    return tap_of(site) * STAGES + stage


@dataclass
class Tracked:
    """A live request as the planner sees it."""

    request_id: str
    reply: str
    prompt_len: int
    prompt_token_ids: np.ndarray | None
    wishes: list[tuple[tuple[int, ...], Positions]]
    """(columns, Positions) pairs, columns restricted to the taps of this pipeline stage."""
    profiles: dict[int, int] = field(default_factory=dict)
    """Combination of wishes (bit mask) -> profile."""


@dataclass(frozen=True)
class Entry:
    """Rows of one request in one step: ``len(positions) * len(columns)`` ring rows from `start`, row-major."""

    request_id: str
    reply: str
    columns: tuple[int, ...]
    positions: np.ndarray
    start: int


@dataclass(frozen=True)
class StepPlan:
    """`slots` and `profiles` are int32 [tokens], -1 where nothing is captured; slots count from 0 within the step."""

    slots: np.ndarray
    profiles: np.ndarray
    rows: int
    entries: list[Entry]


class Planner:
    """Keeps the live requests and turns a step's batch into a StepPlan.

    Args:
        columns: columns (see `column_of`) that this worker's taps can fill.
        num_columns: width of the rank table.
        max_profiles: height of the rank table.
    """

    def __init__(self, columns: frozenset[int], num_columns: int, max_profiles: int) -> None:
        self.columns = columns
        self.ranks = np.full((max_profiles, num_columns), -1, np.int32)
        self.ranks_changed = False
        self.requests: dict[str, Tracked] = {}
        self._profile_of: dict[tuple[int, ...], int] = {}
        self._columns_of: dict[int, tuple[int, ...]] = {}
        self._users: dict[int, int] = {}
        self._free = list(range(max_profiles - 1, -1, -1))

    def add(
        self, request_id: str, reply: str, spec: ResolvedSpec, prompt_len: int, prompt_ids: Sequence[int] | None
    ) -> None:
        """Start following a request; one with the same id (a resumed request) is replaced."""
        self.remove(request_id)
        by_positions: dict[Positions, set[int]] = {}
        for wish in spec.wishes:
            column = column_of(wish.site, wish.before)
            if column in self.columns:
                by_positions.setdefault(wish.positions, set()).add(column)
        if not by_positions:
            return
        needs_ids = any(p.needs_token_ids for p in by_positions)
        ids = np.asarray(prompt_ids, np.int64) if needs_ids and prompt_ids is not None else None
        wishes = [(tuple(sorted(columns)), positions) for positions, columns in by_positions.items()]
        self.requests[request_id] = Tracked(request_id, reply, prompt_len, ids, wishes)

    def remove(self, request_id: str) -> None:
        """Stop following a request; unknown ids are fine (most requests carry no keys)."""
        tracked = self.requests.pop(request_id, None)
        for profile in tracked.profiles.values() if tracked else ():
            self._users[profile] -= 1
            if not self._users[profile]:
                del self._users[profile], self._profile_of[self._columns_of.pop(profile)]
                self._free.append(profile)

    def plan(
        self, request_ids: Sequence[str], num_tokens: Sequence[int], num_computed: Sequence[int]
    ) -> StepPlan | None:
        """The plan for a batch, or None if nothing is captured in it.

        Args:
            request_ids: requests in batch order.
            num_tokens: tokens each one has in this step.
            num_computed: position of each one's first token in this step.
        """
        if not self.requests:
            return None
        work: list[tuple[Tracked, int, np.ndarray, np.ndarray]] = []
        token = 0
        for request_id, n, computed in zip(request_ids, num_tokens, num_computed, strict=True):
            n, computed = int(n), int(computed)
            tracked = self.requests.get(request_id)
            if tracked is not None:
                positions = np.arange(computed, computed + n)
                codes = self._codes(tracked, positions)
                if codes.any():
                    work.append((tracked, token, positions, codes))
            token += n
        return self._lay_out(token, work) if work else None

    def _codes(self, tracked: Tracked, positions: np.ndarray) -> np.ndarray:
        """Per position, the bit mask of the wishes that select it (int64 [n])."""
        tokens = self._token_ids(tracked, positions)
        codes = np.zeros(len(positions), np.int64)
        for bit, (_, selector) in enumerate(tracked.wishes):
            known = tokens if tokens is not None and selector.needs_token_ids else None
            chosen = selector.mask(positions, tracked.prompt_len, known)
            if known is not None:
                # The token sampled for a position is on the device only: take the row, its reader filters.
                chosen = chosen | (positions >= tracked.prompt_len)
            codes |= chosen.astype(np.int64) << bit
        return codes

    def _token_ids(self, tracked: Tracked, positions: np.ndarray) -> np.ndarray | None:
        ids = tracked.prompt_token_ids
        if ids is None:
            return None
        tokens = np.full(len(positions), -1, np.int64)
        known = positions < len(ids)
        tokens[known] = ids[positions[known]]
        return tokens

    def _lay_out(self, num_tokens: int, work: list[tuple[Tracked, int, np.ndarray, np.ndarray]]) -> StepPlan:
        slots = np.full(num_tokens, -1, np.int32)
        profiles = np.full(num_tokens, -1, np.int32)
        entries: list[Entry] = []
        row = 0
        # One reply address after the other, so that what goes to one reader is contiguous too.
        for tracked, first_token, positions, codes in sorted(work, key=lambda w: w[0].reply):
            for code in np.unique(codes[codes > 0]):
                profile = self._profile(tracked, int(code))
                columns = self._columns_of[profile]
                at = np.flatnonzero(codes == code)
                slots[first_token + at] = row + np.arange(len(at), dtype=np.int32) * len(columns)
                profiles[first_token + at] = profile
                entries.append(Entry(tracked.request_id, tracked.reply, columns, positions[at], row))
                row += len(at) * len(columns)
        return StepPlan(slots, profiles, row, entries)

    def _profile(self, tracked: Tracked, code: int) -> int:
        if code in tracked.profiles:
            return tracked.profiles[code]
        columns: set[int] = set()
        for bit, (wanted, _) in enumerate(tracked.wishes):
            if code >> bit & 1:
                columns.update(wanted)
        key = tuple(sorted(columns))
        profile = self._profile_of.get(key)
        if profile is None:
            if not self._free:
                raise WeirError(f"more than {len(self.ranks)} different site sets are wanted at once", "capture")
            profile = self._free.pop()
            self._profile_of[key], self._columns_of[profile] = profile, key
            self.ranks[profile] = -1
            self.ranks[profile, list(key)] = np.arange(len(key))
            self.ranks_changed = True
        tracked.profiles[code] = profile
        self._users[profile] = self._users.get(profile, 0) + 1
        return profile
