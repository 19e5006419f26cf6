"""The store: rows of live requests, keyed by position, so a recomputed row replaces the older and none comes twice."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from vllm_weir import messages as mail
from vllm_weir.frontend.outputs.preslicer import Preslicer
from vllm_weir.frontend.outputs.prompt_slicer import PromptSlicer
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.frontend.receive.pending_sequence import InterventionGroup, PendingSequence
from vllm_weir.frontend.receive.row_sequence_view import Extent, RowSequenceView

FOLD = 64
"""Messages whose marks are kept unread; reading many at once costs little more than reading one."""


class EngineLoad(NamedTuple):
    """A worker's data-parallel engine, the share of its host buffer in use, and the engine's waiting requests."""

    engine: int
    pressure: float
    waiting: int


class RowStore:
    """Live requests of one engine by internal id. Holds them weakly: whoever drops a request drops its rows."""

    def __init__(self) -> None:
        self._pending: WeakValueDictionary[str, PendingSequence] = WeakValueDictionary()
        self._row_views: WeakValueDictionary[tuple[str, int], RowSequenceView] = WeakValueDictionary()
        self._groups: WeakValueDictionary[tuple[str, int], InterventionGroup] = WeakValueDictionary()
        self._widths: dict[tuple[str, int], int] = {}
        """Bytes of a rank of open row sequences whose rows come in messages."""
        self._unread: list[tuple[str, np.ndarray, np.ndarray]] = []
        self._changed = threading.Condition(threading.RLock())
        self.early = PromptSlicer()
        self.ahead = Preslicer()
        self.salt = ""
        """Random from the first failure on, another after each: what failed has left KV under the key of what it was
        to be, so steered requests that come later have keys of their own."""
        self.loads: dict[str, EngineLoad] = {}
        """What each worker last said of itself."""

    def __len__(self) -> int:
        return len(self._pending)

    def spoil(self) -> None:
        """A request failed: what it left in the prefix cache is for nobody, see `salt`."""
        self.salt = secrets.token_hex(8)

    def open(self, pending: PendingSequence) -> None:
        """Accept rows for a request from now on."""
        self._pending[pending.request_id] = pending

    def forget(self, pending: PendingSequence) -> None:
        """Nobody looks at a request's rows any more, though something may refer to it yet."""
        with self._changed:
            if pending.release():
                self._pending.pop(pending.request_id, None)
                self._changed.notify_all()

    def vectors(self, digests: Iterable[str]) -> dict[str, np.ndarray]:
        """Those of these vectors that a live request uses, by digest."""
        missing, found = set(digests), {}
        for pending in self._live():
            rows = pending.admitted.rows
            for digest in [d for d in rows if d in missing] if len(rows) < len(missing) else missing & rows.keys():
                found[digest] = rows[digest]
                missing.discard(digest)
            if not missing:
                break
        return found

    def _live(self) -> Iterator[PendingSequence]:
        for reference in self._pending.valuerefs():  # a list: requests may come and go meanwhile
            if (pending := reference()) is not None:
                yield pending

    def get(self, request_id: str) -> PendingSequence | None:
        """The request, or None if nobody waits for it any more."""
        return self._pending.get(request_id)

    def wait(self, done: Callable[[], bool], timeout: float) -> bool:
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

    def receive(  # noqa: C901
        self,
        header: mail.MessageHeader,
        mapped: MappedBuffer,
        marks: np.ndarray,
        steered: np.ndarray,
        payload: bytes | memoryview,
    ) -> None:
        """One message: `marks` int32 [n, 5], `steered` int32 [n, 4], `payload` bytes of rows or empty."""
        worker, layout_updates = header.worker, header.layout_updates
        dtype = getattr(torch, header.dtype)
        mapped.pressure = header.pressure
        self.loads[worker] = EngineLoad(header.engine, header.pressure, header.waiting)
        with self._changed:
            if header.failures or header.broken:
                self.spoil()
            for request_id, reason in header.failures.items():
                if (pending := self.get(request_id)) is not None:
                    pending.failure = reason
            if header.broken:  # which requests had rows in the step, only the lost marks could have said
                for pending in self._live():
                    pending.failure = pending.failure or header.broken
            for opened in layout_updates.opened:
                if not mapped.shared:
                    self._widths[worker, opened.row_seq] = opened.rank_bytes(header.d_model * dtype.itemsize)
                if (pending := self.get(opened.request_id)) is not None:
                    pending.early = None  # rows that are computed again replace those of before
                    self._row_views[worker, opened.row_seq] = row_view = RowSequenceView(
                        opened, mapped, header.d_model, dtype
                    )
                    pending.row_views.append(row_view)
                    if pending.foreseen and len(pending.row_views) == 1:  # all of them are cut together
                        self.ahead.add(pending)
            for placed in layout_updates.placed:
                owner = self._row_views.get((worker, placed.row_seq))
                if owner is not None:
                    rows = owner.shaped(mapped.piece(placed.start, placed.capacity * owner.rank_bytes))
                    owner.extents.append(Extent(placed.rank, rows, own=not mapped.shared))
                elif mapped.shared:
                    mapped.drop(placed.start)
            for group in layout_updates.groups:
                if (pending := self.get(group.request_id)) is not None:
                    self._groups[worker, group.group] = made = InterventionGroup(pending.steered, group.moves)
                    pending.groups.append(made)
            if len(payload):
                self._unpack(worker, marks, torch.frombuffer(payload, dtype=torch.uint8))
            for row_seq in layout_updates.closed:
                self._widths.pop((worker, row_seq), None)
            if len(marks) or len(steered):
                self._unread.append((worker, marks, steered))
            if len(marks):
                row_views = (self._row_views.get((worker, row_seq)) for row_seq in np.unique(marks[:, 0]).tolist())
                self.early.look(row_view.request_id for row_view in row_views if row_view is not None)
                self.ahead.look()
            if len(self._unread) > FOLD or layout_updates.retired:
                self.fold()
            for retired in layout_updates.retired:
                owner = self._row_views.get((worker, retired.row_seq))
                for extent in owner.extents if owner is not None else ():
                    if extent.rank == retired.rank:
                        extent.filled = retired.filled
            self._changed.notify_all()
        if header.spill:
            self._spill(mapped)

    def prepare(self) -> bool:
        """Make a few hand-outs early, and cut a few ahead; whether there is more to be done at once."""
        if self.early.due:
            with self._changed:
                self.fold()
                self.early.make()
        self.ahead.make()
        return self.early.due

    def fold(self) -> None:
        """Read the marks that have come."""
        with self._changed:
            unread, self._unread = self._unread, []
            for worker in {w for w, _, _ in unread}:
                own = [(marks, steered) for w, marks, steered in unread if w == worker]
                for kind, targets in ((0, self._row_views), (1, self._groups)):
                    for number, some in _split(merged([message[kind] for message in own])):
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
            row_view = self._row_views.get((worker, number))
            if row_view is not None:
                extent = next(x for x in reversed(row_view.extents) if x.rank <= rank)
                extent.rows[rank - extent.rank : rank - extent.rank + count] = row_view.shaped(piece.clone())

    def _spill(self, mapped: MappedBuffer) -> None:
        """Copy what a worker's buffer holds and nobody has looked at into memory of this process."""
        for pending in self._live():
            pending.early = None
        for row_view in [s for s in self._row_views.values() if s.mapped is mapped]:
            row_view.ready = None
            for extent, copy in row_view.take_out():
                with self._changed:
                    extent.rows, extent.own = copy, True


def merged(messages: Sequence[np.ndarray]) -> np.ndarray:
    """The marks of all messages; those that repeat the ones before them, one position on, make these longer."""
    parts: list[tuple[np.ndarray, int]] = []
    """Marks, and of how many messages they are; 0 for marks that cannot be made longer."""
    for marks in messages:
        if not len(marks):
            continue
        last, times = parts[-1] if parts else (marks, 0)
        if times and len(marks) == len(last) and np.array_equal(marks, last + _ON[marks.shape[1]] * times):
            parts[-1] = last, times + 1
        else:
            parts.append((marks, int((marks[:, -2:] == 1).all() and (marks[:, 1] >= 0).all())))
    return np.concatenate([messages[0][:0], *(_longer(marks, n) if n > 1 else marks for marks, n in parts)])


_ON = {
    len(mail.MARK_FIELDS): np.array((0, 1, 1, 0, 0), np.int32),
    len(mail.STEER_FIELDS): np.array((0, 1, 0, 0), np.int32),
}


def _longer(marks: np.ndarray, times: int) -> np.ndarray:
    marks = marks.copy()
    marks[:, -2] = times
    return marks


def _split(marks: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(number, the rest of its rows in order) for each number in the first column."""
    if not len(marks):
        return []
    marks = marks[np.argsort(marks[:, 0], kind="stable")]
    bounds = [0, *(np.flatnonzero(np.diff(marks[:, 0])) + 1).tolist(), len(marks)]
    return [(int(marks[a, 0]), marks[a:b, 1:]) for a, b in itertools.pairwise(bounds)]
