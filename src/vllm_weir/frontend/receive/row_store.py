"""The rows of live requests in the caller's process, filed by position.

A row that was computed again replaces the older one, so every position comes exactly once.
"""

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

from vllm_weir import messages
from vllm_weir.frontend.outputs.slicers import Preslicer, PromptSlicer
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.frontend.receive.pending_sequence import InterventionGroup, PendingSequence
from vllm_weir.frontend.receive.row_sequence_view import Extent, RowSequenceView
from vllm_weir.frontend.receive.score_table import ScoreSeries

MAX_UNREAD = 64
"""Messages whose arrivals are kept unread: reading many at once costs little more than one."""


class EngineLoad(NamedTuple):
    """The load of one worker's data-parallel engine.

    Attributes:
        engine: number of the data-parallel engine.
        pressure: share of the worker's host buffer in use.
        waiting: requests of the engine that wait for table space.
    """

    engine: int
    pressure: float
    waiting: int


class RowStore:
    """The live requests of one engine, by internal id.

    Requests are held weakly: whoever drops a request drops its rows.

    Attributes:
        prompt_slicer: slices rows of prompts as soon as they are complete.
        preslicer: slices rows that are still to come.
        salt: part of the cache keys of steered requests, empty until a request has failed. A failed
            request may have left blocks in the prefix cache that were not steered as their keys
            say, so each failure changes it.
        loads: what each worker last said of its load.
    """

    def __init__(self) -> None:
        self._pending: WeakValueDictionary[str, PendingSequence] = WeakValueDictionary()
        self._row_views: WeakValueDictionary[tuple[str, int], RowSequenceView] = WeakValueDictionary()
        self._groups: WeakValueDictionary[tuple[str, int], InterventionGroup] = WeakValueDictionary()
        self._series = ScoreSeries()
        self._rank_bytes: dict[tuple[str, int], int] = {}
        """Bytes of a rank of open row sequences whose rows come in messages."""
        self._unread: list[tuple[str, np.ndarray, np.ndarray]] = []
        """(worker, arrivals, steered) of messages that have not been read."""
        self._changed = threading.Condition(threading.RLock())
        self.prompt_slicer = PromptSlicer()
        self.preslicer = Preslicer()
        self.salt = ""
        self.loads: dict[str, EngineLoad] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def change_salt(self) -> None:
        """Keep later steered requests from cache blocks that a failed request has left."""
        self.salt = secrets.token_hex(8)

    def open(self, pending: PendingSequence) -> None:
        self._pending[pending.request_id] = pending

    def forget(self, pending: PendingSequence) -> None:
        """Release a request's rows, even if something still refers to the request."""
        with self._changed:
            if pending.release():
                self._pending.pop(pending.request_id, None)
                self._changed.notify_all()

    def vectors(self, digests: Iterable[str]) -> dict[str, np.ndarray]:
        """Return by digest those of these vectors that a live request uses."""
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
        return self._pending.get(request_id)

    def wait(self, done: Callable[[], bool], timeout: float) -> bool:
        """Return whether `done` returns True within `timeout` seconds, asking after each arrival."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                self.read_arrivals()
                if done():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)

    def receive(
        self,
        header: messages.MessageHeader,
        mapped: MappedBuffer,
        arrivals: np.ndarray,
        steered: np.ndarray,
        payload: bytes | memoryview,
    ) -> None:
        """Take in one message of a worker.

        `arrivals` is int32 [n, 5], see `messages.MARK_FIELDS`; `steered` int32 [n, 4], see
        `messages.STEER_FIELDS`; `payload` the rows' bytes if the buffer is not mapped in this process.
        """
        worker = header.worker
        mapped.pressure = header.pressure
        self.loads[worker] = EngineLoad(header.engine, header.pressure, header.waiting)
        with self._changed:
            self._fail_requests(header)
            self._open_layout(header, mapped)
            if header.scored:
                self._series.record(worker, header.scored, header.scores)
            for told in header.told:
                if (pending := self.get(told.request_id)) is not None:
                    pending.told.record(told)
            if len(payload):
                self._unpack(worker, arrivals, torch.frombuffer(payload, dtype=torch.uint8))
            self._queue_arrivals(worker, arrivals, steered)
            # Whoever reads a retired extent's size must know all of its ranks.
            if len(self._unread) > MAX_UNREAD or header.layout_updates.retired:
                self.read_arrivals()
            self._close_layout(worker, header.layout_updates)
            self._changed.notify_all()
        if header.spill:
            self._spill(mapped)

    def _fail_requests(self, header: messages.MessageHeader) -> None:
        """Note the failures that a message reports."""
        if header.failures or header.broken:
            self.change_salt()
        for request_id, reason in header.failures.items():
            if (pending := self.get(request_id)) is not None:
                pending.failure = reason
        if header.broken:
            # Only the lost arrivals could have said which requests had rows in the step.
            for pending in self._live():
                pending.failure = pending.failure or header.broken

    def _open_layout(self, header: messages.MessageHeader, mapped: MappedBuffer) -> None:
        """Enter the row sequences, extents, intervention groups and series that a message introduces."""
        worker, layout = header.worker, header.layout_updates
        if layout.restarted:
            self.read_arrivals()
        for request_id, position in layout.restarted:
            if (pending := self.get(request_id)) is not None:
                pending.forget_from(position)
        for opened in layout.opened:
            self._open_row_sequence(header, opened, mapped)
        for placed in layout.placed:
            row_view = self._row_views.get((worker, placed.row_seq))
            if row_view is not None:
                rows = row_view.shaped(mapped.piece(placed.start, placed.capacity * row_view.rank_bytes))
                row_view.extents.append(Extent(placed.rank, rows, own=not mapped.shared))
            elif mapped.shared:
                mapped.drop(placed.start)
        for defined in layout.groups:
            if (pending := self.get(defined.request_id)) is not None:
                group = InterventionGroup(pending.steered, defined.moves)
                self._groups[worker, defined.group] = group
                pending.groups.append(group)
        for series in layout.series:
            pending = self.get(series.request_id)
            self._series.open(worker, series, None if pending is None else pending.scores)

    def _open_row_sequence(
        self, header: messages.MessageHeader, opened: messages.SequenceOpened, mapped: MappedBuffer
    ) -> None:
        key = header.worker, opened.row_seq
        dtype = getattr(torch, header.dtype)
        if not mapped.shared:
            self._rank_bytes[key] = opened.rank_bytes(header.d_model * dtype.itemsize)
        if (pending := self.get(opened.request_id)) is None:
            return
        pending.early_activations = None  # the new rows may replace some of them
        row_view = RowSequenceView(opened, mapped, header.d_model, dtype)
        self._row_views[key] = row_view
        pending.row_views.append(row_view)
        if pending.expected_end and len(pending.row_views) == 1:  # one entry slices all views of a request
            self.preslicer.add(pending)

    def _queue_arrivals(self, worker: str, arrivals: np.ndarray, steered: np.ndarray) -> None:
        """Keep a message's arrivals for `read_arrivals`, and tell the slicers of them."""
        if len(arrivals) or len(steered):
            self._unread.append((worker, arrivals, steered))
        if len(arrivals):
            row_views = (self._row_views.get((worker, row_seq)) for row_seq in np.unique(arrivals[:, 0]).tolist())
            self.prompt_slicer.note_arrivals(row_view.request_id for row_view in row_views if row_view is not None)
            self.preslicer.note_message()

    def _close_layout(self, worker: str, layout: messages.LayoutUpdate) -> None:
        """Note the extents and row sequences that get no more ranks."""
        for retired in layout.retired:
            row_view = self._row_views.get((worker, retired.row_seq))
            for extent in row_view.extents if row_view is not None else ():
                if extent.rank == retired.rank:
                    extent.filled = retired.filled
        for row_seq in layout.closed:
            self._rank_bytes.pop((worker, row_seq), None)

    def prepare(self) -> bool:
        """Slice rows of a few sequences before anybody asks; return whether more are due."""
        if self.prompt_slicer.has_due:
            with self._changed:
                self.read_arrivals()
                self.prompt_slicer.slice_due()
        self.preslicer.slice_due()
        return self.prompt_slicer.has_due

    def read_arrivals(self) -> None:
        """Enter the arrivals that have been kept unread."""
        with self._changed:
            unread, self._unread = self._unread, []
            for worker in {message[0] for message in unread}:
                from_worker = [message for message in unread if message[0] == worker]
                for row_seq, arrivals in _by_number(merge_arrivals([message[1] for message in from_worker])):
                    row_view = self._row_views.get((worker, row_seq))
                    if row_view is not None:
                        row_view.record(arrivals)
                for number, steered in _by_number(merge_arrivals([message[2] for message in from_worker])):
                    group = self._groups.get((worker, number))
                    if group is not None:
                        group.record(steered)

    def _unpack(self, worker: str, arrivals: np.ndarray, payload: torch.Tensor) -> None:
        """Copy the rows that came in a message to their extents."""
        offset = 0
        for row_seq, rank, _, count, _ in arrivals.tolist():
            if rank < 0:
                continue
            size = self._rank_bytes[worker, row_seq] * count
            piece = payload[offset : offset + size]
            offset += size
            row_view = self._row_views.get((worker, row_seq))
            if row_view is not None:
                extent = next(extent for extent in reversed(row_view.extents) if extent.rank <= rank)
                extent.rows[rank - extent.rank : rank - extent.rank + count] = row_view.shaped(piece.clone())

    def _spill(self, mapped: MappedBuffer) -> None:
        """Copy rows of a worker's buffer that nobody has looked at to memory of this process."""
        for pending in self._live():
            pending.early_activations = None
        for row_view in [view for view in self._row_views.values() if view.mapped is mapped]:
            row_view.presliced = None
            for extent, copy in row_view.copies_of_filled_extents():
                with self._changed:
                    extent.rows, extent.own = copy, True


def merge_arrivals(batches: Sequence[np.ndarray]) -> np.ndarray:
    """Return the arrivals of several messages, as few as possible.

    In steady decoding each message repeats the one before it, one position on: such messages become
    one, with larger counts. Each is int32 [n, 5] with `MARK_FIELDS`, or [n, 4] with `STEER_FIELDS`.
    """
    merged: list[tuple[np.ndarray, int]] = []
    """Arrivals, and how many messages they stand for; 0 for arrivals that others cannot be merged
    into."""
    for arrivals in batches:
        if not len(arrivals):
            continue
        last, times = merged[-1] if merged else (arrivals, 0)
        if times and len(arrivals) == len(last) and np.array_equal(arrivals, last + _NEXT[arrivals.shape[1]] * times):
            merged[-1] = last, times + 1
        else:
            single = (arrivals[:, -2:] == 1).all() and (arrivals[:, 1] >= 0).all()
            merged.append((arrivals, int(single)))
    parts = [_with_count(arrivals, times) if times > 1 else arrivals for arrivals, times in merged]
    return np.concatenate([batches[0][:0], *parts])


_NEXT = {
    len(messages.MARK_FIELDS): np.array((0, 1, 1, 0, 0), np.int32),
    len(messages.STEER_FIELDS): np.array((0, 1, 0, 0), np.int32),
}
"""By number of fields: what is added to an arrival from one steady step to the next."""


def _with_count(arrivals: np.ndarray, count: int) -> np.ndarray:
    arrivals = arrivals.copy()
    arrivals[:, -2] = count
    return arrivals


def _by_number(arrivals: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Group arrivals by their first column; each group keeps its order and loses that column."""
    if not len(arrivals):
        return []
    arrivals = arrivals[np.argsort(arrivals[:, 0], kind="stable")]
    bounds = [0, *(np.flatnonzero(np.diff(arrivals[:, 0])) + 1).tolist(), len(arrivals)]
    return [(int(arrivals[a, 0]), arrivals[a:b, 1:]) for a, b in itertools.pairwise(bounds)]
