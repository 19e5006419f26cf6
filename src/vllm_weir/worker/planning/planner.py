"""The plan of one step: what every scheduled token is to record and to undergo. Pure numpy.

A token that is captured gets a *profile* (the set of columns whose rows are wanted) and a *slot* (the ring row of its
first wanted column); the column at place k of the profile goes to ring row ``slot + k``. So only wanted rows are
written. A token that is steered gets a *program*. Where the rows go from the ring is said by `jobs`.

Most tokens of most steps are the one new token of a request for which nothing changes any more from token to token:
those are planned all at once from the arrays of `SteadyState`, and a step that only repeats the last one is not
planned at all. The others are planned one request after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import ResolvedSpec
from vllm_weir.schema.selectors import SelectorSet
from vllm_weir.schema.taps import column_of
from vllm_weir.util.identity_cache import IdentityCache
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.capture_planner import CapturePlanner, CapturingRequest
from vllm_weir.worker.planning.plan_builder import PlanBuilder
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.site_sets import SiteSets
from vllm_weir.worker.planning.steady_state import SteadyState
from vllm_weir.worker.planning.steering_planner import SteeredRequest, SteeringPlanner
from vllm_weir.worker.planning.step_plan import RepeatedSteps, StepPlan
from vllm_weir.worker.steering.programs import ProgramTable

ESTIMATE = 4096
"""Generated tokens that are looked ahead to guess how many rows a request will have."""


class Planner:
    """Keeps the live requests and turns a step's batch into a StepPlan.

    Args:
        columns: columns (see `column_of`) that this worker fills.
        num_columns: width of the rank table.
        max_profiles: height of the rank table.
        table: where programs live.
        row_seqs: where rows go; None for a planner whose rows go nowhere in particular.

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
        row_seqs: RowSequences | None = None,
    ) -> None:
        self.columns = columns
        self.row_seqs = row_seqs or RowSequences(Arena(1 << 50))
        self.profiles = SiteSets(max_profiles, num_columns)
        self.reader = CapturePlanner(self.profiles, self.row_seqs, table.vectors.shape[1])
        self.steering_planner = SteeringPlanner(table, self.row_seqs)
        self.reading: dict[str, CapturingRequest] = {}
        self.steering: dict[str, SteeredRequest] = {}
        self.seats = SteadyState()
        self._repeat: RepeatedSteps | None = None
        self._wanted = IdentityCache(self._wanted_of)

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
            self.reading[request_id] = CapturingRequest(
                request_id, reply, selectors, columns, min(most, ESTIMATE), spec.postprocess, directions
            )
            self.seats.take(request_id, reply)

    def _wanted_of(self, spec: ResolvedSpec) -> tuple[SelectorSet, list[tuple[int, ...]]] | None:
        """The selectors of a spec, and the columns that each wants of this worker; thousands of requests share one."""
        by_positions: dict[Positions, set[int]] = {}
        for site_request in spec.site_requests:
            column = column_of(site_request.site, site_request.before)
            if column in self.columns:
                by_positions.setdefault(site_request.positions, set()).add(column)
        if not by_positions:
            return None
        return SelectorSet(tuple(by_positions)), [tuple(sorted(columns)) for columns in by_positions.values()]

    def steer(
        self,
        request_id: str,
        reply: str,
        moves: Sequence[ResolvedIntervention],
        prompt_len: int,
        prompt_ids: Sequence[int] | None,
        fetch: Callable,
        salt: str = "",
    ) -> None:
        """Start steering a request; raises WeirError if the tables cannot hold it. `fetch`, `salt`: as for
        `SteeringPlanner.join`."""
        self._end_repeat()
        self.steering[request_id] = self.steering_planner.join(
            request_id, reply, moves, prompt_len, prompt_ids, fetch, salt
        )
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
            self.steering_planner.leave(steering)
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
        draft = PlanBuilder(int(counts.sum()))
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
            x = self.seats.row_seq[seats[followed]]
            self._repeat = RepeatedSteps(request_ids, computed, plan, self.row_seqs, x[x >= 0])
        return plan

    def _end_repeat(self) -> None:
        self._repeat = None
        self.row_seqs.catch_up()

    def _plan_steady(
        self, draft: PlanBuilder, seats: np.ndarray, firsts: np.ndarray, computed: np.ndarray
    ) -> np.ndarray:
        """Plan tokens of requests that go on as they did; returns for which of them that was possible."""
        of, row_seqs = self.seats, self.row_seqs
        at = of.row_seq[seats]
        reads = at >= 0
        x = at[reads]
        fits = np.ones(len(seats), bool)
        fits[reads] = (row_seqs.rank[x] < row_seqs.limit[x]) & (row_seqs.last[x] < computed[reads])
        if not fits.all():
            seats, firsts, computed, reads = seats[fits], firsts[fits], computed[fits], reads[fits]
            x = of.row_seq[seats][reads]
        if len(x):
            rank, tokens, positions = row_seqs.rank[x], firsts[reads], computed[reads]
            draft.profiles[tokens] = of.profile[seats[reads]]
            draft.take(of.reply[seats[reads]], row_seqs, x, rank, tokens, positions)
            row_seqs.rank[x] += 1
            row_seqs.last[x] = positions
        programs = of.program[seats]
        draft.programs[firsts] = programs
        vouched = of.group[seats] >= 0
        if vouched.any():
            draft.steer(of.reply[seats[vouched]], of.group[seats[vouched]], computed[vouched])
        return fits

    def _plan_one(self, draft: PlanBuilder, request_id: str, first: int, computed: int, count: int) -> None:
        """One request's tokens; if that fails, it is followed no longer."""
        reading, steering = self.reading.get(request_id), self.steering.get(request_id)
        seat = self.seats.number(request_id)
        reply = int(self.seats.reply[seat])
        try:
            if reading is not None:
                self.reader.plan(draft, reading, reply, first, computed, count)
            if steering is not None:
                self.steering_planner.plan(draft, steering, reply, first, computed, count)
            self._settle(seat, reading, steering, computed + count)
        except WeirError as e:
            draft.failures.append((self.seats.replies[reply], request_id, str(e)))
            draft.forget(first, count)
            self.remove(request_id)
            if steering is not None:
                self.steering_planner.leftovers.add(steering.keyed, computed)

    def _settle(
        self, seat: int, reading: CapturingRequest | None, steering: SteeredRequest | None, following: int
    ) -> None:
        """Let the next tokens be planned with everybody's, if nothing changes any more from `following` on."""
        row_seq = profile = program = group = -1
        if reading is not None:
            start, code = reading.selectors.steady
            if following < start:
                return self.seats.wait(seat)
            if code:
                profile = reading.profiles.get(code, -1)
                if profile not in reading.row_seqs:
                    return self.seats.wait(seat)
                row_seq = reading.row_seqs[profile].index
        if steering is not None:
            start, code = steering.selectors.steady
            if following < start or steering.recipe.varies(code):
                return self.seats.wait(seat)
            group, program = self.steering_planner.at(steering, code)
        self.seats.settle(seat, following, row_seq, profile, program, group)
        return None
