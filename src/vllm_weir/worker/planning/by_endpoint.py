"""`ByEndpoint`: what a step has to tell its readers, sorted by reader. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_weir.worker.planning.columns import concatenate


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

        Args:
            endpoints: numbers of their readers, [n], or one for all of them.
            rows: what readers are told.
            tokens: the first token that each one stands for, [n], or one for all of them.
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
