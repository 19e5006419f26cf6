"""The plan of one step: what every scheduled token is to record and to undergo. Pure numpy.

A token that is captured gets a *profile* (the set of columns whose rows are wanted) and a *slot* (the ring row of its
first wanted column); the column at place k of the profile goes to ring row ``slot + k``. So only wanted rows are
written. A token that is steered gets a *program*. Where the rows go from the ring is said by `jobs`.

Most tokens of most steps are the one new token of a request for which nothing changes any more from token to token:
those are planned all at once from the arrays of `Seats`. The others are planned one request after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_weir import mail
from vllm_weir.errors import WeirError
from vllm_weir.spec.positions import Positions
from vllm_weir.spec.request import ResolvedSpec, Treatment, cell_rows
from vllm_weir.worker.arena import Arena
from vllm_weir.worker.seats import Seats
from vllm_weir.worker.select import NEVER, Selectors, column_of
from vllm_weir.worker.step import Draft, Lookup, Repeat, StepPlan
from vllm_weir.worker.strands import Cell, Strand, Strands

if TYPE_CHECKING:
    from vllm_weir.spec.interventions import Move
    from vllm_weir.worker.programs import ProgramTable

ESTIMATE = 4096
"""Generated tokens that are looked ahead to guess how many rows a request will have."""

MOST_SPECS = 64
"""Specs of which is remembered what they want here."""


@dataclass
class Reading:
    """A live request's captures."""

    request_id: str
    reply: str
    selectors: Selectors
    columns: list[tuple[int, ...]]
    """Per selector, the columns it wants that this worker fills."""
    most: int
    """Tokens that the request can generate."""
    treatment: Treatment | None
    directions: int
    """Number of the treatment's directions or codec, -1 for none."""
    profiles: dict[int, int] = field(default_factory=dict)
    """Code -> profile."""
    strands: dict[int, Strand] = field(default_factory=dict)
    """Profile -> strand."""
    fold: Strand | None = None
    """What the prompt's rows are reduced into."""


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
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Moves -> number under which the reader knows them."""


class Planner:
    """Keeps the live requests and turns a step's batch into a StepPlan.

    Args:
        columns: columns (see `column_of`) that this worker fills.
        num_columns: width of the rank table.
        max_profiles: height of the rank table.
        table: where programs live.
        strands: where rows go; None for a planner whose rows go nowhere in particular.
    """

    def __init__(
        self,
        columns: frozenset[int],
        num_columns: int,
        max_profiles: int,
        table: ProgramTable,
        strands: Strands | None = None,
    ) -> None:
        self.columns = columns
        self.vouches = True
        """Whether this worker tells what was steered: one of a tensor-parallel group is enough."""
        self.ranks = np.full((max_profiles, num_columns), -1, np.int32)
        self.ranks_changed = False
        self.table = table
        self.strands = strands or Strands(Arena(1 << 50))
        self.reading: dict[str, Reading] = {}
        self.steering: dict[str, Steering] = {}
        self.seats = Seats()
        self.columns_of: dict[int, tuple[int, ...]] = {}
        self._profile_of: dict[tuple[int, ...], int] = {}
        self._users: dict[int, int] = {}
        self._free = list(range(max_profiles - 1, -1, -1))
        self.row_bytes = 4
        """Bytes of a row in ring and arena."""
        self._group_numbers = itertools.count()
        self._repeat: Repeat | None = None
        self._specs: dict[int, tuple[ResolvedSpec, dict[Positions, tuple[int, ...]]]] = {}

    @property
    def profiles_used(self) -> int:
        """Rows of the rank table, from the first on, that hold all that are in use."""
        return max(self._users, default=-1) + 1

    def read(
        self,
        request_id: str,
        reply: str,
        spec: ResolvedSpec,
        prompt_len: int,
        prompt_ids: Sequence[int] | None,
        most: int = ESTIMATE,
        directions: int = -1,
    ) -> None:
        """Start capturing for a request that can generate `most` tokens.

        `directions`: number of those that its treatment multiplies with, or ``PACKED - number`` of its codec.
        """
        self._repeat = None
        wanted = self._wanted(spec)
        if wanted:
            selectors = Selectors(list(wanted), prompt_len, _array(prompt_ids))
            self.reading[request_id] = Reading(
                request_id, reply, selectors, list(wanted.values()), min(most, ESTIMATE), spec.treatment, directions
            )
            self.seats.take(request_id)

    def _wanted(self, spec: ResolvedSpec) -> dict[Positions, tuple[int, ...]]:
        """Per selector of a spec, the columns it wants that this worker fills; thousands of requests share a spec."""
        known = self._specs.get(id(spec))
        if known is None:
            by_positions: dict[Positions, set[int]] = {}
            for wish in spec.wishes:
                column = column_of(wish.site, wish.before)
                if column in self.columns:
                    by_positions.setdefault(wish.positions, set()).add(column)
            wanted = {positions: tuple(sorted(columns)) for positions, columns in by_positions.items()}
            if len(self._specs) >= MOST_SPECS:
                self._specs.clear()
            known = self._specs[id(spec)] = (spec, wanted)  # held, so that its id stays its own
        return known[1]

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
        self._repeat = None
        distinct = list(dict.fromkeys(m.positions for m in moves))
        selectors = Selectors(distinct, prompt_len, _array(prompt_ids))
        vectors = tuple(
            sorted({d for m in moves if self.table.local(m) for i in m.instructions for d in (i.u, i.w) if d})
        )
        self.table.hold_vectors(vectors, fetch)
        placed = [(m, m.digest, distinct.index(m.positions)) for m in moves]
        local = frozenset(k for k, m in enumerate(moves) if self.table.local(m))
        self.steering[request_id] = Steering(request_id, reply, selectors, placed, vectors, local)
        self.seats.take(request_id)

    def remove(self, request_id: str) -> None:
        """Stop following a request; unknown ids are fine (most requests carry no keys)."""
        self._repeat = None
        reading = self.reading.pop(request_id, None)
        for strand in reading.strands.values() if reading else ():
            self.strands.close(strand)
        if reading is not None and reading.fold is not None:
            self.strands.close(reading.fold)
        for profile in reading.profiles.values() if reading else ():
            self._users[profile] -= 1
            if not self._users[profile]:
                del self._users[profile], self._profile_of[self.columns_of.pop(profile)]
                self._free.append(profile)
        steering = self.steering.pop(request_id, None)
        if steering is not None:
            for key, _ in steering.programs.values():
                self.table.give_back(key)
            self.table.drop_vectors(steering.vectors)
        self.seats.leave(request_id)

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
        counts, computed = np.asarray(num_tokens, np.int64), np.array(num_computed, np.int64)
        single = len(counts) == counts.sum()
        if single and self._repeat is not None and (plan := self._repeat.next(request_ids, computed)) is not None:
            return plan
        self._repeat = None
        draft = Draft(int(counts.sum()))
        firsts = np.cumsum(counts) - counts
        seats = self.seats.of(request_ids)
        steady = (counts == 1) & (computed >= self.seats.ready[seats])
        followed = steady.nonzero()[0]
        if len(followed):
            steady[followed] = self._plan_steady(draft, seats[followed], firsts[followed], computed[followed])
        others = ((seats != 0) & ~steady).nonzero()[0]
        for k in others:
            request_id = request_ids[k]
            try:
                self._plan_one(draft, request_id, int(firsts[k]), int(computed[k]), int(counts[k]))
            except WeirError as e:
                live = self.reading.get(request_id) or self.steering[request_id]
                draft.failures.append((live.reply, request_id, str(e)))
                draft.forget(int(firsts[k]), int(counts[k]))
                self.remove(request_id)
        plan = draft.finish(self.seats.replies)
        if single and plan is not None and not len(others):
            x = self.seats.strand[seats[followed]]
            self._repeat = Repeat(request_ids, computed, plan, self.strands, x[x >= 0])
        return plan

    def _plan_steady(self, draft: Draft, seats, firsts, computed) -> np.ndarray:
        """Plan tokens of requests that go on as they did; returns for which of them that was possible."""
        of, strands = self.seats, self.strands
        at = of.strand[seats]
        reads = at >= 0
        x = at[reads]
        fits = np.ones(len(seats), bool)
        fits[reads] = (strands.rank[x] < strands.limit[x]) & (strands.last[x] < computed[reads])
        if not fits.all():
            seats, firsts, computed, reads = seats[fits], firsts[fits], computed[fits], reads[fits]
            x = of.strand[seats][reads]
        if len(x):
            rank, tokens, positions = strands.rank[x], firsts[reads], computed[reads]
            draft.profiles[tokens] = of.profile[seats[reads]]
            draft.take(of.reply[seats[reads]], strands, x, rank, tokens, positions)
            strands.rank[x] += 1
            strands.last[x] = positions
        programs = of.program[seats]
        draft.programs[firsts] = programs
        vouched = of.group[seats] >= 0
        if vouched.any():
            draft.steer(of.reply[seats[vouched]], of.group[seats[vouched]], computed[vouched])
        return fits

    def _plan_one(self, draft: Draft, request_id: str, first: int, computed: int, n: int) -> None:
        reading, steering = self.reading.get(request_id), self.steering.get(request_id)
        positions = np.arange(computed, computed + n)
        seat = self.seats.number(request_id)
        if reading is not None:
            self._read_one(draft, reading, first, positions)
        if steering is not None:
            self._steer_one(draft, steering, first, positions)
        self._settle(seat, reading, steering, computed + n)

    def _read_one(self, draft: Draft, reading: Reading, first: int, positions: np.ndarray) -> None:
        codes = reading.selectors.codes(positions)
        seat = self.seats.number(reading.request_id)
        self.seats.speak_to(seat, reading.reply)
        reply = int(self.seats.reply[seat])
        for code in _distinct(codes):
            profile = self._profile(reading, int(code))
            at = np.flatnonzero(codes == code)
            if reading.treatment is not None and reading.treatment.folds:
                in_prompt = at[positions[at] < reading.selectors.prompt_len]
                if len(in_prompt):
                    self._fold_one(draft, reading, profile, first + in_prompt, positions[in_prompt])
                    at = at[len(in_prompt) :]
            if not len(at):
                continue
            strand = self._strand(reading, int(code), profile, int(positions[at[0]]))
            done = 0
            for rank, row, count in self.strands.place(strand, len(at)):
                some = at[done : done + count]
                draft.profiles[first + some] = profile
                draft.take_run(reply, self.strands, strand, rank, row, first + some, positions[some])
                done += count
            self.strands.last[strand.index] = positions[at[-1]]
            if done < len(at):
                draft.drop(reply, strand.number, positions[at[done:]])

    def _fold_one(
        self, draft: Draft, reading: Reading, profile: int, tokens: np.ndarray, positions: np.ndarray
    ) -> None:
        """Reduce rows of the prompt; all tokens of the request want the same columns."""
        strands, columns, d_model = self.strands, self.columns_of[profile], self.table.vectors.shape[1]
        if reading.fold is not None and strands.last[reading.fold.index] >= positions[0]:
            strands.close(reading.fold)  # computed again after a preemption: all of it
            reading.fold = None
        if reading.fold is None:
            cell = Cell("fold", d_model, cell_rows(len(columns), d_model, self.row_bytes))
            reading.fold = strands.open(reading.request_id, reading.reply, columns, 1, 1, cell)
        draft.profiles[tokens] = profile
        strands.last[reading.fold.index] = positions[-1]
        prompt_len = reading.selectors.prompt_len
        later, _ = reading.selectors.count(1, int(positions[-1]) + 1, prompt_len)
        row, reply = None, int(self.seats.reply[self.seats.number(reading.request_id)])
        if not later:
            placed = strands.place(reading.fold, 1)
            if not placed:
                draft.drop(reply, reading.fold.number, positions[-1:])
            else:
                row = placed[0][1]
        assert reading.treatment is not None
        draft.fold(reply, strands, reading.fold, reading.treatment.reduce or "", tokens, positions, row)

    def _strand(self, reading: Reading, code: int, profile: int, position: int) -> Strand:
        strand = reading.strands.get(profile)
        if strand is not None and self.strands.last[strand.index] >= position:
            # Computed again after a preemption: a new strand, so that rows already handed out do not change.
            self.strands.close(strand)
            strand = None
        if strand is None:
            prompt_len = reading.selectors.prompt_len
            in_prompt, rows = reading.selectors.count(code, position, prompt_len + reading.most - 1)
            columns, cell = self.columns_of[profile], None
            if reading.treatment is not None and reading.treatment.compression is not None:
                record = reading.treatment.compression.record_bytes(self.table.vectors.shape[1])
                cell = Cell("packed", record, record * len(columns), reading.directions, self.row_bytes)
            elif reading.treatment is not None and reading.treatment.directions:
                values = len(reading.treatment.directions)
                cell = Cell("scores", values, cell_rows(len(columns), values, self.row_bytes), reading.directions)
            elif reading.treatment is not None:
                in_prompt, rows = 0, rows - in_prompt
            strand = self.strands.open(reading.request_id, reading.reply, columns, in_prompt, max(rows, 1), cell)
            reading.strands[profile] = strand
        return strand

    def _settle(self, seat: int, reading: Reading | None, steering: Steering | None, following: int) -> None:
        """Let the next tokens be planned with everybody's, if nothing changes any more from `following` on."""
        of = self.seats
        of.ready[seat] = NEVER
        of.strand[seat] = of.program[seat] = of.group[seat] = -1
        if reading is not None:
            start, code = reading.selectors.steady()
            if following < start:
                return
            if code:
                profile = reading.profiles.get(code)
                if profile is None or profile not in reading.strands:
                    return
                strand = reading.strands[profile]
                of.strand[seat], of.profile[seat] = strand.index, profile
        if steering is not None:
            start, code = steering.selectors.steady()
            active = [k for k, (_, _, bit) in enumerate(steering.moves) if code >> bit & 1]
            if following < start or any(
                steering.moves[k][0].per_position or steering.moves[k][0].positions.needs_token_ids for k in active
            ):
                return
            if active:
                of.program[seat] = self._program(steering, code)
                of.group[seat] = self._group(steering, active)
        of.ready[seat] = following

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
            self._profile_of[key], self.columns_of[profile] = profile, key
            self.ranks[profile] = -1
            self.ranks[profile, list(key)] = np.arange(len(key))
            self.ranks_changed = True
        reading.profiles[code] = profile
        self._users[profile] = self._users.get(profile, 0) + 1
        return profile

    def _steer_one(self, draft: Draft, steering: Steering, first: int, positions: np.ndarray) -> None:
        selectors = steering.selectors
        codes = selectors.codes(positions)
        seat = self.seats.number(steering.request_id)
        self.seats.speak_to(seat, steering.reply)
        for code in _distinct(codes):
            at = np.flatnonzero(codes == code)
            active = [k for k, (_, _, bit) in enumerate(steering.moves) if int(code) >> bit & 1]
            group = self._group(steering, active)
            if group >= 0:
                draft.steer_run(self.seats.reply[seat], group, positions[at])
            groups = [(at, -1)]
            if any(steering.moves[k][0].per_position for k in active):
                groups = [(at[k : k + 1], int(positions[i])) for k, i in enumerate(at)]
            open_bits = [bit for bit in selectors.by_token if int(code) >> bit & 1]
            for some, position in groups:
                draft.programs[first + some] = self._program(steering, int(code), position)
                unknown = some[positions[some] >= selectors.prompt_len]
                if open_bits and len(unknown):
                    tokens = first + unknown
                    draft.lookups.append(self._lookup(steering, int(code), open_bits, tokens, position))

    def _group(self, steering: Steering, active: list[int]) -> int:
        """The number of the moves among `active` that this worker vouches for, or -1 if there are none."""
        vouched = tuple(k for k in active if k in steering.local)
        if not vouched or not self.vouches:
            return -1
        group = steering.groups.get(vouched)
        if group is None:
            group = steering.groups[vouched] = next(self._group_numbers)
            news = self.strands.news.setdefault(steering.reply, mail.News())
            news.groups.append(mail.Group(group, steering.request_id, list(vouched)))
        return group

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
                rank = move.positions.rank(position, steering.selectors.prompt_len)
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


def _distinct(codes: np.ndarray) -> np.ndarray:
    """The codes but 0, ascending."""
    first = codes[0]
    if first and (codes == first).all():
        return codes[:1]
    return np.unique(codes[codes > 0])


def _array(ids: Sequence[int] | None) -> np.ndarray | None:
    return None if ids is None else np.asarray(ids, np.int64)
