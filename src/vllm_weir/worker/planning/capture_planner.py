"""Where the rows of captured tokens go, planned one request after the other. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from vllm_weir.schema.read_outs import RecordLayout
from vllm_weir.schema.request import Postprocess, cell_rows
from vllm_weir.schema.rows import COMPLETE, CONTINUED, GROUP
from vllm_weir.schema.selectors import Selectors, distinct, joined_codes
from vllm_weir.worker.planning.columns import SiteSets
from vllm_weir.worker.planning.plan_builder import PlanBuilder
from vllm_weir.worker.planning.row_sequences import ResultCell, RowSequence, RowSequences

ReadOutCodec = Callable[[tuple[int, ...]], int]
"""Columns of a token's rows in the ring -> number of the codec."""


@dataclass
class CapturingRequest:
    """A live request's captures.

    A *code* is the set of the request's selectors that select a position, as bits.
    """

    request_id: str
    endpoint: str  # where its rows go
    selectors: Selectors
    # per selector, the columns it wants that this worker fills, as `CapturePlanner.places` returns them
    columns: list[tuple[int, ...]]
    max_generated: int  # estimate of the tokens that the request generates, to size extents
    postprocess: Postprocess | None
    codec: int  # number of the codec that makes records of its rows, -1 for none
    read_out_codec: ReadOutCodec | None = None  # returns the number of the codec that reads rows with these columns
    site_sets: dict[int, int] = field(default_factory=dict)  # code -> site set
    row_seqs: dict[int, RowSequence] = field(default_factory=dict)  # site set -> row sequence
    reduction: RowSequence | None = None  # row sequence for the prompt's reduced rows; None before the first one
    reduction_site_set: int = -1  # site set that is reduced, -1 before the first row
    reduced_rows: int = 0  # rows reduced so far

    @property
    def reduces_prompt(self) -> bool:
        return self.postprocess is not None and self.postprocess.folds


class CapturePlanner:
    """Plans captures, one request at a time.

    `d_model`: width of a row in ring and arena. `ring_rows`: column -> rows of the ring that one of its rows takes;
    left out where that is 1. `row_bytes`: bytes of a row in ring and arena.
    """

    def __init__(
        self,
        site_sets: SiteSets,
        row_seqs: RowSequences,
        d_model: int,
        ring_rows: Mapping[int, int],
        row_bytes: int = 4,
    ) -> None:
        self._site_sets, self._row_seqs, self._d_model = site_sets, row_seqs, d_model
        self._ring_rows = ring_rows
        self._row_bytes = row_bytes

    def places(self, columns: Iterable[int]) -> tuple[int, ...]:
        """Return these columns, ascending, each as often as one of its rows takes rows of the ring."""
        ascending = sorted(columns)
        if not self._ring_rows:
            return tuple(ascending)
        return tuple(column for column in ascending for _ in range(self._ring_rows.get(column, 1)))

    def plan(
        self,
        builder: PlanBuilder,
        request: CapturingRequest,
        endpoint: int,
        first: int,
        start: int,
        count: int,
        behind: int = 0,
    ) -> None:
        """Plan a request's `count` tokens: positions from `start`, tokens of the step from `first`.

        Positions may be up to `behind` less than planned, if they are generated: a token gives every row that is wanted
        at any position it may have. Raises WeirError if there is no room for them.
        """
        end = start + count
        offset = first - start
        if request.reduces_prompt and start < request.selectors.prompt_len:
            prompt_end = min(end, request.selectors.prompt_len)
            self._plan_reduction(builder, request, endpoint, offset, start, prompt_end)
            start = prompt_end
        if start == end:
            return
        runs = None if behind else request.selectors.runs(start, end)
        if runs is None:
            codes = joined_codes(request.selectors.codes(np.arange(start - behind, end)), behind)
            self._plan_scattered(builder, request, endpoint, offset, np.arange(start, end), codes)
            return
        for code, run_start, run_end in runs:
            self._plan_run(builder, request, endpoint, offset, code, run_start, run_end)

    def restart(self, request: CapturingRequest) -> None:
        """End the row sequences of a request that goes on after a preemption."""
        for row_seq in request.row_seqs.values():
            self._row_seqs.close(row_seq)
        request.row_seqs.clear()

    def leave(self, request: CapturingRequest) -> None:
        """Release what a request holds."""
        self.restart(request)
        if request.reduction is not None:
            self._row_seqs.close(request.reduction)
        for site_set in request.site_sets.values():
            self._site_sets.release(site_set)
        if request.reduction_site_set >= 0:
            self._site_sets.release(request.reduction_site_set)

    def _site_set(self, request: CapturingRequest, code: int) -> int:
        """Return the site set of tokens with `code`; raises WeirError if there are too many."""
        site_set = request.site_sets.get(code)
        if site_set is None:
            if len(request.columns) == 1:
                columns = request.columns[0]
            else:
                wanted = (columns for bit, columns in enumerate(request.columns) if code >> bit & 1)
                columns = self.places(set().union(*wanted))
            site_set = request.site_sets[code] = self._site_sets.hold(columns)
        return site_set

    def _plan_run(
        self,
        builder: PlanBuilder,
        request: CapturingRequest,
        endpoint: int,
        offset: int,
        code: int,
        start: int,
        end: int,
    ) -> None:
        """Plan positions from `start` to `end` (not included), all of them with `code`."""
        site_set = self._site_set(request, code)
        row_seq = self._row_seq(request, code, site_set, start)
        position = start
        for rank, place, count in self._row_seqs.place(row_seq, end - start):
            builder.capture_run(endpoint, row_seq, rank, place, offset + position, position, count, site_set)
            position += count
        self._row_seqs.last_position[row_seq.index] = end - 1
        if position < end:
            lost = np.arange(position, end)
            builder.drop(endpoint, row_seq.number, offset + lost, lost)

    def _plan_scattered(
        self,
        builder: PlanBuilder,
        request: CapturingRequest,
        endpoint: int,
        offset: int,
        positions: np.ndarray,
        codes: np.ndarray,
    ) -> None:
        """Plan any positions with these codes, which are tokens ``offset + positions``."""
        by_site_set: dict[int, list[int]] = {}
        for code in map(int, distinct(codes)):
            by_site_set.setdefault(self._site_set(request, code), []).append(code)
        for site_set, alike in by_site_set.items():
            wanted = positions[codes == alike[0] if len(alike) == 1 else np.isin(codes, alike)]
            row_seq = self._row_seq(request, alike[0], site_set, int(wanted[0]))
            placed = 0
            for rank, place, count in self._row_seqs.place(row_seq, len(wanted)):
                some = wanted[placed : placed + count]
                builder.capture_some(endpoint, row_seq, rank, place, offset + some, some, site_set)
                placed += count
            self._row_seqs.last_position[row_seq.index] = wanted[-1]
            if placed < len(wanted):
                builder.drop(endpoint, row_seq.number, offset + wanted[placed:], wanted[placed:])

    def _row_seq(self, request: CapturingRequest, code: int, site_set: int, position: int) -> RowSequence:
        """Return the row sequence for a token with `code` at `position`."""
        row_seq = request.row_seqs.get(site_set)
        row_seqs = self._row_seqs
        if row_seq is not None and row_seqs.last_position[row_seq.index] - position >= row_seqs.rewind:
            # Recomputed after a preemption. Start a new row sequence, so that rows already handed
            # out do not change.
            row_seqs.close(row_seq)
            row_seq = None
        if row_seq is None:
            row_seq = request.row_seqs[site_set] = self._open(request, code, site_set, position)
        return row_seq

    def _open(self, request: CapturingRequest, code: int, site_set: int, position: int) -> RowSequence:
        """Open a row sequence for tokens with `code` from `position` on."""
        end = request.selectors.prompt_len + request.max_generated - 1
        in_prompt, rows = request.selectors.count(code, position, end)
        rows += self._row_seqs.rewind * (rows - in_prompt)  # each may have to be computed so often
        columns, cell = self._site_sets.columns_of[site_set], None
        postprocess = request.postprocess
        if postprocess is not None:
            if postprocess.compression is not None:
                record_bytes = postprocess.compression.record_bytes(self._d_model)
                size = record_bytes * len(columns)
                cell = ResultCell("packed", record_bytes, size, request.codec, self._row_bytes)
            elif postprocess.directions:
                values = len(postprocess.directions)
                cell = ResultCell("scores", values, 4 * values * len(columns), request.codec, self._row_bytes)
            elif postprocess.read_outs:
                assert request.read_out_codec is not None
                kind, row_bytes = ("rows_read", self._row_bytes) if postprocess.with_rows else ("read_outs", 0)
                record_bytes = RecordLayout.of(postprocess.read_outs, row_bytes).record_bytes
                size, codec = record_bytes * len(columns), request.read_out_codec(columns)
                cell = ResultCell(kind, record_bytes, size, codec, self._row_bytes)
            elif postprocess.folds:
                in_prompt, rows = 0, rows - in_prompt
        return self._row_seqs.open(request.request_id, request.endpoint, columns, in_prompt, max(rows, 1), cell)

    def _plan_reduction(
        self, builder: PlanBuilder, request: CapturingRequest, endpoint: int, offset: int, start: int, end: int
    ) -> None:
        """Reduce rows of the prompt at the wanted positions in [start, end), tokens ``offset + ...`` of the step.

        All have the same columns.
        """
        assert request.postprocess is not None
        positions = _wanted_positions(request.selectors, start, end)
        still_to_come = request.selectors.count(1, end, request.selectors.prompt_len)[0]
        if request.postprocess.reduce == "last":
            positions = positions[:0] if still_to_come else positions[-1:]
        if not len(positions):
            return
        reduction, resumed = self._resume_reduction(request, int(positions[0]))
        if request.reduction_site_set < 0:
            request.reduction_site_set = self._site_sets.hold(request.columns[0], reduced=True)
        self._row_seqs.last_position[reduction.index] = positions[-1]
        request.reduced_rows += len(positions)
        arena_row = None
        if not still_to_come:
            places = self._row_seqs.place(reduction, 1)
            if not places:
                builder.drop(endpoint, reduction.number, offset + positions[-1:], positions[-1:])
                return
            arena_row = places[0][1]
        builder.reduce(
            endpoint, reduction, request.reduction_site_set, offset + positions, positions, resumed,
            request.reduced_rows, request.postprocess.reduce == "max", arena_row,
        )  # fmt: skip

    def _resume_reduction(self, request: CapturingRequest, position: int) -> tuple[RowSequence, int]:
        """Return the row sequence of a reduction that goes on at `position`, and its `resumed`."""
        row_seqs, reduction = self._row_seqs, request.reduction
        if reduction is not None:
            last = row_seqs.last_position[reduction.index]
            if last < position:
                return reduction, CONTINUED if last // GROUP == position // GROUP else COMPLETE
            row_seqs.close(reduction)  # all of it is computed again after a preemption
            request.reduction = None
        columns = request.columns[0]
        cell = ResultCell("fold", self._d_model, cell_rows(len(columns), self._d_model, self._row_bytes))
        request.reduction = row_seqs.open(request.request_id, request.endpoint, columns, 1, 1, cell)
        request.reduced_rows = 0
        return request.reduction, 0


def _wanted_positions(selectors: Selectors, start: int, end: int) -> np.ndarray:
    """Return those of the positions from `start` to `end` (not included) that are selected."""
    runs = selectors.runs(start, end)
    if runs is None:
        positions = np.arange(start, end)
        return positions[selectors.codes(positions) > 0]
    return np.arange(runs[0][1], runs[0][2]) if runs else np.zeros(0, np.int64)
