"""The prefix cache under Weir: what interventions add to block keys, and where hits end."""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_weir.schema.engine_spec import EngineRequest, EngineSpec
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.replay import ReplayRows


def hit_limit(engine_request: EngineRequest | None) -> int | None:
    """Return the most tokens that may come from the prefix cache, or None for no limit."""
    return None if engine_request is None else engine_request.first_position


def own_from(engine_request: EngineRequest, spec: EngineSpec, prompt_len: int) -> int | None:
    """Return the first position from which no other request can share a block; None if there is none."""
    firsts = engine_request.own_from, spec.gated_from(prompt_len), spec.called_from(prompt_len)
    return min((first for first in firsts if first is not None), default=None)


class CacheKeys:
    """What one request that is steered, or replays routing, adds to the keys of its KV blocks.

    A block's key gets the digest of what is done to the positions in it, and includes the key of
    the block before it. So it stands for everything done up to the block's end; blocks before the
    first steered position keep their plain keys; and requests whose interventions do the same to
    the same positions share blocks, however they are written.

    What a gated intervention does follows from scores that only the device knows, so blocks with
    positions from the first on at which one may act get a key that no other request has. So do those
    from the first position on whose row is given to a user's function without a key of its own, and those
    from an image on whose positions attend both ways, if something acts before its end. What only
    scores rows adds nothing. Experts that routers are made to choose add a digest of those of the block.

    Args:
        interventions: those that change something, in order; steps that only write numbers are passed over.
        prompt_len: tokens of the prompt.
        own_from: see the function of that name.
        replay: the experts that routers are made to choose; None if there are none.
    """

    def __init__(
        self,
        interventions: Sequence[ResolvedIntervention],
        prompt_len: int,
        own_from: int | None = None,
        replay: ReplayRows | None = None,
    ) -> None:
        ungated = [m for m in interventions if not m.only_writes and not m.is_gated]
        self._bounded = [
            (m, None if m.per_position else m.positions.bounds(prompt_len), m.positions.listed(prompt_len))
            for m in ungated
        ]
        """Interventions with their first position and the one after their last, None where they are
        not contiguous, and their positions if these are listed: looked up in each block, however
        many they are."""
        self._prompt_len, self._own_from, self._replay = prompt_len, own_from, replay
        self._own = "" if own_from is None else secrets.token_hex(16)
        """Stands for what other requests cannot know."""

    def of_block(self, start: int, token_ids: Sequence[int]) -> str | None:
        """Return the digest for the block of `token_ids` from position `start`; None if nothing is done in it."""
        effects: list[str] = []
        if self._own_from is not None and start + len(token_ids) > self._own_from:
            effects.append(self._own)
        for intervention, bounds, listed in self._bounded:
            if bounds is None:
                effect = self._scattered(intervention, listed, start, token_ids)
            else:
                first, end = max(bounds[0] - start, 0), min(bounds[1] - start, len(token_ids))
                effect = _effect(intervention.digest, first, end) if first < end else ""
            if effect:
                effects.append(effect)
        if self._replay is not None and (effect := self._replay.of_block(start, len(token_ids))):
            effects.append(effect)
        return _digest(tuple(effects)) if effects else None

    def _scattered(
        self, intervention: ResolvedIntervention, listed: np.ndarray | None, start: int, token_ids: Sequence[int]
    ) -> str:
        """Describe what an intervention does in a block.

        The form is that of `_effect`, so that equal effects have equal descriptions.
        """
        if listed is None:
            positions = np.arange(start, start + len(token_ids))
            selected = np.flatnonzero(intervention.positions.mask(positions, self._prompt_len, np.asarray(token_ids)))
        else:
            earlier, end = np.searchsorted(listed, (start, start + len(token_ids))).tolist()
            selected = listed[earlier:end] - start
        if not len(selected):
            return ""
        if not intervention.per_position:
            return f"{intervention.digest}@{selected.tolist()}"
        # Each selected position of the request undergoes the instructions at its rank.
        if listed is None:
            earlier = int(intervention.positions.mask(np.arange(start), self._prompt_len).sum())
        of_offset = ((offset, intervention.of_position(k)) for k, offset in enumerate(selected.tolist(), earlier))
        done = [(offset, instructions) for offset, instructions in of_offset if instructions]
        return f"{intervention.hook}{intervention.layers}{done}" if done else ""


@functools.lru_cache(maxsize=4096)
def _effect(digest: str, first: int, end: int) -> str:
    return f"{digest}@{list(range(first, end))}"


@functools.lru_cache(maxsize=4096)
def _digest(effects: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(effects).encode()).hexdigest()


@dataclass(frozen=True)
class ExternalKV:
    """What one request may take from a KV connector, and leave there.

    Attributes:
        limit: the most tokens whose keys and values may be loaded, as their rows are not wanted;
            None for no limit.
        changed: whether interventions, or a replay, may change the keys and values of the request.
        prompt_changed: whether they may change those of its prompt.
    """

    limit: int | None = None
    changed: bool = False
    prompt_changed: bool = False

    @classmethod
    def of(cls, request: EngineRequest, prompt_ids: Sequence[int]) -> ExternalKV:
        """Return what a request with these prompt tokens may take and leave."""
        limit = hit_limit(request)
        if request.table_needs is None:
            return cls(limit)
        spec, prompt_len = EngineSpec.from_wire(request.spec), len(prompt_ids)
        if not spec.moves and request.replay is None:
            return cls(limit)
        keys = CacheKeys(spec.moves, prompt_len, own_from(request, spec, prompt_len), request.replay)
        return cls(limit, True, keys.of_block(0, prompt_ids) is not None)

    def allows(self, computed: int, loaded: int, num_tokens: int, is_async: bool) -> bool:
        """Return whether keys and values of `loaded` tokens may be loaded after `computed` ones.

        Args:
            computed: tokens at hand.
            loaded: tokens that would be loaded.
            num_tokens: tokens of the request so far.
            is_async: whether they are loaded between steps. If that is all of them, vLLM computes
                the last one again.
        """
        end = computed + loaded
        if is_async and end >= num_tokens:
            end = num_tokens - 1
        return self.limit is None or end <= self.limit
