"""Streaming: rows of a large step leave the ring tap by tap, while the model goes on.

A step that runs without a CUDA graph calls the taps' op from Python, so each tap's rows can be sent on their way (or
compressed) as soon as they are written, and the ring holds the rows of a few taps instead of those of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.worker.codecs import Codecs
from vllm_weir.worker.outlet import CudaOutlet
from vllm_weir.worker.packs import Pack, packs_of
from vllm_weir.worker.ring import Ring
from vllm_weir.worker.select import STAGES
from vllm_weir.worker.step import StepPlan
from vllm_weir.worker.tap_triton import launch

ROWS_IN_A_RUN = 2
"""From this many rows on, those of one column are copied as one piece with gaps."""


@dataclass(frozen=True)
class Column:
    """One column of the step: where its part of the ring starts, and what becomes of it.

    Attributes:
        start: ring row of lane 0.
        runs: int64 [n, 4] of lane, arena row, arena rows from one token to the next, tokens.
        rest: int64 [n, 3] of lane, arena row, 1: tokens that stand alone.
        packs: tokens that are sent compressed, with the column's place among theirs.
    """

    start: int
    runs: np.ndarray
    rest: np.ndarray
    packs: list[tuple[Pack, int]]


class Streamer:
    """Carries out the taps of one step at a time.

    Args:
        ring, outlet: where rows are written, and how they leave.
        ranks: int32 [profiles, columns] on the device; only its shape is used.
        taps: address of each tap's number on the device -> the number.
        codecs: how rows are compressed, by number.
    """

    def __init__(
        self, ring: Ring, outlet: CudaOutlet, ranks: torch.Tensor, taps: dict[int, int], codecs: Codecs
    ) -> None:
        self._ring, self._outlet, self._taps, self._codecs = ring, outlet, taps, codecs
        self._regions = torch.full_like(ranks, -1)
        self._columns: dict[int, list[Column]] = {}
        self._packs: list[Pack] = []
        self._lanes = 0

    def begin(self, plan: StepPlan, columns_of: Mapping[int, tuple[int, ...]]) -> None:
        """Lay the step out: every captured token has a lane, every column a region of that many rows."""
        self._lanes = len(plan.tokens)
        profiles = plan.profiles[plan.tokens]
        used = np.unique(profiles[profiles >= 0]).tolist()
        starts = {c: self._ring.take(self._lanes) for c in sorted({c for p in used for c in columns_of[p]})}
        regions = np.full((len(used), self._regions.shape[1]), -1, np.int32)
        for k, profile in enumerate(used):
            regions[k, list(columns_of[profile])] = [starts[c] for c in columns_of[profile]]
        device = self._regions.device
        self._regions[torch.tensor(used, device=device)] = torch.from_numpy(regions).to(device)
        with torch.cuda.stream(self._outlet.stream):
            self._packs = packs_of(plan, self._codecs, device)
        pieces = Pieces(plan)
        self._columns = {}
        for column, start in starts.items():
            places = {p: columns_of[p].index(column) for p in used if column in columns_of[p]}
            packs = [(pack, places[pack.profile]) for pack in self._packs if pack.profile in places]
            self._columns.setdefault(column // STAGES, []).append(Column(start, *pieces.of(places), packs))

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
            self._send(column)
        copied.record(self._outlet.stream)
        for column in columns:
            self._ring.leaves(column.start, self._lanes, copied)

    def _send(self, column: Column) -> None:
        if len(column.runs):
            self._outlet.send_columns(column.start, column.runs)
        if len(column.rest):
            self._outlet.send(column.rest + np.array((column.start, 0, 0)))
        if column.packs:
            rows = self._ring.buffer[column.start : column.start + self._lanes]
            with torch.cuda.stream(self._outlet.stream):
                for pack, place in column.packs:
                    pack.take(rows, place)

    def end(self) -> Callable[[], None]:
        """What to call to wait until all rows have arrived."""
        for pack in self._packs:
            self._outlet.send_packet(pack.packet())
        self._packs = []
        copied = torch.cuda.Event()
        copied.record(self._outlet.stream)
        return copied.synchronize


class Pieces:
    """What is sent of a step as it is, column by column."""

    def __init__(self, plan: StepPlan) -> None:
        sent = plan.jobs[:, 2] > 0
        self._lanes = np.full(len(sent), -1, np.int64)
        self._lanes[sent] = plan.lanes_of(plan.jobs[sent, 0])
        profiles = plan.profiles[plan.tokens]
        self._profiles = np.where(sent, profiles[self._lanes], -1) if len(profiles) else self._lanes
        self._jobs = plan.jobs
        runs = np.array(plan.runs, np.int64).reshape(-1, 2)
        self._runs = runs[runs[:, 1] - runs[:, 0] >= ROWS_IN_A_RUN]
        self._in_run = np.full(len(sent), -1, np.int64)
        for k, (a, b) in enumerate(self._runs.tolist()):
            self._in_run[a:b] = k

    def of(self, places: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Runs and rest of a column, as in `Column`; `places`: profile -> the column's place in it."""
        place = np.full(len(self._jobs), -1, np.int64)
        for profile, k in places.items():
            place[self._profiles == profile] = k
        first = self._runs[:, 0]
        some = place[first] >= 0
        first, count = first[some], (self._runs[:, 1] - self._runs[:, 0])[some]
        jobs = self._jobs[first]
        runs = np.stack([self._lanes[first], jobs[:, 1] + place[first], jobs[:, 2], count], 1)
        alone = np.flatnonzero((place >= 0) & (self._in_run < 0))
        return runs, np.stack(
            [self._lanes[alone], self._jobs[alone, 1] + place[alone], np.ones(len(alone), np.int64)], 1
        )
