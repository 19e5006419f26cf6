"""Sends rows of a large step while the model runs, a few taps at a time.

A step that runs without a CUDA graph calls the taps' op from Python. So rows can be sent, or
compressed, as soon as they are written, and the ring holds the rows of a few taps instead of those
of the whole step. `band_layout` explains columns, strips, bands and lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_weir.schema.taps import STAGES
from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.columns import as_integers
from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.tap.triton_kernel import launch
from vllm_weir.worker.transfer.band_layout import Band, layout_bands, learn_tap_order
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.copy_out import CudaCopyOut
from vllm_weir.worker.transfer.postprocess import PackGroup, packs_of
from vllm_weir.worker.transfer.ring import Ring

MIN_RUN_TOKENS = 2
"""Runs of at least this many tokens are sent as one copy with gaps."""
ROWS_PER_COPY = 64
"""Rows that a copy should have; starting one costs the copy engine as much as some ten rows."""
MIN_PACKED_COLUMNS = 4
"""Rows that a strip should have if they are compressed, to encode enough in each launch."""


@dataclass(frozen=True)
class SentStrip:
    """A strip of a band: columns that are sent together."""

    rows: int  # how many a token has
    runs: np.ndarray  # int64 [n, 5] of lane, arena row, arena rows from one token to the next, tokens, rows
    single_tokens: np.ndarray  # int64 [n, 3] of lane, arena row, rows: tokens outside of runs
    # tokens that are sent compressed, with the place of the strip's first column among theirs
    packs: list[tuple[PackGroup, int]]


@dataclass(eq=False)
class ColumnBand:
    """A piece of the ring with its strips."""

    start: int  # ring row of lane 0
    unwritten_taps: set[int]  # taps that have yet to write their rows
    strips: list[SentStrip]  # see `Band`


class StreamedCopy:
    """Runs the taps of streamed steps, and sends each band once its last tap has written.

    Args:
        ranks: int32 [site sets, columns] on the device; only its shape is used.
        taps: address of each tap's number on the device -> the number.

    Attributes:
        stride: ring rows from one lane of the step to the next.
        cells: ring row at which the groups of rows that are reduced begin; they stay until the step
            is done.
    """

    def __init__(
        self, ring: Ring, copy_out: CudaCopyOut, ranks: torch.Tensor, taps: dict[int, int], codecs: Codecs
    ) -> None:
        self._ring, self._copy_out, self._taps, self._codecs = ring, copy_out, taps, codecs
        self._regions = torch.full_like(ranks, -1)
        """Ring row of lane 0 for each column of a site set; the taps use it as their rank table."""
        self._bands_of_tap: dict[int, list[ColumnBand]] = {}
        self._open: list[ColumnBand] = []
        """Bands of which some taps have written and some have not."""
        self._packs: list[PackGroup] = []
        self._lanes = 0
        self._listed: torch.Tensor | None = None
        self.stride, self.cells = 1, 0
        self._tap_orders: list[tuple[int, ...]] = []
        """Orders in which the model has reached its taps in streamed steps, see
        `learn_tap_order`."""
        self._reached: list[int] = []
        """Taps that the model has reached in this step, in order."""
        self._fault = ""

    def begin(
        self, plan: StepPlan, columns_of: Mapping[int, tuple[int, ...]], listed: torch.Tensor | None = None
    ) -> None:
        """Lay out the coming step in the ring; `listed`: see `triton_kernel.launch`."""
        self._listed = listed
        self._lanes, self._open, self._reached, self._fault = len(plan.captured_tokens), [], [], ""
        captured = plan.site_sets[plan.captured_tokens]
        site_sets = {number: columns_of[number] for number in np.unique(captured[captured >= 0]).tolist()}
        with torch.cuda.stream(self._copy_out.stream):
            self._packs = packs_of(plan, self._codecs, self._regions.device)
        copies = StripCopies(plan)
        wanted = max(copies.wanted_rows, MIN_PACKED_COLUMNS if self._packs else 1)
        capacity = self._ring.capacity - plan.group_rows
        self.stride, bands = layout_bands(site_sets, self._known_order(site_sets), self._lanes, capacity, wanted)
        self._reserve_cells(plan.group_rows)
        regions = {number: self._no_regions() for number in site_sets}
        self._bands_of_tap = {}
        for band in bands:
            self._add_band(band, site_sets, regions, copies)
        # Groups of reduced rows are in no band: a group's columns stand side by side.
        for number in np.unique(plan.site_sets[plan.spans != 0]).tolist():
            regions[number] = self._no_regions()
            _enter(regions[number], columns_of[number], 0)
        device = self._regions.device
        self._regions[upload(np.array(list(regions), np.int64), device)] = upload(np.stack([*regions.values()]), device)

    def _no_regions(self) -> np.ndarray:
        return np.full(self._regions.shape[1], -1, np.int32)

    def _known_order(self, site_sets: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
        """Return an order of taps that has all taps of the site sets; empty if none is known."""
        taps = {column // STAGES for columns in site_sets.values() for column in columns}
        return next((order for order in self._tap_orders if taps.issubset(order)), ())

    def _reserve_cells(self, cells: int) -> None:
        """Set the first rows of the ring apart for groups of rows that are reduced."""
        self._ring.rewind()
        self.cells = self._ring.take(cells)
        self._ring.claim(self.cells, cells)
        self._ring.rewind(self.cells + cells)

    def _add_band(
        self,
        layout: Band,
        site_sets: Mapping[int, tuple[int, ...]],
        regions: Mapping[int, np.ndarray],
        copies: StripCopies,
    ) -> None:
        """Give a band its place in the ring, and enter that into the regions of its site sets."""
        start = self._ring.take(self._lanes * self.stride)
        strips = []
        for columns, site_set in layout:
            having = site_sets if site_set is None else {site_set: site_sets[site_set]}
            places = {number: own.index(columns[0]) for number, own in having.items() if columns[0] in own}
            for number in places:
                _enter(regions[number], columns, start)
            packs = [(pack, places[pack.site_set]) for pack in self._packs if pack.site_set in places]
            strips.append(SentStrip(len(columns), *copies.of_strip(places, len(columns)), packs))
        taps = {column // STAGES for strip in layout for column in strip.columns}
        band = ColumnBand(start, taps, strips)
        for tap in taps:
            self._bands_of_tap.setdefault(tap, []).append(band)

    def tap(
        self,
        hidden: torch.Tensor,
        other: torch.Tensor | None,
        tap: torch.Tensor,
        plan: torch.Tensor,
        _ranks: torch.Tensor,
        ring: torch.Tensor,
        *tables: torch.Tensor,
        **more: Any,
    ) -> None:
        """Run one tap, in place of `triton_kernel.launch`, and send the bands that it completes."""
        number = self._taps[tap.data_ptr()]
        self._reached.append(number)
        bands = self._bands_of_tap.get(number, [])
        for band in bands:
            self._claim(band)
        launch(hidden, other, tap, plan, self._regions, ring, *tables, listed=self._listed, **more)
        for band in bands:
            band.unwritten_taps.discard(number)
        self._send([band for band in bands if not band.unwritten_taps])

    def _claim(self, band: ColumnBand) -> None:
        """Before a band's first tap, make the device wait until its part of the ring is free."""
        if band in self._open:
            return
        rows = self._lanes * self.stride
        if any(abs(other.start - band.start) < rows for other in self._open):
            self._fault = "the model reached its taps in another order than in the steps before"
        self._ring.claim(band.start, rows)
        self._open.append(band)

    def _send(self, bands: Sequence[ColumnBand]) -> None:
        """Send the rows of complete bands."""
        if not bands:
            return
        written, copied = torch.cuda.Event(), torch.cuda.Event()
        written.record()
        stream, stride = self._copy_out.stream, self.stride
        stream.wait_event(written)
        for band in bands:
            lanes = self._ring.buffer[band.start : band.start + self._lanes * stride].view(self._lanes, stride, -1)
            for strip in band.strips:
                if len(strip.runs):
                    self._copy_out.send_runs(band.start, stride, strip.runs)
                if len(strip.single_tokens):
                    self._copy_out.send(strip.single_tokens * (stride, 1, 1) + (band.start, 0, 0))
                if strip.packs:
                    with torch.cuda.stream(stream):
                        for pack, place in strip.packs:
                            pack.encode(lanes[:, : strip.rows], place)
        copied.record(stream)
        for band in bands:
            self._ring.release_after(band.start, self._lanes * stride, copied)
            self._open.remove(band)

    def end(self, plan: StepPlan) -> Callable[[], None]:
        """Send the step's compressed rows and its reductions, which are complete.

        Returned: A function that waits until all rows have arrived, and raises RuntimeError if they cannot be vouched
        for.
        """
        unreached = {
            tap for tap, bands in self._bands_of_tap.items() if any(tap in band.unwritten_taps for band in bands)
        }
        fault = self._fault or (f"the model did not reach its taps {sorted(unreached)}" if unreached else "")
        self._tap_orders = learn_tap_order(self._tap_orders, tuple(self._reached))
        self._bands_of_tap = {}
        for pack in self._packs:
            self._copy_out.send_packet(pack.packet())
        self._packs = []
        copied = torch.cuda.Event()
        if len(plan.reduced):
            reduced = torch.cuda.Event()
            reduced.record()
            self._copy_out.stream.wait_event(reduced)
            self._copy_out.send(as_integers(plan.reduced) + np.array((self.cells, 0, 0)))
        copied.record(self._copy_out.stream)
        if plan.group_rows:
            self._ring.release_after(self.cells, plan.group_rows, copied)
        self._ring.rewind()

        def arrived() -> None:
            copied.synchronize()
            if fault:
                raise RuntimeError(f"{fault}, so the rows of this step are lost")

        return arrived


def _enter(regions: np.ndarray, columns: Sequence[int], start: int) -> None:
    """Enter the first ring row of each column, of columns that stand side by side from `start` on."""
    numbers, first = np.unique(columns, return_index=True)
    regions[numbers] = start + first


class StripCopies:
    """The tokens of a step whose rows are sent as they are, for one strip after the other.

    Tokens that follow each other in the step and in the arena are a *run*, which is one copy with
    gaps.
    """

    def __init__(self, plan: StepPlan) -> None:
        sent = plan.copies["rows"] > 0
        self._lanes = np.full(len(sent), -1, np.int64)
        self._lanes[sent] = plan.lanes_of(plan.copies["ring_row"][sent])
        site_sets = plan.site_sets[plan.captured_tokens]
        self._site_sets = np.where(sent, site_sets[self._lanes], -1) if len(site_sets) else self._lanes
        self._copies = plan.copies
        self._runs = plan.copy_runs[plan.copy_runs["end"] - plan.copy_runs["first"] >= MIN_RUN_TOKENS]
        self._in_run = np.full(len(sent), -1, np.int64)
        for k, (a, b) in enumerate(self._runs.tolist()):
            self._in_run[a:b] = k

    @property
    def wanted_rows(self) -> int:
        """Rows that a strip should have for its copies to be of a good size."""
        tokens, in_runs = int((self._lanes >= 0).sum()), int((self._in_run >= 0).sum())
        copies = len(self._runs) + tokens - in_runs
        return -(-ROWS_PER_COPY * copies // tokens) if tokens else 1

    def of_strip(self, places: Mapping[int, int], width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `runs` and `single_tokens` of a strip of `width` rows, at these places in site sets."""
        place = np.full(len(self._copies), -1, np.int64)
        for site_set, k in places.items():
            place[self._site_sets == site_set] = k
        arena_rows, rows = self._copies["arena_row"], self._copies["rows"]
        in_strip = self._runs[place[self._runs["first"]] >= 0]
        first, count = in_strip["first"], in_strip["end"] - in_strip["first"]
        side_by_side = np.full(len(first), width)
        runs = np.stack([self._lanes[first], arena_rows[first] + place[first], rows[first], count, side_by_side], 1)
        alone = np.flatnonzero((place >= 0) & (self._in_run < 0))
        single_tokens = [self._lanes[alone], arena_rows[alone] + place[alone], np.full(len(alone), width)]
        return runs, np.stack(single_tokens, 1)
