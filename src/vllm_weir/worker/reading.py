"""Reading: where the rows of captured tokens go, planned one request after the other. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vllm_weir.spec.request import Treatment, cell_rows
from vllm_weir.worker.draft import Draft
from vllm_weir.worker.folds import COMPLETE, CONTINUED, GROUP
from vllm_weir.worker.profiles import Profiles
from vllm_weir.worker.select import Selectors, distinct
from vllm_weir.worker.strands import Cell, Strand, Strands


@dataclass
class Reading:
    """A live request's captures."""

    request_id: str
    reply: str
    selectors: Selectors
    columns: list[tuple[int, ...]]
    """Per selector, the columns it wants that this worker fills."""
    most: int
    """Tokens that the request can generate."""
    treatment: Treatment | None
    directions: int
    """``PACKED - number`` of the treatment's codec, -1 for none."""
    profiles: dict[int, int] = field(default_factory=dict)
    """Code -> profile."""
    strands: dict[int, Strand] = field(default_factory=dict)
    """Profile -> strand."""
    fold: Strand | None = None
    """What the prompt's rows are reduced into."""
    fold_profile: int = -1
    folded: int = 0
    """Rows that have been reduced."""

    @property
    def folds(self) -> bool:
        """Whether the prompt's rows are reduced."""
        return self.treatment is not None and self.treatment.folds


class Reader:
    """Plans what readings have recorded.

    Args:
        profiles, strands: where columns and rows get their places.
        d_model: width of a row.

    Attributes:
        row_bytes: bytes of a row in ring and arena.
    """

    def __init__(self, profiles: Profiles, strands: Strands, d_model: int) -> None:
        self._profiles, self._strands, self._d_model = profiles, strands, d_model
        self.row_bytes = 4

    def plan(self, draft: Draft, reading: Reading, reply: int, first: int, start: int, count: int) -> None:
        """The request's `count` tokens from position `start` on, tokens `first`, ... of the step."""
        if reading.folds and start < reading.selectors.prompt_len:
            end = min(start + count, reading.selectors.prompt_len)
            self._fold(draft, reading, reply, first - start, start, end)
            first, start, count = first + end - start, end, start + count - end
        runs = reading.selectors.runs(start, start + count) if count else ()
        if runs is None:
            self._plan_scattered(draft, reading, reply, first, np.arange(start, start + count))
            return
        strands = self._strands
        for code, a, b in runs:
            profile = self.profile(reading, code)
            strand = self._strand(reading, code, profile, a)
            token, position = first + a - start, a
            for rank, row, n in strands.place(strand, b - a):
                draft.take_run(reply, strand, rank, row, token, position, n, profile)
                token, position = token + n, position + n
            strands.last[strand.index] = b - 1
            if position < b:
                draft.drop(reply, strand.number, np.arange(position, b))

    def leave(self, reading: Reading) -> None:
        """The request has left."""
        for strand in reading.strands.values():
            self._strands.close(strand)
        if reading.fold is not None:
            self._strands.close(reading.fold)
        for profile in reading.profiles.values():
            self._profiles.give_back(profile)
        if reading.fold_profile >= 0:
            self._profiles.give_back(reading.fold_profile)

    def profile(self, reading: Reading, code: int) -> int:
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

    def _plan_scattered(self, draft: Draft, reading: Reading, reply: int, first: int, positions: np.ndarray) -> None:
        """As `plan`, of any positions."""
        codes = reading.selectors.codes(positions)
        strands = self._strands
        for code in distinct(codes):
            profile = self.profile(reading, int(code))
            at = np.flatnonzero(codes == code)
            strand = self._strand(reading, int(code), profile, int(positions[at[0]]))
            done = 0
            for rank, row, count in strands.place(strand, len(at)):
                some = at[done : done + count]
                draft.take_some(reply, strand, rank, row, first + some, positions[some], profile)
                done += count
            strands.last[strand.index] = positions[at[-1]]
            if done < len(at):
                draft.drop(reply, strand.number, positions[at[done:]])

    def _fold(self, draft: Draft, reading: Reading, reply: int, offset: int, start: int, end: int) -> None:
        """Reduce rows of the prompt, at those of the positions from `start` to `end` (not included) that are wanted,
        which are tokens ``offset + position``; all want the same columns."""
        runs = reading.selectors.runs(start, end)
        if runs is None:
            positions = np.arange(start, end)
            positions = positions[reading.selectors.codes(positions) > 0]
        else:
            positions = np.arange(runs[0][1], runs[0][2]) if runs else np.zeros(0, np.int64)
        assert reading.treatment is not None
        how, later = reading.treatment.reduce, reading.selectors.count(1, end, reading.selectors.prompt_len)[0]
        if how == "last":
            positions = positions[:0] if later else positions[-1:]
        if not len(positions):
            return
        strands, columns = self._strands, reading.columns[0]
        if reading.fold is not None and strands.last[reading.fold.index] >= positions[0]:
            strands.close(reading.fold)  # computed again after a preemption: all of it
            reading.fold = None
        resumed = 0
        if reading.fold is None:
            cell = Cell("fold", self._d_model, cell_rows(len(columns), self._d_model, self.row_bytes))
            reading.fold = strands.open(reading.request_id, reading.reply, columns, 1, 1, cell)
            reading.folded = 0
        else:
            same = strands.last[reading.fold.index] // GROUP == positions[0] // GROUP
            resumed = CONTINUED if same else COMPLETE
        if reading.fold_profile < 0:
            reading.fold_profile = self._profiles.take(columns, folded=True)
        strands.last[reading.fold.index] = positions[-1]
        reading.folded += len(positions)
        row = None
        if not later:
            placed = strands.place(reading.fold, 1)
            if not placed:
                draft.drop(reply, reading.fold.number, positions[-1:])
                return
            row = placed[0][1]
        draft.fold(
            reply, reading.fold, reading.fold_profile, offset + positions, positions, resumed, reading.folded,
            how == "max", row,
        )  # fmt: skip

    def _strand(self, reading: Reading, code: int, profile: int, position: int) -> Strand:
        strand = reading.strands.get(profile)
        if strand is not None and self._strands.last[strand.index] >= position:
            # Computed again after a preemption: a new strand, so that rows already handed out do not change.
            self._strands.close(strand)
            strand = None
        if strand is None:
            prompt_len = reading.selectors.prompt_len
            in_prompt, rows = reading.selectors.count(code, position, prompt_len + reading.most - 1)
            columns, cell = self._profiles.columns_of[profile], None
            if reading.treatment is not None:
                if reading.treatment.compression is not None:
                    record = reading.treatment.compression.record_bytes(self._d_model)
                    cell = Cell("packed", record, record * len(columns), reading.directions, self.row_bytes)
                elif reading.treatment.directions:
                    values = len(reading.treatment.directions)
                    cell = Cell("scores", values, 4 * values * len(columns), reading.directions, self.row_bytes)
                else:
                    in_prompt, rows = 0, rows - in_prompt
            strand = self._strands.open(reading.request_id, reading.reply, columns, in_prompt, max(rows, 1), cell)
            reading.strands[profile] = strand
        return strand
