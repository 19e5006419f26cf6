"""Prefix cache: what a request's interventions add to block keys, and where its hits end."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_weir.schema.instructions import ResolvedIntervention


def hit_limit(wire: Mapping[str, Any] | None) -> int | None:
    """The most tokens that may come from the prefix cache, or None for no limit."""
    return None if wire is None else wire.get("first")


class CacheKeys:
    """What a steered request adds to the keys of its KV blocks.

    A block's key gets the digest of what happens to the positions in it, and a block's key includes its parent's: so
    it stands for everything done up to the block's end, a block before the first steered position keeps its plain
    key, and requests whose interventions do the same to the same positions share, however they were written down.
    """

    def __init__(self, moves: Sequence[ResolvedIntervention], prompt_len: int) -> None:
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

    def _scattered(self, move: ResolvedIntervention, start: int, token_ids: Sequence[int]) -> str:
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
