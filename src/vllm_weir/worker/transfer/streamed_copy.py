"""Streaming: rows of a large step leave the ring while the model goes on, a few taps at a time.

A step that runs without a CUDA graph calls the taps' op from Python, so rows can be sent on their way (or compressed)
as soon as they are written, and the ring holds the rows of a few taps instead of those of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.schema.taps import STAGES
from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.tap.triton_kernel import launch
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.copy_out import CudaCopyOut
from vllm_weir.worker.transfer.packed_bands import PackGroup, packs_of
from vllm_weir.worker.transfer.ring import Ring

ROWS_IN_A_RUN = 2
"""From this many rows on, those of one band are copied as one piece with gaps."""
WORTH_A_PIECE = 64
"""Rows that a piece should have: the copy engine needs as long for the start of one as for some ten rows (H200: 24 GB/s
with 16 rows a piece, 39 with 64, 47 with 1024)."""
WIDEST = 8
"""Columns of a band at most: the last band's rows leave when the model is done."""
PACKED_TOGETHER = 4
"""Columns of a band where rows are compressed: so many products become one."""
MOST_ORDERS = 8
"""Orders of taps that are remembered; steps come to those taps only that somebody needs."""


@dataclass(eq=False)
class ColumnBand:
    """Columns that are sent together: a token's rows of them stand side by side in the ring and in the arena.

    Attributes:
        start: ring row of lane 0.
        columns: how many.
        waiting: taps that have yet to write their rows.
        runs: int64 [n, 5] of lane, arena row, arena rows from one token to the next, tokens, columns.
        rest: int64 [n, 3] of lane, arena row, columns: tokens that stand alone.
        packs: tokens that are sent compressed, with the first column's place among theirs.
    """

    start: int
    columns: int
    waiting: set[int]
    runs: np.ndarray
    rest: np.ndarray
    packs: list[tuple[PackGroup, int]]


class StreamedCopy:
    """Carries out the taps of one step at a time.

    Args:
        ring, outlet: where rows are written, and how they leave.
        ranks: int32 [profiles, columns] on the device; only its shape is used.
        taps: address of each tap's number on the device -> the number.
        codecs: how rows are compressed, by number.

    Attributes:
        stride: ring rows from one lane of the step to the next.
        cells: ring row at which the groups of rows that are reduced begin; they stay until the step is done.
    """

    def __init__(
        self, ring: Ring, outlet: CudaCopyOut, ranks: torch.Tensor, taps: dict[int, int], codecs: Codecs
    ) -> None:
        self._ring, self._outlet, self._taps, self._codecs = ring, outlet, taps, codecs
        self._regions = torch.full_like(ranks, -1)
        self._bands: dict[int, list[ColumnBand]] = {}
        self._open: list[ColumnBand] = []
        """Bands that have been begun and are not complete."""
        self._packs: list[PackGroup] = []
        self._lanes = 0
        self._listed: torch.Tensor | None = None
        self.stride, self.cells = 1, 0
        self._orders: list[tuple[int, ...]] = []
        """Taps in the orders in which the model came to them in streamed steps, see `learned`."""
        self._met: list[int] = []
        self._fault = ""

    def begin(
        self, plan: StepPlan, columns_of: Mapping[int, tuple[int, ...]], listed: torch.Tensor | None = None
    ) -> None:
        """Lay the step out: every captured token has a lane, every band a region with `stride` rows of each; `listed`:
        as in `tap_triton.launch`."""
        self._listed = listed
        self._lanes, self._open, self._met, self._fault = len(plan.tokens), [], [], ""
        captured = plan.profiles[plan.tokens]
        members = {p: columns_of[p] for p in np.unique(captured[captured >= 0]).tolist()}
        device = self._regions.device
        with torch.cuda.stream(self._outlet.stream):
            self._packs = packs_of(plan, self._codecs, device)
        pieces = BandCopies(plan)
        wanted = max(pieces.columns_worth_a_piece, PACKED_TOGETHER if self._packs else 1)
        taps = {column // STAGES for columns in members.values() for column in columns}
        order = next((order for order in self._orders if taps.issubset(order)), ())
        self.stride, banded = layout(members, order, self._lanes, self._ring.capacity - plan.cells, wanted)
        self._ring.rewind()
        self.cells = self._ring.take(plan.cells)
        self._ring.claim(self.cells, plan.cells)
        self._ring.rewind(self.cells + plan.cells)
        regions = np.full((len(members), self._regions.shape[1]), -1, np.int32)
        of = dict(zip(members, regions, strict=True))
        self._bands = {}
        for columns in banded:
            start = self._ring.take(self._lanes * self.stride)
            places = {p: every.index(columns[0]) for p, every in members.items() if columns[0] in every}
            for p in places:
                of[p][list(columns)] = np.arange(start, start + len(columns))
            packs = [(pack, places[pack.profile]) for pack in self._packs if pack.profile in places]
            waiting = {column // STAGES for column in columns}
            band = ColumnBand(start, len(columns), waiting, *pieces.of(places, len(columns)), packs)
            for tap in waiting:
                self._bands.setdefault(tap, []).append(band)
        folded = np.unique(plan.profiles[plan.spans != 0]).tolist()
        of |= {p: np.full(self._regions.shape[1], -1, np.int32) for p in folded}
        for p in folded:
            of[p][list(columns_of[p])] = np.arange(len(columns_of[p]))
        regions = np.stack([*of.values()])
        self._regions[upload(np.array(list(of), np.int64), device)] = upload(regions, device)

    def tap(
        self,
        hidden: torch.Tensor,
        other: torch.Tensor | None,
        tap: torch.Tensor,
        plan: torch.Tensor,
        _ranks: torch.Tensor,
        ring: torch.Tensor,
        *tables: torch.Tensor,
    ) -> None:
        """Stands in for the tap's launch during the step."""
        number = self._taps[tap.data_ptr()]
        self._met.append(number)
        bands = self._bands.get(number, [])
        for band in bands:
            self._claim(band)
        launch(hidden, other, tap, plan, self._regions, ring, *tables, listed=self._listed)
        for band in bands:
            band.waiting.discard(number)
        self._send([band for band in bands if not band.waiting])

    def _claim(self, band: ColumnBand) -> None:
        if band in self._open:
            return
        rows = self._lanes * self.stride
        if any(abs(other.start - band.start) < rows for other in self._open):
            self._fault = "the model came to its taps in another order than before"
        self._ring.claim(band.start, rows)
        self._open.append(band)

    def _send(self, bands: Sequence[ColumnBand]) -> None:
        """Let rows that are complete leave."""
        if not bands:
            return
        written, copied = torch.cuda.Event(), torch.cuda.Event()
        written.record()
        stream, stride = self._outlet.stream, self.stride
        stream.wait_event(written)
        for band in bands:
            if len(band.runs):
                self._outlet.send_runs(band.start, stride, band.runs)
            if len(band.rest):
                self._outlet.send(band.rest * (stride, 1, 1) + (band.start, 0, 0))
            if band.packs:
                rows = self._ring.buffer[band.start : band.start + self._lanes * stride]
                with torch.cuda.stream(stream):
                    for pack, place in band.packs:
                        pack.take(rows.view(self._lanes, stride, -1)[:, : band.columns], place)
        copied.record(stream)
        for band in bands:
            self._ring.leaves(band.start, self._lanes * stride, copied)
            self._open.remove(band)

    def end(self, plan: StepPlan) -> Callable[[], None]:
        """Send the reductions, which are done by now; returns what to call to wait until all rows have arrived, which
        raises RuntimeError if they cannot be vouched for."""
        unmet = {tap for tap, bands in self._bands.items() if any(tap in band.waiting for band in bands)}
        fault = self._fault or (f"the model did not come to its taps {sorted(unmet)}" if unmet else "")
        self._orders, self._bands = learned(self._orders, tuple(self._met)), {}
        for pack in self._packs:
            self._outlet.send_packet(pack.packet())
        self._packs = []
        copied = torch.cuda.Event()
        if len(plan.results):
            joined = torch.cuda.Event()
            joined.record()
            self._outlet.stream.wait_event(joined)
            self._outlet.send(plan.results + (self.cells, 0, 0))  # noqa: RUF005 - an array, not a tuple
        copied.record(self._outlet.stream)
        if plan.cells:
            self._ring.leaves(self.cells, plan.cells, copied)
        self._ring.rewind()

        def arrived() -> None:
            copied.synchronize()
            if fault:
                raise RuntimeError(f"{fault}: rows of this step are lost")

        return arrived


def layout(
    members: Mapping[int, tuple[int, ...]], order: Sequence[int], lanes: int, capacity: int, wanted: int
) -> tuple[int, list[tuple[int, ...]]]:
    """How a step's columns share the ring: columns of the widest band, and the bands in the order of their taps.

    Two bands have room at a time, so that one leaves while the next is written, and all that one tap writes has.

    Args:
        members: profile -> its columns.
        order: all their taps in the order in which the model comes to them; if it is not known, columns stand alone:
            then no two taps' rows are in the ring before they may leave.
        lanes: captured tokens.
        capacity: rows of the ring.
        wanted: columns that would be best.
    """
    width = min(1 << (wanted - 1).bit_length(), WIDEST) if order else 1
    while True:
        bands = bands_of(members, order, width)
        widest = max(map(len, bands), default=1)
        if widest == 1 or max(2, _most_at_once(bands)) * widest * lanes <= capacity:
            return widest, bands
        width //= 2


def bands_of(members: Mapping[int, tuple[int, ...]], order: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Columns in bands of up to `width`: side by side in every profile that has one of them."""
    turn = {tap: k for k, tap in enumerate(order)}
    every = {column for columns in members.values() for column in columns}
    bands: list[tuple[int, ...]] = []
    for column in sorted(every, key=lambda c: (turn.get(c // STAGES, len(turn)), c)):
        last = bands[-1] if bands else ()
        if last and len(last) < width and _follows(column, last, members.values()):
            bands[-1] = (*last, column)
        else:
            bands.append((column,))
    return bands


def _follows(column: int, band: tuple[int, ...], members: Iterable[tuple[int, ...]]) -> bool:
    for columns in members:
        if (column in columns) != (band[0] in columns):
            return False
        if column in columns and columns.index(column) != columns.index(band[-1]) + 1:
            return False
    return True


def learned(orders: Sequence[tuple[int, ...]], met: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Orders that are known after a step that came to the taps `met`; what it contradicts is not known any more."""
    kept = [order for order in orders if [t for t in order if t in met] == [t for t in met if t in order]]
    if any(set(met).issubset(order) for order in kept):
        return kept
    return [met, *(order for order in kept if not set(order).issubset(met))][:MOST_ORDERS]


def _most_at_once(bands: Iterable[tuple[int, ...]]) -> int:
    """Bands that one tap writes, at most."""
    taps = [tap for band in bands for tap in {column // STAGES for column in band}]
    return max(map(taps.count, taps), default=0)


class BandCopies:
    """What is sent of a step as it is, band by band."""

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

    @property
    def columns_worth_a_piece(self) -> int:
        """Columns that a band should have for what is sent to be of a good size."""
        tokens, in_runs = int((self._lanes >= 0).sum()), int((self._in_run >= 0).sum())
        pieces = len(self._runs) + tokens - in_runs
        return -(-WORTH_A_PIECE * pieces // tokens) if tokens else 1

    def of(self, places: Mapping[int, int], columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Runs and rest of a band, as in `ColumnBand`; `places`: profile -> the first column's place in it."""
        place = np.full(len(self._jobs), -1, np.int64)
        for profile, k in places.items():
            place[self._profiles == profile] = k
        first = self._runs[:, 0]
        some = place[first] >= 0
        first, count = first[some], (self._runs[:, 1] - self._runs[:, 0])[some]
        jobs = self._jobs[first]
        side_by_side = np.full(len(first), columns)
        runs = np.stack([self._lanes[first], jobs[:, 1] + place[first], jobs[:, 2], count, side_by_side], 1)
        alone = np.flatnonzero((place >= 0) & (self._in_run < 0))
        rest = [self._lanes[alone], self._jobs[alone, 1] + place[alone], np.full(len(alone), columns)]
        return runs, np.stack(rest, 1)
