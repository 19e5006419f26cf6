"""The store: rows of live requests, keyed by position, so a recomputed row overwrites and none comes twice."""

from __future__ import annotations

import threading
import time
from weakref import WeakValueDictionary

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admit import Admitted
from vllm_weir.spec.hooks import Site
from vllm_weir.worker.plan import column_of


class Pending:
    """One sequence's rows as they arrive.

    Attributes:
        admitted: what was asked.
        prompt_token_ids: int64 [P]; -1 where a prompt was given as embeddings.
    """

    def __init__(self, request_id: str, admitted: Admitted, prompt_token_ids: np.ndarray) -> None:
        self.request_id = request_id
        self.admitted = admitted
        self.prompt_token_ids = prompt_token_ids
        self._column = {w.site: column_of(w.site, w.before) for w in admitted.spec.wishes}
        self._chunks: dict[int, list[tuple[np.ndarray, torch.Tensor]]] = {c: [] for c in self._column.values()}
        self._have: dict[int, np.ndarray] = {c: np.zeros(0, bool) for c in self._column.values()}
        self._steered: list[np.ndarray] = [np.zeros(0, bool) for _ in admitted.effective]
        self._failure: str | None = None
        self._changed = threading.Condition()

    def add(self, columns: list[int], positions: np.ndarray, rows: torch.Tensor) -> None:
        """Rows [n, len(columns), d] at `positions` (int32 [n], ascending)."""
        with self._changed:
            for k, column in enumerate(columns):
                if column in self._chunks:
                    self._chunks[column].append((positions, rows[:, k]))
                    self._have[column] = _mark(self._have[column], positions)
            self._changed.notify_all()

    def add_span(self, moves: list[int], positions: np.ndarray) -> None:
        """The worker applied `moves` (indices into the effective interventions) at `positions` (int32 [n])."""
        with self._changed:
            for move in moves:
                self._steered[move] = _mark(self._steered[move], positions)
            self._changed.notify_all()

    def await_steered(self, move: int, positions: np.ndarray, timeout: float) -> None:
        """Wait for word that `move` was applied at all of `positions`.

        Raises:
            WeirError: if the worker reported a failure, or the word does not come within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._failure is None and not _covers(self._steered[move], positions):
                if not self._changed.wait(deadline - time.monotonic()):
                    raise WeirError(f"intervention {move} was not confirmed at every position within {timeout:g} s")
            self.check()

    def check(self) -> None:
        """Raise WeirError if the worker reported a failure."""
        if self._failure is not None:
            raise WeirError(f"this request failed in the worker: {self._failure}")

    def fail(self, reason: str) -> None:
        """The rows will not come."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def take(self, site: Site, positions: np.ndarray, timeout: float) -> torch.Tensor:
        """Rows [len(positions), d] of `site`, waiting for those still on their way.

        Raises:
            WeirError: if the worker reported a failure, or the rows do not come within `timeout` seconds.
        """
        column = self._column[site]
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._failure is None and not self._complete(column, positions):
                if not self._changed.wait(deadline - time.monotonic()):
                    missing = [int(p) for p in positions if not self._has(column, p)]
                    raise WeirError(
                        f"{len(missing)} of {len(positions)} rows of {site} did not arrive within {timeout:g} s "
                        f"(first missing position {missing[0] if missing else '-'}); the worker's log says why"
                    )
            self.check()
            return self._gather(column, positions)

    def arrived(self, site: Site, positions: np.ndarray) -> np.ndarray:
        """Those of `positions` whose rows are here; for requests that were aborted."""
        column = self._column[site]
        with self._changed:
            return np.asarray([p for p in positions if self._has(column, p)], np.int64)

    def _has(self, column: int, position: int) -> bool:
        have = self._have[column]
        return position < len(have) and bool(have[position])

    def _complete(self, column: int, positions: np.ndarray) -> bool:
        return _covers(self._have[column], positions)

    def _gather(self, column: int, positions: np.ndarray) -> torch.Tensor:
        chunks = self._chunks[column]
        if not len(positions) or not chunks:
            return torch.empty(0)
        total = sum(len(p) for p, _ in chunks)
        where = np.full(max(int(p[-1]) for p, _ in chunks) + 1, -1, np.int64)
        at = 0
        for held, _ in chunks:
            where[held] = np.arange(at, at + len(held))
            at += len(held)
        if len(chunks) > 1 and total > 2 * len(where):
            # Many recomputed rows: keep one copy of each.
            kept = np.flatnonzero(where >= 0)
            rows = torch.cat([r for _, r in chunks])[torch.from_numpy(where[kept])]
            self._chunks[column] = [(kept.astype(np.int32), rows)]
            return self._gather(column, positions)
        return torch.cat([r for _, r in chunks])[torch.from_numpy(where[positions])]


def _mark(have: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`have` with `positions` (ascending) set, grown if need be."""
    if positions[-1] >= len(have):
        grown = np.zeros(max(2 * len(have), int(positions[-1]) + 1), bool)
        grown[: len(have)] = have
        have = grown
    have[positions] = True
    return have


def _covers(have: np.ndarray, positions: np.ndarray) -> bool:
    """Whether all of `positions` (ascending) are set."""
    return not len(positions) or (int(positions[-1]) < len(have) and bool(have[positions].all()))


class Store:
    """Live requests of one engine by internal id. Holds them weakly: whoever drops a request drops its rows."""

    def __init__(self) -> None:
        self._pending: WeakValueDictionary[str, Pending] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._pending)

    def open(self, pending: Pending) -> None:
        """Accept rows for a request from now on."""
        self._pending[pending.request_id] = pending

    def vector(self, digest: str) -> np.ndarray | None:
        """A steering vector that a live request uses."""
        for pending in list(self._pending.values()):
            row = pending.admitted.rows.get(digest)
            if row is not None:
                return row
        return None

    def get(self, request_id: str) -> Pending | None:
        """The request, or None if nobody waits for it any more."""
        return self._pending.get(request_id)
