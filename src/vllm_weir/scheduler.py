"""The scheduler's half: cache keys and hit limits, step budgets, and a place to wait while the tables are full.

Reads only the engine wire form of a request, see `vllm_weir.frontend.admit.engine_form`.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
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

    def __init__(self, moves: Sequence[Move], prompt_len: int) -> None:
        self._moves = [(m, None if m.per_position else m.positions.bounds(prompt_len)) for m in moves]
        self._prompt_len = prompt_len

    def of_block(self, start: int, token_ids: Sequence[int]) -> str | None:
        """Digest for the block of `token_ids` that starts at position `start`; None if nothing is done in it."""
        effects: list[str] = []
        for move, bounds in self._moves:
            if bounds is None:
                effect = self._scattered(move, start, token_ids)
            else:
                effect = _effect(move.digest, max(bounds[0] - start, 0), min(bounds[1] - start, len(token_ids)))
            if effect:
                effects.append(effect)
        return _digest(tuple(effects)) if effects else None

    def _scattered(self, move: Move, start: int, token_ids: Sequence[int]) -> str:
        """What a move does in a block; the form is that of `_effect`, so that equal effects share."""
        positions = np.arange(start, start + len(token_ids))
        chosen = np.flatnonzero(move.positions.mask(positions, self._prompt_len, np.asarray(token_ids)))
        if not len(chosen):
            return ""
        if not move.per_position:
            return f"{move.digest}@{chosen.tolist()}"
        before = int(move.positions.mask(np.arange(start), self._prompt_len).sum())
        done = [(int(c), before + k) for k, c in enumerate(chosen) if before + k < len(move.instructions)]
        done = [(at, rank) for at, rank in done if move.instructions[rank].u]
        return f"{move.hook}{move.layers}{[(at, move.instructions[rank]) for at, rank in done]}" if done else ""


@functools.lru_cache(maxsize=4096)
def _effect(digest: str, first: int, end: int) -> str:
    """What a move does at the `first` to `end`-th position of a block."""
    return f"{digest}@{list(range(first, end))}" if first < end else ""


@functools.lru_cache(maxsize=4096)
def _digest(effects: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(effects).encode()).hexdigest()


class StepBudget:
    """Bounds a step's tokens so that what it records has room.

    Args:
        ring_rows: rows that the ring holds.
        host_rows: rows that one step may take of the host buffer.
        streams_above: steps of more tokens than this leave the ring band by band; None if none do.
    """

    def __init__(self, ring_rows: int, host_rows: int, streams_above: int | None = None) -> None:
        self._ring_rows, self._host_rows, self._streams_above = ring_rows, host_rows, streams_above
        self._widths: dict[str, int] = {}
        self._talls: dict[str, int] = {}
        self._widest = self._tallest = 0
        self._whole: set[str] = set()
        """Requests of whose rows something is made once a step is done: all of its rows must fit the ring."""

    def join(self, request_id: str, wire: Mapping[str, Any]) -> None:
        """A capturing request has entered the scheduler."""
        self._widths[request_id] = width = max(1, int(wire.get("width", 1)))
        self._talls[request_id] = tall = min(width, int(wire.get("tall", STAGES)))
        self._widest, self._tallest = max(self._widest, width), max(self._tallest, tall)
        if wire.get("whole"):
            self._whole.add(request_id)

    def tokens(self, live: Mapping[str, Any], limit: int) -> int:
        """Tokens that the coming step may hold, at most `limit`; forgets requests that are no longer `live`."""
        if not self._widths:
            return limit
        if not self._widths.keys() <= live.keys():
            self._widths = {r: w for r, w in self._widths.items() if r in live}
            self._talls = {r: n for r, n in self._talls.items() if r in live}
            self._widest = max(self._widths.values(), default=0)
            self._tallest = max(self._talls.values(), default=0)
            self._whole &= self._widths.keys()
            if not self._widths:
                return limit
        width = self._widest
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
            and tokens * self._tallest <= self._ring_rows
        )


class WaitingRoom:
    """Holds requests back, first come first served, until the device tables have room for what they need."""

    def __init__(self, sizes: Sizes) -> None:
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
