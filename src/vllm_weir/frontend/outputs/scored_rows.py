"""`ScoredRows`: what probes and gates said of the tokens of one output."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.tokens import SequenceTokens
from vllm_weir.results.scores import Scores
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import selected


@dataclass(frozen=True)
class ScoredRows:
    """The scores and factors of a sequence at the positions from `start` to `end` (not included).

    Attributes:
        start, end: of the positions whose scores are wanted.
        aborted: whether the sequence ended before its time; then there is what has arrived.
        timeout: seconds to wait for scores.
    """

    pending: PendingSequence
    tokens: SequenceTokens
    start: int
    end: int
    aborted: bool
    timeout: float

    def scores(self) -> Scores | None:
        """Return the probes' scores, waiting for those on their way; None if there are no probes.

        Raises:
            WeirError: if the request has failed, or scores do not come in time.
        """
        admitted = self.pending.admitted
        return self._first_scores(admitted.told) if admitted.told else None

    def every_score(self) -> Scores:
        """Return the scores of all probes, likewise."""
        return self._first_scores(len(self.pending.admitted.probes))

    def _first_scores(self, count: int) -> Scores:
        self.pending.check()
        values, positions = {}, {}
        for index, probe in enumerate(self.pending.admitted.probes[:count]):
            at, scores = self.scores_of(index)
            values[probe.name] = torch.from_numpy(scores)
            positions[probe.name] = torch.from_numpy(at)
        return Scores(values, positions)

    def scores_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where one probe scores, int64 [rows], and its scores, float32 [rows, k], waiting for them.

        Raises:
            WeirError: if scores do not come in time.
        """
        probe, first = self.pending.admitted.probes[index], self.pending.admitted.cells.scores[index]
        at = self._arrived(self._selected(probe.positions))
        return at, np.ascontiguousarray(self.pending.scores.take(at)[:, first : first + probe.outputs])

    def acted(self, gate: int, positions: np.ndarray) -> np.ndarray:
        """Return those of `positions` at which a gate's factor is not 0, waiting for it where it is on its way.

        `gate` is its index; `positions` ascend.

        Raises:
            WeirError: if the request has failed, or factors do not come in time.
        """
        positions, admitted = self._arrived(positions), self.pending.admitted
        factors = self.pending.scores.take(positions)[:, admitted.cells.factors[gate]]
        refused = np.signbit(factors) & (factors == 0)  # see `step_controllers.REFUSED`
        if (controller := admitted.gates[gate].controller) and refused.any():
            raise WeirError(
                f"the controller {controller!r} gave no number from -1 to 1 for position {positions[refused][0]}",
                "interventions",
            )
        return positions[factors != 0]

    def doses(self, first: int, count: int, positions: np.ndarray) -> np.ndarray:
        """Return relative doses in `count` cells from `first` on, float32 [n, count], of `positions` that have some.

        Wait for those on their way; `positions` ascend.

        Raises:
            WeirError: if the request has failed, or doses do not come in time.
        """
        return self.pending.scores.take(self._arrived(positions))[:, first : first + count]

    def arrived(self, measured: Iterable[np.ndarray] = ()) -> bool:
        """Return whether `scores` would return at once, and `doses` of these positions, too."""
        if self.aborted or self.pending.failure is not None:
            return True
        return all(self.pending.scores.known(at).all() for at in itertools.chain(self._wanted(), measured))

    def _wanted(self) -> Iterator[np.ndarray]:
        for selector in dict.fromkeys(probe.positions for probe in self.pending.admitted.probes):
            yield self._selected(selector)

    def _arrived(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions once they have scores; of an aborted sequence, those that have some."""
        if self.aborted:
            return positions[self.pending.scores.known(positions)]
        self.pending.await_scores(positions, self.timeout)
        return positions

    def _selected(self, selector: Positions) -> np.ndarray:
        bounds = selector.bounds(self.tokens.prompt_len)
        if bounds is not None:
            first, end = max(bounds[0], self.start), min(bounds[1], self.end)
            return np.arange(first, max(first, end))
        positions = selected((selector,), self.tokens.prompt_len, self.tokens.up_to(self.end))
        return positions[positions >= self.start]
