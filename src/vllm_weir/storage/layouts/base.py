"""What every layout's writer does alike: check, count, refuse repetitions, and keep failures apart."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import FORMAT, VERSION, Compression
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.batch import Batch, CheckedBatch, check_id, metadata_text, pack
from vllm_weir.storage.object_store import ObjectStore

MARKER = "weir.json"
SHARING = ("npz",)
"""Layouts whose folder may hold other programs' files, too: Vllm_mi_patch asks for no empty one."""


class _Seen:
    """Positions of one site of one request that were written, and the header of their records."""

    def __init__(self, header: str) -> None:
        self.header = header
        self.parts: list[np.ndarray] = []
        self.top, self.rows = -1, 0

    def add(self, positions: np.ndarray, ascending: bool) -> None:
        if len(positions):
            self.parts.append(positions)
            self.top = max(self.top, int(positions[-1] if ascending else positions.max()))
            self.rows += len(positions)


class Writer(ABC):
    """Writes rows into a dataset. Made by `open_writer`; safe to use from several threads.

    Rows of a request become part of the dataset when the request is finished *and* that was flushed (by `flush`, by
    `close`, or because enough came together). What was not, a later writer does not hold: write it again. In a ``with``
    statement that an exception ends, what is finished is published, and what is unfinished is dropped.

    Attributes:
        store: where.
        layout: its name.
        failed: request -> why its rows cannot be kept. Other requests are not affected.
    """

    layout: str
    folder_prefix: ClassVar[str | None] = None
    """How the folders begin that its requests have, if they have some."""

    def __init__(self, store: ObjectStore, compress: object = None) -> None:
        self.store = store
        self.compression = Compression.parse(compress)
        self.failed: dict[str, str] = {}
        self._lock = threading.RLock()
        self._seen: dict[str, dict[Site, _Seen]] = {}
        self._finished: set[str] = set()
        self._closed = False
        store.make_folder()
        _claim(store, self.layout)
        store.sweep(self.folder_prefix)

    def write(self, batch: Batch) -> None:
        """Add rows. Raises WeirError if they are wrong, repeated, of another kind than their site's before, belong to a
        finished request, or cannot be kept."""
        packed = pack(batch, self.compression)
        with self._lock:
            self._check_open(packed.request_id)
            self._refuse_other_header(packed)
            self._refuse_repeated(packed)
            try:
                self._append(packed)
            except WeirError as e:
                self._fail(packed.request_id, str(e))
                raise
            self._seen.setdefault(packed.request_id, {}).setdefault(packed.site, _Seen(packed.header)).add(
                packed.positions, packed.ascending
            )

    def finish_request(self, request_id: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Declare a request complete. `metadata`: plain JSON data to keep with it.

        ``prompt_tokens`` in it (an int) lets readers select positions such as ``"last_prompt"``.
        """
        check_id(request_id, "request_id")
        text = metadata_text(metadata)
        with self._lock:
            self._check_open(request_id)
            seen = self._seen.pop(request_id, {})
            try:
                self._finish(request_id, text, sum(site.rows for site in seen.values()))
            except WeirError as e:
                self._fail(request_id, str(e))
                raise
            self._finished.add(request_id)

    def settle(self, request_id: str) -> None:
        """Have the disk take a finished request that is not published yet, or set the room for it aside.

        Raises WeirError if it cannot, as when it is full; then `abandon` the request, or try again.
        """
        with self._lock:
            self._settle(request_id)

    def pending(self, request_id: str) -> bool:
        """Whether a request is finished and not published."""
        with self._lock:
            return self._waits(request_id)

    def abandon(self, request_id: str) -> None:
        """Forget a request that is unfinished, or finished and not published: its rows do not become part of the
        dataset."""
        with self._lock:
            self._seen.pop(request_id, None)
            self._drop(request_id)

    def holds(self, request_id: str) -> bool:
        """Whether a request is complete: in the dataset, or finished here."""
        with self._lock:
            return request_id in self._finished

    def flush(self, *, join: bool = False) -> None:
        """Publish what is finished. After an error (a full disk) nothing is lost: try again.

        `join`: bring what readers look at first up to date, too, if it is not.
        """
        with self._lock:
            self._flush()
            if join:
                self._tidy(others=False)

    def tidy(self) -> None:
        """Flush, and bring what readers look at first up to date with what other writers have published."""
        with self._lock:
            self._flush()
            self._tidy(others=True)

    def close(self) -> None:
        """Flush and end. Unfinished requests are dropped. After an error try again, or `discard` what is left."""
        with self._lock:
            if not self._closed:
                self._flush()
                self._end()
                self._closed = True

    def discard(self) -> None:
        """End without publishing anything more, and leave no temporary files."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._let_go()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            try:
                self.close()
            finally:
                self.discard()  # nothing, unless that failed
            return
        with self._lock:
            try:
                self._flush()  # what is finished is whole, whatever went wrong afterwards
            except (WeirError, OSError) as e:
                error.add_note(f"requests that were finished before could not be published either: {e}")
            finally:
                self._end()
                self._closed = True

    def _check_open(self, request_id: str) -> None:
        if self._closed:
            raise WeirError(f"the writer of {self.store.url} is closed")
        if request_id in self.failed:
            raise WeirError(f"the rows of request {request_id[:80]!r} cannot be kept: {self.failed[request_id]}")
        if request_id in self._finished:
            raise WeirError(f"{self.store.url} holds request {request_id[:80]!r} already", "request_id")

    def _refuse_other_header(self, packed: CheckedBatch) -> None:
        seen = self._seen.get(packed.request_id, {}).get(packed.site)
        if seen is not None and seen.header != packed.header:
            raise WeirError(
                f"rows of {packed.site} of request {packed.request_id[:80]!r} were written as {_kind(seen.header)}, "
                f"these are {_kind(packed.header)}; compress all rows of a site alike, or write these under another id",
                "batch.header",
            )

    def _refuse_repeated(self, packed: CheckedBatch) -> None:
        new = packed.positions
        if not packed.ascending and len(np.unique(new)) < len(new):
            raise WeirError(f"a position of {packed.site} comes twice", "batch.positions")
        seen = self._seen.get(packed.request_id, {}).get(packed.site)
        if seen is None or not len(new) or (new[0] if packed.ascending else new.min()) > seen.top:
            return  # rows nearly always come in ascending order
        again = np.isin(new, np.concatenate(seen.parts))
        if again.any():
            raise WeirError(
                f"position {int(new[again][0])} of {packed.site} of request {packed.request_id[:80]!r} was written "
                "before",
                "batch.positions",
            )

    def _fail(self, request_id: str, reason: str) -> None:
        self.failed[request_id] = reason
        self._seen.pop(request_id, None)
        self._drop(request_id)

    @abstractmethod
    def _append(self, packed: CheckedBatch) -> None: ...

    @abstractmethod
    def _finish(self, request_id: str, metadata: str, rows: int) -> None: ...

    @abstractmethod
    def _drop(self, request_id: str) -> None: ...

    @abstractmethod
    def _flush(self) -> None: ...

    def _settle(self, request_id: str) -> None:  # noqa: B027
        """Nothing, where a request is published when it is finished."""

    def _waits(self, request_id: str) -> bool:
        return False

    def _tidy(self, others: bool) -> None:  # noqa: B027
        """Nothing, where every file is whole by itself. `others`: even if nothing was published here."""

    def _end(self) -> None:
        self._let_go()

    def _let_go(self) -> None:  # noqa: B027  (most have nothing open)
        """Let go of what is open."""


def _kind(header: str) -> str:
    """A header for people, e.g. ``rp8 (k 64, seed 7), bfloat16 rows of 4096``."""
    parsed = json.loads(header)
    more = ", ".join(f"{name} {parsed[name]}" for name in ("k", "seed") if parsed.get(name))
    method = "uncompressed" if parsed["method"] == "none" else parsed["method"]
    return f"{method}{f' ({more})' if more else ''}, {parsed['dtype']} rows of {parsed['d_model']}"


def is_claimed(store: ObjectStore, layout: str) -> bool:
    """Whether a dataset of this layout is there; raises WeirError if something else is that cannot stay beside it."""
    names = store.names()
    if MARKER in names:
        found = read_marker(store)
        if found != layout:
            raise WeirError(f"{store.url} is a dataset of layout {found!r}; it cannot be continued as {layout!r}")
        return True
    if (names and layout not in SHARING) or store.is_file():
        raise WeirError(f"{store.url} is not empty and no dataset of Weir's; choose another place")
    return False


def _claim(store: ObjectStore, layout: str) -> None:
    """Write the marker that says what the folder is, or check the one that is there."""
    if not is_claimed(store, layout):
        store.put(MARKER, json.dumps({"format": FORMAT, "version": VERSION, "layout": layout}).encode())


def read_marker(store: ObjectStore) -> str:
    """The layout that a dataset's marker names."""
    data = store.read(MARKER)
    try:
        marker = json.loads(data)
        if marker["format"] != FORMAT:
            raise ValueError
        version, layout = marker["version"], marker["layout"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise store.error(MARKER, f"does not say that this is a dataset of {FORMAT}") from None
    if version != VERSION:
        raise store.error(MARKER, f"version {str(version)[:20]} is not known; this Weir reads {VERSION}")
    return str(layout)
