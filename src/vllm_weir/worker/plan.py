"""The plan of one step: what every scheduled token is to record and to undergo. Pure numpy.

A token that is captured gets a *profile* (the set of columns whose rows are wanted) and a *slot* (the ring row of its
first wanted column); the column at place k of the profile goes to ring row ``slot + k``. So only wanted rows are
written. A token that is steered gets a *program*. Where the rows go from the ring is said by `jobs`.

Most tokens of most steps are the one new token of a request for which nothing changes any more from token to token:
those are planned all at once from the arrays of `Seats`, and a step that only repeats the last one is not planned at
all. The others are planned one request after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.spec.interventions import Move
from vllm_weir.spec.positions import Positions
from vllm_weir.spec.request import ResolvedSpec
from vllm_weir.worker.arena import Arena
from vllm_weir.worker.draft import Draft
from vllm_weir.worker.known import Known
from vllm_weir.worker.profiles import Profiles
from vllm_weir.worker.programs import ProgramTable
from vllm_weir.worker.reading import Reader, Reading
from vllm_weir.worker.seats import Seats
from vllm_weir.worker.select import Choice, column_of
from vllm_weir.worker.steering import Steerer, Steering
from vllm_weir.worker.step import Repeat, StepPlan
from vllm_weir.worker.strands import Strands

ESTIMATE = 4096
"""Generated tokens that are looked ahead to guess how many rows a request will have."""


class Planner:
    """Keeps the live requests and turns a step's batch into a StepPlan.

    Args:
        columns: columns (see `column_of`) that this worker fills.
        num_columns: width of the rank table.
        max_profiles: height of the rank table.
        table: where programs live.
        strands: where rows go; None for a planner whose rows go nowhere in particular.

    Attributes:
        reading, steering: the live requests that do so, by id.
        profiles: the rank table.
        reader, steerer: plan one request each.
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
        self.strands = strands or Strands(Arena(1 << 50))
        self.profiles = Profiles(max_profiles, num_columns)
        self.reader = Reader(self.profiles, self.strands, table.vectors.shape[1])
        self.steerer = Steerer(table, self.strands)
        self.reading: dict[str, Reading] = {}
        self.steering: dict[str, Steering] = {}
        self.seats = Seats()
        self._repeat: Repeat | None = None
        self._wanted = Known(self._wanted_of)

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

        `directions`: ``PACKED - number`` of the codec that its treatment asks for, -1 for none.
        """
        self._end_repeat()
        wanted = self._wanted[spec]
        if wanted is not None:
            choice, columns = wanted
            selectors = choice.of(prompt_len, prompt_ids)
            self.reading[request_id] = Reading(
                request_id, reply, selectors, columns, min(most, ESTIMATE), spec.treatment, directions
            )
            self.seats.take(request_id, reply)

    def _wanted_of(self, spec: ResolvedSpec) -> tuple[Choice, list[tuple[int, ...]]] | None:
        """The selectors of a spec, and the columns that each wants of this worker; thousands of requests share one."""
        by_positions: dict[Positions, set[int]] = {}
        for wish in spec.wishes:
            column = column_of(wish.site, wish.before)
            if column in self.columns:
                by_positions.setdefault(wish.positions, set()).add(column)
        if not by_positions:
            return None
        return Choice(tuple(by_positions)), [tuple(sorted(columns)) for columns in by_positions.values()]

    def steer(
        self,
        request_id: str,
        reply: str,
        moves: Sequence[Move],
        prompt_len: int,
        prompt_ids: Sequence[int] | None,
        fetch: Callable,
        salt: str = "",
    ) -> None:
        """Start steering a request; raises WeirError if the tables cannot hold it. `fetch`, `salt`: as for
        `Steerer.join`."""
        self._end_repeat()
        self.steering[request_id] = self.steerer.join(request_id, reply, moves, prompt_len, prompt_ids, fetch, salt)
        self.seats.take(request_id, reply)

    def resume(self, request_ids: Iterable[str]) -> None:
        """These were preempted: what comes before their next tokens may be others', from the prefix cache."""
        for steering in filter(None, map(self.steering.get, request_ids)):
            self._end_repeat()
            steering.entered = False
            self.seats.wait(self.seats.number(steering.request_id))

    def remove(self, request_id: str) -> None:
        """Stop following a request; unknown ids are fine (most requests carry no keys)."""
        reading, steering = self.reading.pop(request_id, None), self.steering.pop(request_id, None)
        if reading is None and steering is None:
            return
        self._end_repeat()
        if reading is not None:
            self.reader.leave(reading)
        if steering is not None:
            self.steerer.leave(steering)
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
        counts, computed = np.asarray(num_tokens, np.int64), np.asarray(num_computed, np.int64)
        if self._repeat is not None and self._repeat.goes_on(request_ids, counts, computed):
            return self._repeat.next()
        self._end_repeat()
        draft = Draft(int(counts.sum()))
        firsts = np.cumsum(counts) - counts
        seats = self.seats.of(request_ids)
        steady = (counts == 1) & (computed >= self.seats.ready[seats])
        followed = steady.nonzero()[0]
        if len(followed):
            steady[followed] = self._plan_steady(draft, seats[followed], firsts[followed], computed[followed])
        others = ((seats != 0) & ~steady).nonzero()[0]
        # What one takes from the prefix cache may be computed by another in this step, whose failure is then known.
        others = others[computed[others].argsort(kind="stable")]
        places = np.stack([others, firsts[others], computed[others], counts[others]], 1)
        for k, *at in places.tolist():
            self._plan_one(draft, request_ids[k], *at)
        plan = draft.finish(self.seats.replies)
        if not len(others) and len(counts) == draft.size:
            x = self.seats.strand[seats[followed]]
            self._repeat = Repeat(request_ids, computed, plan, self.strands, x[x >= 0])
        return plan

    def _end_repeat(self) -> None:
        self._repeat = None
        self.strands.catch_up()

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

    def _plan_one(self, draft: Draft, request_id: str, first: int, computed: int, count: int) -> None:
        """One request's tokens; if that fails, it is followed no longer."""
        reading, steering = self.reading.get(request_id), self.steering.get(request_id)
        seat = self.seats.number(request_id)
        reply = int(self.seats.reply[seat])
        try:
            if reading is not None:
                self.reader.plan(draft, reading, reply, first, computed, count)
            if steering is not None:
                self.steerer.plan(draft, steering, reply, first, computed, count)
            self._settle(seat, reading, steering, computed + count)
        except WeirError as e:
            draft.failures.append((self.seats.replies[reply], request_id, str(e)))
            draft.forget(first, count)
            self.remove(request_id)
            if steering is not None:
                self.steerer.leftovers.add(steering.keyed, computed)

    def _settle(self, seat: int, reading: Reading | None, steering: Steering | None, following: int) -> None:
        """Let the next tokens be planned with everybody's, if nothing changes any more from `following` on."""
        strand = profile = program = group = -1
        if reading is not None:
            start, code = reading.selectors.steady
            if following < start:
                return self.seats.wait(seat)
            if code:
                profile = reading.profiles.get(code, -1)
                if profile not in reading.strands:
                    return self.seats.wait(seat)
                strand = reading.strands[profile].index
        if steering is not None:
            start, code = steering.selectors.steady
            if following < start or steering.recipe.varies(code):
                return self.seats.wait(seat)
            group, program = self.steerer.at(steering, code)
        self.seats.settle(seat, following, strand, profile, program, group)
        return None
