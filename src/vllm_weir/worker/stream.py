"""Streaming: rows of a large step leave the ring tap by tap, while the model goes on.

A step that runs without a CUDA graph calls the taps' op from Python, so each tap's rows can be sent on their way as
soon as they are written, and the ring holds the rows of a few taps instead of those of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.worker.outlet import CudaOutlet
from vllm_weir.worker.ring import Ring
from vllm_weir.worker.select import STAGES
from vllm_weir.worker.step import StepPlan
from vllm_weir.worker.tap_triton import launch

DMA_BYTES = 64 << 10
"""From this size on a piece is left to the copy engine; smaller ones go by kernel, many at once."""


@dataclass(frozen=True)
class Column:
    """One column of the step: its part of the ring, and the pieces for the copy engine (lane, host row, rows)."""

    number: int
    start: int
    pieces: list[tuple[int, int, int]]


class Streamer:
    """Carries out the taps of one step at a time.

    Args:
        ring, outlet: where rows are written, and how they leave.
        ranks: int32 [profiles, columns] on the device, as the taps read it: place of a column in a profile.
        taps: address of each tap's number on the device -> the number.
        staging: pinned int32 rows of `ranks`' width for the step's own version of it.
    """

    def __init__(self, ring: Ring, outlet: CudaOutlet, ranks: torch.Tensor, taps: dict[int, int]) -> None:
        self._ring, self._outlet, self._ranks, self._taps = ring, outlet, ranks, taps
        self._regions = torch.full_like(ranks, -1)
        self._columns: dict[int, list[Column]] = {}
        self._lanes = 0
        self._rest: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def begin(self, plan: StepPlan, columns_of: dict[int, tuple[int, ...]]) -> None:
        """Lay the step out: every captured token has a lane, every column a region of that many rows."""
        self._lanes = len(plan.jobs)
        used = np.unique(plan.profiles[plan.profiles >= 0]).tolist()
        every = sorted({c for profile in used for c in columns_of[profile]})
        starts = {c: self._ring.take(self._lanes) for c in every}
        regions = np.full((len(used), self._ranks.shape[1]), -1, np.int32)
        for row, profile in enumerate(used):
            regions[row, list(columns_of[profile])] = [starts[c] for c in columns_of[profile]]
        self._regions[torch.tensor(used, device=self._regions.device)] = torch.from_numpy(regions).to(
            self._regions.device
        )
        profiles = plan.profiles[plan.tokens]
        row_bytes = self._ring.buffer.shape[1] * self._ring.buffer.element_size()
        large = [(a, b) for a, b in plan.runs if (b - a) * row_bytes >= DMA_BYTES and plan.jobs[a, 3]]
        alone = np.ones(self._lanes, bool)
        for a, b in large:
            alone[a:b] = False
        alone &= plan.jobs[:, 3] > 0
        rest = np.flatnonzero(alone)
        table = np.stack([rest, plan.jobs[rest, 1], plan.jobs[rest, 2], profiles[rest]], 1)
        self._rest = self._outlet.upload(table)() if len(rest) else None
        self._columns = {}
        for c in every:
            pieces = []
            for a, b in large:
                columns = columns_of[int(profiles[a])]
                if c in columns:
                    row = int(plan.jobs[a, 1] + columns.index(c) * plan.jobs[a, 2])
                    pieces.append((a, row, b - a))
            self._columns.setdefault(c // STAGES, []).append(Column(c, starts[c], pieces))

    def tap(self, hidden, residual, tap, plan, _ranks, ring, *tables) -> None:
        """Stands in for the tap's launch during the step."""
        columns = self._columns.get(self._taps[tap.data_ptr()], [])
        for column in columns:
            self._ring.claim(column.start, self._lanes)
        launch(hidden, residual, tap, plan, self._regions, ring, *tables)
        if not columns:
            return
        written, copied = torch.cuda.Event(), torch.cuda.Event()
        written.record()
        with torch.cuda.stream(self._outlet.stream):
            written.wait()
            for column in columns:
                self._outlet.send(column.start, column.pieces, self._rest, self._ranks, column.number)
            copied.record()
        for column in columns:
            self._ring.leaves(column.start, self._lanes, copied)
        self._copied = copied

    def end(self) -> Callable[[], None]:
        """What to call to wait until all rows have arrived."""
        assert self._copied is not None, "a streamed step has rows"
        return self._copied.synchronize
