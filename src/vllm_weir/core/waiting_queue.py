"""`WaitingQueue`: steered and scored requests that wait until the device tables have room for them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import Any

from vllm_weir.schema.engine_spec import TableNeeds
from vllm_weir.schema.engine_traits import TableSizes


class WaitingQueue:
    """Steered and scored requests, held back until the device tables have room.

    The lowest rank goes first; of equal ranks, who came first.
    """

    def __init__(self, sizes: TableSizes) -> None:
        self._sizes = sizes
        self._vector_users: dict[str, int] = {}
        """Digest -> admitted requests that use the vector."""
        self._vector_rows = self._programs = self._instructions = 0
        self._probes = self._gates = self._states = 0
        self._admitted: dict[str, TableNeeds] = {}
        self._waiting: dict[str, tuple[Any, TableNeeds, int]] = {}
        """Request -> itself, its needs and its number in `_order`."""
        self._order: list[tuple[tuple[float, ...], int, str]] = []
        """Heap of (rank, number, request); also of some that have left."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def ids(self) -> list[str]:
        return list(self._waiting)

    def enter(self, request_id: str, request: Any, needs: TableNeeds, rank: tuple[float, ...] = ()) -> bool:
        """Return True if the request may go on; otherwise keep it waiting here and return False."""
        first = self._first()
        if (first is None or rank < self._order[0][0]) and self._fits(needs):
            self._reserve(request_id, needs)
            return True
        number = next(self._numbers)
        self._waiting[request_id] = (request, needs, number)
        heapq.heappush(self._order, (rank, number, request_id))
        return False

    def leave(self, request_id: str) -> Any | None:
        entry = self._waiting.pop(request_id, None)
        return None if entry is None else entry[0]

    def release(self, live: Mapping[str, Any]) -> list[Any]:
        """Return, in order, the requests that have room, after forgetting those that are not `live`."""
        if not self._admitted.keys() <= live.keys():
            for request_id in [r for r in self._admitted if r not in live]:
                self._free(self._admitted.pop(request_id))
        released = []
        while (first := self._first()) is not None:
            request, needs, _ = self._waiting[first]
            if not self._fits(needs):
                break
            del self._waiting[first]
            self._reserve(first, needs)
            released.append(request)
        return released

    def _first(self) -> str | None:
        """Return the id of the request that is next; None if none waits."""
        while self._order:
            _, number, request_id = self._order[0]
            waiting = self._waiting.get(request_id)
            if waiting is not None and waiting[2] == number:
                return request_id
            heapq.heappop(self._order)
        return None

    def _fits(self, needs: TableNeeds) -> bool:
        added = sum(needs.wide.get(digest, 1) for digest in needs.vectors if digest not in self._vector_users)
        return (
            self._vector_rows + added <= self._sizes.vectors
            and self._programs + needs.programs <= self._sizes.programs
            and self._instructions + needs.instructions <= self._sizes.nodes
            and self._probes + needs.probes <= self._sizes.probes
            and self._gates + needs.gates <= self._sizes.gates
            and self._states + needs.states <= self._sizes.states
        )

    def _free(self, needs: TableNeeds) -> None:
        for digest in needs.vectors:
            self._vector_users[digest] -= 1
            if not self._vector_users[digest]:
                del self._vector_users[digest]
                self._vector_rows -= needs.wide.get(digest, 1)
        self._count(needs, -1)

    def _reserve(self, request_id: str, needs: TableNeeds) -> None:
        for digest in needs.vectors:
            users = self._vector_users.get(digest, 0)
            self._vector_users[digest] = users + 1
            if not users:
                self._vector_rows += needs.wide.get(digest, 1)
        self._count(needs, 1)
        self._admitted[request_id] = needs

    def _count(self, needs: TableNeeds, sign: int) -> None:
        """Add (1) or subtract (-1) what no two requests share."""
        self._programs += sign * needs.programs
        self._instructions += sign * needs.instructions
        self._probes += sign * needs.probes
        self._gates += sign * needs.gates
        self._states += sign * needs.states
