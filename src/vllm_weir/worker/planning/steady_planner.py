"""`SteadyPlanner`: plans requests for which nothing changes from token to token, all at once. Pure numpy."""

from __future__ import annotations

import numpy as np

from vllm_weir.worker.planning.plan_builder import PlanBuilder
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.score_planner import ScorePlanner
from vllm_weir.worker.planning.steady_state import SteadyState


class SteadyPlanner:
    """Plans requests in the steady state."""

    def __init__(self, steady: SteadyState, row_seqs: RowSequences, scores: ScorePlanner) -> None:
        self._steady, self._row_seqs, self._scores = steady, row_seqs, scores

    def plan(
        self, builder: PlanBuilder, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Plan consecutive tokens of requests in the steady state, all arrays [n].

        Returns:
            bool [n], for which of them that was possible: the others' rows need another extent or
            row sequence.
        """
        steady, row_seqs = self._steady, self._row_seqs
        indices = steady.row_seq[slots]
        captures = indices >= 0
        indices = indices[captures]
        fits = np.ones(len(slots), bool)
        fits[captures] = (row_seqs.next_rank[indices] + counts[captures] <= row_seqs.end_rank[indices]) & (
            row_seqs.last_position[indices] - positions[captures] < row_seqs.rewind
        )
        if not fits.all():
            slots, tokens, positions, counts, captures = (
                array[fits] for array in (slots, tokens, positions, counts, captures)
            )
            indices = steady.row_seq[slots][captures]
        if len(indices):
            self._capture(builder, slots[captures], indices, tokens[captures], positions[captures], counts[captures])
        builder.programs[_all_tokens(tokens, counts)] = steady.program[slots].repeat(counts)
        groups = steady.group[slots]
        is_reported = groups >= 0
        if is_reported.any():
            builder.steer_each(
                steady.endpoint[slots[is_reported]],
                *(array[is_reported] for array in (groups, tokens, positions, counts)),
            )
        self._plan_scores(builder, slots, tokens, positions, counts)
        return fits

    def _capture(
        self,
        builder: PlanBuilder,
        slots: np.ndarray,
        indices: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """Capture consecutive tokens for the row sequences at `indices`, which have room; all arrays [n]."""
        steady, row_seqs = self._steady, self._row_seqs
        builder.site_sets[_all_tokens(tokens, counts)] = steady.site_set[slots].repeat(counts)
        ranks = row_seqs.next_rank[indices]
        if (counts == 1).all():
            builder.capture_one_each(steady.endpoint[slots], row_seqs, indices, ranks, tokens, positions)
        else:
            builder.capture_runs(steady.endpoint[slots], row_seqs, indices, ranks, tokens, positions, counts)
        row_seqs.next_rank[indices] += counts
        row_seqs.last_position[indices] = positions + counts - 1

    def _plan_scores(
        self, builder: PlanBuilder, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray, counts: np.ndarray
    ) -> None:
        """Plan what is scored and measured of tokens of requests in the steady state, all arrays [n]."""
        steady = self._steady
        is_scored = steady.probe[slots] >= 0
        if is_scored.any():
            probes = steady.probe[slots[is_scored]]
            self._scores.plan_each(builder.scores, probes, tokens[is_scored], counts[is_scored])
        is_read = steady.series[slots] >= 0
        if is_read.any():
            slots = slots[is_read]
            builder.scores.read(
                steady.endpoint[slots], steady.series[slots], positions[is_read], counts[is_read], tokens[is_read],
                steady.reported[slots],
            )  # fmt: skip


def _all_tokens(first_tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the tokens of runs, int64, one run after the other."""
    if (counts == 1).all():
        return first_tokens
    run = np.arange(len(counts)).repeat(counts)
    return first_tokens[run] + np.arange(len(run)) - (counts.cumsum() - counts)[run]
