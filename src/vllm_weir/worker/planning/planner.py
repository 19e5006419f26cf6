"""The planner of a step: what to capture of each scheduled token, and how to steer it. Pure numpy.

A token that is captured gets a *site set* (the set of columns whose rows are wanted) and a *slot*
(the ring row of its first wanted column); the column at place k of the site set goes to ring row
``slot + k``. So only wanted rows are written. A token that is steered gets a *program*. The plan's
copies say where rows go from the ring.

In most steps, most requests have one new token and are treated as in the step before. These are
planned all at once from the arrays of `SteadyRequests`; a step that merely repeats the last one is not
planned at all. Other requests are planned one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_traits import PLAIN_ENGINE, EngineTraits, TableSizes
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.replay import ReplayRows
from vllm_weir.schema.request import ResolvedSpec
from vllm_weir.schema.resolved_probes import Scoring
from vllm_weir.schema.selectors import SelectorSet
from vllm_weir.schema.taps import column_of
from vllm_weir.util.lru import IdentityCache
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.capture_planner import CapturePlanner, CapturingRequest, ReadOutCodec
from vllm_weir.worker.planning.columns import SiteSets
from vllm_weir.worker.planning.drafts import DraftedStep
from vllm_weir.worker.planning.plan_builder import PlanBuilder
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.score_planner import ScorePlanner
from vllm_weir.worker.planning.steady_requests import SteadyRequests
from vllm_weir.worker.planning.steering_planner import SteeredRequest, SteeringPlanner
from vllm_weir.worker.planning.step_plan import RepeatedSteps, RequestFailure, StepPlan
from vllm_weir.worker.scoring.probe_table import ProbeTable
from vllm_weir.worker.steering.programs import ProgramTable

MOST_EXPECTED = 4096
"""Cap on the generated tokens assumed when estimating how many rows a request will have."""

NO_PROBES = TableSizes(vectors=0, programs=0, nodes=0, probes=0, gates=0, states=0)


class Planner:
    """Keeps the live requests, and turns each step's batch into a `StepPlan`.

    Args:
        columns: columns (see `column_of`) that this worker fills.
        num_columns: width of the rank table.
        max_site_sets: height of the rank table.
        row_seqs: where rows go; None for an unbounded arena of its own.
        ring_rows: column -> rows of the ring that one of its rows takes; left out where that is 1.
        probes: where probes and gates are held; None if no request has any.
        reports: whether this worker reports what was steered and scored; one per tensor-parallel
            group does.
        row_bytes: bytes of a row in ring and arena.

    Attributes:
        capturing, steered: the live requests that capture or are steered, by id.
        site_sets: the rank table.
        capture_planner, steering_planner, score_planner: plan one request each.
        steady: what goes on without change.
    """

    def __init__(
        self,
        columns: frozenset[int],
        num_columns: int,
        max_site_sets: int,
        table: ProgramTable,
        row_seqs: RowSequences | None = None,
        ring_rows: Mapping[int, int] = MappingProxyType({}),
        probes: ProbeTable | None = None,
        traits: EngineTraits = PLAIN_ENGINE,
        reports: bool = True,
        row_bytes: int = 4,
    ) -> None:
        self.columns, self._traits = columns, traits
        self.row_seqs = row_seqs or RowSequences(Arena(1 << 50), rewind=traits.draft_tokens)
        self.site_sets = SiteSets(max_site_sets, num_columns)
        self.capture_planner = CapturePlanner(
            self.site_sets, self.row_seqs, table.vectors.shape[1], ring_rows, row_bytes
        )
        self.score_planner = ScorePlanner(probes or ProbeTable(NO_PROBES, table), table, self.row_seqs, reports)
        self.steering_planner = SteeringPlanner(table, self.row_seqs, self.score_planner, reports)
        self.capturing: dict[str, CapturingRequest] = {}
        self.steered: dict[str, SteeredRequest] = {}
        self.steady = SteadyRequests(self.row_seqs, self.score_planner)
        self._drafted: DraftedStep | None = None
        self._restarted: list[str] = []
        """Requests that have joined, or go on after a preemption, since the last step."""
        self._repeated: RepeatedSteps | None = None
        self._selected = IdentityCache(self._select)

    def add_capture(
        self,
        request_id: str,
        endpoint: str,
        spec: ResolvedSpec,
        prompt_len: int,
        prompt_ids: Sequence[int] | None,
        max_generated: int = MOST_EXPECTED,
        codec: int = -1,
        read_out_codec: ReadOutCodec | None = None,
        worker_sink: str = "",
    ) -> None:
        """Start capturing for a request, if it wants anything of this worker.

        `prompt_ids` is None if only the device knows them; `max_generated` are the most tokens that it
        generates. `codec` is the number of the codec that makes records of its rows, -1 for none;
        `read_out_codec` is as in `CapturingRequest`. Rows go to `worker_sink` instead of the reader if it is given.
        """
        self._end_repetition()
        selected = self._selected[spec]
        if selected is not None:
            selector_set, columns = selected
            selectors = selector_set.of(prompt_len, prompt_ids)
            self.capturing[request_id] = CapturingRequest(
                request_id,
                worker_sink or endpoint,
                selectors,
                columns,
                min(max_generated, MOST_EXPECTED),
                spec.postprocess,
                codec,
                read_out_codec,
            )
            self.steady.add_request(request_id, endpoint)
            self._restarted += [request_id] * self._traits.speculative

    def _select(self, spec: ResolvedSpec) -> tuple[SelectorSet, list[tuple[int, ...]]] | None:
        """Return a spec's selectors and the columns that each wants of this worker, if any."""
        by_positions: dict[Positions, set[int]] = {}
        for site_request in spec.site_requests:
            column = column_of(site_request.site, site_request.before)
            if column in self.columns:
                by_positions.setdefault(site_request.positions, set()).add(column)
        if not by_positions:
            return None
        return SelectorSet(tuple(by_positions)), [self.capture_planner.places(c) for c in by_positions.values()]

    def add_steering(
        self,
        request_id: str,
        endpoint: str,
        interventions: Sequence[ResolvedIntervention],
        prompt_len: int,
        prompt_ids: Sequence[int] | None,
        fetch: Callable[[list[str]], dict[str, np.ndarray]],
        salt: str = "",
        scoring: Scoring | None = None,
        own_from: int | None = None,
        steps: tuple[ResolvedIntervention, ...] | None = None,
        replay: ReplayRows | None = None,
    ) -> None:
        """Start steering or scoring a request; arguments and errors as for `SteeringPlanner.join`."""
        self._end_repetition()
        self.steered[request_id] = self.steering_planner.join(
            request_id, endpoint, interventions, prompt_len, prompt_ids, fetch, salt, scoring, own_from, steps, replay
        )
        self.steady.add_request(request_id, endpoint)
        self._restarted += [request_id] * self._traits.speculative

    def forget_from(self, request_id: str, position: int) -> None:
        """Tell the reader of a request that goes on after a preemption how many tokens it has.

        Rows of drafts behind them may have been told as accepted: the engine drops what was sampled
        for a request that is preempted meanwhile.
        """
        request = self.capturing.get(request_id) or self.steered.get(request_id)
        if self._traits.speculative and request is not None and not request.endpoint.startswith(messages.KEPT):
            self.row_seqs.layout_update_for(request.endpoint).restarted.append((request_id, position))

    def resume(self, request_ids: Iterable[str]) -> None:
        """Note that requests go on after a preemption: their probes begin anew.

        The KV before their next tokens may now be other requests', from the prefix cache.
        """
        if self._traits.speculative:
            request_ids = list(request_ids)
            self._restarted += request_ids
            for capturing in filter(None, map(self.capturing.get, request_ids)):
                self.capture_planner.restart(capturing)
                self.steady.unsettle(self.steady.slot_of(capturing.request_id))
        for request in filter(None, map(self.steered.get, request_ids)):
            self._end_repetition()
            request.entered = False
            if request.scored is not None:
                request.scored.fresh, request.scored.asked = True, False
            self.steady.unsettle(self.steady.slot_of(request.request_id))

    def remove(self, request_id: str) -> None:
        """Stop following a request; unknown ids are ignored (most requests carry no keys)."""
        capturing, steered = self.capturing.pop(request_id, None), self.steered.pop(request_id, None)
        if capturing is None and steered is None:
            return
        self._end_repetition()
        if capturing is not None:
            self.capture_planner.leave(capturing)
        if steered is not None:
            self.steering_planner.leave(steered)
        self.steady.remove_request(request_id)

    def plan(
        self,
        request_ids: Sequence[str],
        num_tokens: Sequence[int],
        num_computed: Sequence[int],
        num_drafts: Sequence[int] | None = None,
    ) -> StepPlan | None:
        """Return the plan for a batch, None if nothing is captured or steered in it.

        Lists are by request, in batch order: its tokens in this step, the position of the first of them,
        and how many, the last ones, are drafts; None if none are.
        """
        self._drafted = None
        if not self.capturing and not self.steered:
            return None
        counts, computed = np.asarray(num_tokens, np.int64), np.asarray(num_computed, np.int64)
        if self._repeated is not None and self._repeated.continues(request_ids, counts, computed):
            return self._repeated.next()
        self._end_repetition()
        builder = PlanBuilder(int(counts.sum()))
        first_tokens = np.cumsum(counts) - counts
        slots = self.steady.slots_of(request_ids)
        is_steady = counts <= 1 + self._traits.draft_tokens
        is_steady &= computed - self._traits.uncertainty >= self.steady.ready[slots]
        steady = is_steady.nonzero()[0]
        if len(steady):
            is_steady[steady] = self.steady.plan(
                builder, slots[steady], first_tokens[steady], computed[steady], counts[steady]
            )
        others = ((slots != 0) & ~is_steady).nonzero()[0]
        # A request may take from the prefix cache what another computes in this very step. Plan by
        # position, so that the other's failure is known first.
        others = others[computed[others].argsort(kind="stable")]
        arguments = np.stack([others, first_tokens[others], computed[others], counts[others]], 1)
        for k, first_token, start, count in arguments.tolist():
            self._plan_one(builder, request_ids[k], first_token, start, count)
        plan = builder.finish(self.steady.endpoints)
        if self._traits.speculative:
            drafts = np.zeros_like(counts) if num_drafts is None else np.asarray(num_drafts, np.int64)
            self._note_drafts(builder, request_ids, slots, np.stack([first_tokens, counts, drafts, computed], 1))
        elif not len(others) and len(counts) == builder.size:
            row_seqs = self.steady.row_seq[slots[steady]]
            self._repeated = RepeatedSteps(request_ids, computed, plan, self.row_seqs, row_seqs[row_seqs >= 0])
        return plan

    def take_drafted(self) -> DraftedStep | None:
        """Return the last planned step, and forget it, if drafts decide on what its readers are told."""
        drafted, self._drafted = self._drafted, None
        return drafted

    def _note_drafts(
        self, builder: PlanBuilder, request_ids: Sequence[str], slots: np.ndarray, batch: np.ndarray
    ) -> None:
        """Set `_drafted`; `batch` is int64 [n, 4]: first token, tokens, drafts and position of each request."""
        restarted, self._restarted = self._restarted, []
        followed = slots.nonzero()[0]
        if not len(followed) or not (self._traits.drafts_ahead or batch[followed, 2].any()):
            return
        endpoints = list(self.steady.endpoints)
        arrival_tokens, steered_tokens = builder.drafted(endpoints)
        first_tokens, counts, drafts, starts = batch[followed].T
        self._drafted = DraftedStep(
            request_ids=[request_ids[k] for k in followed.tolist()],
            first_tokens=first_tokens,
            counts=counts,
            drafts=drafts,
            starts=starts,
            restarted=restarted,
            arrival_tokens=arrival_tokens,
            steered_tokens=steered_tokens,
            score_reads=builder.scores.reads,
            endpoints=endpoints,
        )

    def _end_repetition(self) -> None:
        self._repeated = None
        self.row_seqs.catch_up()

    def _plan_one(self, builder: PlanBuilder, request_id: str, first_token: int, start: int, count: int) -> None:
        """Plan one request's tokens; a request that fails is removed, and its reader told why."""
        capturing, steered = self.capturing.get(request_id), self.steered.get(request_id)
        slot = self.steady.slot_of(request_id)
        endpoint = int(self.steady.endpoint[slot])
        place = endpoint, first_token, start, count
        try:
            if capturing is not None:
                to = self.steady.number_of(capturing.endpoint), *place[1:]
                self.capture_planner.plan(builder, capturing, *to, self._behind(capturing.selectors.prompt_len, start))
            if steered is not None:
                behind = self._behind(steered.selectors.prompt_len, start)
                self.steering_planner.plan(builder, steered, *place, behind)
            self._settle(slot, capturing, steered, start + count)
        except WeirError as e:
            builder.failures.append(RequestFailure(self.steady.endpoints[endpoint], request_id, str(e)))
            builder.cancel(first_token, count)
            self.remove(request_id)
            if steered is not None and steered.keys.changes:
                known = max(0, start - self._traits.uncertainty)
                self.steering_planner.unsteered_kv.add(steered.keys, known)

    def _behind(self, prompt_len: int, start: int) -> int:
        """Return how far behind a planned position a request may really be."""
        return min(self._traits.uncertainty, max(0, start - prompt_len))

    def _settle(
        self, slot: int, capturing: CapturingRequest | None, steered: SteeredRequest | None, position: int
    ) -> None:
        """Put a request into the steady state if nothing changes any more from `position` on."""
        row_seq = site_set = program = group = -1
        ready = 0 if self._traits.speculative else position  # positions of rejected drafts come again
        if capturing is not None:
            start, code = capturing.selectors.steady
            ready = max(ready, start)
            if position < start:
                return self.steady.unsettle(slot)
            if code and self.steady.endpoints[self.steady.endpoint[slot]] != capturing.endpoint:
                return self.steady.unsettle(slot)  # one reader is told of rows, another of steering
            if code:
                site_set = capturing.site_sets.get(code, -1)
                if site_set not in capturing.row_seqs:
                    return self.steady.unsettle(slot)
                row_seq = capturing.row_seqs[site_set].index
        if steered is not None:
            start, code = steered.selectors.steady
            ready = max(ready, start)
            if position < start or steered.recipe.varies(code):
                return self.steady.unsettle(slot)
            group, program = self.steering_planner.group_and_program(steered, code)
        self.steady.settle(slot, ready, row_seq, site_set, program, group)
        scored = None if steered is None else steered.scored
        if scored is not None and code & scored.recipe.bits:
            if scored.fresh:  # nothing has been read yet, so the next token is planned alone
                return self.steady.unsettle(slot)
            series, reported = self.score_planner.series(scored), scored.recipe.layout.reported
            probe = int(scored.rows[0]) if len(scored.rows) else -1
            self.steady.settle_scores(slot, probe, series, reported)
        return None
