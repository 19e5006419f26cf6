"""The scheduler's half: cache keys and hit limits, step budgets, and a place to wait while the tables are full.

Reads only the engine wire form of a request, see `vllm_weir.frontend.admit.engine_form`.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.spec.interventions import Move
from vllm_weir.spec.positions import ENDLESS
from vllm_weir.spec.sizes import Sizes
from vllm_weir.worker.folds import GROUP
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
