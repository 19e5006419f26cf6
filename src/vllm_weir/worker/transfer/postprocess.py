"""Treatments: what is made of recorded rows on the device before anything is sent: products with directions, and
compressed records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.step_plan import PACKED, StepPlan
from vllm_weir.worker.transfer.codecs import Codecs


@dataclass(frozen=True)
class CompressedRecords:
    """Compressed records on their way to the host.

    Attributes:
        records: uint8 [n, record_bytes] on the device.
        pieces: int64 [m, 3] of byte in `records`, byte of the arena, bytes.
    """

    records: torch.Tensor
    pieces: np.ndarray


class Postprocessor:
    """Works on a step's rows in the ring; on CUDA on the current stream.

    Args:
        ring: [rows, d_model]. Results are left in it as float32, in the rows that the plan keeps for them.
    """

    def __init__(self, ring: torch.Tensor) -> None:
        self._ring = ring
        words = ring.shape[1] * ring.element_size() // 4
        self._cells = ring.view(torch.float32).view(len(ring), words) if words else ring

    def run(self, plan: StepPlan, start: int, directions: dict[int, torch.Tensor]) -> None:
        """Make what the plan wants of the rows from ring row `start` on; `directions`: number -> float32 [m, d]."""
        jobs = plan.jobs[(plan.jobs[:, 4] >= 0) & (plan.jobs[:, 2] > 0)]
        kinds = {(int(d), int(lead), int(cell)) for _, _, cell, lead, d in jobs}
        for number, lead, cell in sorted(kinds):
            some = jobs[(jobs[:, 4] == number) & (jobs[:, 3] == lead), 0] + start
            rows = self._ring[self._index(some - lead, lead)].float()
            if rows.is_cuda:
                directions[number].record_stream(torch.cuda.current_stream())
            self._leave(some, cell, (rows @ directions[number].T).view(len(some), -1))

    def pack(self, plan: StepPlan, start: int, codecs: Codecs, quick: bool) -> list[CompressedRecords]:
        """The records that the plan wants of the rows from ring row `start` on, a packet for each codec: of those that
        are quick, or of the others."""
        packets = []
        for number in np.unique(plan.packs[:, 4]).tolist():
            if codecs[PACKED - number].quick != quick:
                continue
            after, places, sizes, columns, _ = plan.packs[plan.packs[:, 4] == number].T
            firsts = after - columns + start
            if (firsts[1:] == firsts[:-1] + columns[:-1]).all():
                rows = self._ring[int(firsts[0]) : int(firsts[-1] + columns[-1])]
            else:
                rows = self._ring[self._ranges(firsts, columns)]
            records = codecs[PACKED - number].encode(rows)
            packets.append(CompressedRecords(records, pieces_of(places, sizes)))
        return packets

    def _index(self, slots: np.ndarray, width: int) -> torch.Tensor:
        every = (slots[:, None] + np.arange(width)).ravel()
        return upload(every, self._ring.device)

    def _ranges(self, firsts: np.ndarray, sizes: np.ndarray) -> torch.Tensor:
        """first, first + 1, .. for each of them, one after the other."""
        ends = sizes.cumsum()
        return upload(np.repeat(firsts - (ends - sizes), sizes) + np.arange(ends[-1]), self._ring.device)

    def _leave(self, slots: np.ndarray, cell: int, values: torch.Tensor) -> None:
        """Values float32 [n, k] to the first words of `cell` ring rows each, from `slots` on."""
        words = self._cells.shape[1]
        padded = values.new_zeros(len(slots), cell * words)
        padded[:, : values.shape[1]] = values
        self._cells[self._index(slots, cell)] = padded.view(-1, words)


def pieces_of(places: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """As `CompressedRecords.pieces`, the fewest: records that follow each other go together."""
    ends = sizes.cumsum()
    first = np.concatenate([[0], np.flatnonzero(places[1:] != places[:-1] + sizes[:-1]) + 1])
    last = np.concatenate([first[1:], [len(sizes)]]) - 1
    starts = ends[first] - sizes[first]
    return np.stack([starts, places[first], ends[last] - starts], 1)
