"""The store: rows of live requests, keyed by position, so a recomputed row replaces the older and none comes twice."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from vllm_weir import mail
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admit import Admitted
from vllm_weir.frontend.mirror import Mirror
from vllm_weir.frontend.strips import Extent, Strip
from vllm_weir.spec.hooks import Site

FOLD = 64
"""Messages whose marks are kept unread; reading many at once costs little more than reading one."""
CROWDED = 0.5
"""Share of a worker's buffer in use from which rows are handed out as copies."""


class Group:
    """Some interventions of a request, and at which positions each was applied."""

    def __init__(self, steered: list[np.ndarray], moves: Sequence[int]) -> None:
        self._steered, self._moves = steered, moves

    def mark(self, marks: np.ndarray) -> None:
        """int array [n, 3] of position, count, stride."""
        if (marks[:, 1] == 1).all():
            positions = np.sort(marks[:, 0])
        else:
            positions = np.unique(np.concatenate([np.arange(p, p + n * s, s) for p, n, s in marks.tolist()]))
        for move in self._moves:
            self._steered[move] = _mark(self._steered[move], positions)


class Pending:
    """One sequence's rows as they arrive.

    Attributes:
        admitted: what was asked.
        prompt_len: P.
        strips: rows that have come, later strips replacing earlier ones where they overlap.
        steered: per intervention, bool array by position.
    """

    def __init__(self, request_id: str, admitted: Admitted, prompt_token_ids: Sequence[int], store: Store) -> None:
        self.request_id = request_id
        self.admitted = admitted
        self._prompt, self.prompt_len = prompt_token_ids, len(prompt_token_ids)
        self.strips: list[Strip] = []
        self.groups: list[Group] = []
        self.steered: list[np.ndarray] = [_NOWHERE] * len(admitted.effective)
        self.failure: str | None = None
        self._store = store
        self._claims, self._lock = 0, threading.Lock()

    @functools.cached_property
    def prompt_token_ids(self) -> np.ndarray:
        """int64 [P]; -1 where a prompt was given as embeddings."""
        return np.asarray(self._prompt, np.int64)

    def claim(self, claims: int) -> None:
        """The sequence has finished, and its rows are needed in so many places."""
        self._claims = claims

    def unclaim(self) -> None:
        """One of the places needs them no longer; after the last one the memory is free, whoever holds an output."""
        with self._lock:
            self._claims -= 1
            if self._claims == 0:
                self.strips = []

    def await_steered(self, move: int, positions: np.ndarray, timeout: float) -> None:
        """Wait for word that `move` was applied at all of `positions`.

        Raises:
            WeirError: if the worker reported a failure, or the word does not come within `timeout` seconds.
        """
        if not self._store.wait(lambda: self.failure is not None or _covers(self.steered[move], positions), timeout):
            raise WeirError(f"intervention {move} was not confirmed at every position within {timeout:g} s")
        self.check()

    def check(self) -> None:
        """Raise WeirError if the worker reported a failure."""
        if self.failure is not None:
            raise WeirError(f"this request failed in the worker: {self.failure}")

    def take(self, sites: Sequence[Site], positions: np.ndarray, timeout: float, kind: str = "rows") -> list[Taken]:
        """Rows of `sites` at `positions` (ascending), or what is made of them, waiting for those still on their way.

        Raises:
            WeirError: if the worker reported a failure, or the rows do not come within `timeout` seconds.
        """
        found: list[tuple[Sequence[Site], Where]] = []

        def complete() -> bool:
            found[:] = [(some, self._locate(strips, positions)) for some, strips in self._groups(sites, kind)]
            return self.failure is not None or all(w.all_in_first or w.there.all() for _, w in found)

        if not self._store.wait(complete, timeout):
            for some, where in found:
                missing = positions[~where.there]
                if len(missing):
                    raise WeirError(
                        f"{len(missing)} of {len(positions)} rows of {some[0]} did not arrive within {timeout:g} s "
                        f"(first missing position {missing[0]}); the worker's log says why"
                    )
        self.check()
        return [self._collect(*both, positions) for both in found]

    def arrived(self, sites: Sequence[Site], positions: np.ndarray, kind: str = "rows") -> list[Taken]:
        """As `take`, of those rows that are here; for requests that were aborted."""
        self._store.fold()
        groups = self._groups(sites, kind)
        return [self._collect(some, self._locate(strips, positions), positions) for some, strips in groups]

    def _groups(self, sites: Sequence[Site], kind: str) -> list[tuple[Sequence[Site], list[Strip]]]:
        """The sites, those that lie in the same strips together, with these strips."""
        strips = [strip for strip in self.strips if strip.kind == kind]
        columns = self.admitted.columns_of(sites)
        if len(strips) == 1 and columns == strips[0].order:
            return [(sites, strips)]
        groups: dict[tuple[int, ...], list[Site]] = {}
        for site, column in zip(sites, columns, strict=True):
            groups.setdefault(tuple(k for k, s in enumerate(strips) if column in s.columns), []).append(site)
        return [(some, [strips[k] for k in key]) for key, some in groups.items()]

    def _locate(self, strips: list[Strip], positions: np.ndarray) -> Where:
        """Where the rows at `positions` are; the last strip that has one counts."""
        if len(strips) == 1 and not len(strips[0].dropped):
            have = strips[0].positions[: len(positions)]
            if len(have) == len(positions) and (have == positions).all():
                return Where(strips, np.zeros(len(positions), np.int64), np.arange(len(positions)), True)
        where = Where(strips, np.full(len(positions), -1), np.zeros(len(positions), np.int64))
        for k, strip in enumerate(strips):
            have = strip.positions
            rank = np.searchsorted(have, positions)
            found = np.zeros(len(positions), bool)
            inside = rank < len(have)
            found[inside] = have[rank[inside]] == positions[inside]
            where.strip[found], where.rank[found] = k, rank[found]
            if len(strip.dropped):
                where.dropped |= np.isin(positions, strip.dropped)
        return where

    def _collect(self, sites: Sequence[Site], where: Where, positions: np.ndarray) -> Taken:
        strips, ranks = where.strip, where.rank
        bounds = [0, len(positions)]
        if not where.all_in_first:
            have = strips >= 0
            if not have.all():
                positions, strips, ranks = positions[have], strips[have], ranks[have]
            bounds = [0, *(np.flatnonzero(np.diff(strips)) + 1).tolist(), len(positions)]
        if not len(positions):
            return Taken(sites, positions, {})
        columns = self.admitted.columns_of(sites)
        pieces = [(where.strips[int(strips[a])], ranks[a:b]) for a, b in itertools.pairwise(bounds)]
        if len(pieces) == 1:
            strip = pieces[0][0]
            rows = strip.gather(pieces[0][1])
            crowded = any(strip.mirror.pressure > CROWDED for strip in where.strips)
            every: Sequence[torch.Tensor] = (rows.clone() if crowded else rows).unbind(1)
            if columns != strip.order:
                every = [every[strip.columns[column]] for column in columns]
            return Taken(sites, positions, dict(zip(sites, every, strict=True)))
        gathered = [(strip, strip.gather(some)) for strip, some in pieces]
        return Taken(
            sites,
            positions,
            {
                site: torch.cat([rows[:, strip.columns[column]] for strip, rows in gathered])
                for site, column in zip(sites, columns, strict=True)
            },
        )


_NOWHERE = np.zeros(0, bool)


class Where:
    """For each position: the number (in `strips`) of the strip that has its row (-1: none), the row's rank there, and
    whether the worker has dropped it."""

    def __init__(self, strips: list[Strip], strip: np.ndarray, rank: np.ndarray, all_in_first: bool = False) -> None:
        self.strips, self.strip, self.rank, self.all_in_first = strips, strip, rank, all_in_first
        self.dropped = np.zeros(len(strip), bool)

    @property
    def there(self) -> np.ndarray:
        """Whether there is nothing more to wait for."""
        return (self.strip >= 0) | self.dropped


@dataclass(frozen=True)
class Taken:
    """Rows [n, d] of some sites at `positions` [n]; no tensors if there are no rows."""

    sites: Sequence[Site]
    positions: np.ndarray
    rows: dict[Site, torch.Tensor]


class Load(NamedTuple):
    """A worker's data-parallel engine, the share of its host buffer in use, and the engine's waiting requests."""

    engine: int
    pressure: float
    waiting: int


class Store:
    """Live requests of one engine by internal id. Holds them weakly: whoever drops a request drops its rows."""

    def __init__(self) -> None:
        self._pending: WeakValueDictionary[str, Pending] = WeakValueDictionary()
        self._strips: WeakValueDictionary[tuple[str, int], Strip] = WeakValueDictionary()
        self._groups: WeakValueDictionary[tuple[str, int], Group] = WeakValueDictionary()
        self._widths: dict[tuple[str, int], int] = {}
        """Bytes of a rank of open strands whose rows come in messages."""
        self._unread: list[tuple[str, np.ndarray, np.ndarray]] = []
        self._changed = threading.Condition(threading.RLock())
        self.loads: dict[str, Load] = {}
        """What each worker last said of itself."""

    def __len__(self) -> int:
        return len(self._pending)

    def open(self, pending: Pending) -> None:
        """Accept rows for a request from now on."""
        self._pending[pending.request_id] = pending

    def vectors(self, digests: Iterable[str]) -> dict[str, np.ndarray]:
        """Those of these vectors that a live request uses, by digest."""
        missing, found = set(digests), {}
        for reference in self._pending.valuerefs():  # a list: requests may come and go meanwhile
            pending = reference()
            rows = pending.admitted.rows if pending is not None else {}
            for digest in [d for d in rows if d in missing] if len(rows) < len(missing) else missing & rows.keys():
                found[digest] = rows[digest]
                missing.discard(digest)
            if not missing:
                break
        return found

    def get(self, request_id: str) -> Pending | None:
        """The request, or None if nobody waits for it any more."""
        return self._pending.get(request_id)

    def wait(self, done, timeout: float) -> bool:
        """Wait until `done` says so, asking whenever something has arrived; False if `timeout` seconds went by."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                self.fold()
                if done():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)

    def receive(self, header: mail.Header, mirror: Mirror, marks: np.ndarray, steered: np.ndarray, payload) -> None:
        """One message: `marks` int32 [n, 5], `steered` int32 [n, 4], `payload` bytes of rows or empty."""
        worker, news = header.worker, header.news
        dtype = getattr(torch, header.dtype)
        mirror.pressure = header.pressure
        self.loads[worker] = Load(header.engine, header.pressure, header.waiting)
        with self._changed:
            for request_id, reason in header.failures.items():
                if (pending := self.get(request_id)) is not None:
                    pending.failure = reason
            if header.broken:  # which requests had rows in the step, only the lost marks could have said
                for pending in list(self._pending.values()):
                    pending.failure = pending.failure or header.broken
            for opened in news.opened:
                if not mirror.shared:
                    self._widths[worker, opened.strand] = opened.rank_bytes(header.d_model * dtype.itemsize)
                if (pending := self.get(opened.request_id)) is not None:
                    self._strips[worker, opened.strand] = strip = Strip(opened, mirror, header.d_model, dtype)
                    pending.strips.append(strip)
            for placed in news.placed:
                owner = self._strips.get((worker, placed.strand))
                if owner is not None:
                    rows = owner.shaped(mirror.piece(placed.start, placed.capacity * owner.rank_bytes))
                    owner.extents.append(Extent(placed.rank, rows, own=not mirror.shared))
                elif mirror.shared:
                    mirror.drop(placed.start)
            for group in news.groups:
                if (pending := self.get(group.request_id)) is not None:
                    self._groups[worker, group.group] = made = Group(pending.steered, group.moves)
                    pending.groups.append(made)
            if len(payload):
                self._unpack(worker, marks, torch.frombuffer(payload, dtype=torch.uint8))
            for strand in news.closed:
                self._widths.pop((worker, strand), None)
            if len(marks) or len(steered):
                self._unread.append((worker, marks, steered))
            if len(self._unread) > FOLD or news.retired:
                self.fold()
            for retired in news.retired:
                owner = self._strips.get((worker, retired.strand))
                for extent in owner.extents if owner is not None else ():
                    if extent.rank == retired.rank:
                        extent.filled = retired.filled
            self._changed.notify_all()
        if header.spill:
            self._spill(mirror)

    def fold(self) -> None:
        """Read the marks that have come."""
        with self._changed:
            unread, self._unread = self._unread, []
            for worker in {w for w, _, _ in unread}:
                for kind, targets in ((1, self._strips), (2, self._groups)):
                    marks = np.concatenate([m[kind] for m in unread if m[0] == worker])
                    for number, some in _split(marks):
                        target = targets.get((worker, number))
                        if target is not None:
                            target.mark(some)

    def _unpack(self, worker: str, marks: np.ndarray, payload: torch.Tensor) -> None:
        at = 0
        for number, rank, _, count, _ in marks.tolist():
            if rank < 0:
                continue
            width = self._widths[worker, number]
            piece = payload[at : at + width * count]
            at += width * count
            strip = self._strips.get((worker, number))
            if strip is not None:
                extent = next(x for x in reversed(strip.extents) if x.rank <= rank)
                extent.rows[rank - extent.rank : rank - extent.rank + count] = strip.shaped(piece.clone())

    def _spill(self, mirror: Mirror) -> None:
        """Copy what a worker's buffer holds and nobody has looked at into memory of this process."""
        for strip in [s for s in self._strips.values() if s.mirror is mirror]:
            for extent, copy in strip.take_out():
                with self._changed:
                    extent.rows, extent.own = copy, True


def _split(marks: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(number, the rest of its rows in order) for each number in the first column."""
    if not len(marks):
        return []
    marks = marks[np.argsort(marks[:, 0], kind="stable")]
    bounds = [0, *(np.flatnonzero(np.diff(marks[:, 0])) + 1).tolist(), len(marks)]
    return [(int(marks[a, 0]), marks[a:b, 1:]) for a, b in itertools.pairwise(bounds)]


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
