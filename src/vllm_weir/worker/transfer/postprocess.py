"""Records that are made of a step's rows on the device: compressed rows, or projections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.transfer.codecs import Codecs


@dataclass(frozen=True)
class CompressedRecords:
    """Records to be copied to the host."""

    records: torch.Tensor  # uint8 [n, record_bytes] on the device
    pieces: np.ndarray  # int64 [m, 3] of byte in `records`, byte of the arena, bytes


class Postprocessor:
    """Makes records of a step's rows in the ring; on CUDA on the current stream.

    Args:
        ring: [rows, d_model].
    """

    def __init__(self, ring: torch.Tensor) -> None:
        self._ring = ring

    def pack(self, plan: StepPlan, start: int, codecs: Codecs, quick: bool) -> list[CompressedRecords]:
        """Return the records of a plan whose rows begin at `start` of the ring, one packet for each codec.

        `quick`: of the codecs that are quick, else of the others.
        """
        packets = []
        for number in np.unique(plan.records["codec"]).tolist():
            if codecs[number].quick != quick:
                continue
            records = plan.records[plan.records["codec"] == number]
            places, sizes, columns = records["arena_byte"], records["bytes"], records["ring_rows"]
            firsts = records["ring_row"] + start
            if (firsts[1:] == firsts[:-1] + columns[:-1]).all():
                rows = self._ring[int(firsts[0]) : int(firsts[-1] + columns[-1])]
            else:
                rows = self._ring[self._ranges(firsts, columns)]
            packets.append(CompressedRecords(codecs[number].encode(rows), pieces_of(places, sizes)))
        return packets

    def _ranges(self, firsts: np.ndarray, sizes: np.ndarray) -> torch.Tensor:
        """Return the row numbers of ranges `[first, first + size)`, one after the other."""
        ends = sizes.cumsum()
        return upload(np.repeat(firsts - (ends - sizes), sizes) + np.arange(ends[-1]), self._ring.device)


def pieces_of(places: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the pieces of `CompressedRecords`; records that follow each other are one piece.

    `places` are int64 [n], byte of the arena where each token's records go, in their order; `sizes` their
    bytes, int64 [n].
    """
    ends = sizes.cumsum()
    first = np.concatenate([[0], np.flatnonzero(places[1:] != places[:-1] + sizes[:-1]) + 1])
    last = np.concatenate([first[1:], [len(sizes)]]) - 1
    starts = ends[first] - sizes[first]
    return np.stack([starts, places[first], ends[last] - starts], 1)
