"""Which program each steered token undergoes, planned one request after the other. Pure numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.replay import ReplayRows
from vllm_weir.schema.resolved_probes import Scoring
from vllm_weir.schema.selectors import Selectors, SelectorSet, distinct, selector_bits
from vllm_weir.util.lru import IdentityCache
from vllm_weir.worker.planning.plan_builder import PlanBuilder
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.score_planner import ScoredRequest, ScorePlanner
from vllm_weir.worker.planning.step_plan import ProgramsByPosition, ProgramsByToken
from vllm_weir.worker.steering.programs import ActiveIntervention, ProgramTable
from vllm_weir.worker.steering.unsteered_kv import SteeredKeys, UnsteeredKV

MOST_CACHED = 64
"""Recipes with more instructions than this are not cached; the identity cache bounds their number
(`identity_cache.MOST`), not their size."""

ProgramIdentity = tuple[tuple[str, int], ...]
"""(digest, rank) of every intervention of a program."""


class SteeringRecipe:
    """What requests with the same interventions have in common on this worker.

    Attributes:
        choice: the distinct selectors of the interventions.
        interventions: (intervention, digest, bit of its selector), in the order in which they
            apply.
        local: indices of interventions with a site at this worker's taps.
        reported: those of them that the reader is told of: all that do not only write into cells.
        vectors: digests of the vectors that they need.
        by_position: whether any intervention has instructions of their own for each position.
    """

    def __init__(self, interventions: tuple[ResolvedIntervention, ...], table: ProgramTable) -> None:
        bits = selector_bits(i.positions for i in interventions)
        self.choice = SelectorSet(tuple(bits))
        self.interventions = [(i, i.digest, bits[i.positions]) for i in interventions]
        self.local = frozenset(k for k, intervention in enumerate(interventions) if table.is_local(intervention))
        self.reported = frozenset(k for k in self.local if not interventions[k].only_writes)
        self.vectors = tuple(sorted({digest for k in self.local for digest in interventions[k].vectors}))
        self.by_position = any(i.per_position for i in interventions)
        self._by_token = any(i.positions.needs_token_ids for i in interventions)
        self._active: dict[int, tuple[int, ...]] = {}
        self._programs: dict[int, tuple[ProgramIdentity, list[ActiveIntervention]]] = {}

    def active(self, code: int) -> tuple[int, ...]:
        """Return the indices of the interventions that apply at positions with `code`."""
        active = self._active.get(code)
        if active is None:
            active = self._active[code] = tuple(
                k for k, (_, _, bit) in enumerate(self.interventions) if code >> bit & 1
            )
        return active

    def varies(self, code: int) -> bool:
        """Return whether what is done with `code` also depends on the position or its token."""
        if not (self.by_position or self._by_token):
            return False
        active = [self.interventions[k][0] for k in self.active(code)]
        return any(i.per_position or i.positions.needs_token_ids for i in active)

    def program(self, code: int) -> tuple[ProgramIdentity, list[ActiveIntervention]]:
        """Return what is done at positions with `code`, if it is the same at all of them."""
        program = self._programs.get(code)
        if program is None:
            active = [ActiveIntervention(*self.interventions[k][:2], -1) for k in self.active(code)]
            program = self._programs[code] = tuple((digest, -1) for _, digest, _ in active), active
        return program

    def program_at(self, code: int, position: int, prompt_len: int) -> tuple[ProgramIdentity, list[ActiveIntervention]]:
        """Return what is done at one position with `code`."""
        active = []
        for k in self.active(code):
            intervention, digest, _ = self.interventions[k]
            rank = -1
            if intervention.per_position:
                rank = intervention.positions.rank(position, prompt_len)
                if not intervention.of_position(rank):
                    continue
            active.append(ActiveIntervention(intervention, digest, rank))
        return tuple((digest, rank) for _, digest, rank in active), active


@dataclass
class SteeredRequest:
    """A live request's interventions."""

    request_id: str
    endpoint: str
    selectors: Selectors
    recipe: SteeringRecipe
    keys: SteeredKeys  # what its keys in the prefix cache are made of
    vectors: tuple[str, ...]  # digests of the vectors that it holds
    entered: bool = False  # whether its first position computed here is known, and those before it reported
    # programs that it holds: identity -> (key, number)
    programs: dict[ProgramIdentity, tuple[object, int]] = field(default_factory=dict)
    # indices of interventions -> number under which the reader knows them
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)
    # code -> (group, program), for codes where neither depends on the position
    by_code: dict[int, tuple[int, int]] = field(default_factory=dict)
    scored: ScoredRequest | None = None  # its probes; None if none reads at this worker's taps


class SteeringPlanner:
    """Plans what steered requests change.

    Args:
        reports: whether this worker reports what was steered; one per tensor-parallel group does.

    Attributes:
        unsteered_kv: blocks in the prefix cache that were not steered as their keys say.
    """

    def __init__(self, table: ProgramTable, row_seqs: RowSequences, scores: ScorePlanner, reports: bool = True) -> None:
        self.table, self._row_seqs, self.scores = table, row_seqs, scores
        self._reports = reports
        self.unsteered_kv = UnsteeredKV()
        self._group_numbers = itertools.count()
        self._recipes: IdentityCache[tuple[ResolvedIntervention, ...], SteeringRecipe] = IdentityCache(
            lambda interventions: SteeringRecipe(interventions, self.table)
        )

    def join(
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
    ) -> SteeredRequest:
        """Return a request's steering, which holds its vectors until it leaves.

        `prompt_ids` is None if only the device knows them; `fetch` returns missing vectors by digest; `salt` is of its
        keys in the prefix cache; `own_from`: see `cache_keys.own_from`; `steps`: see `EngineSpec.steps`, by default
        those of `scoring`, or the interventions; `replay`: see `CacheKeys`. Raises WeirError if the tables cannot hold
        it.
        """
        interventions = tuple(interventions)
        if steps is None:
            steps = interventions if scoring is None else scoring.steps
        is_cached = sum(len(i.instructions) for i in steps) <= MOST_CACHED
        recipe = self._recipes[steps] if is_cached else SteeringRecipe(steps, self.table)
        selectors = recipe.choice.of(prompt_len, prompt_ids)
        keys = SteeredKeys(interventions, prompt_len, prompt_ids, salt, own_from, replay)
        scores = None if scoring is None else self.scores.recipe(scoring, is_cached)
        vectors = recipe.vectors if scores is None else tuple({*recipe.vectors, *scores.vectors})
        self.table.hold_vectors(vectors, fetch)
        request = SteeredRequest(request_id, endpoint, selectors, recipe, keys, vectors)
        if scores is not None and scores.reads:
            try:
                request.scored = self.scores.join(request_id, endpoint, scores)
            except WeirError:
                self.table.release_vectors(vectors)
                raise
        return request

    def leave(self, request: SteeredRequest) -> None:
        """Release what a request holds."""
        for key, _ in request.programs.values():
            self.table.release(key)
        self.table.release_vectors(request.vectors)
        if request.scored is not None:
            self.scores.leave(request.scored)

    def plan(
        self,
        builder: PlanBuilder,
        request: SteeredRequest,
        endpoint: int,
        first: int,
        start: int,
        count: int,
        behind: int = 0,
    ) -> None:
        """Plan a request's `count` tokens: positions from `start`, tokens of the step from `first`.

        Positions may be up to `behind` less than planned, if they are generated. Where that matters, the device chooses
        the programs. Raises WeirError if it cannot be steered as asked.
        """
        selectors, by_position = request.selectors, request.recipe.by_position
        end, offset = start + count, first - start
        codes = selectors.codes(np.arange(start - behind, end)) if behind else None
        if codes is None or ((codes == codes[0]).all() and not by_position):
            codes, behind = None, 0
        if not request.entered and start:
            self._report_cached(builder, request, endpoint, start - behind)
        request.entered = True
        if request.scored is not None:
            self.scores.plan(builder.scores, request.scored, selectors, endpoint, first, start, count, behind)
        if codes is not None:
            self._plan_by_position(builder, request, endpoint, first, np.arange(start - behind, end), codes, count)
            return
        runs = None if by_position else selectors.runs(start, end)
        if runs is None:
            self._plan_scattered(builder, request, endpoint, offset, np.arange(start, end))
            return
        for code, run_start, run_end in runs:
            group, program = self.group_and_program(request, code)
            if group >= 0:
                builder.steer_run(endpoint, group, offset + run_start, run_start, run_end - run_start)
            builder.programs[offset + run_start : offset + run_end] = program

    def _plan_by_position(
        self,
        builder: PlanBuilder,
        request: SteeredRequest,
        endpoint: int,
        first: int,
        positions: np.ndarray,
        codes: np.ndarray,
        count: int,
    ) -> None:
        """Plan `count` tokens of the step from `first` on, which are at some of these positions with these codes."""
        programs = np.full(len(positions), -1, np.int32)
        for k, (position, code) in enumerate(zip(positions.tolist(), codes.tolist(), strict=True)):
            if any(code >> bit & 1 for bit in request.selectors.by_token):
                raise WeirError(
                    "what is done to a token cannot depend on both its position and its id", "interventions"
                )
            programs[k] = self.program(request, code, position) if code else -1
        for code in map(int, distinct(codes)):
            group = self._group(request, code)
            if group >= 0:  # a position that is not reached yet will be steered likewise
                builder.steer_some(endpoint, group, positions[codes == code])
        tokens = np.arange(first, first + count)
        builder.programs_by_position.append(ProgramsByPosition(tokens, int(positions[0]), programs))

    def _report_cached(self, builder: PlanBuilder, request: SteeredRequest, endpoint: int, start: int) -> None:
        """Report positions before `start`, whose KV comes from the prefix cache.

        By its cache keys, that KV was steered as this request asks. Raises WeirError if it may come from a request that
        failed before it was steered.
        """
        if self.unsteered_kv.may_reach(request.keys, start):
            raise WeirError(
                "the prefix cache may hold tokens of a request with the same steering that failed before it was "
                "steered, and this request would use them; send it again",
                "interventions",
            )
        positions = np.arange(start)
        codes = request.selectors.codes(positions)
        for code in map(int, distinct(codes)):
            group = self._group(request, code)
            if group >= 0:
                builder.steer_some(endpoint, group, positions[codes == code])

    def _plan_scattered(
        self, builder: PlanBuilder, request: SteeredRequest, endpoint: int, offset: int, positions: np.ndarray
    ) -> None:
        """Plan any positions (tokens ``offset + positions``); programs may depend on these."""
        selectors = request.selectors
        codes = selectors.codes(positions)
        for code in map(int, distinct(codes)):
            steered = positions[codes == code]
            group = self._group(request, code)
            if group >= 0:
                builder.steer_some(endpoint, group, steered, offset)
            parts = [(steered, -1)]
            if any(request.recipe.interventions[k][0].per_position for k in request.recipe.active(code)):
                parts = [(steered[k : k + 1], position) for k, position in enumerate(steered.tolist())]
            open_bits = [bit for bit in selectors.by_token if code >> bit & 1]
            for part, position in parts:
                builder.programs[offset + part] = self.program(request, code, position)
                # The host does not know the ids of generated tokens.
                generated = part[part >= selectors.prompt_len]
                if open_bits and len(generated):
                    choice = self._programs_by_token(request, code, open_bits, offset + generated, position)
                    builder.programs_by_token.append(choice)

    def group_and_program(self, request: SteeredRequest, code: int) -> tuple[int, int]:
        """Return group and program, -1 for none, of all tokens with `code`, which do not depend on the position."""
        found = request.by_code.get(code)
        if found is None:
            found = request.by_code[code] = self._group(request, code), self.program(request, code)
        return found

    def _group(self, request: SteeredRequest, code: int) -> int:
        """Return the number of the reported interventions at positions with `code`, or -1."""
        if not self._reports:
            return -1
        reported = request.recipe.active(code)
        if len(request.recipe.reported) < len(request.recipe.interventions):
            reported = tuple(k for k in reported if k in request.recipe.reported)
        if not reported:
            return -1
        group = request.groups.get(reported)
        if group is None:
            group = request.groups[reported] = next(self._group_numbers)
            layout_update = self._row_seqs.layout_update_for(request.endpoint)
            layout_update.groups.append(messages.GroupDefined(group, request.request_id, list(reported)))
        return group

    def program(self, request: SteeredRequest, code: int, position: int = -1) -> int:
        """Return the program of tokens with `code`, the bits of their selectors; -1 for none.

        `position` is needed if it has interventions with an instruction for each position. Raises WeirError if the
        tables are full.
        """
        recipe = request.recipe
        if recipe.by_position:
            identity, active = recipe.program_at(code, position, request.selectors.prompt_len)
        else:
            identity, active = recipe.program(code)
        if not active:
            return -1
        held = request.programs.get(identity)
        if held is None:
            held = request.programs[identity] = self.table.hold(active)
        return held[1]

    def _programs_by_token(
        self, request: SteeredRequest, code: int, open_bits: list[int], tokens: np.ndarray, position: int
    ) -> ProgramsByToken:
        """Return the programs for `tokens` with `code`; `open_bits` depend on the token's id."""
        selectors = [request.selectors.distinct[bit] for bit in open_bits]
        programs = []
        for combination in range(1 << len(open_bits)):
            actual_code = code
            for j, (bit, selector) in enumerate(zip(open_bits, selectors, strict=True)):
                is_in_set = bool(combination >> j & 1)
                if is_in_set == (selector.kind == "not_token_ids"):
                    actual_code &= ~(1 << bit)
            programs.append(self.program(request, actual_code, position) if actual_code else -1)
        token_sets = tuple(selector.numbers for selector in selectors)
        return ProgramsByToken(tokens, token_sets, np.asarray(programs, np.int32))
