"""`WaitingQueue`: requests wait, first come first served, until the device tables have room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_weir.schema.table_sizes import TableSizes


class WaitingQueue:
    """Holds requests back, first come first served, until the device tables have room for what they need."""

    def __init__(self, sizes: TableSizes) -> None:
        self._sizes = sizes
        self._vectors: dict[str, int] = {}
        self._programs = self._nodes = 0
        self._inside: dict[str, Sequence[Any]] = {}
        self._waiting: OrderedDict[str, tuple[Any, Sequence[Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def ids(self) -> list[str]:
        """Requests that wait, first come first."""
        return list(self._waiting)

    def enter(self, request_id: str, request: Any, needs: Sequence[Any]) -> bool:
        """True if the request may go on; False if it waits here."""
        if not self._waiting and self._fits(needs):
            self._take(request_id, needs)
            return True
        self._waiting[request_id] = (request, needs)
        return False

    def leave(self, request_id: str) -> Any | None:
        """A request waits no longer (it was aborted); returns it, or None if it was not waiting."""
        entry = self._waiting.pop(request_id, None)
        return None if entry is None else entry[0]

    def release(self, live: Mapping[str, Any]) -> list[Any]:
        """Requests that may go on now that those not `live` any more have left, in order."""
        if not self._inside.keys() <= live.keys():
            for request_id in [r for r in self._inside if r not in live]:
                self._give_back(self._inside.pop(request_id))
        out = []
        while self._waiting:
            request_id, (request, needs) = next(iter(self._waiting.items()))
            if not self._fits(needs):
                break
            del self._waiting[request_id]
            self._take(request_id, needs)
            out.append(request)
        return out

    def _fits(self, needs: Sequence[Any]) -> bool:
        digests, programs, nodes = needs
        vectors = len(self._vectors) + sum(d not in self._vectors for d in digests)
        return (
            vectors <= self._sizes.vectors
            and self._programs + programs <= self._sizes.programs
            and self._nodes + nodes <= self._sizes.nodes
        )

    def _give_back(self, needs: Sequence[Any]) -> None:
        digests, programs, nodes = needs
        for digest in digests:
            self._vectors[digest] -= 1
            if not self._vectors[digest]:
                del self._vectors[digest]
        self._programs -= programs
        self._nodes -= nodes

    def _take(self, request_id: str, needs: Sequence[Any]) -> None:
        digests, programs, nodes = needs
        for digest in digests:
            self._vectors[digest] = self._vectors.get(digest, 0) + 1
        self._programs += programs
        self._nodes += nodes
        self._inside[request_id] = needs
