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
from vllm_weir.frontend.admission.admit import Admitted
from vllm_weir.frontend.admission.capture_groups import Part
from vllm_weir.frontend.receive.row_sequence_view import Cut, Strip
from vllm_weir.frontend.receive.tokens import Prompt
from vllm_weir.results.activations import Activations
from vllm_weir.results.site_slices import Block
from vllm_weir.schema.hooks import Site

CROWDED = 0.5
"""Share of a worker's buffer in use from which rows are handed out as copies."""


class Arrivals(Protocol):
    """What is needed of the store."""

    def wait(self, done: Callable[[], bool], timeout: float) -> bool: ...

    def spoil(self) -> None: ...

    def forget(self, pending: Pending) -> None: ...


class Group:
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


class Pending:
    """One sequence's rows as they arrive.

    Attributes:
        admitted: what was asked.
        prompt: its tokens.
        strips: rows that have come, later strips replacing earlier ones where they overlap.
        steered: per intervention, bool array by position.
        foreseen: positions that have rows if it generates all tokens that it may; 0: its rows are not cut ahead.
    """

    def __init__(self, request_id: str, admitted: Admitted, prompt_token_ids: Sequence[int], store: Arrivals) -> None:
        self.request_id = request_id
        self.admitted = admitted
        self.prompt = Prompt(prompt_token_ids)
        self.strips: list[Strip] = []
        self.groups: list[Group] = []
        self.steered: list[np.ndarray] = [_NOWHERE] * len(admitted.effective)
        self.failure: str | None = None
        self.foreseen = 0
        self.early: Activations | None = None
        """What is handed out, if it was made before anybody asked."""
        self._store = store
        self._claims, self._lock, self._released = 0, threading.Lock(), False

    @property
    def memory(self) -> Part:
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
                self.strips, self.early = [], None
        if over and self._released:
            self._store.forget(self)

    def release(self) -> bool:
        """Nobody will look at what comes back on the output; whether nobody needs its rows at all: sinks that wait for
        some keep them until they have done, and then the store forgets it."""
        if not self._released and self._claims and self.memory.spec.wishes:
            self.unclaim()
        self._released = True  # before the claims are looked at: who gives up the last one meanwhile looks at this
        if self._claims:
            return False
        self.failure = self.failure or "its rows were let go, as nobody waited for its answer any more"
        self.strips, self.early = [], None
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
    ) -> list[Taken]:
        """Rows of `sites` at `positions` (ascending), or what is made of them, waiting for those still on their way.

        `own`: nobody else has the memory of what is returned.

        Raises:
            WeirError: if the worker reported a failure, or the rows do not come within `timeout` seconds.
        """
        found: list[tuple[Sequence[Site], Where]] = []

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
        for some, strips in self._groups(sites, kind):
            if len(strips) == 1 and strips[0].order == self.admitted.columns_of(some):
                strips[0].cut(some, first, count)

    def whole(self, sites: Sequence[Site]) -> Cut | None:
        """All rows of `sites` as they were cut ahead, if they are here, lie together, and may be handed out as they
        are; of a sequence that has no more to come."""
        if len(self.strips) != 1 or self.strips[0].ready is None or self.awaited(sites):
            return None
        found: list[Cut] = []

        def look() -> bool:
            for strip in self.strips if len(self.strips) == 1 else ():
                cut = None if self._copied(strip, False) else strip.whole()
                found.extend([cut] if cut is not None and tuple(cut.block) == tuple(sites) else ())
            return True

        self._store.wait(look, 0.0)
        return found[0] if found else None

    def has(self, sites: Sequence[Site], positions: np.ndarray, kind: str = "rows") -> bool:
        """Whether `take` would not have to wait, by the marks that have been read."""
        return all(where.all_there for _, where in self._found(sites, positions, kind))

    def _found(self, sites: Sequence[Site], positions: np.ndarray, kind: str) -> list[tuple[Sequence[Site], Where]]:
        return [(some, self._locate(strips, positions)) for some, strips in self._groups(sites, kind)]

    def arrived(
        self, sites: Sequence[Site], positions: np.ndarray, kind: str = "rows", own: bool = False
    ) -> list[Taken]:
        """As `take`, of those rows that are here; for requests that were aborted."""
        found: list[tuple[Sequence[Site], Where]] = []

        def look() -> bool:
            found.extend(self._found(sites, positions, kind))
            return True

        self._store.wait(look, 0.0)  # by way of the store: marks that come while a strip's are read would be lost
        return [self._collect(some, where, positions, own) for some, where in found]

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
        if len(strips) == 1 and not len(strips[0].dropped) and len(positions):
            have = strips[0].positions
            first = 0 if len(have) and have[0] == positions[0] else int(np.searchsorted(have, positions[0]))
            found = have[first : first + len(positions)]
            if len(found) == len(positions) and (found == positions).all():
                return Where(strips, *_NONE, run=first)
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

    def _collect(self, sites: Sequence[Site], where: Where, positions: np.ndarray, own: bool) -> Taken:
        columns = self.admitted.columns_of(sites)
        if where.run is not None:
            strip = where.strips[0]
            if not self._copied(strip, own) and (ready := strip.block(sites, where.run, len(positions))) is not None:
                return Taken(sites, positions, ready)
            rows = strip.run(where.run, len(positions))
            return Taken(sites, positions, self._block(sites, columns, strip, rows, own))
        have = where.strip >= 0
        positions, strips, ranks = positions[have], where.strip[have], where.rank[have]
        if not len(positions):
            return Taken(sites, positions, {})
        bounds = [0, *(np.flatnonzero(np.diff(strips)) + 1).tolist(), len(positions)]
        pieces = [(where.strips[int(strips[a])], ranks[a:b]) for a, b in itertools.pairwise(bounds)]
        if len(pieces) == 1:
            ((strip, some),) = pieces
            return Taken(sites, positions, self._block(sites, columns, strip, strip.gather(some), own))
        gathered = [(strip, strip.gather(some)) for strip, some in pieces]
        return Taken(
            sites,
            positions,
            {
                site: torch.cat([rows[:, strip.columns[column]] for strip, rows in gathered])
                for site, column in zip(sites, columns, strict=True)
            },
        )

    def _block(
        self, sites: Sequence[Site], columns: Sequence[int], strip: Strip, rows: torch.Tensor, own: bool
    ) -> Block:
        places = None if columns == strip.order else [strip.columns[column] for column in columns]
        return Block(sites, places, rows.clone() if self._copied(strip, own) else rows)

    @staticmethod
    def _copied(strip: Strip, own: bool) -> bool:
        """Whether rows are handed out as copies; `own` as in `take`."""
        return own or strip.mirror.pressure > CROWDED


_NOWHERE = np.zeros(0, bool)
_NONE = (np.zeros(0, np.int64), np.zeros(0, np.int64))


class Where:
    """For each position: the number (in `strips`) of the strip that has its row (-1: none), the row's rank there, and
    whether the worker has dropped it. `run`: instead of these, the rank in the first strip from which on they lie."""

    def __init__(self, strips: list[Strip], strip: np.ndarray, rank: np.ndarray, run: int | None = None) -> None:
        self.strips, self.strip, self.rank, self.run = strips, strip, rank, run
        self.dropped = np.zeros(len(strip), bool)

    @property
    def there(self) -> np.ndarray:
        """Whether there is nothing more to wait for."""
        return (self.strip >= 0) | self.dropped

    @property
    def all_there(self) -> bool:
        """Whether that is so at every position."""
        return self.run is not None or bool(self.there.all())


@dataclass(frozen=True)
class Taken:
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
