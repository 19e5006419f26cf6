"""Reading: where the rows of captured tokens go, planned one request after the other. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vllm_weir.schema.reductions import COMPLETE, CONTINUED, GROUP
from vllm_weir.schema.request import Postprocess, cell_rows
from vllm_weir.schema.selectors import Selectors, distinct
from vllm_weir.worker.planning.plan_builder import PlanBuilder
from vllm_weir.worker.planning.row_sequences import ResultCell, RowSequence, RowSequences
from vllm_weir.worker.planning.site_sets import SiteSets


@dataclass
class CapturingRequest:
    """A live request's captures."""

    request_id: str
    reply: str
    selectors: Selectors
    columns: list[tuple[int, ...]]
    """Per selector, the columns it wants that this worker fills."""
    most: int
    """Tokens that the request can generate."""
    postprocess: Postprocess | None
    directions: int
    """``PACKED - number`` of the treatment's codec, -1 for none."""
    profiles: dict[int, int] = field(default_factory=dict)
    """Code -> profile."""
    row_seqs: dict[int, RowSequence] = field(default_factory=dict)
    """Profile -> row sequence."""
    fold: RowSequence | None = None
    """What the prompt's rows are reduced into."""
    fold_profile: int = -1
    folded: int = 0
    """Rows that have been reduced."""

    @property
    def folds(self) -> bool:
        """Whether the prompt's rows are reduced."""
        return self.postprocess is not None and self.postprocess.folds


class CapturePlanner:
    """Plans what readings have recorded.

    Args:
        profiles, row_seqs: where columns and rows get their places.
        d_model: width of a row.

    Attributes:
        row_bytes: bytes of a row in ring and arena.
    """

    def __init__(self, profiles: SiteSets, row_seqs: RowSequences, d_model: int) -> None:
        self._profiles, self._row_seqs, self._d_model = profiles, row_seqs, d_model
        self.row_bytes = 4

    def plan(
        self, draft: PlanBuilder, reading: CapturingRequest, reply: int, first: int, start: int, count: int
    ) -> None:
        """The request's `count` tokens from position `start` on, tokens `first`, ... of the step."""
        if reading.folds and start < reading.selectors.prompt_len:
            end = min(start + count, reading.selectors.prompt_len)
            self._fold(draft, reading, reply, first - start, start, end)
            first, start, count = first + end - start, end, start + count - end
        runs = reading.selectors.runs(start, start + count) if count else ()
        if runs is None:
            self._plan_scattered(draft, reading, reply, first, np.arange(start, start + count))
            return
        row_seqs = self._row_seqs
        for code, a, b in runs:
            profile = self.profile(reading, code)
            row_seq = self._row_seq(reading, code, profile, a)
            token, position = first + a - start, a
            for rank, row, n in row_seqs.place(row_seq, b - a):
                draft.take_run(reply, row_seq, rank, row, token, position, n, profile)
                token, position = token + n, position + n
            row_seqs.last[row_seq.index] = b - 1
            if position < b:
                draft.drop(reply, row_seq.number, np.arange(position, b))

    def leave(self, reading: CapturingRequest) -> None:
        """The request has left."""
        for row_seq in reading.row_seqs.values():
            self._row_seqs.close(row_seq)
        if reading.fold is not None:
            self._row_seqs.close(reading.fold)
        for profile in reading.profiles.values():
            self._profiles.give_back(profile)
        if reading.fold_profile >= 0:
            self._profiles.give_back(reading.fold_profile)

    def profile(self, reading: CapturingRequest, code: int) -> int:
        """The profile of tokens with `code`; raises WeirError if there are too many."""
        profile = reading.profiles.get(code)
        if profile is None:
            if len(reading.columns) == 1:
                columns = reading.columns[0]
            else:
                wanted = (columns for bit, columns in enumerate(reading.columns) if code >> bit & 1)
                columns = tuple(sorted(set().union(*wanted)))
            profile = reading.profiles[code] = self._profiles.take(columns)
        return profile

    def _plan_scattered(
        self, draft: PlanBuilder, reading: CapturingRequest, reply: int, first: int, positions: np.ndarray
    ) -> None:
        """As `plan`, of any positions."""
        codes = reading.selectors.codes(positions)
        row_seqs = self._row_seqs
        for code in distinct(codes):
            profile = self.profile(reading, int(code))
            at = np.flatnonzero(codes == code)
            row_seq = self._row_seq(reading, int(code), profile, int(positions[at[0]]))
            done = 0
            for rank, row, count in row_seqs.place(row_seq, len(at)):
                some = at[done : done + count]
                draft.take_some(reply, row_seq, rank, row, first + some, positions[some], profile)
                done += count
            row_seqs.last[row_seq.index] = positions[at[-1]]
            if done < len(at):
                draft.drop(reply, row_seq.number, positions[at[done:]])

    def _fold(
        self, draft: PlanBuilder, reading: CapturingRequest, reply: int, offset: int, start: int, end: int
    ) -> None:
        """Reduce rows of the prompt, at those of the positions from `start` to `end` (not included) that are wanted,
        which are tokens ``offset + position``; all want the same columns."""
        runs = reading.selectors.runs(start, end)
        if runs is None:
            positions = np.arange(start, end)
            positions = positions[reading.selectors.codes(positions) > 0]
        else:
            positions = np.arange(runs[0][1], runs[0][2]) if runs else np.zeros(0, np.int64)
        assert reading.postprocess is not None
        how, later = reading.postprocess.reduce, reading.selectors.count(1, end, reading.selectors.prompt_len)[0]
        if how == "last":
            positions = positions[:0] if later else positions[-1:]
        if not len(positions):
            return
        row_seqs, columns = self._row_seqs, reading.columns[0]
        if reading.fold is not None and row_seqs.last[reading.fold.index] >= positions[0]:
            row_seqs.close(reading.fold)  # computed again after a preemption: all of it
            reading.fold = None
        resumed = 0
        if reading.fold is None:
            cell = ResultCell("fold", self._d_model, cell_rows(len(columns), self._d_model, self.row_bytes))
            reading.fold = row_seqs.open(reading.request_id, reading.reply, columns, 1, 1, cell)
            reading.folded = 0
        else:
            same = row_seqs.last[reading.fold.index] // GROUP == positions[0] // GROUP
            resumed = CONTINUED if same else COMPLETE
        if reading.fold_profile < 0:
            reading.fold_profile = self._profiles.take(columns, folded=True)
        row_seqs.last[reading.fold.index] = positions[-1]
        reading.folded += len(positions)
        row = None
        if not later:
            placed = row_seqs.place(reading.fold, 1)
            if not placed:
                draft.drop(reply, reading.fold.number, positions[-1:])
                return
            row = placed[0][1]
        draft.fold(
            reply, reading.fold, reading.fold_profile, offset + positions, positions, resumed, reading.folded,
            how == "max", row,
        )  # fmt: skip

    def _row_seq(self, reading: CapturingRequest, code: int, profile: int, position: int) -> RowSequence:
        row_seq = reading.row_seqs.get(profile)
        if row_seq is not None and self._row_seqs.last[row_seq.index] >= position:
            # Computed again after a preemption: a new row sequence, so that rows already handed out do not change.
            self._row_seqs.close(row_seq)
            row_seq = None
        if row_seq is None:
            prompt_len = reading.selectors.prompt_len
            in_prompt, rows = reading.selectors.count(code, position, prompt_len + reading.most - 1)
            columns, cell = self._profiles.columns_of[profile], None
            if reading.postprocess is not None:
                if reading.postprocess.compression is not None:
                    record = reading.postprocess.compression.record_bytes(self._d_model)
                    cell = ResultCell("packed", record, record * len(columns), reading.directions, self.row_bytes)
                elif reading.postprocess.directions:
                    values = len(reading.postprocess.directions)
                    cell = ResultCell("scores", values, 4 * values * len(columns), reading.directions, self.row_bytes)
                else:
                    in_prompt, rows = 0, rows - in_prompt
            row_seq = self._row_seqs.open(reading.request_id, reading.reply, columns, in_prompt, max(rows, 1), cell)
            reading.row_seqs[profile] = row_seq
        return row_seq
