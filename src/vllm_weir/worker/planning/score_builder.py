"""The columns of a plan that score tokens, and those that say which readers are told."""

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


class ByEndpoint:
    """Arrays of one dtype, to be sorted by the reader that each row is for."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._rows: list[np.ndarray] = []
        self._endpoints: list[np.ndarray | int] = []
        self._tokens: list[np.ndarray | int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, endpoints: np.ndarray | int, rows: np.ndarray, tokens: np.ndarray | int) -> None:
        """Add rows [n].

        `endpoints`: numbers of their readers, [n], or one for all of them; `rows`: what readers are told; `tokens`: the
        first token that each one stands for, [n], or one for all of them.
        """
        self._rows.append(rows)
        self._endpoints.append(endpoints)
        self._tokens.append(tokens)

    def sorted(self, endpoints: Sequence[str]) -> dict[str, np.ndarray]:
        """Return endpoint -> its rows, in the order in which they were added."""
        if not self._rows:
            return {}
        rows = concatenate(self._rows, self._dtype)
        return self._sorted(rows, endpoints)

    def tokens(self, endpoints: Sequence[str]) -> dict[str, np.ndarray]:
        """Return endpoint -> int64 [n], the first token of each row of `sorted`."""
        return self._sorted(self._spread(self._tokens), endpoints) if self._rows else {}

    def _sorted(self, rows: np.ndarray, endpoints: Sequence[str]) -> dict[str, np.ndarray]:
        if len(endpoints) == 1:
            return {endpoints[0]: rows}
        numbers = self._spread(self._endpoints)
        return {endpoints[number]: rows.take((numbers == number).nonzero()[0]) for number in np.unique(numbers)}

    def _spread(self, values: Sequence[np.ndarray | int]) -> np.ndarray:
        parts = zip(values, self._rows, strict=True)
        return np.concatenate([np.broadcast_to(value, len(part)) for value, part in parts])
