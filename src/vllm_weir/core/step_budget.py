"""Step budgets: how many tokens a step may hold so that what it records has room.

Reads only the `EngineRequest` of a request, so every bound is known before the engine computes
anything.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.schema.engine_spec import EngineRequest
from vllm_weir.schema.positions import ENDLESS
from vllm_weir.schema.rows import GROUP


class _ReducedPrompt(NamedTuple):
    """The positions of a request whose prompt's rows are reduced."""

    rows_per_group: int  # ring rows of a group of positions
    first: int  # the first wanted position
    last: int  # the last wanted position of the prompt


class StepBudget:
    """A bound on a step's tokens, such that what the step records has room.

    Args:
        ring_rows: rows that the ring holds.
        host_rows: rows that one step may take of the host buffer.
        streams_above: steps of more tokens than this leave the ring band by band; None if none do.
        max_requests: requests that a step can have.
        max_chunk: the most tokens of one prompt in a step; 0 for no such bound.
    """

    def __init__(
        self,
        ring_rows: int,
        host_rows: int,
        streams_above: int | None = None,
        max_requests: int = ENDLESS,
        max_chunk: int = 0,
    ) -> None:
        self._ring_rows, self._host_rows, self._streams_above = ring_rows, host_rows, streams_above
        self._max_requests, self._max_chunk = max_requests, max_chunk
        self._token_rows: dict[str, int] = {}
        """Request -> rows that one of its tokens gives, at most."""
        self._tap_rows: dict[str, int] = {}
        """Request -> rows that one of its tokens gives at one tap, at most."""
        self._row_tokens: dict[str, int] = {}
        """Request -> tokens that give rows, at most."""
        self._reduced: dict[str, _ReducedPrompt] = {}
        self._max_token_rows = self._max_tap_rows = self._total_row_tokens = 0
        self._stale = False

    def join(self, request_id: str, engine_request: EngineRequest) -> None:
        """Add a capturing request that has entered the scheduler."""
        row_tokens = engine_request.max_row_tokens
        self._row_tokens[request_id] = ENDLESS if row_tokens is None else row_tokens
        token_rows = self._token_rows[request_id] = 0 if row_tokens == 0 else engine_request.rows_per_token
        self._tap_rows[request_id] = min(token_rows, engine_request.rows_per_tap)
        if engine_request.last_reduced is not None:
            self._reduced[request_id] = _ReducedPrompt(
                engine_request.rows_per_group, engine_request.first_position or 0, engine_request.last_reduced
            )
        self._stale = True

    def _measure(self) -> None:
        self._max_token_rows = max(self._token_rows.values(), default=0)
        self._max_tap_rows = max(self._tap_rows.values(), default=0)
        row_tokens = list(self._row_tokens.values())
        if len(row_tokens) > self._max_requests:
            row_tokens = heapq.nlargest(self._max_requests, row_tokens)
        self._total_row_tokens = min(sum(row_tokens), ENDLESS)

    def tokens(self, live: Mapping[str, Any], limit: int) -> int:
        """Return how many tokens the coming step may hold, at most `limit`; forget requests that are not `live`."""
        if not self._token_rows:
            return limit
        if not self._token_rows.keys() <= live.keys():
            for by_request in (self._token_rows, self._tap_rows, self._row_tokens, self._reduced):
                for request_id in by_request.keys() - live.keys():
                    del by_request[request_id]
            self._stale = True
        if self._stale:
            self._measure()
            self._stale = False
        group_rows = self._group_rows(live)
        if self._fits(limit, group_rows):
            return limit
        return max(1, bisect_left(range(1, limit), True, key=lambda tokens: not self._fits(tokens, group_rows)))

    def _fits(self, tokens: int, group_rows: Callable[[int], int]) -> bool:
        if min(tokens, self._total_row_tokens) * self._max_token_rows > self._host_rows:
            return False
        if self._fits_ring(tokens, self._max_token_rows, group_rows):
            return True
        above = self._streams_above
        return (
            above is not None
            and tokens > above
            and self._fits_ring(above, self._max_token_rows, group_rows)
            and self._fits_ring(tokens, self._max_tap_rows, group_rows)
        )

    def _fits_ring(self, tokens: int, rows_per_token: int, group_rows: Callable[[int], int]) -> bool:
        return min(tokens, self._total_row_tokens) * rows_per_token + group_rows(tokens) <= self._ring_rows

    def _group_rows(self, live: Mapping[str, Any]) -> Callable[[int], int]:
        """Return a function of a step's tokens: the ring rows that reduced groups can take."""
        if not self._reduced:
            return lambda tokens: 0
        remaining, resumed = [], 0
        for request_id, (_, first, last) in self._reduced.items():
            computed = max(getattr(live[request_id], "num_computed_tokens", 0), first)
            if computed <= last:
                remaining.append(last + 1 - computed)
                resumed += computed > 0
        if not remaining:
            return lambda tokens: 0
        remaining.sort()
        tokens_of_shortest = np.minimum(remaining, self._max_chunk or ENDLESS).cumsum()
        rows_per_group = max(prompt.rows_per_group for prompt in self._reduced.values())

        def group_rows(tokens: int) -> int:
            # The most groups arise if as many requests as possible share the step: each with all
            # that is left of its prompt, and a last one with less.
            whole = int(np.searchsorted(tokens_of_shortest, tokens, "right"))
            requests = min(whole + 1, len(remaining), self._max_requests)
            # Each request begins a group, and a resumed one may begin in the middle of one.
            return rows_per_group * (tokens // GROUP + requests + min(requests, resumed))

        return group_rows
