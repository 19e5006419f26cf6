"""Which experts the routers have to choose for each token of a step. Pure numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vllm_weir.schema.replay import FREE, ReplayRows
from vllm_weir.schema.routing import RoutedBlocks

NOWHERE = -1 << 40
"""Base of a token for which nothing is replayed."""


class ReplayedStep(NamedTuple):
    """The experts of a step's tokens.

    Attributes:
        rows: int16 [rows, blocks, top_k], `FREE` where the router chooses; row 0 is free.
        bases: int64 [tokens]: a token's row is its base plus its position, or row 0 if that is negative.
    """

    rows: np.ndarray
    bases: np.ndarray


def replayed_step(
    held: Mapping[str, ReplayRows],
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
    for k, request_id in enumerate(request_ids):
        replay = held.get(request_id)
        if replay is None:
            continue
        planned = int(num_computed[k])
        start, stop = max(0, planned - uncertainty), planned + int(counts[k])
        if start >= replay.stop or stop <= replay.start:
            continue
        bases[firsts[k] : firsts[k] + counts[k]] = length - start
        rows.append(replay.between(start, stop, blocks.blocks).astype(np.int16))
        length += stop - start
    return None if length == 1 else ReplayedStep(np.concatenate(rows), bases)
