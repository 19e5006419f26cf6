"""The rows of one sequence, from their arrival until they are handed out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.receive.row_sequence_view import RowSequenceView, SlicedRows
from vllm_weir.frontend.receive.score_table import ScoreTable, ToldValues
from vllm_weir.frontend.receive.tokens import PromptTokens
from vllm_weir.results.activations import Activations
from vllm_weir.results.site_slices import SiteSlices
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import RowShard, ring_rows
from vllm_weir.util.token_texts import TokenTexts

if TYPE_CHECKING:
    from vllm_weir.frontend.tracing import RequestTrace

CROWDED = 0.5
"""Share of a worker's buffer in use from which rows are handed out as copies."""


class ArrivalReader(Protocol):
    """The part of `RowStore` that a pending sequence uses."""

    def wait(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait until `done` returns True, see `RowStore.wait`."""

    def change_salt(self) -> None:
        """Give steered requests that come later other cache keys."""

    def forget(self, pending: PendingSequence) -> None:
        """Release a request's rows."""


class InterventionGroup:
    """Interventions of a request that are always applied at the same positions.

    Args:
        steered: see `PendingSequence.steered`.
        interventions: indices of the group's interventions.
    """

    def __init__(self, steered: list[np.ndarray], interventions: Sequence[int]) -> None:
        self._steered, self._interventions = steered, interventions

    def record(self, runs: np.ndarray) -> None:
        """Note positions at which the group was applied, int [n, 3] of position, count, stride."""
        rows = runs.tolist()
        end = max(first + (count - 1) * stride for first, count, stride in rows) + 1
        for index in self._interventions:
            steered = self._steered[index]
            if end > len(steered):
                grown = np.zeros(max(2 * len(steered), end), bool)
                grown[: len(steered)] = steered
                steered = self._steered[index] = grown
            for first, count, stride in rows:
                steered[first : first + count * stride : stride] = True


class PendingSequence:
    """One sequence's rows as they arrive.

    Attributes:
        row_views: rows that have arrived; where views overlap, the later one counts.
        groups: groups of interventions that the worker has named.
        steered: of each intervention, bool by position: whether it was applied there.
        scores: the scores of its probes and the factors of its gates.
        told: what its functions gave and saved.
        failure: why the worker could not serve the request, if so.
        expected_end: positions that have rows if the sequence generates all tokens that it may; 0
            if its rows are not presliced.
        early_activations: what is handed out, if it was made before anybody asked.
        texts: of tokens, for who shows them; their ids until there is a tokenizer.
        tag: the request's own, for its receipt.
        trace: records its spans; None where requests are not traced.
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
        self.scores = ScoreTable(admitted.cells.reported)
        self.told = ToldValues()
        self.failure: str | None = None
        self.expected_end = 0
        self.early_activations: Activations | None = None
        self.texts = TokenTexts()
        self.tag = ""
        self.trace: RequestTrace | None = None
        self._store = store
        self._claims, self._lock, self._released = 0, threading.Lock(), False

    @property
    def memory(self) -> CaptureGroup:
        """The captures that come back on the output."""
        return self.admitted.parts[0]

    def claim(self, claims: int) -> None:
        """Keep the rows of this finished sequence until `unclaim` was called `claims` times."""
        self._claims = claims

    def unclaim(self) -> None:
        """Give up one claim; after the last one the memory is free, whoever holds an output."""
        with self._lock:
            self._claims -= 1
            unclaimed = self._claims == 0
            if unclaimed:
                self.row_views, self.early_activations = [], None
        if unclaimed and self._released:
            self._store.forget(self)

    def release(self) -> bool:
        """Give up the rows of the output; return whether nobody else needs any.

        Sinks that wait for rows keep them until they have taken them; the store forgets the
        sequence then.
        """
        if not self._released and self._claims and self.memory.has_rows:
            self.unclaim()
        # Set this before reading the claims: `unclaim` reads it after giving up the last one.
        self._released = True
        if self._claims:
            return False
        self.failure = self.failure or "its rows were released, as nobody waited for its answer any more"
        self.row_views, self.early_activations = [], None
        self.scores, self.told = ScoreTable(0), ToldValues()
        return True

    def forget_from(self, position: int) -> None:
        """Forget what was told of a position and all later ones, which come again."""
        for steered in self.steered:
            steered[position:] = False
        self.scores.forget_from(position)
        for row_view in self.row_views:
            row_view.forget_from(position)
        self.early_activations = None

    def await_steered(self, index: int, positions: np.ndarray | tuple[int, int], timeout: float) -> None:
        """Wait for word that an intervention was applied at all of `positions`.

        `index` says which; `positions` ascend, or are (first, end) for all between them; `timeout` is in seconds.

        Raises:
            WeirError: if the worker reported a failure, or the word does not come in time.
        """

        def done() -> bool:
            return self.failure is not None or _covers(self.steered[index], positions)

        if self.failure is None and done():
            return
        if not self._store.wait(done, timeout):
            self._store.change_salt()
            raise WeirError(f"intervention {index} was not confirmed at every position within {timeout:g} s")
        self.check()

    def confirmed(self, positions: Sequence[np.ndarray | tuple[int, int]]) -> bool:
        """Return whether `await_steered` would return at once for the `positions` of every intervention."""

        def done() -> bool:
            return self.failure is not None or all(map(_covers, self.steered, positions))

        return done() or self._store.wait(done, 0.0)

    def await_scores(self, positions: np.ndarray, timeout: float) -> None:
        """Wait for the scores at all of `positions`, ascending; `timeout` in seconds.

        Raises:
            WeirError: if the worker reported a failure, or the scores do not come in time.
        """

        def done() -> bool:
            return self.failure is not None or bool(self.scores.known(positions).all())

        if not done() and not self._store.wait(done, timeout):
            missing = positions[~self.scores.known(positions)]
            raise WeirError(
                f"the scores at {len(missing)} of {len(positions)} positions did not arrive within {timeout:g} s "
                f"(first missing position {missing[0]}); see the worker's log for the cause"
            )
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            raise WeirError(f"this request failed in the worker: {self.failure}")

    def awaited(self, sites: Sequence[Site]) -> bool:
        """Return whether sinks, too, still wait for rows of any of these sites."""
        return self._claims != 1 and not self.admitted.shared.isdisjoint(sites)

    def take(
        self,
        sites: Sequence[Site | RowShard],
        positions: np.ndarray,
        timeout: float,
        kind: str = "rows",
        copy: bool = False,
    ) -> list[TakenRows]:
        """Return rows of `sites` at `positions`, ascending, waiting up to `timeout` seconds for those on their way.

        `kind` is what the worker has made of them, see `messages.SequenceOpened`; `copy`: whether to return
        memory that nobody else has.

        Raises:
            WeirError: if the worker reported a failure, or the rows do not come in time.
        """
        found: list[tuple[Sequence[Site | RowShard], RowLocations]] = []

        def complete() -> bool:
            found[:] = self._find(sites, positions, kind)
            return self.failure is not None or all(locations.all_resolved for _, locations in found)

        if not self._store.wait(complete, timeout):
            for some_sites, locations in found:
                missing = positions[~locations.resolved] if locations.first_rank is None else positions[:0]
                if len(missing):
                    raise WeirError(
                        f"{len(missing)} of {len(positions)} rows of {some_sites[0]} did not arrive within "
                        f"{timeout:g} s (first missing position {missing[0]}); see the worker's log for the cause"
                    )
        self.check()
        return [self._collect(some_sites, locations, positions, kind, copy) for some_sites, locations in found]

    def arrived(
        self, sites: Sequence[Site | RowShard], positions: np.ndarray, kind: str = "rows", copy: bool = False
    ) -> list[TakenRows]:
        """Return those rows that are here, as `take` does; for requests that were aborted."""
        found: list[tuple[Sequence[Site | RowShard], RowLocations]] = []

        def look() -> bool:
            found.extend(self._find(sites, positions, kind))
            return True

        # Under the store's lock: arrivals recorded while a view's positions are read would be lost.
        self._store.wait(look, 0.0)
        return [self._collect(some_sites, locations, positions, kind, copy) for some_sites, locations in found]

    def has(self, sites: Sequence[Site | RowShard], positions: np.ndarray, kind: str = "rows") -> bool:
        """Return whether `take` would return at once, by the arrivals that have been read."""
        return all(locations.all_resolved for _, locations in self._find(sites, positions, kind))

    def preslice(self, sites: Sequence[Site], kind: str, first: int, count: int) -> None:
        """Make tensors of rows at `count` positions from `first` on before they arrive, where that is possible."""
        if self.admitted.shard_widths:
            return  # parts are joined once they are here
        for some_sites, row_views in self._group_by_views(sites, kind):
            alone = len(row_views) == 1 and row_views[0].kind == kind
            if alone and row_views[0].columns == self.admitted.columns_of(some_sites):
                row_views[0].preslice(some_sites, first, count)

    def complete_preslice(self, sites: Sequence[Site]) -> SlicedRows | None:
        """Return all rows of a finished sequence as they were presliced.

        None if they were not, are not all here, lie apart, or have to be copied before they are
        handed out.
        """
        if len(self.row_views) != 1 or self.row_views[0].presliced is None or self.awaited(sites):
            return None
        found: list[SlicedRows] = []

        def look() -> bool:
            for row_view in self.row_views if len(self.row_views) == 1 else ():
                sliced = None if self._must_copy(row_view, False) else row_view.complete_preslice()
                if sliced is not None and tuple(sliced.block) == tuple(sites):
                    found.append(sliced)
            return True

        self._store.wait(look, 0.0)
        return found[0] if found else None

    def _find(
        self, sites: Sequence[Site | RowShard], positions: np.ndarray, kind: str
    ) -> list[tuple[Sequence[Site | RowShard], RowLocations]]:
        return [
            (some_sites, _locate(row_views, positions)) for some_sites, row_views in self._group_by_views(sites, kind)
        ]

    def _group_by_views(
        self, sites: Sequence[Site | RowShard], kind: str
    ) -> list[tuple[Sequence[Site | RowShard], list[RowSequenceView]]]:
        """Group the sites by the views that their rows are in."""
        row_views = [row_view for row_view in self.row_views if row_view.gives(kind)]
        columns = self.admitted.columns_of(sites)
        if len(row_views) == 1 and columns == row_views[0].columns:
            return [(sites, row_views)]
        groups: dict[tuple[int, ...], list[Site | RowShard]] = {}
        for site, column in zip(sites, columns, strict=True):
            key = tuple(k for k, row_view in enumerate(row_views) if column in row_view.column_index)
            groups.setdefault(key, []).append(site)
        return [(some_sites, [row_views[k] for k in key]) for key, some_sites in groups.items()]

    def _collect(
        self, sites: Sequence[Site | RowShard], locations: RowLocations, positions: np.ndarray, kind: str, copy: bool
    ) -> TakenRows:
        """Return the rows that were located."""
        if locations.first_rank is not None:
            row_view, first_rank = locations.row_views[0], locations.first_rank
            if not self._must_copy(row_view, copy):
                presliced = row_view.presliced_run(sites, first_rank, len(positions))
                if presliced is not None:
                    return TakenRows(sites, positions, presliced)
            rows = row_view.gather_run(first_rank, len(positions), kind)
            return TakenRows(sites, positions, self._slice(sites, row_view, rows, copy))
        here = locations.view_index >= 0
        positions, view_index, ranks = positions[here], locations.view_index[here], locations.rank[here]
        if not len(positions):
            return TakenRows(sites, positions, {})
        bounds = [0, *(np.flatnonzero(np.diff(view_index)) + 1).tolist(), len(positions)]
        pieces: list[tuple[RowSequenceView, torch.Tensor]] = []
        for a, b in itertools.pairwise(bounds):
            row_view = locations.row_views[int(view_index[a])]
            pieces.append((row_view, row_view.gather(ranks[a:b], kind)))
        if len(pieces) == 1:
            return TakenRows(sites, positions, self._slice(sites, *pieces[0], copy))
        columns = self.admitted.columns_of(sites)
        widths = self.admitted.shard_widths
        by_site = {
            site: torch.cat([_rows_of(row_view, rows, column, widths.get(site)) for row_view, rows in pieces])
            for site, column in zip(sites, columns, strict=True)
        }
        return TakenRows(sites, positions, by_site)

    def _slice(
        self, sites: Sequence[Site | RowShard], row_view: RowSequenceView, rows: torch.Tensor, copy: bool
    ) -> Mapping[Site | RowShard, torch.Tensor]:
        columns, widths = self.admitted.columns_of(sites), self.admitted.shard_widths
        if widths and any(site in widths for site in sites):
            must_copy = self._must_copy(row_view, copy)
            by_site = {
                site: _rows_of(row_view, rows, column, widths.get(site))
                for site, column in zip(sites, columns, strict=True)
            }
            return {site: tensor.clone() if must_copy else tensor for site, tensor in by_site.items()}
        places = None if columns == row_view.columns else [row_view.column_index[column] for column in columns]
        return SiteSlices(sites, places, rows.clone() if self._must_copy(row_view, copy) else rows)

    @staticmethod
    def _must_copy(row_view: RowSequenceView, copy: bool) -> bool:
        """Return whether rows are handed out as copies; `copy` as in `take`."""
        return copy or row_view.mapped.pressure > CROWDED


def _rows_of(row_view: RowSequenceView, rows: torch.Tensor, column: int, width: int | None) -> torch.Tensor:
    """Return one column's rows [n, width] out of ranks [n, columns, d_model].

    A `width` of None means that a row is one row of the ring.
    """
    place = row_view.column_index[column]
    if width is None:
        return rows[:, place]
    return rows[:, place : place + ring_rows(width, rows.shape[2])].flatten(1)[:, :width]


_NOWHERE = np.zeros(0, bool)


class RowLocations:
    """Where the rows at some positions are.

    Attributes:
        row_views: the views that may have them.
        view_index: int64 by position, which view has the row; -1 if none has.
        rank: int64 by position, the row's rank in that view.
        dropped: bool by position, whether the worker had no room for the row.
        first_rank: if all rows follow each other in the first view, their first rank there; the
            arrays are empty then.
    """

    def __init__(
        self,
        row_views: list[RowSequenceView],
        view_index: np.ndarray,
        rank: np.ndarray,
        first_rank: int | None = None,
    ) -> None:
        self.row_views, self.view_index, self.rank, self.first_rank = row_views, view_index, rank, first_rank
        self.dropped = np.zeros(len(view_index), bool)

    @property
    def resolved(self) -> np.ndarray:
        """By position, whether the row is here or was dropped."""
        return (self.view_index >= 0) | self.dropped

    @property
    def all_resolved(self) -> bool:
        """Whether there is no row to wait for."""
        return self.first_rank is not None or bool(self.resolved.all())


def _locate(row_views: list[RowSequenceView], positions: np.ndarray) -> RowLocations:
    """Find the rows at `positions`; the last view that has one counts."""
    if len(row_views) == 1 and not len(row_views[0].dropped) and len(positions) and not row_views[0].has_gaps:
        have = row_views[0].positions
        first = 0 if len(have) and have[0] == positions[0] else int(np.searchsorted(have, positions[0]))
        found = have[first : first + len(positions)]
        if len(found) == len(positions) and (found == positions).all():
            return RowLocations(row_views, _NO_INDICES, _NO_INDICES, first_rank=first)
    locations = RowLocations(row_views, np.full(len(positions), -1), np.zeros(len(positions), np.int64))
    for k, row_view in enumerate(row_views):
        have = row_view.positions
        rank = np.searchsorted(have, positions)
        found = np.zeros(len(positions), bool)
        inside = rank < len(have)
        found[inside] = have[rank[inside]] == positions[inside]
        locations.view_index[found], locations.rank[found] = k, row_view.ranks(rank[found])
        if len(row_view.dropped):
            locations.dropped |= np.isin(positions, row_view.dropped)
    return locations


_NO_INDICES = np.zeros(0, np.int64)


@dataclass(frozen=True)
class TakenRows:
    """Rows [n, d] of some sites, or parts of rows, at `positions` [n]; no tensors if there are none."""

    sites: Sequence[Any]
    positions: np.ndarray
    rows: Mapping[Any, torch.Tensor]


def _covers(steered: np.ndarray, positions: np.ndarray | tuple[int, int]) -> bool:
    """Return whether `steered`, bool by position, is set at `positions`, see `await_steered`."""
    if isinstance(positions, tuple):
        first, end = positions
        return first >= end or (end <= len(steered) and bool(steered[first:end].all()))
    return not len(positions) or (int(positions[-1]) < len(steered) and bool(steered[positions].all()))
