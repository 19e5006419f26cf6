"""`Writer`: the base of all layouts' writers, which checks rows and isolates failures."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import FORMAT, VERSION, Compression, header_shape, shape_text
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.batch import Batch, CheckedBatch, check_id, metadata_text, pack
from vllm_weir.storage.object_store import ObjectStore

MARKER = "weir.json"
"""File that says which layout a folder has."""
SHARED_FOLDER_LAYOUTS = ("npz",)
"""Layouts whose folder may hold files of other programs, since Vllm_mi_patch does not need an empty
one."""


class _WrittenRows:
    """Positions of one site of one request that were written, and their records' header."""

    def __init__(self, header: str) -> None:
        self.header = header
        self.parts: list[np.ndarray] = []
        self.highest, self.count = -1, 0

    def add(self, positions: np.ndarray, ascending: bool) -> None:
        if len(positions):
            self.parts.append(positions)
            self.highest = max(self.highest, int(positions[-1] if ascending else positions.max()))
            self.count += len(positions)


class Writer(ABC):
    """A writer of rows into a dataset. Made by `open_writer`; safe to use from several threads.

    The rows of a request become part of the dataset when the request is finished *and* flushed: by
    `flush`, by `close`, or because enough rows have come together. Until then they are lost with
    the writer. When an exception ends a ``with`` statement, finished requests are published and
    unfinished ones dropped.

    Attributes:
        store: Where the files go.
        layout: Name of the layout.
        failed: Request -> why its rows cannot be kept. Other requests are not affected.
    """

    layout: str
    folder_prefix: ClassVar[str | None] = None
    """Prefix of the folders that the layout gives its requests, if it does."""

    def __init__(self, store: ObjectStore, compress: object = None) -> None:
        self.store = store
        self.compression = Compression.parse(compress)
        self.failed: dict[str, str] = {}
        self._lock = threading.RLock()
        self._written: dict[str, dict[Site, _WrittenRows]] = {}
        self._finished: set[str] = set()
        self._closed = False
        store.make_folder()
        claim(store, self.layout)
        store.sweep(self.folder_prefix)

    def write(self, batch: Batch) -> None:
        """Add rows.

        Raises:
            WeirError: If they are invalid, repeated, or differ from earlier rows of their site in
                width, dtype or compression; if the request is finished; or if they cannot be
                written.
        """
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
            sites = self._written.setdefault(packed.request_id, {})
            sites.setdefault(packed.site, _WrittenRows(packed.header)).add(packed.positions, packed.ascending)

    def finish_request(self, request_id: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Declare a request complete.

        Args:
            request_id: The request.
            metadata: Plain JSON data to store with it. ``prompt_tokens`` (an int) lets readers
                select positions such as ``"last_prompt"``.
        """
        check_id(request_id, "request_id")
        text = metadata_text(metadata)
        with self._lock:
            self._check_open(request_id)
            sites = self._written.pop(request_id, {})
            try:
                self._finish(request_id, text, sum(rows.count for rows in sites.values()))
            except WeirError as e:
                self._fail(request_id, str(e))
                raise
            self._finished.add(request_id)

    def settle(self, request_id: str) -> None:
        """Write a finished, unpublished request to the disk, or reserve the space for it.

        Raises:
            WeirError: If that fails, as on a full disk; then `abandon` the request, or try again.
        """
        with self._lock:
            self._settle(request_id)

    def pending(self, request_id: str) -> bool:
        """Return whether a request is finished but not published."""
        with self._lock:
            return self._is_pending(request_id)

    def abandon(self, request_id: str) -> None:
        """Drop a request that is not published; its rows do not become part of the dataset."""
        with self._lock:
            self._written.pop(request_id, None)
            self._drop(request_id)

    def holds(self, request_id: str) -> bool:
        """Return whether a request is in the dataset, or finished by this writer."""
        with self._lock:
            return request_id in self._finished

    def flush(self, *, join: bool = False) -> None:
        """Publish finished requests; after an error (such as a full disk) it can be tried again.

        Args:
            join: Also update the joined manifest (layout ``sharded``) if this writer has published
                since.
        """
        with self._lock:
            self._flush()
            if join:
                self._tidy(others=False)

    def tidy(self) -> None:
        """Flush, and join manifests (layout ``sharded``), also those of other writers."""
        with self._lock:
            self._flush()
            self._tidy(others=True)

    def close(self) -> None:
        """Flush, drop unfinished requests and end; after an error, try again or `discard`."""
        with self._lock:
            if not self._closed:
                self._flush()
                self._end()
                self._closed = True

    def discard(self) -> None:
        """End without publishing anything more, and delete temporary files."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_files()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            try:
                self.close()
            finally:
                self.discard()  # does nothing, unless `close` has failed
            return
        with self._lock:
            try:
                self._flush()  # finished requests are complete, whatever went wrong later
            except (WeirError, OSError) as e:
                error.add_note(f"finished requests could not be published either: {e}")
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
        written = self._written.get(packed.request_id, {}).get(packed.site)
        if written is not None and written.header != packed.header:
            raise WeirError(
                f"rows of {packed.site} of request {packed.request_id[:80]!r} were written as "
                f"{_describe(written.header)}, these are {_describe(packed.header)}; compress all rows of a site "
                "alike, or write these under another id",
                "batch.header",
            )

    def _refuse_repeated(self, packed: CheckedBatch) -> None:
        new = packed.positions
        if not packed.ascending and len(np.unique(new)) < len(new):
            raise WeirError(f"a position of {packed.site} comes twice", "batch.positions")
        written = self._written.get(packed.request_id, {}).get(packed.site)
        if written is None or not len(new) or (new[0] if packed.ascending else new.min()) > written.highest:
            return  # the usual case: positions ascend from batch to batch
        repeated = np.isin(new, np.concatenate(written.parts))
        if repeated.any():
            raise WeirError(
                f"position {int(new[repeated][0])} of {packed.site} of request {packed.request_id[:80]!r} was written "
                "before",
                "batch.positions",
            )

    def _fail(self, request_id: str, reason: str) -> None:
        self.failed[request_id] = reason
        self._written.pop(request_id, None)
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
        """Do nothing, where a request is published when it is finished."""

    def _is_pending(self, request_id: str) -> bool:
        return False

    def _tidy(self, others: bool) -> None:  # noqa: B027
        """Update the joined manifest, if any; `others`: even if this writer published nothing."""

    def _end(self) -> None:
        self._close_files()

    def _close_files(self) -> None:  # noqa: B027  (most have no open files)
        """Close and delete unpublished files."""


def _describe(header: str) -> str:
    """Describe a header in words, e.g. ``rp8 (k 64, seed 7), bfloat16 rows of 4096``."""
    parsed = json.loads(header)
    options = ", ".join(f"{name} {parsed[name]}" for name in ("k", "seed") if parsed.get(name))
    method = "uncompressed" if parsed["method"] == "none" else parsed["method"]
    rows = f"{parsed['dtype']} rows of {shape_text(header_shape(parsed))}"
    return f"{method}{f' ({options})' if options else ''}, {rows}"


def is_claimed(store: ObjectStore, layout: str) -> bool:
    """Return whether the folder has this layout; raise WeirError if it has something else."""
    names = store.names()
    if MARKER in names:
        found = read_marker(store)
        if found != layout:
            raise WeirError(f"{store.url} is a dataset of layout {found!r}; it cannot be continued as {layout!r}")
        return True
    if (names and layout not in SHARED_FOLDER_LAYOUTS) or store.is_file():
        raise WeirError(f"{store.url} is not empty and not a Weir dataset; choose another place")
    return False


def claim(store: ObjectStore, layout: str) -> None:
    if not is_claimed(store, layout):
        store.put(MARKER, json.dumps({"format": FORMAT, "version": VERSION, "layout": layout}).encode())


def read_marker(store: ObjectStore) -> str:
    """Return the layout that a dataset's marker names."""
    data = store.read(MARKER)
    try:
        marker = json.loads(data)
        if marker["format"] != FORMAT:
            raise ValueError
        version, layout = marker["version"], marker["layout"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise store.error(MARKER, f"does not say that this is a dataset of {FORMAT}") from None
    if version != VERSION:
        raise store.error(MARKER, f"version {str(version)[:20]} is unknown; this version of Weir reads {VERSION}")
    return str(layout)
