"""Step budgets: how many tokens a step may hold so that what it records has room.

Reads only the engine wire form of a request, see `vllm_weir.frontend.admission.engine_wire.engine_form`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.schema.positions import ENDLESS
from vllm_weir.schema.reductions import GROUP
from vllm_weir.schema.taps import STAGES


class _Folded(NamedTuple):
    """Of a request whose prompt's rows are reduced.

    Attributes:
        cell: ring rows of a group of them.
        first, last: its first wanted position, and the last one of the prompt.
    """

    cell: int
    first: int
    last: int


class StepBudget:
    """Bounds a step's tokens so that what it records has room.

    Args:
        ring_rows: rows that the ring holds.
        host_rows: rows that one step may take of the host buffer.
        streams_above: steps of more tokens than this leave the ring band by band; None if none do.
        most_requests: requests that a step can have.
        chunk: tokens of a prompt that are computed at once at most; 0 for no bound of its own.
    """

    def __init__(
        self,
        ring_rows: int,
        host_rows: int,
        streams_above: int | None = None,
        most_requests: int = ENDLESS,
        chunk: int = 0,
    ) -> None:
        self._ring_rows, self._host_rows, self._streams_above = ring_rows, host_rows, streams_above
        self._most_requests, self._chunk = most_requests, chunk
        self._widths: dict[str, int] = {}
        self._talls: dict[str, int] = {}
        self._few: dict[str, int] = {}
        """Request -> tokens that give rows, at most."""
        self._folded: dict[str, _Folded] = {}
        self._widest = self._tallest = self._lanes = 0
        self._stale = False

    def join(self, request_id: str, wire: Mapping[str, Any]) -> None:
        """A capturing request has entered the scheduler."""
        width = max(1, int(wire.get("width", 1)))
        few = wire.get("few")
        self._few[request_id] = ENDLESS if few is None else int(few)
        self._widths[request_id] = width if self._few[request_id] else 0
        self._talls[request_id] = min(self._widths[request_id], int(wire.get("tall", STAGES)))
        if cell := wire.get("cell"):
            self._folded[request_id] = _Folded(cell, wire["first"] or 0, wire["last"])
        self._stale = True

    def _measure(self) -> None:
        self._widest = max(self._widths.values(), default=0)
        self._tallest = max(self._talls.values(), default=0)
        few = list(self._few.values())
        if len(few) > self._most_requests:
            few = heapq.nlargest(self._most_requests, few)
        self._lanes = min(sum(few), ENDLESS)

    def tokens(self, live: Mapping[str, Any], limit: int) -> int:
        """Tokens that the coming step may hold, at most `limit`; forgets requests that are no longer `live`.

        `live`: vLLM's requests by id.
        """
        if not self._widths:
            return limit
        if not self._widths.keys() <= live.keys():
            for known in (self._widths, self._talls, self._few, self._folded):
                for request_id in known.keys() - live.keys():
                    del known[request_id]
            self._stale = True
        if self._stale:
            self._measure()
            self._stale = False
        if self._widest:
            limit = max(1, min(limit, self._host_rows // self._widest))
        cells = self._cells(live)
        if self._fits(limit, cells):
            return limit
        return max(1, bisect_left(range(1, limit), True, key=lambda tokens: not self._fits(tokens, cells)))

    def _fits(self, tokens: int, cells: Callable[[int], int]) -> bool:
        if self._records(tokens, self._widest, cells):
            return True
        above = self._streams_above
        return (
            above is not None
            and tokens > above
            and self._records(above, self._widest, cells)
            and self._records(tokens, self._tallest, cells)
        )

    def _records(self, tokens: int, width: int, cells: Callable[[int], int]) -> bool:
        return min(tokens, self._lanes) * width + cells(tokens) <= self._ring_rows

    def _cells(self, live: Mapping[str, Any]) -> Callable[[int], int]:
        """Function of a step's tokens: ring rows that groups of them can take."""
        if not self._folded:
            return lambda tokens: 0
        needs, resumed = [], 0
        for request_id, (_, first, last) in self._folded.items():
            computed = max(getattr(live[request_id], "num_computed_tokens", 0), first)
            if computed <= last:
                needs.append(last + 1 - computed)
                resumed += computed > 0
        needs.sort()
        reached = np.minimum(needs, self._chunk or ENDLESS).cumsum()
        cell = max(folded.cell for folded in self._folded.values())

        def cells(tokens: int) -> int:
            # As many requests as possible, each with all that is left of its prompt, and a last one with less.
            requests = min(int(np.searchsorted(reached, tokens, "right")) + 1, len(needs), self._most_requests)
            # Every one begins a group, and one that goes on may begin in the middle of another.
            return cell * (tokens // GROUP + requests + min(requests, resumed)) if needs else 0

        return cells
