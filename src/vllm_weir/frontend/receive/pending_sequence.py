"""One sequence's rows as they arrive, and as they are taken."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import AdmittedRequest
from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.receive.row_sequence_view import RowSequenceView, SlicedRows
from vllm_weir.frontend.receive.tokens import PromptTokens
from vllm_weir.results.activations import Activations
from vllm_weir.results.site_slices import SiteSlices
from vllm_weir.schema.hooks import Site

CROWDED = 0.5
"""Share of a worker's buffer in use from which rows are handed out as copies."""


class ArrivalReader(Protocol):
    """What is needed of the store."""

    def wait(self, done: Callable[[], bool], timeout: float) -> bool: ...

    def spoil(self) -> None: ...

    def forget(self, pending: PendingSequence) -> None: ...


class InterventionGroup:
    """Some interventions of a request, and at which positions each was applied."""

    def __init__(self, steered: list[np.ndarray], moves: Sequence[int]) -> None:
        self._steered, self._moves = steered, moves

    def mark(self, marks: np.ndarray) -> None:
        """int array [n, 3] of position, count, stride."""
        runs = marks.tolist()
        end = max(p + (n - 1) * s for p, n, s in runs) + 1
        for move in self._moves:
            have = self._steered[move]
            if end > len(have):
                grown = np.zeros(max(2 * len(have), end), bool)
                grown[: len(have)] = have
                have = self._steered[move] = grown
            for p, n, s in runs:
                have[p : p + n * s : s] = True


class PendingSequence:
    """One sequence's rows as they arrive.

    Attributes:
        admitted: what was asked.
        prompt: its tokens.
        row_views: rows that have come, later views replacing earlier ones where they overlap.
        steered: per intervention, bool array by position.
        foreseen: positions that have rows if it generates all tokens that it may; 0: its rows are not cut ahead.
    """

    def __init__(
        self, request_id: str, admitted: AdmittedRequest, prompt_token_ids: Sequence[int], store: ArrivalReader
    ) -> None:
        self.request_id = request_id
        self.admitted = admitted
        self.prompt = PromptTokens(prompt_token_ids)
        self.row_views: list[RowSequenceView] = []
        self.groups: list[InterventionGroup] = []
        self.steered: list[np.ndarray] = [_NOWHERE] * len(admitted.effective)
        self.failure: str | None = None
        self.foreseen = 0
        self.early: Activations | None = None
        """What is handed out, if it was made before anybody asked."""
        self._store = store
        self._claims, self._lock, self._released = 0, threading.Lock(), False

    @property
    def memory(self) -> CaptureGroup:
        """What comes back on the output."""
        return self.admitted.parts[0]

    def claim(self, claims: int) -> None:
        """The sequence has finished, and its rows are needed in so many places."""
        self._claims = claims

    def unclaim(self) -> None:
        """One of the places needs them no longer; after the last one the memory is free, whoever holds an output."""
        with self._lock:
            self._claims -= 1
            over = self._claims == 0
            if over:
                self.row_views, self.early = [], None
        if over and self._released:
            self._store.forget(self)

    def release(self) -> bool:
        """Nobody will look at what comes back on the output; whether nobody needs its rows at all: sinks that wait for
        some keep them until they have done, and then the store forgets it."""
        if not self._released and self._claims and self.memory.spec.site_requests:
            self.unclaim()
        self._released = True  # before the claims are looked at: who gives up the last one meanwhile looks at this
        if self._claims:
            return False
        self.failure = self.failure or "its rows were let go, as nobody waited for its answer any more"
        self.row_views, self.early = [], None
        return True

    def await_steered(self, move: int, positions: np.ndarray | tuple[int, int], timeout: float) -> None:
        """Wait for word that `move` was applied at all of `positions` (ascending; or the first, and where they end).

        Raises:
            WeirError: if the worker reported a failure, or the word does not come within `timeout` seconds.
        """
        if self.failure is None and _covers(self.steered[move], positions):
            return
        if not self._store.wait(lambda: self.failure is not None or _covers(self.steered[move], positions), timeout):
            self._store.spoil()
            raise WeirError(f"intervention {move} was not confirmed at every position within {timeout:g} s")
        self.check()

    def confirmed(self, positions: Sequence[np.ndarray | tuple[int, int]]) -> bool:
        """Whether `await_steered` would not have to wait for any intervention, each at its `positions`."""

        def done() -> bool:
            return self.failure is not None or all(map(_covers, self.steered, positions))

        return done() or self._store.wait(done, 0.0)

    def check(self) -> None:
        """Raise WeirError if the worker reported a failure."""
        if self.failure is not None:
            raise WeirError(f"this request failed in the worker: {self.failure}")

    def awaited(self, sites: Sequence[Site]) -> bool:
        """Whether what comes back on the output of any of these sites is still to go elsewhere, too."""
        return self._claims != 1 and not self.admitted.shared.isdisjoint(sites)

    def take(
        self, sites: Sequence[Site], positions: np.ndarray, timeout: float, kind: str = "rows", own: bool = False
    ) -> list[TakenRows]:
        """Rows of `sites` at `positions` (ascending), or what is made of them, waiting for those still on their way.

        `own`: nobody else has the memory of what is returned.

        Raises:
            WeirError: if the worker reported a failure, or the rows do not come within `timeout` seconds.
        """
        found: list[tuple[Sequence[Site], RowLocations]] = []

        def complete() -> bool:
            found[:] = self._found(sites, positions, kind)
            return self.failure is not None or all(where.all_there for _, where in found)

        if not self._store.wait(complete, timeout):
            for some, where in found:
                missing = positions[~where.there] if where.run is None else positions[:0]
                if len(missing):
                    raise WeirError(
                        f"{len(missing)} of {len(positions)} rows of {some[0]} did not arrive within {timeout:g} s "
                        f"(first missing position {missing[0]}); the worker's log says why"
                    )
        self.check()
        return [self._collect(*both, positions, own) for both in found]

    def cut(self, sites: Sequence[Site], kind: str, first: int, count: int) -> None:
        """Make the tensors of the first `count` rows of each of `sites`, from position `first` on, before they are
        complete, where that can be."""
        for some, row_views in self._groups(sites, kind):
            if len(row_views) == 1 and row_views[0].order == self.admitted.columns_of(some):
                row_views[0].cut(some, first, count)

    def whole(self, sites: Sequence[Site]) -> SlicedRows | None:
        """All rows of `sites` as they were cut ahead, if they are here, lie together, and may be handed out as they
        are; of a sequence that has no more to come."""
        if len(self.row_views) != 1 or self.row_views[0].ready is None or self.awaited(sites):
            return None
        found: list[SlicedRows] = []

        def look() -> bool:
            for row_view in self.row_views if len(self.row_views) == 1 else ():
                cut = None if self._copied(row_view, False) else row_view.whole()
                found.extend([cut] if cut is not None and tuple(cut.block) == tuple(sites) else ())
            return True

        self._store.wait(look, 0.0)
        return found[0] if found else None

    def has(self, sites: Sequence[Site], positions: np.ndarray, kind: str = "rows") -> bool:
        """Whether `take` would not have to wait, by the marks that have been read."""
        return all(where.all_there for _, where in self._found(sites, positions, kind))

    def _found(
        self, sites: Sequence[Site], positions: np.ndarray, kind: str
    ) -> list[tuple[Sequence[Site], RowLocations]]:
        return [(some, self._locate(row_views, positions)) for some, row_views in self._groups(sites, kind)]

    def arrived(
        self, sites: Sequence[Site], positions: np.ndarray, kind: str = "rows", own: bool = False
    ) -> list[TakenRows]:
        """As `take`, of those rows that are here; for requests that were aborted."""
        found: list[tuple[Sequence[Site], RowLocations]] = []

        def look() -> bool:
            found.extend(self._found(sites, positions, kind))
            return True

        self._store.wait(look, 0.0)  # by way of the store: marks that come while a view's are read would be lost
        return [self._collect(some, where, positions, own) for some, where in found]

    def _groups(self, sites: Sequence[Site], kind: str) -> list[tuple[Sequence[Site], list[RowSequenceView]]]:
        """The sites, those that lie in the same views together, with these views."""
        row_views = [row_view for row_view in self.row_views if row_view.kind == kind]
        columns = self.admitted.columns_of(sites)
        if len(row_views) == 1 and columns == row_views[0].order:
            return [(sites, row_views)]
        groups: dict[tuple[int, ...], list[Site]] = {}
        for site, column in zip(sites, columns, strict=True):
            groups.setdefault(tuple(k for k, s in enumerate(row_views) if column in s.columns), []).append(site)
        return [(some, [row_views[k] for k in key]) for key, some in groups.items()]

    def _locate(self, row_views: list[RowSequenceView], positions: np.ndarray) -> RowLocations:
        """Where the rows at `positions` are; the last view that has one counts."""
        if len(row_views) == 1 and not len(row_views[0].dropped) and len(positions):
            have = row_views[0].positions
            first = 0 if len(have) and have[0] == positions[0] else int(np.searchsorted(have, positions[0]))
            found = have[first : first + len(positions)]
            if len(found) == len(positions) and (found == positions).all():
                return RowLocations(row_views, *_NONE, run=first)
        where = RowLocations(row_views, np.full(len(positions), -1), np.zeros(len(positions), np.int64))
        for k, row_view in enumerate(row_views):
            have = row_view.positions
            rank = np.searchsorted(have, positions)
            found = np.zeros(len(positions), bool)
            inside = rank < len(have)
            found[inside] = have[rank[inside]] == positions[inside]
            where.row_view[found], where.rank[found] = k, rank[found]
            if len(row_view.dropped):
                where.dropped |= np.isin(positions, row_view.dropped)
        return where

    def _collect(self, sites: Sequence[Site], where: RowLocations, positions: np.ndarray, own: bool) -> TakenRows:
        columns = self.admitted.columns_of(sites)
        if where.run is not None:
            row_view = where.row_views[0]
            if (
                not self._copied(row_view, own)
                and (ready := row_view.block(sites, where.run, len(positions))) is not None
            ):
                return TakenRows(sites, positions, ready)
            rows = row_view.run(where.run, len(positions))
            return TakenRows(sites, positions, self._block(sites, columns, row_view, rows, own))
        have = where.row_view >= 0
        positions, row_views, ranks = positions[have], where.row_view[have], where.rank[have]
        if not len(positions):
            return TakenRows(sites, positions, {})
        bounds = [0, *(np.flatnonzero(np.diff(row_views)) + 1).tolist(), len(positions)]
        pieces = [(where.row_views[int(row_views[a])], ranks[a:b]) for a, b in itertools.pairwise(bounds)]
        if len(pieces) == 1:
            ((row_view, some),) = pieces
            return TakenRows(sites, positions, self._block(sites, columns, row_view, row_view.gather(some), own))
        gathered = [(row_view, row_view.gather(some)) for row_view, some in pieces]
        return TakenRows(
            sites,
            positions,
            {
                site: torch.cat([rows[:, row_view.columns[column]] for row_view, rows in gathered])
                for site, column in zip(sites, columns, strict=True)
            },
        )

    def _block(
        self, sites: Sequence[Site], columns: Sequence[int], row_view: RowSequenceView, rows: torch.Tensor, own: bool
    ) -> SiteSlices:
        places = None if columns == row_view.order else [row_view.columns[column] for column in columns]
        return SiteSlices(sites, places, rows.clone() if self._copied(row_view, own) else rows)

    @staticmethod
    def _copied(row_view: RowSequenceView, own: bool) -> bool:
        """Whether rows are handed out as copies; `own` as in `take`."""
        return own or row_view.mapped.pressure > CROWDED


_NOWHERE = np.zeros(0, bool)
_NONE = (np.zeros(0, np.int64), np.zeros(0, np.int64))


class RowLocations:
    """For each position: the number (in `row_views`) of the view that has its row (-1: none), the row's rank there,
    and whether the worker has dropped it. `run`: instead of these, the rank in the first view from which on they
    lie."""

    def __init__(
        self, row_views: list[RowSequenceView], row_view: np.ndarray, rank: np.ndarray, run: int | None = None
    ) -> None:
        self.row_views, self.row_view, self.rank, self.run = row_views, row_view, rank, run
        self.dropped = np.zeros(len(row_view), bool)

    @property
    def there(self) -> np.ndarray:
        """Whether there is nothing more to wait for."""
        return (self.row_view >= 0) | self.dropped

    @property
    def all_there(self) -> bool:
        """Whether that is so at every position."""
        return self.run is not None or bool(self.there.all())


@dataclass(frozen=True)
class TakenRows:
    """Rows [n, d] of some sites at `positions` [n]; no tensors if there are no rows."""

    sites: Sequence[Site]
    positions: np.ndarray
    rows: Mapping[Site, torch.Tensor]


def _covers(have: np.ndarray, positions: np.ndarray | tuple[int, int]) -> bool:
    """Whether all of `positions`, as in `await_steered`, are set."""
    if isinstance(positions, tuple):
        first, end = positions
        return first >= end or (end <= len(have) and bool(have[first:end].all()))
    return not len(positions) or (int(positions[-1]) < len(have) and bool(have[positions].all()))
