"""Compressed records of a step's rows, and of the bands of a streamed step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """Makes records of a step's rows in the ring; on CUDA on the current stream. `ring`: [rows, d_model]."""

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


class PackGroup:
    """The tokens of a step that share codec and site set, and their records.

    `lanes`: int64 [n], ascending, each token's lane; `places`: int64 [n], byte of the arena at which each token's
    records start.
    """

    def __init__(
        self,
        codec: Any,
        site_set: int,
        columns: int,
        lanes: np.ndarray,
        places: np.ndarray,
        device: torch.device,
    ) -> None:
        self.site_set = site_set
        self._codec, self._places = codec, places
        self._records = torch.empty(len(lanes), columns, codec.record_bytes, dtype=torch.uint8, device=device)
        first, last = int(lanes[0]), int(lanes[-1])
        self._lanes: slice | torch.Tensor = slice(first, last + 1)
        if last - first != len(lanes) - 1:
            self._lanes = upload(lanes, device)

    def encode(self, band_rows: torch.Tensor, place: int) -> None:
        """Compress the tokens' rows of a band, [lanes, columns, d_model]; `place` is of its first column."""
        rows = band_rows[self._lanes]
        tokens, columns, width = rows.shape
        if self._codec.by_column:
            records = self._codec.encode_columns(rows, place)
        else:
            records = self._codec.encode(rows.reshape(-1, width)).view(tokens, columns, -1)
        self._records[:, place : place + columns] = records

    def packet(self) -> CompressedRecords:
        """Return all columns' records."""
        size = self._records[0].numel()
        return CompressedRecords(self._records.view(-1), pieces_of(self._places, np.full(len(self._places), size)))


def packs_of(plan: StepPlan, codecs: Codecs, device: torch.device) -> list[PackGroup]:
    """Return what a step sends compressed; on CUDA its memory belongs to the current stream."""
    if not len(plan.records):
        return []
    places, columns, numbers = (plan.records[name] for name in ("arena_byte", "ring_rows", "codec"))
    lanes = plan.lanes_of(plan.records["ring_row"])
    site_sets = plan.site_sets[plan.captured_tokens[lanes]]
    groups = []
    for number, site_set in sorted(set(zip(numbers.tolist(), site_sets.tolist(), strict=True))):
        tokens = np.flatnonzero((numbers == number) & (site_sets == site_set))
        tokens = tokens[np.argsort(lanes[tokens], kind="stable")]
        width = int(columns[tokens[0]])
        groups.append(PackGroup(codecs[number], site_set, width, lanes[tokens], places[tokens], device))
    return groups
