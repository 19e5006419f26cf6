"""Steering: which program each steered token undergoes, planned one request after the other. Pure numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.selectors import Selectors, SelectorSet, distinct
from vllm_weir.util.identity_cache import IdentityCache
from vllm_weir.worker.planning.plan_builder import PlanBuilder
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.step_plan import TokenLookup
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.steering.unsteered_kv import SteeredKeys, UnsteeredKV

FEW = 64
"""Instructions of moves whose recipe is remembered: there are up to `known.MOST` such."""


class SteeringRecipe:
    """What requests with the same moves have in common on this worker.

    Attributes:
        choice: the distinct selectors of the moves.
        moves: (move, digest, bit of its selector), in the order in which they apply.
        local: moves with a site at this worker's taps: those it can vouch for.
        vectors: what they need, by digest.
        by_position: whether a move has an instruction for each position.
    """

    def __init__(self, moves: tuple[ResolvedIntervention, ...], table: ProgramTable) -> None:
        bits = {positions: bit for bit, positions in enumerate(dict.fromkeys(m.positions for m in moves))}
        self.choice = SelectorSet(tuple(bits))
        self.moves = [(m, m.digest, bits[m.positions]) for m in moves]
        self.local = frozenset(k for k, m in enumerate(moves) if table.local(m))
        self.vectors = tuple(sorted({d for k in self.local for d in moves[k].vectors}))
        self.by_position = any(m.per_position for m in moves)
        self._by_token = any(m.positions.needs_token_ids for m in moves)
        self._active: dict[int, tuple[int, ...]] = {}
        self._programs: dict[int, tuple[tuple, list[tuple[ResolvedIntervention, str, int]]]] = {}

    def active(self, code: int) -> tuple[int, ...]:
        """The moves that apply at positions with `code`."""
        active = self._active.get(code)
        if active is None:
            active = self._active[code] = tuple(k for k, (_, _, bit) in enumerate(self.moves) if code >> bit & 1)
        return active

    def varies(self, code: int) -> bool:
        """Whether what is done at positions with `code` follows from the position or its token, too."""
        if not (self.by_position or self._by_token):
            return False
        moves = [self.moves[k][0] for k in self.active(code)]
        return any(move.per_position or move.positions.needs_token_ids for move in moves)

    def program(self, code: int) -> tuple[tuple, list[tuple[ResolvedIntervention, str, int]]]:
        """(identity, moves with their digests and ranks) of what is done at all positions with `code`."""
        found = self._programs.get(code)
        if found is None:
            active = [(*self.moves[k][:2], -1) for k in self.active(code)]
            found = self._programs[code] = tuple((digest, -1) for _, digest, _ in active), active
        return found


@dataclass
class SteeredRequest:
    """A live request's moves."""

    request_id: str
    reply: str
    selectors: Selectors
    recipe: SteeringRecipe
    keyed: SteeredKeys
    entered: bool = False
    """Whether it is known from where on its positions are computed here."""
    programs: dict[tuple, tuple[object, int]] = field(default_factory=dict)
    """(digest, rank) of every active move -> (key, number) of a held program."""
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Moves -> number under which the reader knows them."""
    at_code: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Code -> (group, program) at all positions with it, as far as they follow from it."""


class SteeringPlanner:
    """Plans what steerings change.

    Args:
        table: where programs live.
        row_seqs: where readers are told of groups.

    Attributes:
        vouches: whether this worker tells what was steered: one of a tensor-parallel group is enough.
        leftovers: what is in the prefix cache without having been steered as its keys say.
    """

    def __init__(self, table: ProgramTable, row_seqs: RowSequences) -> None:
        self.table, self._row_seqs = table, row_seqs
        self.vouches = True
        self.leftovers = UnsteeredKV()
        self._group_numbers = itertools.count()
        self._recipes: IdentityCache[tuple[ResolvedIntervention, ...], SteeringRecipe] = IdentityCache(
            lambda moves: SteeringRecipe(moves, self.table)
        )

    def join(
        self,
        request_id: str,
        reply: str,
        moves: Sequence[ResolvedIntervention],
        prompt_len: int,
        prompt_ids: Sequence[int] | None,
        fetch: Callable,
        salt: str = "",
    ) -> SteeredRequest:
        """A request's steering; raises WeirError if the tables cannot hold it. `fetch`: digests -> rows; `salt`: of its
        keys in the prefix cache."""
        moves = tuple(moves)
        few = sum(len(m.instructions) for m in moves) <= FEW
        recipe = self._recipes[moves] if few else SteeringRecipe(moves, self.table)
        selectors = recipe.choice.of(prompt_len, prompt_ids)
        self.table.hold_vectors(recipe.vectors, fetch)
        return SteeredRequest(request_id, reply, selectors, recipe, SteeredKeys(moves, prompt_len, prompt_ids, salt))

    def leave(self, steering: SteeredRequest) -> None:
        """The request has left."""
        for key, _ in steering.programs.values():
            self.table.give_back(key)
        self.table.drop_vectors(steering.recipe.vectors)

    def plan(
        self, draft: PlanBuilder, steering: SteeredRequest, reply: int, first: int, start: int, count: int
    ) -> None:
        """The request's `count` tokens from position `start` on, tokens `first`, ... of the step."""
        if not steering.entered and start:
            self._take_over(draft, steering, reply, start)
        steering.entered = True
        runs = None if steering.recipe.by_position else steering.selectors.runs(start, start + count)
        if runs is None:
            self._plan_scattered(draft, steering, reply, first, np.arange(start, start + count))
            return
        for code, a, b in runs:
            group, program = self.at(steering, code)
            if group >= 0:
                draft.steer_run(reply, group, a, b - a)
            draft.programs[first + a - start : first + b - start] = program

    def _take_over(self, draft: PlanBuilder, steering: SteeredRequest, reply: int, start: int) -> None:
        """Positions before `start` come from the prefix cache, where their keys say that they were steered alike."""
        if self.leftovers.reach(steering.keyed, start):
            raise WeirError(
                "what the prefix cache holds under this request's keys may be of a request that failed before it was "
                "steered; send it again",
                "interventions",
            )
        positions = np.arange(start)
        codes = steering.selectors.codes(positions)
        for code in map(int, distinct(codes)):
            group = self.group(steering, code)
            if group >= 0:
                draft.steer_some(reply, group, positions[codes == code])

    def _plan_scattered(
        self, draft: PlanBuilder, steering: SteeredRequest, reply: int, first: int, positions: np.ndarray
    ) -> None:
        """As `plan`, of any positions, of those chosen by token, and with an instruction for each position."""
        selectors = steering.selectors
        codes = selectors.codes(positions)
        for code in map(int, distinct(codes)):
            at = np.flatnonzero(codes == code)
            active = steering.recipe.active(code)
            group = self.group(steering, code)
            if group >= 0:
                draft.steer_some(reply, group, positions[at])
            groups = [(at, -1)]
            if any(steering.recipe.moves[k][0].per_position for k in active):
                groups = [(at[k : k + 1], int(positions[i])) for k, i in enumerate(at)]
            open_bits = [bit for bit in selectors.by_token if code >> bit & 1]
            for some, position in groups:
                draft.programs[first + some] = self.program(steering, code, position)
                unknown = some[positions[some] >= selectors.prompt_len]
                if open_bits and len(unknown):
                    draft.lookups.append(self._lookup(steering, code, open_bits, first + unknown, position))

    def at(self, steering: SteeredRequest, code: int) -> tuple[int, int]:
        """(group, program) of all tokens with `code`, of which that is known to be alike."""
        known = steering.at_code.get(code)
        if known is None:
            known = steering.at_code[code] = self.group(steering, code), self.program(steering, code)
        return known

    def group(self, steering: SteeredRequest, code: int) -> int:
        """The number of the moves at positions with `code` that this worker vouches for, or -1 if there are none."""
        if not self.vouches:
            return -1
        vouched = steering.recipe.active(code)
        if len(steering.recipe.local) < len(steering.recipe.moves):
            vouched = tuple(k for k in vouched if k in steering.recipe.local)
        if not vouched:
            return -1
        group = steering.groups.get(vouched)
        if group is None:
            group = steering.groups[vouched] = next(self._group_numbers)
            layout_updates = self._row_seqs.layout_updates_for(steering.reply)
            layout_updates.groups.append(messages.GroupDefined(group, steering.request_id, list(vouched)))
        return group

    def program(self, steering: SteeredRequest, code: int, position: int = -1) -> int:
        """The program of tokens with `code` (at `position`, if that matters), -1 for none; raises WeirError if the
        tables are full."""
        if steering.recipe.by_position:
            identity, active = self._at(steering, code, position)
        else:
            identity, active = steering.recipe.program(code)
        if not active:
            return -1
        held = steering.programs.get(identity)
        if held is None:
            held = steering.programs[identity] = self.table.take(active)
        return held[1]

    @staticmethod
    def _at(
        steering: SteeredRequest, code: int, position: int
    ) -> tuple[tuple, list[tuple[ResolvedIntervention, str, int]]]:
        """As `SteeringRecipe.program`, at one position."""
        active = []
        for k in steering.recipe.active(code):
            move, digest, _ = steering.recipe.moves[k]
            rank = -1
            if move.per_position:
                rank = move.positions.rank(position, steering.selectors.prompt_len)
                if rank >= len(move.instructions) or not move.instructions[rank].u:
                    continue
            active.append((move, digest, rank))
        return tuple((digest, rank) for _, digest, rank in active), active

    def _lookup(
        self, steering: SteeredRequest, code: int, open_bits: list[int], tokens: np.ndarray, position: int
    ) -> TokenLookup:
        by_token = [steering.selectors.distinct[bit] for bit in open_bits]
        choices = []
        for combination in range(1 << len(open_bits)):
            chosen = code
            for j, (bit, selector) in enumerate(zip(open_bits, by_token, strict=True)):
                inside = bool(combination >> j & 1)
                if inside == (selector.kind == "not_token_ids"):
                    chosen &= ~(1 << bit)
            choices.append(self.program(steering, chosen, position) if chosen else -1)
        sets = tuple(selector.numbers for selector in by_token)
        return TokenLookup(tokens, sets, np.asarray(choices, np.int32))
