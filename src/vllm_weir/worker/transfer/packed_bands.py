"""Packs: rows of a streamed step that are sent compressed, gathered on the device band by band."""

from __future__ import annotations

import numpy as np
import torch

from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.step_plan import PACKED, StepPlan
from vllm_weir.worker.transfer.codecs import Codec, Codecs
from vllm_weir.worker.transfer.postprocess import CompressedRecords, pieces_of


class PackGroup:
    """The tokens of a step that share codec and profile.

    Args:
        codec: how their rows are compressed.
        profile: what is recorded of them.
        columns: rows of a token.
        lanes: int64 [n], ascending, where each token's rows stand in a band's part of the ring.
        places: int64 [n], byte of the arena at which each token's records start.
        device: the ring's.
    """

    def __init__(
        self,
        codec: Codec,
        profile: int,
        columns: int,
        lanes: np.ndarray,
        places: np.ndarray,
        device: torch.device,
    ) -> None:
        self.profile = profile
        self._codec, self._places = codec, places
        self._records = torch.empty(len(lanes), columns, codec.record_bytes, dtype=torch.uint8, device=device)
        first, last = int(lanes[0]), int(lanes[-1])
        self._lanes: slice | torch.Tensor = slice(first, last + 1)
        if last - first != len(lanes) - 1:
            self._lanes = upload(lanes, device)

    def take(self, rows: torch.Tensor, place: int) -> None:
        """Compress a band's rows, [lanes, columns, d_model]; `place`: which of its tokens' columns the first one is."""
        some = rows[self._lanes]
        tokens, columns, width = some.shape
        records = self._codec.encode(some.reshape(-1, width)).view(tokens, columns, -1)
        self._records[:, place : place + columns] = records

    def packet(self) -> CompressedRecords:
        """All columns' records."""
        size = self._records[0].numel()
        return CompressedRecords(self._records.view(-1), pieces_of(self._places, np.full(len(self._places), size)))


def packs_of(plan: StepPlan, codecs: Codecs, device: torch.device) -> list[PackGroup]:
    """What a step sends compressed; on CUDA its memory belongs to the current stream."""
    if not len(plan.packs):
        return []
    after, places, _, columns, numbers = plan.packs.T
    lanes = plan.lanes_of(after - columns)
    profiles = plan.profiles[plan.tokens[lanes]]
    packs = []
    for number, profile in sorted(set(zip(numbers.tolist(), profiles.tolist(), strict=True))):
        some = np.flatnonzero((numbers == number) & (profiles == profile))
        some = some[np.argsort(lanes[some], kind="stable")]
        width = int(columns[some[0]])
        packs.append(PackGroup(codecs[PACKED - number], profile, width, lanes[some], places[some], device))
    return packs
