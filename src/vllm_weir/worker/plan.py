"""The plan of one step: what every scheduled token is to record and to undergo. Pure numpy.

A token that is captured gets a *profile* (the set of taps whose rows are wanted) and a *slot* (the ring row of its
first wanted tap); the tap at place k of the profile writes ring row ``slot + k``. So only wanted rows are written, and
everything one step captures is one contiguous piece of the ring. A token that is steered gets a *program*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.spec.hooks import Site
from vllm_weir.spec.positions import Positions
from vllm_weir.spec.request import ResolvedSpec

if TYPE_CHECKING:
    from vllm_weir.spec.interventions import Move
    from vllm_weir.worker.programs import ProgramTable

MAX_SELECTORS = 63
"""What the bits of an int64 can tell apart."""
STAGES = 3
"""Moments at one tap: before resid_post's interventions, between those and the next block's resid_pre's, after both."""


def tap_of(site: Site) -> int:
    """The tap that serves a residual-stream site: tap 0 is what enters block 0, tap L+1 what leaves block L."""
    return site.layer if site.hook == "resid_pre" else site.layer + 1


def column_of(site: Site, before: bool) -> int:
    """Column of the rank table: the tap and the stage at which the site's row is read."""
    stage = (1 if before else 2) if site.hook == "resid_pre" else (0 if before else 1)
    return tap_of(site) * STAGES + stage


class Selectors:
    """A request's distinct selectors; positions get a code, the bit mask of the selectors that choose them."""

    def __init__(self, distinct: Sequence[Positions], prompt_len: int, prompt_ids: np.ndarray | None) -> None:
        if len(distinct) > MAX_SELECTORS:
            raise WeirError(
                f"{len(distinct)} different position selectors in one request; at most {MAX_SELECTORS} are served",
                "interventions",
            )
        self.distinct = list(distinct)
        self.prompt_len = prompt_len
        self.by_token = [bit for bit, s in enumerate(self.distinct) if s.needs_token_ids]
        self._prompt_ids = prompt_ids if self.by_token else None

    def codes(self, positions: np.ndarray) -> np.ndarray:
        """int64 [n]. A selector by token takes every generated position: its token is only on the device."""
        tokens = None
        if self._prompt_ids is not None:
            tokens = np.full(len(positions), -1, np.int64)
            known = positions < len(self._prompt_ids)
            tokens[known] = self._prompt_ids[positions[known]]
        codes = np.zeros(len(positions), np.int64)
        for bit, selector in enumerate(self.distinct):
            if selector.needs_token_ids and tokens is not None:
                chosen = selector.mask(positions, self.prompt_len, tokens) | (positions >= self.prompt_len)
            else:
                chosen = selector.mask(positions, self.prompt_len)
            codes |= chosen.astype(np.int64) << bit
        return codes


@dataclass
class Reading:
    """A live request's captures."""

    request_id: str
    reply: str
    selectors: Selectors
    columns: list[tuple[int, ...]]
    """Per selector, the columns it wants that this pipeline stage's taps can fill."""
    profiles: dict[int, int] = field(default_factory=dict)
    """Code -> profile."""


@dataclass
class Steering:
    """A live request's moves."""

    request_id: str
    reply: str
    selectors: Selectors
    moves: list[tuple[Move, str, int]]
    """(move, digest, bit of its selector), in the order in which they apply."""
    vectors: tuple[str, ...]
    local: frozenset[int]
    """Moves with a site at this worker's taps: those it can vouch for."""
    programs: dict[tuple, tuple[object, int]] = field(default_factory=dict)
    """(digest, rank) of every active move -> (key, number) of a held program."""


@dataclass(frozen=True)
class Entry:
    """Rows of one request in one step: ``len(positions) * len(columns)`` ring rows from `start`, row-major."""

    request_id: str
    reply: str
    columns: tuple[int, ...]
    positions: np.ndarray
    start: int


@dataclass(frozen=True)
class Steered:
    """Positions of one request that undergo `moves` (their indices) in one step."""

    request_id: str
    reply: str
    moves: tuple[int, ...]
    positions: np.ndarray


@dataclass(frozen=True)
class Lookup:
    """Tokens whose program hangs on which token they are: bit j of the index into `programs` says whether it is in
    `token_sets` [j]."""

    tokens: np.ndarray
    token_sets: tuple[tuple[int, ...], ...]
    programs: np.ndarray


@dataclass(frozen=True)
class StepPlan:
    """`slots`, `profiles` and `programs` are int32 [tokens], -1 for none; slots count from 0 within the step."""

    slots: np.ndarray
    profiles: np.ndarray
    programs: np.ndarray
    rows: int
    entries: list[Entry]
    steered: list[Steered]
    lookups: list[Lookup]


class Planner:
    """Keeps the live requests and turns a step's batch into a StepPlan.

    Args:
        columns: columns (see `column_of`) that this worker's taps can fill.
        num_columns: width of the rank table.
        max_profiles: height of the rank table.
        table: where programs live.
    """

    def __init__(self, columns: frozenset[int], num_columns: int, max_profiles: int, table: ProgramTable) -> None:
        self.columns = columns
        self.ranks = np.full((max_profiles, num_columns), -1, np.int32)
        self.ranks_changed = False
        self.table = table
        self.reading: dict[str, Reading] = {}
        self.steering: dict[str, Steering] = {}
        self._profile_of: dict[tuple[int, ...], int] = {}
        self._columns_of: dict[int, tuple[int, ...]] = {}
        self._users: dict[int, int] = {}
        self._free = list(range(max_profiles - 1, -1, -1))

    def read(
        self, request_id: str, reply: str, spec: ResolvedSpec, prompt_len: int, prompt_ids: Sequence[int] | None
    ) -> None:
        """Start capturing for a request."""
        by_positions: dict[Positions, set[int]] = {}
        for wish in spec.wishes:
            column = column_of(wish.site, wish.before)
            if column in self.columns:
                by_positions.setdefault(wish.positions, set()).add(column)
        if by_positions:
            columns = [tuple(sorted(c)) for c in by_positions.values()]
            selectors = Selectors(list(by_positions), prompt_len, _array(prompt_ids))
            self.reading[request_id] = Reading(request_id, reply, selectors, columns)

    def steer(
        self,
        request_id: str,
        reply: str,
        moves: Sequence[Move],
        prompt_len: int,
        prompt_ids: Sequence[int] | None,
        fetch,
    ) -> None:
        """Start steering a request; raises WeirError if the tables cannot hold it. `fetch`: digests -> rows."""
        distinct = list(dict.fromkeys(m.positions for m in moves))
        selectors = Selectors(distinct, prompt_len, _array(prompt_ids))
        vectors = tuple(
            sorted({d for m in moves if self.table.local(m) for i in m.instructions for d in (i.u, i.w) if d})
        )
        self.table.hold_vectors(vectors, fetch)
        placed = [(m, m.digest, distinct.index(m.positions)) for m in moves]
        local = frozenset(k for k, m in enumerate(moves) if self.table.local(m))
        self.steering[request_id] = Steering(request_id, reply, selectors, placed, vectors, local)

    def remove(self, request_id: str) -> None:
        """Stop following a request; unknown ids are fine (most requests carry no keys)."""
        reading = self.reading.pop(request_id, None)
        for profile in reading.profiles.values() if reading else ():
            self._users[profile] -= 1
            if not self._users[profile]:
                del self._users[profile], self._profile_of[self._columns_of.pop(profile)]
                self._free.append(profile)
        steering = self.steering.pop(request_id, None)
        if steering is not None:
            for key, _ in steering.programs.values():
                self.table.give_back(key)
            self.table.drop_vectors(steering.vectors)

    def plan(
        self, request_ids: Sequence[str], num_tokens: Sequence[int], num_computed: Sequence[int]
    ) -> StepPlan | None:
        """The plan for a batch, or None if nothing is captured or steered in it.

        Args:
            request_ids: requests in batch order.
            num_tokens: tokens each one has in this step.
            num_computed: position of each one's first token in this step.
        """
        if not self.reading and not self.steering:
            return None
        reads: list[tuple[Reading, int, np.ndarray, np.ndarray]] = []
        steers: list[tuple[Steering, int, np.ndarray, np.ndarray]] = []
        token = 0
        for request_id, n, computed in zip(request_ids, num_tokens, num_computed, strict=True):
            n, computed = int(n), int(computed)
            reading, steering = self.reading.get(request_id), self.steering.get(request_id)
            if reading is not None or steering is not None:
                positions = np.arange(computed, computed + n)
                if reading is not None and (codes := reading.selectors.codes(positions)).any():
                    reads.append((reading, token, positions, codes))
                if steering is not None and (codes := steering.selectors.codes(positions)).any():
                    steers.append((steering, token, positions, codes))
            token += n
        if not reads and not steers:
            return None
        slots, profiles, programs = np.full((3, token), -1, np.int32)
        entries, rows = self._lay_out(slots, profiles, reads)
        steered, lookups = self._programme(programs, steers)
        return StepPlan(slots, profiles, programs, rows, entries, steered, lookups)

    def _lay_out(self, slots, profiles, reads) -> tuple[list[Entry], int]:
        entries: list[Entry] = []
        row = 0
        # One reply address after the other, so that what goes to one reader is contiguous too.
        for reading, first_token, positions, codes in sorted(reads, key=lambda r: r[0].reply):
            for code in np.unique(codes[codes > 0]):
                profile = self._profile(reading, int(code))
                columns = self._columns_of[profile]
                at = np.flatnonzero(codes == code)
                slots[first_token + at] = row + np.arange(len(at), dtype=np.int32) * len(columns)
                profiles[first_token + at] = profile
                entries.append(Entry(reading.request_id, reading.reply, columns, positions[at], row))
                row += len(at) * len(columns)
        return entries, row

    def _profile(self, reading: Reading, code: int) -> int:
        if code in reading.profiles:
            return reading.profiles[code]
        columns: set[int] = set()
        for bit, wanted in enumerate(reading.columns):
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
        reading.profiles[code] = profile
        self._users[profile] = self._users.get(profile, 0) + 1
        return profile

    def _programme(self, programs, steers) -> tuple[list[Steered], list[Lookup]]:
        steered: list[Steered] = []
        lookups: list[Lookup] = []
        for steering, first_token, positions, codes in steers:
            selectors = steering.selectors
            for code in np.unique(codes[codes > 0]):
                at = np.flatnonzero(codes == code)
                active = [k for k, (_, _, bit) in enumerate(steering.moves) if int(code) >> bit & 1]
                vouched = tuple(k for k in active if k in steering.local)
                if vouched:
                    steered.append(Steered(steering.request_id, steering.reply, vouched, positions[at]))
                groups = [(at, -1)]
                if any(steering.moves[k][0].per_position for k in active):
                    groups = [(at[k : k + 1], int(positions[i])) for k, i in enumerate(at)]
                open_bits = [bit for bit in selectors.by_token if int(code) >> bit & 1]
                for some, position in groups:
                    programs[first_token + some] = self._program(steering, int(code), position)
                    unknown = some[positions[some] >= selectors.prompt_len]
                    if open_bits and len(unknown):
                        tokens = first_token + unknown
                        lookups.append(self._lookup(steering, int(code), open_bits, tokens, position))
        return steered, lookups

    def _lookup(self, steering: Steering, code: int, open_bits: list[int], tokens: np.ndarray, position: int) -> Lookup:
        choices = []
        for combination in range(1 << len(open_bits)):
            chosen = code
            for j, bit in enumerate(open_bits):
                if not combination >> j & 1:
                    chosen &= ~(1 << bit)
            choices.append(self._program(steering, chosen, position) if chosen else -1)
        sets = tuple(steering.selectors.distinct[bit].numbers for bit in open_bits)
        return Lookup(tokens, sets, np.asarray(choices, np.int32))

    def _program(self, steering: Steering, code: int, position: int = -1) -> int:
        active = []
        for move, digest, bit in steering.moves:
            if not code >> bit & 1:
                continue
            rank = -1
            if move.per_position:
                rank = rank_of(move.positions, position, steering.selectors.prompt_len)
                if rank >= len(move.instructions) or not move.instructions[rank].u:
                    continue
            active.append((move, digest, rank))
        if not active:
            return -1
        identity = tuple((digest, rank) for _, digest, rank in active)
        held = steering.programs.get(identity)
        if held is None:
            held = steering.programs[identity] = self.table.take(active)
        return held[1]


def rank_of(selector: Positions, position: int, prompt_len: int) -> int:
    """How many selected positions come before a selected `position`."""
    return int(selector.mask(np.arange(position), prompt_len).sum())


def _array(ids: Sequence[int] | None) -> np.ndarray | None:
    return None if ids is None else np.asarray(ids, np.int64)
