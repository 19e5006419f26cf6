"""KV that failed requests left in the prefix cache, unsteered but under keys of steered blocks.

Once its reader learns of the failure, it uses other keys (see `RowStore.salt`). Requests already on
their way by then, and those of other processes, are checked against what is kept here.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_weir.core.cache_keys import CacheKeys
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.replay import ReplayRows

MOST_FAILED = 256
"""Failed requests that are remembered one by one."""


@dataclass(frozen=True)
class SteeredKeys:
    """What the prefix-cache keys of a steered request are made of.

    `salt`: see `RowStore.salt`; `own_from`: see `cache_keys.own_from`; `replay`: see `CacheKeys`.
    """

    interventions: tuple[ResolvedIntervention, ...]
    prompt_len: int
    prompt_ids: Sequence[int] | None
    salt: str = ""
    own_from: int | None = None
    replay: ReplayRows | None = None

    @property
    def changes(self) -> bool:
        """Whether anything is done that the keys tell of."""
        return bool(self.interventions) or self.replay is not None

    @functools.cached_property
    def cache_keys(self) -> CacheKeys:
        """The same as in the scheduler, but for what stands for gated interventions: no two requests share that."""
        return CacheKeys(self.interventions, self.prompt_len, self.own_from, self.replay)

    @functools.cached_property
    def depends_on_tokens(self) -> bool:
        """Whether what is done at a position depends on its token."""
        return any(i.positions.needs_token_ids for i in self.interventions)

    def token_at(self, position: int) -> int | None:
        """Return the token at a position, None where only the device knows it."""
        return self.prompt_ids[position] if self.prompt_ids is not None and position < self.prompt_len else None


class UnsteeredKV:
    """The requests that failed, and from where on they were not steered."""

    def __init__(self) -> None:
        self._failed: deque[tuple[SteeredKeys, int]] = deque()
        self._forgot_unsalted = False

    def add(self, keys: SteeredKeys, start: int) -> None:
        """Note that a request failed: it was not steered from position `start` on."""
        self._failed.append((keys, start))
        if len(self._failed) > MOST_FAILED:
            # Forgetting a salted failure is safe: its process has moved on to another salt. But
            # every process starts without a salt, so an unsalted failure can still be hit.
            forgotten, _ = self._failed.popleft()
            self._forgot_unsalted |= not forgotten.salt

    def may_reach(self, keys: SteeredKeys, end: int) -> bool:
        """Return whether a request with `end` cached positions may be given KV of a failed one."""
        if self._forgot_unsalted and not keys.salt:
            return True
        return any(
            failed.salt == keys.salt and _shares_unsteered(failed, start, keys, end) for failed, start in self._failed
        )


def _shares_unsteered(failed: SteeredKeys, start: int, keys: SteeredKeys, end: int) -> bool:
    """Return whether the requests share a cached position at which `failed` missed its steering.

    `failed` was not steered from position `start` on. Compare positions up to `end` (not included),
    and stop at the first whose keys differ.
    """
    for position in range(end if start < end else 0):
        known_tokens = [t for t in (keys.token_at(position), failed.token_at(position)) if t is not None]
        token = known_tokens[:1] or [-1]
        steering = keys.cache_keys.of_block(position, token)
        if known_tokens[1:] not in ([], token) or steering != failed.cache_keys.of_block(position, token):
            return False
        if position >= start and (steering is not None or (not known_tokens and keys.depends_on_tokens)):
            return True
    return False
