"""Which experts the routers have to choose for each token of a step. Pure numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vllm_weir.schema.replay import ReplayRows
from vllm_weir.schema.routing import RoutedBlocks

FREE = -1
"""In rows of experts: the router chooses itself."""
NOWHERE = -1 << 40
"""Base of a token for which nothing is replayed."""


class HeldReplay(NamedTuple):
    """What a live request replays on this worker.

    Attributes:
        start: the first position.
        experts: int16 [positions, blocks, top_k].
    """

    start: int
    experts: np.ndarray

    @classmethod
    def of(cls, rows: ReplayRows, blocks: RoutedBlocks) -> HeldReplay:
        """Return the experts of a worker's blocks."""
        return cls(rows.start, rows.ids[:, list(blocks.blocks)].astype(np.int16))

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + len(self.experts)

    def between(self, start: int, stop: int) -> np.ndarray:
        """Return the experts of positions from `start` on, `FREE` where nothing is replayed."""
        first, end = max(start, self.start), min(stop, self.stop)
        covered = self.experts[first - self.start : end - self.start]
        if len(covered) == stop - start:
            return covered
        found = np.full((stop - start, *self.experts.shape[1:]), FREE, np.int16)
        found[first - start : end - start] = covered
        return found


class ReplayedStep(NamedTuple):
    """The experts of a step's tokens.

    Attributes:
        rows: int16 [rows, blocks, top_k], `FREE` where the router chooses; row 0 is free.
        bases: int64 [tokens]: a token's row is its base plus its position, or row 0 if that is negative.
    """

    rows: np.ndarray
    bases: np.ndarray


def replayed_step(
    held: Mapping[str, HeldReplay],
    blocks: RoutedBlocks,
    request_ids: Sequence[str],
    num_tokens: Sequence[int],
    num_computed: Sequence[int],
    uncertainty: int = 0,
) -> ReplayedStep | None:
    """Return the experts of a step's tokens; None if nothing is replayed in it.

    Lists are by request, in batch order: its tokens, and the position of the first of them, which may really be up to
    `uncertainty` less.
    """
    counts = np.asarray(num_tokens, np.int64)
    firsts = np.cumsum(counts) - counts
    rows = [np.full((1, len(blocks.blocks), blocks.top_k), FREE, np.int16)]
    bases = np.full(int(counts.sum()), NOWHERE, np.int64)
    length = 1
    places = zip(firsts.tolist(), counts.tolist(), np.asarray(num_computed).tolist(), strict=True)
    for request_id, (token, count, planned) in zip(request_ids, places, strict=True):
        replay = held.get(request_id)
        if replay is None:
            continue
        start, stop = max(0, planned - uncertainty), planned + count
        if start >= replay.stop or stop <= replay.start:
            continue
        bases[token : token + count] = length - start
        rows.append(replay.between(start, stop))
        length += stop - start
    return None if length == 1 else ReplayedStep(np.concatenate(rows), bases)
