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

ROWS_IN_A_RUN = 8
"""From this many rows on, those of one column are copied as one piece with gaps; shorter runs row by row."""


@dataclass(frozen=True)
class Column:
    """One column of the step: where its part of the ring starts, and the pieces of it.

    Attributes:
        start: ring row of lane 0.
        runs: (lane, arena row, arena rows from one token to the next, tokens).
        rest: int64 [n, 3] of lane, arena row, 1: tokens that stand alone.
    """

    start: int
    runs: list[tuple[int, int, int, int]]
    rest: np.ndarray


class Streamer:
    """Carries out the taps of one step at a time.

    Args:
        ring, outlet: where rows are written, and how they leave.
        ranks: int32 [profiles, columns] on the device; only its shape is used.
        taps: address of each tap's number on the device -> the number.
    """

    def __init__(self, ring: Ring, outlet: CudaOutlet, ranks: torch.Tensor, taps: dict[int, int]) -> None:
        self._ring, self._outlet, self._taps = ring, outlet, taps
        self._regions = torch.full_like(ranks, -1)
        self._columns: dict[int, list[Column]] = {}
        self._lanes = 0
        self._copied: torch.cuda.Event | None = None

    def begin(self, plan: StepPlan, columns_of: dict[int, tuple[int, ...]]) -> None:
        """Lay the step out: every captured token has a lane, every column a region of that many rows."""
        self._lanes = len(plan.jobs)
        profiles = plan.profiles[plan.tokens]
        used = np.unique(profiles[profiles >= 0]).tolist()
        starts = {c: self._ring.take(self._lanes) for c in sorted({c for p in used for c in columns_of[p]})}
        regions = np.full((len(used), self._regions.shape[1]), -1, np.int32)
        for k, profile in enumerate(used):
            regions[k, list(columns_of[profile])] = [starts[c] for c in columns_of[profile]]
        device = self._regions.device
        self._regions[torch.tensor(used, device=device)] = torch.from_numpy(regions).to(device)
        self._columns = {}
        for column, start in starts.items():
            made = _pieces(plan, profiles, {p: columns_of[p].index(column) for p in used if column in columns_of[p]})
            self._columns.setdefault(column // STAGES, []).append(Column(start, *made))

    def tap(self, hidden, other, tap, plan, _ranks, ring, *tables) -> None:
        """Stands in for the tap's launch during the step."""
        columns = self._columns.get(self._taps[tap.data_ptr()], [])
        for column in columns:
            self._ring.claim(column.start, self._lanes)
        launch(hidden, other, tap, plan, self._regions, ring, *tables)
        if not columns:
            return
        written, copied = torch.cuda.Event(), torch.cuda.Event()
        written.record()
        self._outlet.stream.wait_event(written)
        for column in columns:
            for lane, row, width, count in column.runs:
                self._outlet.send_column(column.start + lane, row, width, count)
            if len(column.rest):
                self._outlet.send(column.rest + np.array((column.start, 0, 0)))
        copied.record(self._outlet.stream)
        for column in columns:
            self._ring.leaves(column.start, self._lanes, copied)
        self._copied = copied

    def end(self) -> Callable[[], None]:
        """What to call to wait until all rows have arrived."""
        assert self._copied is not None, "a streamed step has rows"
        return self._copied.synchronize


def _pieces(plan: StepPlan, profiles: np.ndarray, places: dict[int, int]) -> tuple[list, np.ndarray]:
    """Runs and rest of a column, as in `Column`; `places`: profile -> the column's place in it."""
    place = np.full(len(plan.jobs), -1, np.int64)
    for profile, k in places.items():
        place[profiles == profile] = k
    place[plan.jobs[:, 2] == 0] = -1
    runs = []
    alone = place >= 0
    for a, b in plan.runs:
        if b - a >= ROWS_IN_A_RUN and place[a] >= 0:
            alone[a:b] = False
            runs.append((a, int(plan.jobs[a, 1] + place[a]), int(plan.jobs[a, 2]), b - a))
    lanes = np.flatnonzero(alone)
    return runs, np.stack([lanes, plan.jobs[lanes, 1] + place[lanes], np.ones(len(lanes), np.int64)], 1)
