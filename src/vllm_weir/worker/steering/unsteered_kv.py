"""What requests that failed have left in the prefix cache: KV under the keys of steering that was not done.

Their readers ask under other keys once they know (see `RowStore.salt`). Requests that were on their way by then, and
those of other processes, are compared with what is kept here.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_weir.core.cache_keys import CacheKeys
from vllm_weir.schema.instructions import ResolvedIntervention

MOST = 256
"""Requests that are remembered one by one."""


@dataclass(frozen=True)
class SteeredKeys:
    """What the keys of a steered request's KV are made of; `salt`: see `RowStore.salt`."""

    moves: tuple[ResolvedIntervention, ...]
    prompt_len: int
    prompt_ids: Sequence[int] | None
    salt: str = ""

    @functools.cached_property
    def keys(self) -> CacheKeys:
        """The same as in the scheduler."""
        return CacheKeys(self.moves, self.prompt_len)

    @functools.cached_property
    def by_token(self) -> bool:
        """Whether it takes a token to say what is done at a position."""
        return any(m.positions.needs_token_ids for m in self.moves)

    def token(self, position: int) -> int | None:
        """The token at a position, None where only the device knows it."""
        return self.prompt_ids[position] if self.prompt_ids is not None and position < self.prompt_len else None


class UnsteeredKV:
    """What failed requests have left."""

    def __init__(self) -> None:
        self._left: deque[tuple[SteeredKeys, int]] = deque()
        self._forgotten = False

    def add(self, request: SteeredKeys, start: int) -> None:
        """The request failed: from position `start` on it was not steered."""
        self._left.append((request, start))
        if len(self._left) > MOST:
            # A salt belongs to one process, which has taken another since; none is what all processes begin with.
            self._forgotten |= not self._left.popleft()[0].salt

    def reach(self, request: SteeredKeys, end: int) -> bool:
        """Whether any of it may be among the first `end` positions of a request, which came from the cache."""
        if self._forgotten and not request.salt:
            return True
        return any(left.salt == request.salt and _meet(left, start, request, end) for left, start in self._left)


def _meet(left: SteeredKeys, start: int, request: SteeredKeys, end: int) -> bool:
    """Whether keys are equal up to a position before `end` at which `left` was not steered, though it was to be."""
    for position in range(end if start < end else 0):
        known = [t for t in (request.token(position), left.token(position)) if t is not None]
        token = known[:1] or [-1]
        done = request.keys.of_block(position, token)
        if known[1:] not in ([], token) or done != left.keys.of_block(position, token):
            return False
        if position >= start and (done is not None or (not known and request.by_token)):
            return True
    return False
