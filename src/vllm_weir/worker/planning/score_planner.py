"""Which tokens the probes of a request read, planned one request after the other. Pure numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.schema.resolved_probes import Scoring
from vllm_weir.schema.selectors import Selectors, joined_codes
from vllm_weir.util.lru import IdentityCache
from vllm_weir.worker.planning.columns import DUE, FIRST_DUE
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.score_builder import ScoreBuilder
from vllm_weir.worker.scoring.probe_table import NEXT, TAP, ControlledGate, HeldProbes, ProbeTable
from vllm_weir.worker.scoring.recipe import ScoringRecipe
from vllm_weir.worker.steering.programs import ProgramTable

_NO_PROBES = np.zeros(0, np.int64)


@dataclass
class ScoredRequest:
    """A live request's probes and gates, and its doses.

    Attributes:
        held: the rows of probes and gates in the tables; None if there are no probes.
        taps, rows: int64 [probes], the tap and the row of each probe.
        fresh: whether no token has been read since the request joined or was resumed.
        asked: whether a controller was asked about it since.
        series: number under which the reader knows its scores, -1 before the first.
    """

    request_id: str
    endpoint: str
    recipe: ScoringRecipe
    held: HeldProbes | None
    taps: np.ndarray
    rows: np.ndarray
    fresh: bool = True
    asked: bool = False
    series: int = -1


class ScorePlanner:
    """Plans what the probes of requests read.

    `reports`: whether this worker reports scores; one per tensor-parallel group does.
    """

    def __init__(self, probes: ProbeTable, table: ProgramTable, row_seqs: RowSequences, reports: bool = True) -> None:
        self.table, self._row_seqs, self._reports = probes, row_seqs, reports
        self._programs = table
        self._series_numbers = itertools.count()
        self._recipes: IdentityCache[Scoring, ScoringRecipe] = IdentityCache(
            lambda scoring: ScoringRecipe(scoring, table)
        )

    def recipe(self, scoring: Scoring, cached: bool) -> ScoringRecipe:
        """Return what requests with the same probes have in common, the same object if it is `cached`.

        Raises WeirError if this worker cannot do what is asked.
        """
        return self._recipes[scoring] if cached else ScoringRecipe(scoring, self._programs)

    def join(self, request_id: str, endpoint: str, recipe: ScoringRecipe) -> ScoredRequest:
        """Give rows to the probes of a request, of which this worker reports something, until it leaves.

        Raises WeirError if a table is full.
        """
        if not recipe.probes:
            return ScoredRequest(request_id, endpoint, recipe, None, _NO_PROBES, _NO_PROBES)
        held = self.table.hold(recipe)
        for row, gate in zip(held.gates, recipe.gates, strict=True):
            if gate.controller:
                reads = tuple(held.probes[k] for k in gate.reads)
                self.table.controlled[row] = ControlledGate(gate.controller, request_id, endpoint, reads)
        return ScoredRequest(request_id, endpoint, recipe, held, np.array(recipe.taps), np.array(held.probes))

    def leave(self, request: ScoredRequest) -> None:
        if request.held is not None:
            self.table.release(request.held)

    def plan(
        self,
        builder: ScoreBuilder,
        request: ScoredRequest,
        selectors: Selectors,
        endpoint: int,
        first: int,
        start: int,
        count: int,
        behind: int = 0,
    ) -> None:
        """Plan a request's `count` tokens: positions from `start`, tokens of the step from `first`.

        Positions may be up to `behind` less than planned. Raises WeirError if a gate would need to know what follows.
        """
        recipe = request.recipe
        if recipe.early_bits and count > 1:
            _refuse_together(recipe, selectors, start, count)
        due = 0
        if recipe.controlled and start + count >= selectors.prompt_len:
            due = DUE if request.asked else FIRST_DUE
            request.asked = True
        spans = list(_spans(selectors, recipe.bits, start, start + count, behind))
        # What is kept after a token that may be taken back goes on in the next step, scored or not.
        if not spans and not due and self.table.copies == 1:
            return
        if len(request.rows):
            builder.add_runs(request.taps, request.rows, first, count, request.fresh, due)
        request.fresh = False
        if spans and (series := self.series(request)) >= 0:
            positions, ends = np.array(spans).T
            tokens = first + positions - start
            builder.read(endpoint, series, positions, ends - positions, tokens, recipe.layout.reported)

    def plan_each(self, builder: ScoreBuilder, probes: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Plan consecutive tokens of requests with these first probes; all int64 [n]."""
        while len(probes):
            fields = self.table.probes[probes]
            builder.add_runs(fields[:, TAP], probes, tokens, counts, False, DUE)
            goes_on = fields[:, NEXT] >= 0
            probes, tokens, counts = fields[goes_on, NEXT], tokens[goes_on], counts[goes_on]

    def series(self, request: ScoredRequest) -> int:
        """Return the number under which the reader knows a request's scores, -1 if they are not reported."""
        if request.series < 0 and self._reports:
            request.series = next(self._series_numbers)
            opened = messages.SeriesOpened(request.series, request.request_id, request.recipe.layout.reported)
            self._row_seqs.layout_update_for(request.endpoint).series.append(opened)
        return request.series


def _refuse_together(recipe: ScoringRecipe, selectors: Selectors, start: int, count: int) -> None:
    """Raise WeirError if a token of a pass, but for its first, is steered by what the one before says."""
    codes = selectors.codes(np.arange(start + 1, start + count))
    if not (codes & recipe.early_bits).any():
        return
    again = "the request was preempted, and its generated tokens are computed again together; send it again"
    if recipe.controlled:
        raise WeirError(
            f"a controller decides on a token after the pass of the one before: {again}, or start the engine with more "
            "room for its KV cache",
            "interventions",
        )
    raise WeirError(
        "a gate with delay=1 acts at or before its probe's block, so it needs the score of a token that is computed in "
        f"the same pass: {again}, or gate a later block than the probe's",
        "interventions",
    )


def _spans(selectors: Selectors, bits: int, start: int, end: int, behind: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the runs of positions in [start, end), or up to `behind` less, that have any of `bits`."""
    runs = None if behind else selectors.runs(start, end)
    if runs is not None:
        yield from ((first, last) for code, first, last in runs if code & bits)
        return
    codes = selectors.codes(np.arange(start - behind, end))
    chosen = np.flatnonzero(joined_codes(codes, behind) & bits)
    if len(chosen):
        breaks = np.flatnonzero(np.diff(chosen) > 1) + 1
        for run in np.split(chosen + start, breaks):
            yield int(run[0]), int(run[-1]) + 1
