"""What a step's plan says of probes: which tokens they read, and what readers are told. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_weir.worker.planning.columns import RUN, SCORE_READ, SCORED, concatenate
from vllm_weir.worker.planning.step_plan import ScoreReads


class ScoreBuilder:
    """Collects the runs of a step, and what is read of them.

    Attributes:
        reads: SCORE_READ [n], what is read; None before `finish`.
    """

    def __init__(self) -> None:
        self.reads: np.ndarray | None = None
        self._runs: list[np.ndarray] = []
        self._reads: list[np.ndarray] = []

    def __bool__(self) -> bool:
        return bool(self._runs or self._reads)

    def add_runs(
        self,
        taps: np.ndarray,
        probes: np.ndarray,
        tokens: np.ndarray | int,
        count: np.ndarray | int,
        fresh: bool,
        due: int,
    ) -> None:
        """Add `count` tokens each, from `tokens` on, for `probes` that read at `taps`; all [n]; see RUN."""
        runs = np.empty(len(probes), RUN)
        runs["tap"], runs["probe"], runs["token"], runs["count"], runs["fresh"] = taps, probes, tokens, count, fresh
        runs["due"] = due
        self._runs.append(runs)

    def read(
        self,
        endpoints: np.ndarray | int,
        series: np.ndarray | int,
        positions: np.ndarray,
        counts: np.ndarray | int,
        tokens: np.ndarray,
        cells: np.ndarray | int,
    ) -> None:
        """Send the first `cells` cells of consecutive tokens; fields as in SCORE_READ, arrays [n]."""
        reads = np.empty(len(positions), SCORE_READ)
        reads["endpoint"], reads["series"], reads["position"] = endpoints, series, positions
        reads["count"], reads["token"], reads["cells"] = counts, tokens, cells
        self._reads.append(reads)

    def finish(
        self, endpoints: Sequence[str], cancelled: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, dict[str, np.ndarray], ScoreReads | None]:
        """Return `runs`, `scored` and `score_reads` of the plan.

        `cancelled` has (first token, token after the last one) of requests that failed.
        """
        runs, reads = concatenate(self._runs, RUN), concatenate(self._reads, SCORE_READ)
        for first, end in cancelled:
            runs = runs[(runs["token"] < first) | (runs["token"] >= end)]
            reads = reads[(reads["token"] < first) | (reads["token"] >= end)]
        self.reads = reads
        return runs[runs["tap"].argsort(kind="stable")], *told_scores(reads, endpoints)


def told_scores(reads: np.ndarray, endpoints: Sequence[str]) -> tuple[dict[str, np.ndarray], ScoreReads | None]:
    """Return `scored` and `score_reads` of a plan for SCORE_READ [n]."""
    if not len(reads):
        return {}, None
    tokens, columns = int((reads["token"] + reads["count"]).max()), int(reads["cells"].max())
    scored, places = {}, {}
    for number in np.unique(reads["endpoint"]).tolist():
        own = reads[reads["endpoint"] == number]
        scored[endpoints[number]] = entries = np.empty(len(own), SCORED)
        for name in SCORED.names or ():
            entries[name] = own[name]
        places[endpoints[number]] = _places(own, columns)
    return scored, ScoreReads(tokens, columns, places)


def _places(reads: np.ndarray, columns: int) -> np.ndarray:
    """Return where the numbers of SCORE_READ [n] stand in an array with so many columns, int64 [m]."""
    sizes = reads["count"] * reads["cells"]
    ends = sizes.cumsum()
    read = np.arange(len(reads)).repeat(sizes)
    place = np.arange(len(read)) - (ends - sizes)[read]
    cells = reads["cells"][read]
    return (reads["token"][read] + place // cells) * columns + place % cells
