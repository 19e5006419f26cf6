"""The scheduler's half: cache keys and hit limits, step budgets, and a place to wait while the tables are full.

Reads only the engine wire form of a request: ``first`` (its first wanted position, or None), ``width`` (the most rows
that one of its tokens can give), ``moves`` (its interventions) and ``needs`` (what they need of the tables).
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_weir.spec.interventions import Move
from vllm_weir.spec.sizes import Sizes
from vllm_weir.worker.select import STAGES


def hit_limit(wire: Mapping[str, Any] | None) -> int | None:
    """The most tokens that may come from the prefix cache, or None for no limit."""
    return None if wire is None else wire.get("first")


class CacheKeys:
    """What a steered request adds to the keys of its KV blocks.

    A block's key gets the digest of what happens to the positions in it, and a block's key includes its parent's: so
    it stands for everything done up to the block's end, a block before the first steered position keeps its plain
    key, and requests whose interventions do the same to the same positions share, however they were written down.
    """

    def __init__(self, wire: Mapping[str, Any], prompt_len: int) -> None:
        moves = [Move.from_wire(m) for m in wire["moves"]]
        self._moves = [(m, m.digest) for m in moves]
        self._prompt_len = prompt_len

    def of_block(self, start: int, token_ids: Sequence[int]) -> str | None:
        """Digest for the block of `token_ids` that starts at position `start`; None if nothing is done in it."""
        positions = np.arange(start, start + len(token_ids))
        ids = np.asarray(token_ids)
        effects: list[str] = []
        for move, digest in self._moves:
            chosen = np.flatnonzero(move.positions.mask(positions, self._prompt_len, ids))
            if move.per_position and len(chosen):
                before = int(move.positions.mask(np.arange(start), self._prompt_len).sum())
                done = [(int(c), before + k) for k, c in enumerate(chosen) if before + k < len(move.instructions)]
                done = [(at, rank) for at, rank in done if move.instructions[rank].u]
                if done:
                    effects.append(f"{move.hook}{move.layers}{[(at, move.instructions[rank]) for at, rank in done]}")
            elif len(chosen):
                effects.append(f"{digest}@{chosen.tolist()}")
        return hashlib.sha256("\n".join(effects).encode()).hexdigest() if effects else None


class StepBudget:
    """Bounds a step's tokens so that what it records has room.

    Args:
        ring_rows: rows that the ring holds.
        host_rows: rows that one step may take of the host buffer.
        streams_above: steps of more tokens than this leave the ring tap by tap; None if none do.
    """

    def __init__(self, ring_rows: int, host_rows: int, streams_above: int | None = None) -> None:
        self._ring_rows, self._host_rows, self._streams_above = ring_rows, host_rows, streams_above
        self._widths: dict[str, int] = {}
        self._whole: set[str] = set()
        """Requests whose rows are treated on the device once a step is done: its rows must fit the ring."""

    def join(self, request_id: str, wire: Mapping[str, Any]) -> None:
        """A capturing request has entered the scheduler."""
        self._widths[request_id] = max(1, int(wire.get("width", 1)))
        if wire.get("treatment"):
            self._whole.add(request_id)

    def tokens(self, live: Mapping[str, Any], limit: int) -> int:
        """Tokens that the coming step may hold, at most `limit`; forgets requests that are no longer `live`."""
        if not self._widths:
            return limit
        self._widths = {r: w for r, w in self._widths.items() if r in live}
        self._whole &= self._widths.keys()
        if not self._widths:
            return limit
        width = max(self._widths.values())
        limit = min(limit, self._host_rows // width)
        if limit * width > self._ring_rows and not self._streams(limit, width):
            limit = self._ring_rows // width
        return max(1, limit)

    def _streams(self, tokens: int, width: int) -> bool:
        above = self._streams_above
        return (
            not self._whole
            and above is not None
            and above * width <= self._ring_rows
            and tokens * STAGES <= self._ring_rows
        )


class WaitingRoom:
    """Holds requests back, first come first served, until the device tables have room for what they need."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._vectors: Counter[str] = Counter()
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
        for request_id in [r for r in self._inside if r not in live]:
            digests, programs, nodes = self._inside.pop(request_id)
            self._vectors.subtract(digests)
            self._programs -= programs
            self._nodes -= nodes
        self._vectors += Counter()
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

    def _take(self, request_id: str, needs: Sequence[Any]) -> None:
        digests, programs, nodes = needs
        self._vectors.update(digests)
        self._programs += programs
        self._nodes += nodes
        self._inside[request_id] = needs
